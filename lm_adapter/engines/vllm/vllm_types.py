"""What the plugin reads of vLLM's configuration and of its scheduler's output, by attribute.

Owns these interfaces alone. Objects of vLLM satisfy them; nothing here imports vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from lm_adapter.engines.shared.geometry import TextModelConfig


class MultiModalConfig(Protocol):
    mm_processor_kwargs: Mapping[str, Any] | None
    mm_processor_cache_type: str | None

    def is_multimodal_pruning_enabled(self) -> bool: ...


class ModelConfig(TextModelConfig, Protocol):
    architecture: str
    max_model_len: int
    runner_type: str

    def get_multimodal_config(self) -> MultiModalConfig: ...


class TransferConfig(Protocol):
    """``--ec-transfer-config``."""

    engine_id: str
    ec_role: str
    ec_connector: str | None
    ec_connector_module_path: str | None
    ec_connector_extra_config: dict[str, Any]

    @property
    def is_ec_producer(self) -> bool: ...


class CacheManagerConfig(Protocol):
    """manager_config: arguments of the class that ``encoder_cache_manager_cls`` names."""

    encoder_cache_manager_cls: str | None
    manager_config: dict[str, Any]


class ParallelConfig(Protocol):
    data_parallel_index: int
    data_parallel_size: int
    distributed_executor_backend: str | None
    nnodes_within_dp: int
    prefill_context_parallel_size: int
    tensor_parallel_size: int


class VllmConfig(Protocol):
    """The parts without a type here are read in one line each."""

    compilation_config: Any
    device_config: Any
    ec_manager_config: CacheManagerConfig
    ec_transfer_config: TransferConfig | None
    kv_transfer_config: Any
    lora_config: Any
    max_concurrent_batches: int
    model_config: ModelConfig
    num_prefill_lookahead_tokens: int
    parallel_config: ParallelConfig
    scheduler_config: Any


class SchedulerOutput(Protocol):
    """scheduled_encoder_inputs: features that vLLM would compute itself, by request id."""

    free_encoder_mm_hashes: Sequence[str]
    num_scheduled_tokens: Mapping[str, int]
    scheduled_encoder_inputs: Mapping[str, Sequence[int]]
    total_num_scheduled_tokens: int
