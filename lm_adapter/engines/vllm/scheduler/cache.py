"""What vLLM's own cache of encoder outputs holds, for the connector's half in the scheduler.

vLLM asks a connector for the rows of every item, also of those that its cache has. Its configuration may name
the class that manages this cache, and the manager is made after the connector.
"""

from __future__ import annotations

import functools
from typing import Any

from lm_adapter.engines.vllm.scheduler.tracker import RequestTracker

CLASS_NAME = "WatchedCacheManager"


def watch(vllm_config: Any, tracker: RequestTracker) -> None:
    """From vLLM's next manager on, the tracker sees what is cached. A manager that the user has named stays,
    and the tracker orders all rows."""
    config, path = vllm_config.ec_manager_config, f"{__name__}.{CLASS_NAME}"
    if config.encoder_cache_manager_cls in (None, path):
        config.encoder_cache_manager_cls = path
        config.manager_config["tracker"] = tracker


def __getattr__(name: str) -> Any:
    if name == CLASS_NAME:
        return _manager()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@functools.cache
def _manager() -> type:
    from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

    class WatchedCacheManager(EncoderCacheManager):  # type: ignore[misc]
        @classmethod
        def create_manager(cls, *, cache_size: int, vllm_config: Any) -> Any:
            manager = cls(cache_size=cache_size)
            tracker = vllm_config.ec_manager_config.manager_config.pop("tracker")
            tracker.watch_cache(manager.cached)
            return manager

    return WatchedCacheManager
