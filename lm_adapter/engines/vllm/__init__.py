"""vLLM 0.32 without its vision tower: a plugin, fed by the service.

Owns the names that vLLM is given: the connector class for ``ec_connector_module_path``, and the function that
this package's entry point registers. Both are imported on demand. ``docs/vllm.md`` has the command line. An
image or a clip passes the modules in this order:

- ``frontend``    in the API server: the file, undecoded (``plugin.images``, ``clips``), and the first
                  ``Prefetch``
- ``processing``  its grid and placeholders (``kimi`` for Kimi-K2.5), and its form in a request
                  (``file_requests``)
- ``scheduler``   in the engine: which requests wait for which rows; ``cache``, which vLLM has itself
- ``ranks``       in each worker: rows are read and checked; ``link`` carries orders and reports between them
- ``connector``   the methods by which vLLM calls both; ``plugin.calls`` is the thread that calls the encoder
- ``failures``    why a request failed, back to the API server

``models`` has the model classes that run without a tower, ``plugin.geometry`` the rows that they take,
``settings`` the settings.
"""

from __future__ import annotations

import functools
from typing import Any

__all__ = ["VisionEncoderConnector", "register"]


@functools.cache
def _connector() -> type:
    from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase

    from lm_adapter.engines.vllm.connector import ConnectorMethods

    return type("VisionEncoderConnector", (ConnectorMethods, ECConnectorBase), {"__module__": __name__})


def __getattr__(name: str) -> Any:
    if name == "VisionEncoderConnector":
        return _connector()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def register() -> None:
    """vLLM's entry point ``vllm.general_plugins``: see ``models.register``."""
    from lm_adapter.engines.vllm.models import register as register_models

    register_models()
