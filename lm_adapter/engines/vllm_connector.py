"""The methods of the vLLM 0.32 connector, to be joined with vLLM's base class by ``vllm``.

Owns the two halves of an out-of-tree ``ECConnector``: the scheduler's, which answers from ``vllm_book``, and
the worker's, which fills the encoder cache. Where both live in one process (one GPU, or vLLM's in-process
engine) rows go to the worker's device by themselves and are handed over as they are; else they come to the
scheduler's process through shared host memory and travel with the step's metadata, to every rank.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

from lm_adapter.engines.vllm_book import Book
from lm_adapter.engines.vllm_fetch import Fetcher, FetchSettings
from lm_adapter.engines.vllm_items import Geometry
from lm_adapter.engines.vllm_models import check_model
from lm_adapter.errors import InvalidRequest
from lm_adapter.types import EncodedRows

__all__ = ["ConnectorMethods", "HostRows", "StepRows"]

logger = logging.getLogger("vllm.vision_encoder")

IN_PROCESS_EXECUTORS = ("uni", "external_launcher")
# vLLM asks again at once while a request waits for rows and nothing else runs, through all of its workers.
IDLE_S = 0.004


@dataclass(frozen=True, eq=False)
class HostRows:
    """Rows on their way to another process. payload: uint8, travels out of band of the pickle."""

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
    """Metadata of one step: rows to put into the encoder cache, by identifier."""

    rows: dict[str, Any] = field(default_factory=dict)


class ConnectorMethods:
    """Every method that vLLM calls. The base class' initialiser keeps config and role."""

    _vllm_config: Any
    _connector_metadata: Any

    def __init__(self, vllm_config: Any, role: Any) -> None:
        super().__init__(vllm_config, role)  # type: ignore[call-arg]
        transfer = vllm_config.ec_transfer_config
        if transfer.is_ec_producer:
            raise InvalidRequest(f"ec_role is {transfer.ec_role}, this connector is an ec_consumer")
        has_tower = check_model(vllm_config)
        self._settings = FetchSettings.read(transfer.ec_connector_extra_config)
        self._geometry = Geometry.of_model(vllm_config.model_config, check_finite=self._settings.finite)
        self._device = vllm_config.device_config.device
        backend = vllm_config.parallel_config.distributed_executor_backend
        self._in_process = backend in IN_PROCESS_EXECUTORS
        self._step = StepRows()
        self._was_idle = False
        self._fetcher: Fetcher | None = None
        self._book: Book | None = None
        if role.name == "SCHEDULER":
            prepare = self._use_own_stream if self._in_process else _do_nothing
            self._fetcher = Fetcher(self._settings, self._geometry, prepare_thread=prepare)
            self._book = Book(self._fetcher, self._geometry, self._settings, has_tower=has_tower)
            logger.info("image rows are fetched at %s as %s", self._settings.target, self._geometry)

    def shutdown(self) -> None:
        if self._fetcher is not None:
            self._fetcher.close()
        if self._book is not None:
            self._book.close()

    # The scheduler's side

    def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
        """True once every image row that the request needs from here on is resident and checked."""
        return self._scheduler.ensure(request, num_computed_tokens)

    def has_cache_item(self, identifier: str) -> bool:
        return self._scheduler.holds(identifier)

    def take_unavailable_requests(self) -> set[str]:
        return self._scheduler.take_unavailable()

    def update_state_after_alloc(self, request: Any, index: int) -> None:
        """vLLM has made room for a feature: its rows go with this step."""
        rows = self._scheduler.rows(request, index)
        if rows is not None:
            identifier = request.mm_features[index].identifier
            self._step.rows[identifier] = rows.torch() if self._in_process else HostRows.of(rows)

    def update_state_after_free(self, request: Any, index: int) -> None:
        self._scheduler.passed(request, index)

    def build_connector_meta(self, scheduler_output: Any) -> StepRows:
        """Waits for rows, shortly, where this step and the one before it have nothing to compute: by then no
        step is in flight whose tokens would wait too."""
        is_idle = not scheduler_output.total_num_scheduled_tokens
        if is_idle and self._was_idle:
            self._scheduler.idle(IDLE_S)
        self._was_idle = is_idle
        step, self._step = self._step, StepRows()
        return step

    def request_finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        self._scheduler.finished(request)
        return False, None

    # The worker's side

    def start_load_caches(self, encoder_cache: dict[str, Any], **_: Any) -> None:
        """Puts the step's rows, which the scheduler's side has checked, into the encoder cache."""
        import torch

        for identifier, rows in self._connector_metadata.rows.items():
            if identifier in encoder_cache:
                continue
            tensor = rows.torch() if isinstance(rows, HostRows) else rows
            tensor = tensor.to(self._device)
            if tensor.is_cuda:
                # Its memory belongs to the stream that fetched it, and is read by this one.
                tensor.record_stream(torch.cuda.current_stream())
            encoder_cache[identifier] = tensor

    def save_caches(self, encoder_cache: dict[str, Any], mm_hash: str, **kwargs: Any) -> None:
        """Nothing: what vLLM's own tower makes stays there."""

    @property
    def _scheduler(self) -> Book:
        assert self._book is not None, "this connector is a worker's"
        return self._book

    def _use_own_stream(self) -> None:
        """Copies of rows do not wait for forward passes; the client finds the GPU that is current."""
        if self._device.type != "cuda":
            return
        import torch

        # vLLM's device has no index, and means the one that is current.
        index = torch.cuda.current_device() if self._device.index is None else self._device.index
        torch.cuda.set_device(index)
        stream: Any = torch.cuda.Stream  # untyped in torch
        torch.cuda.set_stream(stream())


def _do_nothing() -> None:
    pass
