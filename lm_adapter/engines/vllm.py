"""vLLM 0.32 without its vision tower: an out-of-tree encoder-cache connector, fed by the service.

Owns the names that vLLM is given: the connector class for ``ec_connector_module_path``, and the plugin that
this package's entry point registers. Both are imported on demand. ``docs/vllm.md`` has the command line. The
modules are

- ``vllm_connector``  the methods that vLLM calls, for scheduler and workers
- ``vllm_tracker``    which requests wait for which rows
- ``vllm_row_cache``  the rows that requests share, and which image an identifier stands for
- ``vllm_fetch``      the thread that fetches and checks rows
- ``vllm_items``      ``ec_transfer_params``, and the rows that a request needs
- ``vllm_settings``   the connector's settings
- ``vllm_models``     model classes that run without a tower; Kimi-K2.5's is in ``vllm_kimi``
- ``vllm_front``      the HTTP front that turns ordinary chat requests into such requests, with
  ``vllm_rewrite`` (requests and failures) and ``vllm_upstream`` (vLLM's answers)
"""

from __future__ import annotations

import functools
from typing import Any

__all__ = ["VisionEncoderConnector", "register"]  # noqa: F822 - the class is made on demand


@functools.cache
def _connector() -> type:
    from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase

    from lm_adapter.engines.vllm_connector import ConnectorMethods

    return type("VisionEncoderConnector", (ConnectorMethods, ECConnectorBase), {"__module__": __name__})


def __getattr__(name: str) -> Any:
    if name == "VisionEncoderConnector":
        return _connector()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def register() -> None:
    """vLLM's entry point ``vllm.general_plugins``: see ``vllm_models.register``."""
    from lm_adapter.engines.vllm_models import register as register_models

    register_models()
