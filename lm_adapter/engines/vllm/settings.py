"""The plugin's settings in vLLM: ``ec_connector_extra_config`` of ``--ec-transfer-config``.

Owns which engines use the plugin, the setting that only vLLM has, and the sizes that ``mm_processor_kwargs``
request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from lm_adapter.engines.shared import settings
from lm_adapter.engines.vllm.vllm_types import MultiModalConfig, VllmConfig

MODULE = "lm_adapter.engines.vllm"
CONNECTOR = "VisionEncoderConnector"
"""``ec_connector_module_path`` and ``ec_connector``."""
_MARK = "rows_come_from_vision_encoder"


def has_connector(vllm_config: VllmConfig) -> bool:
    """Whether the engine gets its rows through this plugin's connector."""
    transfer = vllm_config.ec_transfer_config
    return (
        transfer is not None
        and transfer.ec_connector == CONNECTOR
        and transfer.ec_connector_module_path == MODULE
    )


def mark(mm_config: MultiModalConfig) -> None:
    """Marks an engine with this plugin's connector, for the processors: they see only this part of vLLM's
    configuration."""
    setattr(mm_config, _MARK, True)


def is_marked(mm_config: MultiModalConfig) -> bool:
    return getattr(mm_config, _MARK, False)


def given_sizes(options: Mapping[str, Any]) -> dict[str, int]:
    """``min_pixels`` and ``max_pixels`` of one scope of ``mm_processor_kwargs``, without those that the scope
    leaves to the checkpoint: the encoder refuses two given limits that contradict each other, but not one
    that contradicts the checkpoint's. As in vLLM, a number of pixels takes precedence over the edge in
    ``size``."""
    size = options.get("size") or {}
    edges = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}
    requested = {name: size.get(edge) for name, edge in edges.items()}
    requested |= {name: options[name] for name in edges if options.get(name) is not None}
    return {name: pixels for name, pixels in requested.items() if pixels is not None}


@dataclass(frozen=True, kw_only=True)
class Settings(settings.Settings):
    """max_resident_bytes: limit on the bytes of rows that wait for vLLM's forward pass, on each GPU.
    announces: whether an image's file is sent when it arrives, before anybody knows if its rows are needed.
    An instance that only consumes KV never does."""

    ENGINE: ClassVar[str] = "vLLM"
    SOURCE: ClassVar[str] = "ec_connector_extra_config"

    max_resident_bytes: int = 1 << 30
    announces: bool = True
