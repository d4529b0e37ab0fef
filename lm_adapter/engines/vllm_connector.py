"""The methods of the vLLM 0.32 connector, which ``vllm`` joins with vLLM's base class.

Owns the two halves of an out-of-tree ``ECConnector``: the scheduler's half, which answers from
``vllm_tracker``, and the worker's half, which fills the encoder cache. If both live in one process (one GPU,
or vLLM's in-process engine), rows come to the worker's device and are handed over as they are. Otherwise they
come to the scheduler's process in host memory and travel with the step's metadata to every rank.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

from lm_adapter.engines.vllm_fetch import Fetcher
from lm_adapter.engines.vllm_items import Geometry
from lm_adapter.engines.vllm_models import check_model
from lm_adapter.engines.vllm_settings import FetchSettings
from lm_adapter.engines.vllm_tracker import RequestTracker
from lm_adapter.errors import InvalidRequest
from lm_adapter.types import EncodedRows

__all__ = ["ConnectorMethods", "HostRows", "StepRows"]

logger = logging.getLogger("vllm.vision_encoder")

IN_PROCESS_EXECUTORS = ("uni", "external_launcher")
IDLE_S = 0.004
"""vLLM steps all of its workers without pause while a request waits for rows and nothing else runs."""


@dataclass(frozen=True, eq=False)
class HostRows:
    """Rows for another process. payload: uint8, which pickle protocol 5 passes out of band."""

    payload: Any
    shape: tuple[int, int]
    dtype: str

    @classmethod
    def of(cls, rows: EncodedRows) -> HostRows:
        return cls(rows.raw().view("uint8").reshape(-1), (rows.num_rows, rows.width), rows.dtype)

    def torch(self) -> Any:
        """[num_rows, width] on the host, in memory of its own."""
        import torch

        tensor = torch.empty(self.shape, dtype=getattr(torch, self.dtype))
        tensor.view(torch.uint8).reshape(-1).numpy()[:] = self.payload
        return tensor


@dataclass
class StepRows:
    """The metadata of one step. rows: by identifier, tensors within a process and HostRows between two."""

    rows: dict[str, Any] = field(default_factory=dict)


class ConnectorMethods:
    """Every method that vLLM calls. The base class's initialiser keeps configuration and role."""

    _vllm_config: Any
    _connector_metadata: Any

    def __init__(self, vllm_config: Any, role: Any) -> None:
        super().__init__(vllm_config, role)  # type: ignore[call-arg]
        transfer = vllm_config.ec_transfer_config
        if transfer.is_ec_producer:
            raise InvalidRequest(f"ec_role is {transfer.ec_role}, this connector is an ec_consumer")
        has_tower = check_model(vllm_config)
        settings = FetchSettings.read(transfer.ec_connector_extra_config)
        geometry = Geometry.of_model(vllm_config.model_config, check_finite=settings.finite)
        self._device = vllm_config.device_config.device
        backend = vllm_config.parallel_config.distributed_executor_backend
        self._in_process = backend in IN_PROCESS_EXECUTORS
        self._step = StepRows()
        self._was_idle = False
        self._fetcher: Fetcher | None = None
        self._tracker: RequestTracker | None = None
        if role.name == "SCHEDULER":
            self._fetcher = Fetcher(settings, geometry, prepare_thread=self._use_own_stream)
            self._tracker = RequestTracker(self._fetcher, geometry, settings, has_tower=has_tower)
            logger.info("image rows are fetched at %s as %s", settings.target, geometry)

    def shutdown(self) -> None:
        if self._fetcher is not None:
            self._fetcher.close()
        if self._tracker is not None:
            self._tracker.close()

    # Scheduler --------------------------------------------------------------------------------------------

    def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
        """True once every image row that the request needs from here on is resident and checked."""
        return self._requests.ensure(request, num_computed_tokens)

    def has_cache_item(self, identifier: str) -> bool:
        return self._requests.holds(identifier)

    def take_unavailable_requests(self) -> set[str]:
        return self._requests.take_unavailable()

    def update_state_after_alloc(self, request: Any, index: int) -> None:
        """vLLM has allocated a feature: its rows go with this step."""
        rows = self._requests.rows(request, index)
        if rows is not None:
            identifier = request.mm_features[index].identifier
            self._step.rows[identifier] = rows.torch() if self._in_process else HostRows.of(rows)

    def update_state_after_free(self, request: Any, index: int) -> None:
        self._requests.passed(request, index)

    def build_connector_meta(self, scheduler_output: Any) -> StepRows:
        """Waits for rows, at most IDLE_S, if this step and the one before it are empty: then no step is in
        flight whose tokens would wait as well."""
        is_idle = not scheduler_output.total_num_scheduled_tokens
        if is_idle and self._was_idle:
            self._requests.wait(IDLE_S)
        self._was_idle = is_idle
        step, self._step = self._step, StepRows()
        return step

    def request_finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        self._requests.finished(request)
        return False, None

    # Worker -----------------------------------------------------------------------------------------------

    def start_load_caches(self, encoder_cache: dict[str, Any], **_: Any) -> None:
        """Puts the step's rows, which the scheduler's half has checked, into the encoder cache."""
        import torch

        for identifier, rows in self._connector_metadata.rows.items():
            if identifier in encoder_cache:
                continue
            tensor = rows.torch() if isinstance(rows, HostRows) else rows
            tensor = tensor.to(self._device)
            if tensor.is_cuda:
                # The memory was allocated on the fetching thread's stream, and is read on this one.
                tensor.record_stream(torch.cuda.current_stream())
            encoder_cache[identifier] = tensor

    def save_caches(self, encoder_cache: dict[str, Any], mm_hash: str, **kwargs: Any) -> None:
        """Nothing is saved: the rows of vLLM's own tower stay in vLLM."""

    @property
    def _requests(self) -> RequestTracker:
        assert self._tracker is not None, "this connector is a worker's"
        return self._tracker

    def _use_own_stream(self) -> None:
        """Selects the GPU, which the client finds as the current one, and a stream whose copies do not wait
        for forward passes. Nothing where rows come to host memory."""
        if not self._in_process or self._device.type != "cuda":
            return
        import torch

        # vLLM's device may have no index, which means the current one (pitfall 39).
        index = torch.cuda.current_device() if self._device.index is None else self._device.index
        torch.cuda.set_device(index)
        stream: Any = torch.cuda.Stream  # untyped in torch
        torch.cuda.set_stream(stream())
