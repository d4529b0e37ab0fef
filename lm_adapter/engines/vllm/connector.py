"""The methods of the connector, which ``lm_adapter.engines.vllm`` joins with vLLM's base class.

Owns which part answers each method: ``scheduler.tracker`` in the scheduler, ``worker.ranks`` in each worker.
A step carries only the names of the rows that it computes with.
"""

from __future__ import annotations

import logging
import time
from typing import Any, ClassVar

from lm_adapter.engines.shared.agreement import Agreement
from lm_adapter.engines.shared.encoder_thread import EncoderThread
from lm_adapter.engines.shared.first_contact import check_encoder, start_of
from lm_adapter.engines.shared.geometry import Geometry
from lm_adapter.engines.shared.rank_socket import RankSocket
from lm_adapter.engines.vllm.failures import send_report
from lm_adapter.engines.vllm.models import check_model
from lm_adapter.engines.vllm.scheduler import vllm_cache_view
from lm_adapter.engines.vllm.scheduler.items import VllmRequest
from lm_adapter.engines.vllm.scheduler.tracker import RequestTracker
from lm_adapter.engines.vllm.settings import Settings
from lm_adapter.engines.vllm.stats import RowStats
from lm_adapter.engines.vllm.step_rows import StepRows
from lm_adapter.engines.vllm.vllm_types import SchedulerOutput, VllmConfig
from lm_adapter.engines.vllm.worker.ranks import RankReader
from lm_adapter.errors import InvalidRequest

logger = logging.getLogger("vllm.vision_encoder")

MIN_IDLE_S, MAX_IDLE_S, IDLE_SHARE = 0.004, 0.02, 0.5
"""vLLM steps all of its workers without pause while a request waits for rows and nothing else runs. The
connector then pauses vLLM for IDLE_SHARE of its idle time, from MIN_IDLE_S to MAX_IDLE_S. A longer pause
would delay a request that arrives meanwhile. Seen on two cores under Linux 6.18: two ranks that step every
4 ms can leave no time to other processes for seconds, not even to an encoder on the same host."""


class ConnectorMethods:
    """Every method that vLLM calls. The base class's initialiser keeps configuration and role.

    encoder_thread, rank_socket, tracker: in the scheduler, None in a worker. reader: in a worker that reads
    rows, else None. Without vLLM, stats and metrics have no base class of it."""

    stats_class: ClassVar[type[RowStats]] = RowStats
    metrics_base: ClassVar[type] = object
    _connector_metadata: StepRows | None

    @start_of(Settings.ENGINE, logger)
    def __init__(self, vllm_config: VllmConfig, role: Any) -> None:
        """Raises EncoderError for what cannot work."""
        super().__init__(vllm_config, role)  # type: ignore[call-arg]
        transfer = vllm_config.ec_transfer_config
        assert transfer is not None, "vLLM makes a connector only where one is configured"
        if transfer.is_ec_producer:
            raise InvalidRequest(f"ec_role is {transfer.ec_role}, this connector is an ec_consumer")
        check_model(vllm_config)
        settings = Settings.read(transfer.ec_connector_extra_config)
        geometry = Geometry.of_model(vllm_config.model_config, check_finite=settings.finite)
        self._num_idle = 0
        self._idle_since_s = 0.0
        self._num_in_flight = vllm_config.max_concurrent_batches
        parallel = vllm_config.parallel_config
        # Other ranks of data parallelism would wait too.
        self._may_wait = parallel.data_parallel_size == 1
        self.encoder_thread: EncoderThread | None = None
        self.rank_socket: RankSocket | None = None
        self.tracker: RequestTracker | None = None
        self.reader: RankReader | None = None
        socket_name = f"vision-encoder-{transfer.engine_id}-{parallel.data_parallel_index}"
        if role.name == "SCHEDULER":
            num_ranks = parallel.tensor_parallel_size * parallel.prefill_context_parallel_size
            self.encoder_thread = EncoderThread(Agreement(settings, geometry), name="requests", logger=logger)
            # ``configure`` has asked too, but an encoder may start while the model is loaded.
            check_encoder(self.encoder_thread, settings.target, logger)
            self.rank_socket = RankSocket(socket_name, num_ranks)
            self.encoder_thread.run_coroutine(self.rank_socket.open())
            self.tracker = RequestTracker(
                self.encoder_thread,
                self.rank_socket,
                geometry,
                settings,
                step_tokens=vllm_config.scheduler_config.max_num_batched_tokens
                + vllm_config.num_prefill_lookahead_tokens,
                report=send_report,
            )
            vllm_cache_view.watch(vllm_config, self.tracker)
            logger.info("image rows come from the encoder at %s as %s", settings.target, geometry)
        elif computes_embeddings():
            self.reader = RankReader(settings, geometry, vllm_config.device_config.device, socket_name)

    def shutdown(self) -> None:
        if self.encoder_thread is not None and self.rank_socket is not None:
            thread, self.encoder_thread = self.encoder_thread, None
            thread.run_coroutine(self.rank_socket.close())
            thread.close()
        if self.reader is not None:
            self.reader.close()

    # Scheduler --------------------------------------------------------------------------------------------

    def ensure_cache_available(self, request: VllmRequest, num_computed_tokens: int) -> bool:
        """True once every rank has all rows of the request's next step."""
        return self._requests.ensure(request, num_computed_tokens)

    def has_cache_item(self, identifier: str) -> bool:
        return self._requests.holds(identifier)

    def take_unavailable_requests(self) -> set[str]:
        """vLLM calls this at the end of a step, before it schedules the next one. Waits for rows, at most
        MAX_IDLE_S, once so many steps in a row were empty that none with tokens is in flight."""
        if self._may_wait and self._num_idle > self._num_in_flight:
            share_s = IDLE_SHARE * (time.monotonic() - self._idle_since_s)
            self._requests.wait(min(max(share_s, MIN_IDLE_S), MAX_IDLE_S))
        return self._requests.take_unavailable()

    def update_state_after_alloc(self, request: VllmRequest, index: int) -> None:
        self._requests.allocated(request, index)

    def update_state_after_free(self, request: VllmRequest, index: int) -> None:
        self._requests.passed(request, index)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepRows:
        has_tokens = bool(scheduler_output.total_num_scheduled_tokens)
        self._num_idle = 0 if has_tokens else self._num_idle + 1
        if self._num_idle == 1:
            self._idle_since_s = time.monotonic()
        if self._num_idle > self._num_in_flight:
            self._requests.flush()
        self._requests.check_step(scheduler_output.scheduled_encoder_inputs)
        self._requests.freed(scheduler_output.free_encoder_mm_hashes, scheduler_output.num_scheduled_tokens)
        return self._requests.take_step(has_tokens=has_tokens)

    def request_finished(self, request: VllmRequest) -> tuple[bool, dict[str, Any] | None]:
        self._requests.finished(request)
        return False, None

    def get_ec_connector_stats(self) -> RowStats | None:
        """What happened since the last call. A worker's half has nothing: ranks report to the scheduler's."""
        taken = None if self.tracker is None else self.tracker.take_stats()
        return None if taken is None else self.stats_class(taken.data)

    # The process that has /metrics ------------------------------------------------------------------------

    @classmethod
    def build_ec_connector_stats(cls, data: dict[str, Any] | None = None) -> RowStats:
        return cls.stats_class(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,  # noqa: ARG003 - vLLM's name
        metric_types: Any,
        labelnames: Any,
        per_engine_labelvalues: Any,
    ) -> Any:
        from lm_adapter.engines.vllm.api_server.metrics import EncoderMetrics
        from lm_adapter.engines.vllm.api_server.server import ApiServer

        # Only what vLLM's base class is, not what its initialiser keeps: nothing reads that.
        kind = type(EncoderMetrics.__name__, (EncoderMetrics, cls.metrics_base), {})
        metrics = kind(metric_types, labelnames, per_engine_labelvalues)
        if ApiServer.current is not None:
            ApiServer.current.report_to(metrics)
        return metrics

    # Worker -----------------------------------------------------------------------------------------------

    def start_worker_services(self) -> None:
        """Reserves memory for waiting rows. vLLM calls this after it has loaded the model, and sizes its KV
        cache afterwards."""
        if self.reader is not None and (num_bytes := self.reader.reserve()):
            logger.info("%.0f MiB are reserved for rows that wait", num_bytes / 2**20)

    def start_load_caches(self, encoder_cache: dict[str, Any], **_: Any) -> None:
        """Puts the rows that the step computes with into vLLM's encoder cache. Without metadata there is no
        step."""
        if self.reader is not None and self._connector_metadata is not None:
            self.reader.begin_step(self._connector_metadata, encoder_cache)

    def save_caches(self, encoder_cache: dict[str, Any], mm_hash: str, **kwargs: Any) -> None:
        """Nothing is saved: this engine computes no rows."""

    @property
    def _requests(self) -> RequestTracker:
        assert self.tracker is not None, "this connector is a worker's"
        return self.tracker


def computes_embeddings() -> bool:
    """Only the first stage of a pipeline needs rows."""
    from vllm.distributed.parallel_state import get_pp_group

    return bool(get_pp_group().is_first_rank)
