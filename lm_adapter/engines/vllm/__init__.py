"""vLLM without its vision tower: a plugin, fed by the service.

Owns the names that users and vLLM's entry points state: the connector class for ``ec_connector_module_path``,
and ``register``. Both import the rest on demand. ``docs/vllm.md`` has the command line. An image or a clip
passes the modules in this order:

- ``api_server``  ``contact``: before the first image, whether the encoder has this model's rows
                  ``media``: the file, undecoded (``shared.images``, ``clips``); ``server``: the first
                  ``Prefetch``; ``parser``, ``processor``: its grid and placeholders (``kimi`` for Kimi-K2.5,
                  ``kimi_images`` for Kimi-VL and Kimi-K3); ``metrics``: what vLLM's ``/metrics`` has of it
- ``scheduler``   ``tracker``: which requests wait for which rows (``items``, ``requests``, ``room``,
                  ``rows``); ``orders``: the calls that fetch them; ``vllm_cache_view``: which rows vLLM has
- ``worker``      ``ranks``: rows are read and checked (``shared.rank_reader``); ``without_tower``: the
                  model that takes them

Each folder runs in one kind of vLLM process. The modules beside them run in several:

- ``interfaces``   the versions of vLLM, and what the plugin touches in it
- ``models``       the classes that vLLM registers, and the configurations that are refused
- ``connector``    the methods by which vLLM calls scheduler and workers
- ``file_items``   an image or a clip in a request, from the API server to the scheduler
- ``step_rows``    which rows a step computes with
- ``failures``     why a request failed, from the scheduler to the API server
- ``stats``        what happened, from the scheduler to the API server's metrics
- ``settings``     the settings
- ``vllm_types``   what is read of vLLM's configuration and scheduler

``shared.encoder_thread`` is the thread that calls the encoder, ``shared.rank_socket`` has orders and reports
between the scheduler and the workers, ``shared.geometry`` the rows of a model.
"""

from __future__ import annotations

import functools
from typing import Any

__all__ = ["VisionEncoderConnector", "register"]


@functools.cache
def _connector() -> type:
    from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase, ECConnectorMetadata
    from vllm.distributed.ec_transfer.ec_connector.metrics import ECConnectorPromMetrics, ECConnectorStats

    from lm_adapter.engines.vllm.connector import ConnectorMethods
    from lm_adapter.engines.vllm.stats import RowStats
    from lm_adapter.engines.vllm.step_rows import StepRows

    ECConnectorMetadata.register(StepRows)
    names = {
        "__module__": __name__,
        "stats_class": type("RowStats", (RowStats, ECConnectorStats), {}),
        "metrics_base": ECConnectorPromMetrics,
    }
    return type("VisionEncoderConnector", (ConnectorMethods, ECConnectorBase), names)


def __getattr__(name: str) -> Any:
    if name == "VisionEncoderConnector":
        return _connector()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def register() -> None:
    """vLLM's entry point ``vllm.general_plugins``: see ``models.register``."""
    from lm_adapter.engines.vllm.models import register as register_models

    register_models()
