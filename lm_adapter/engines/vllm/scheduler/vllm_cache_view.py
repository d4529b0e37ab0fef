"""The content of vLLM's own cache of encoder outputs, for the tracker.

vLLM asks a connector for the rows of every item, also of items that its cache has. vLLM makes the manager of
this cache after the connector; its configuration may name the manager's class.
"""

from __future__ import annotations

import functools
from typing import Any

from lm_adapter.engines.vllm.scheduler.tracker import RequestTracker
from lm_adapter.engines.vllm.vllm_types import VllmConfig

CLASS_NAME = "WatchedCacheManager"


def watch(vllm_config: VllmConfig, tracker: RequestTracker) -> None:
    """The tracker sees the content of the next manager that vLLM makes. If the user has named a manager
    class, that class is used: the tracker cannot see the cache then, and orders all rows."""
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
        def create_manager(cls, *, cache_size: int, vllm_config: VllmConfig) -> Any:
            manager = cls(cache_size=cache_size)
            tracker = vllm_config.ec_manager_config.manager_config.pop("tracker")
            tracker.watch_cache(manager.cached)
            return manager

    return WatchedCacheManager
