"""Composition root: builds the service, starts it, drains it. The only file that knows every part.

Life: addresses are bound, the model is loaded and warmed up (``startup``), requests are served. After a
signal the health check says NOT_SERVING, work in progress ends within the grace, and the service stops. After
a device fault it stops at once: waiting work fails with a retryable error, and the process exits non-zero for
its supervisor.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import ssl
import time
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING

import structlog
import torch

from encoder_service import __version__
from encoder_service.admin.plane import AdminPlane
from encoder_service.broker import Broker
from encoder_service.config import Settings
from encoder_service.defaults import with_broker_path, with_device
from encoder_service.engine.device import DeviceEngine
from encoder_service.engine.faults import first_line
from encoder_service.engine.sharing import SharedGpu
from encoder_service.errors import DeviceFault, StartupError
from encoder_service.http.endpoint import Access, EncodeEndpoint
from encoder_service.http.explained import NAMESPACE, explained
from encoder_service.http.server import HttpEncodeServer
from encoder_service.ingest.cores import num_clip_workers, usable_cores
from encoder_service.ingest.pixel_segments import PixelSegments
from encoder_service.ingest.urls import open_urls
from encoder_service.ingest.workers import IngestWorkers
from encoder_service.ops.allocator import return_freed_memory
from encoder_service.ops.descriptors import raise_limit
from encoder_service.ops.http_server import HttpLimits, HttpServer
from encoder_service.ops.metrics import Metrics
from encoder_service.ops.tls import server_context
from encoder_service.ops.tokens import NamespaceTokens
from encoder_service.ops.traces import start_traces
from encoder_service.own_thread import on_own_thread
from encoder_service.pipeline import Pipeline, ServedModel
from encoder_service.protocols.base import Backend, ProtocolServer
from encoder_service.protocols.sglang.server import SglangServer
from encoder_service.rpc.gate import CallGate, CallPermits
from encoder_service.rpc.item_reader import ItemReader
from encoder_service.rpc.server import (
    SERVICE,
    call_gate,
    is_reachable,
    method_handlers,
    open_grpc,
    open_tokens,
)
from encoder_service.rpc.server_info import server_info
from encoder_service.rpc.servicer import VisionEncoderServicer
from encoder_service.scheduler.admission import Admission
from encoder_service.startup import (
    build_engine,
    build_pipeline,
    capture_graphs,
    failure_text,
    load_model,
    open_segments,
    start_broker,
    warm_up_grids,
    within_descriptors,
)
from encoder_service.store.embedding_store import EmbeddingStore, open_store
from encoder_service.towers.optional import unusable_kernels
from encoder_service.types import Modality
from vision_encoder.v1 import encoder_pb2 as pb

if TYPE_CHECKING:
    from encoder_service.protocols.tokenspeed.server import TokenSpeedServer

log = structlog.get_logger(__name__)

# A batch that outlives the grace gets this long to end before the process leaves it.
ENGINE_STOP_S = 5.0
# After SIGTERM the health check says NOT_SERVING and work is still accepted: gateways check each half second.
LEAVE_S = 2.0
# Grace after a device fault: the streams in progress carry the failure to their callers.
FAULT_GRACE_S = 2.0
# At the end, for spans that are not sent yet; the collector may be gone.
LAST_SPANS_S = 3.0
# Readers copy announced rows within milliseconds. Those that report nothing are not waited for longer.
UNREAD_DRAIN_S = 2.0
DRAIN_POLL_S = 0.05
# Between two lines about what is left.
DRAIN_REPORT_S = 5.0
# Images that the page's playground encodes at a time.
MAX_PLAYGROUND_CALLS = 2
# Copies between tiers end within this time, or the device hangs.
STORE_STOP_S = 5.0


class ForeignServer:
    """A server of a protocol other than gRPC and the HTTP server of its routes. address: host:port of the
    routes, once started. tls: None for plain HTTP. has_tokens: callers need those of their namespaces."""

    def __init__(
        self,
        server: ProtocolServer,
        listen: str,
        tls: ssl.SSLContext | None = None,
        *,
        has_tokens: bool = False,
    ) -> None:
        self.server, self.address, self.has_tokens = server, "", has_tokens
        self._listen, self._tls = listen, tls
        self._http: HttpServer | None = None

    async def start(self, settings: Settings) -> None:
        """Raises ConfigurationError."""
        limits = HttpLimits(settings.max_connections, settings.max_message_bytes, settings.max_queued_bytes)
        self._http = HttpServer(self.server.app, self._listen, limits, self._tls)
        self.address = self._http.address
        self._http.start()
        await self.server.open()

    async def stop(self) -> None:
        if self._http is not None:
            await self._http.stop()
        await self.server.stop()


class Service:
    """One service process: ``start``, then ``wait`` until a stop is requested or the device fails, then
    ``stop``. For one event loop.

    listen: gRPC addresses as bound. addresses: host:port of the other open ports, by name: ``admin``,
    ``http``, ``sglang``, ``tokenspeed`` (for its gateways), ``tokenspeed_bootstrap`` (for its prefill
    workers). admission: counts the content of the calls of every protocol, and their items' patches.
    not_ready: the reason why no work is accepted, or None. info: the answer of GetServerInfo. Parts that
    ``start`` creates are None before.
    """

    def __init__(self, settings: Settings) -> None:
        """Raises ConfigurationError."""
        self.settings = settings = with_device(settings)
        self.metrics = Metrics()
        self.listen: tuple[str, ...] = ()
        self.addresses: dict[str, str] = {}
        self.not_ready: str | None = "starting"
        self.store: EmbeddingStore | None = None
        self.broker: Broker | None = None
        self.engine: DeviceEngine | None = None
        self.pipeline: Pipeline | None = None
        self.shared_gpu: SharedGpu | None = None
        self.admission = Admission(settings.max_queued_patches, settings.max_queued_bytes, time.monotonic)
        self._instance_id = uuid.uuid4().hex
        self.info: pb.GetServerInfoResponse | None = None
        num_threads = settings.ingest_threads or usable_cores()
        self._workers = IngestWorkers(num_threads, num_clip_workers(num_threads), settings.max_decoded_bytes)
        self._tokens = open_tokens(settings)
        self.gate = call_gate(settings, self._tokens, self.metrics, self.admission)
        self._grpc = open_grpc(settings, self.gate)
        self._urls = open_urls(settings, self.metrics)
        self._segments: PixelSegments | None = None
        self._playground = self._make_playground() if settings.playground else None
        self._admin = AdminPlane(settings, self.metrics, self._playground)
        self.protocols: dict[str, ForeignServer] = {}
        self._tokenspeed: TokenSpeedServer | None = None
        self._add_protocols()
        self._stop_traces: Callable[[], None] | None = None
        self._fault: DeviceFault | None = None
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()

    def _add_protocols(self) -> None:
        settings = self.settings
        if settings.http_listen:
            http = HttpEncodeServer(
                self.gate,
                self.metrics,
                self._instance_id,
                self._not_ready_because,
                lambda: self.info,
                settings.http_listen.rpartition(":")[0],
            )
            tls = None
            if settings.tls_cert is not None and settings.tls_key is not None:
                tls = server_context(settings.tls_cert, settings.tls_key, settings.tls_client_ca)
            self.protocols["http"] = ForeignServer(http, settings.http_listen, tls, has_tokens=True)
        if settings.serve_sglang:
            sglang = SglangServer(settings, self.metrics, self._not_ready_because, self.admission)
            self.protocols["sglang"] = ForeignServer(sglang, settings.serve_sglang)
        if settings.serve_tokenspeed:
            # Imported here: a process that has another version of its messages can still import this file.
            from encoder_service.protocols.tokenspeed.server import TokenSpeedServer

            self._tokenspeed = TokenSpeedServer(
                settings, self.metrics, self._not_ready_because, self.admission
            )
            host = settings.serve_tokenspeed.rpartition(":")[0]
            bootstrap = f"{host}:{settings.tokenspeed_bootstrap_port}"
            self.protocols["tokenspeed"] = ForeignServer(self._tokenspeed, bootstrap)

    def _make_playground(self) -> EncodeEndpoint:
        """The admin page's calls: of a namespace of their own, so that they reveal nothing of what others
        have cached, behind all other work. The admin plane checks who calls."""
        permits = CallPermits(MAX_PLAYGROUND_CALLS)
        gate = CallGate(NamespaceTokens(), permits, self.admission, self.settings.max_message_bytes)
        return EncodeEndpoint(
            Access(gate, NAMESPACE, is_prefetch=True),
            explained,
            self.metrics,
            self._instance_id,
            self._not_ready_because,
        )

    def _not_ready_because(self) -> str | None:
        return self.not_ready

    def num_calls(self) -> int:
        """Calls of every protocol that are in progress, and encodes, which may outlive their calls."""
        num_encodes = 0 if self.pipeline is None else len(self.pipeline.inflight)
        of_protocols = sum(protocol.server.num_calls for protocol in self.protocols.values())
        return self.gate.permits.num_calls + of_protocols + num_encodes

    def is_alive(self) -> bool:
        """False after a device fault."""
        return self._fault is None

    async def start(self) -> None:
        """Returns once the service is ready, and its log says so with all addresses. Raises StartupError;
        nothing is left running then."""
        started_s = time.monotonic()
        try:
            store = await self._open()
            model = await self._load(store)
        except BaseException as error:
            await self._release()
            if isinstance(error, Exception) and not isinstance(error, StartupError):
                log.debug("start failed", exc_info=error)
                raise StartupError(failure_text(error, self.settings.device)) from error
            raise
        self.not_ready = None
        self.metrics.ready.set(1)
        log.info(
            "ready",
            model=model.name,
            family=model.family,
            device=str(model.tower.device),
            dtype=str(model.tower.dtype).removeprefix("torch."),
            listen=",".join(self.listen),
            **self.addresses,
            start_s=round(time.monotonic() - started_s, 2),
        )

    async def _open(self) -> EmbeddingStore:
        """Binds addresses and takes memory. This comes before the model, which takes longer to load, so that
        a port in use or too little memory fails at once."""
        settings = self.settings
        self.listen = self._grpc.bind(settings.listen)
        self._admin.open(self)
        if self._admin.address:
            self.addresses["admin"] = self._admin.address
        for name, foreign in self.protocols.items():
            await foreign.start(settings)
            self.addresses[name] = foreign.address
            if is_reachable(foreign.address) and not foreign.has_tokens:
                log.warning("a protocol without tokens can be reached", protocol=name, listen=foreign.address)
        if self._tokenspeed is not None:  # its HTTP routes are for prefill workers
            self.addresses["tokenspeed_bootstrap"] = self.addresses["tokenspeed"]
            self.addresses["tokenspeed"] = self._tokenspeed.address
        if settings.traces != "off":
            self._stop_traces = start_traces(__version__)
        prefixes = settings.shm_prefixes
        if self._tokenspeed is not None and not prefixes:
            prefixes = self._tokenspeed.segment_prefixes
        self._segments = open_segments(settings, prefixes, self.metrics)
        self.settings = settings = await on_own_thread(with_broker_path, settings, self.listen)
        if settings.broker_path:
            log.info("taking shared memory for rows", mib=settings.arena_bytes >> 20)
        self.store = store = await on_own_thread(self._open_store)
        self.broker = await on_own_thread(start_broker, settings, self._instance_id, store, self._tokens)
        return store

    async def _load(self, store: EmbeddingStore) -> ServedModel:
        """Loads the model, starts its engine and answers calls."""
        settings = self.settings
        device = torch.device(settings.device)
        if device.type == "cuda":
            arenas = [arena.capacity_bytes for _, arena in store.arenas() if arena.kind == "device"]
            self.shared_gpu = SharedGpu(device, sum(arenas))
            await on_own_thread(self.shared_gpu.start)
        model = await on_own_thread(load_model, settings)
        graphs = await on_own_thread(capture_graphs, model, settings)
        self.engine = engine = build_engine(settings, model, graphs, self.metrics, self.on_device_fault)
        self.pipeline = pipeline = build_pipeline(
            settings, model, engine, store, self._workers, self.metrics, self.admission
        )
        await on_own_thread(engine.warm_up, warm_up_grids(model, settings))
        engine.start()
        unusable = await on_own_thread(unusable_kernels, model.tower.device)
        # Callers of the service's own protocol may name segments only with prefixes of the settings.
        segments = self._segments if settings.shm_prefixes else None
        self.info = server_info(settings, model, store, self._instance_id, segments, unusable)
        self._admin.attach(pipeline, engine, self.broker)
        reader = ItemReader(self.admission, self._workers.executor, segments, self._urls)
        servicer = VisionEncoderServicer(pipeline, self.info, reader, self.metrics)
        await self._grpc.start({SERVICE: method_handlers(servicer, self.gate)})
        max_file_bytes = {
            Modality.IMAGE: settings.max_encoded_bytes,
            Modality.VIDEO: settings.max_clip_bytes,
        }
        backend = Backend(pipeline, self._urls, self._segments, max_file_bytes)
        for foreign in self.protocols.values():
            await foreign.server.attach(backend)
        if self._playground is not None:
            self._playground.attach(backend)
        return model

    async def wait(self) -> DeviceFault | None:
        """Returns None once ``request_stop`` was called, or the fault once the device failed."""
        await self._ended.wait()
        return self._fault

    def request_stop(self) -> bool:
        """Ends ``wait``. False if that has ended already."""
        is_first = not self._ended.is_set()
        self._ended.set()
        return is_first

    def on_device_fault(self, fault: DeviceFault) -> None:
        """Refuses work and ends ``wait``. May be called on any thread."""
        self._loop.call_soon_threadsafe(self._leave_service, fault)

    def _leave_service(self, fault: DeviceFault) -> None:
        self._fault = fault
        self.not_ready = "device fault"
        if self.store is not None:
            self.store.freeze()
        self.metrics.ready.set(0)
        self._ended.set()

    def _open_store(self) -> EmbeddingStore:
        return open_store(self.settings, on_copy_error=self._report_copy_error)

    def _report_copy_error(self, error: Exception) -> bool:
        """A copy between tiers may be the first to find a device fault."""
        return self.engine is not None and self.engine.report(error)

    async def stop(self, *, delay_s: float = 0.0) -> bool:
        """Drains and stops. False if work outlived the grace and was cut off. delay_s: for how long work is
        still accepted while the health check says NOT_SERVING."""
        self.not_ready = "draining" if self._fault is None else "device fault"
        self.metrics.ready.set(0)
        reporting = asyncio.ensure_future(self._report_what_is_left())
        try:
            in_time = await self._drain(delay_s)
        finally:
            reporting.cancel()
        await self._release()
        log.info("stopped", in_time=in_time)
        return in_time

    async def _drain(self, delay_s: float) -> bool:
        """As ``stop``: returns whether all work has ended."""
        await self._grpc.set_serving(False)
        servers = [foreign.server for foreign in self.protocols.values()]
        await asyncio.gather(
            asyncio.sleep(delay_s if self._fault is None else 0.0), *(server.leave() for server in servers)
        )
        grace_s = self.settings.drain_grace_s if self._fault is None else FAULT_GRACE_S
        ends_s = time.monotonic() + grace_s
        in_time = await self.pipeline.drain(grace_s) if self.pipeline is not None else True
        await self._wait_for_readers(min(ends_s, time.monotonic() + UNREAD_DRAIN_S))
        for server in servers:
            await server.drain(ends_s)
        await self._grpc.stop(max(0.0, ends_s - time.monotonic()))
        return in_time

    async def _report_what_is_left(self) -> None:
        """Logs it at once and every DRAIN_REPORT_S."""
        log.info(
            "draining",
            **self.work_left(),
            grace_s=self.settings.drain_grace_s if self._fault is None else FAULT_GRACE_S,
            second_signal="ends at once",
        )
        while True:
            await asyncio.sleep(DRAIN_REPORT_S)
            log.info("draining", **self.work_left())

    def work_left(self) -> dict[str, int]:
        """Items that are being encoded, or wait for it; calls of every protocol that are in progress."""
        num_items = 0 if self.pipeline is None else len(self.pipeline.inflight)
        return {"items_left": num_items, "calls_left": self.num_calls() - num_items}

    async def _wait_for_readers(self, ends_s: float) -> None:
        """Returns once readers have reported all announced rows as read, or at that time."""
        while self.store is not None and self.store.num_unread() and time.monotonic() < ends_s:  # noqa: ASYNC110
            await asyncio.sleep(DRAIN_POLL_S)

    async def _release(self) -> None:
        """Gives back everything that ``start`` took."""
        await self._grpc.stop(0)
        # Not on the loop: a second signal and the admin plane still need it.
        if self.engine is not None and not await on_own_thread(self.engine.stop, ENGINE_STOP_S):
            log.error("a batch is still running and is left behind", waited_s=ENGINE_STOP_S)
        await self._admin.stop()
        for foreign in self.protocols.values():
            await foreign.stop()
        if self.broker is not None:  # readers unmap once their connection ends
            await on_own_thread(self.broker.stop)
        if self.store is not None:
            await close_store(self.store)
        if self._segments is not None:
            self._segments.close()
        if self._urls is not None:
            await self._urls.close()
        self._workers.shutdown()
        if self._stop_traces is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(on_own_thread(self._stop_traces), LAST_SPANS_S)


async def close_store(store: EmbeddingStore) -> None:
    """Closes the store, unless a copy may still write to its memory: that is left to the process's end."""
    store.freeze()
    try:
        await asyncio.wait_for(on_own_thread(store.wait_for_copies), STORE_STOP_S)
    except TimeoutError:
        log.error("copies between tiers have not ended", waited_s=STORE_STOP_S)
    except Exception as error:
        log.warning("the device failed before the store's end", error=first_line(error))
    else:
        store.close()


async def serve(settings: Settings) -> int:
    """Runs the service until a signal or a fault, and returns the process's exit code. A second signal ends
    it at once. Raises StartupError."""
    delay_s = 0.0
    service = Service(within_descriptors(settings, raise_limit()))
    loop = asyncio.get_running_loop()
    main = asyncio.current_task()
    assert main is not None

    def on_signal(number: signal.Signals) -> None:
        nonlocal delay_s
        delay_s = LEAVE_S if number is signal.SIGTERM else 0.0
        if not service.request_stop():
            log.warning("ended at once by a second signal", signal=number.name, **service.work_left())
            main.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    starting = asyncio.ensure_future(service.start())
    stopping = asyncio.ensure_future(service.wait())
    try:
        await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():  # stopped while loading
            starting.cancel()
            with contextlib.suppress(asyncio.CancelledError, StartupError):
                await starting
            log.info("stopped before it was ready")
            return 0 if service.is_alive() else 1
        starting.result()
        gc.freeze()  # garbage collections then skip torch and the model
        beside = [asyncio.ensure_future(return_freed_memory(service.num_calls))]
        if service.shared_gpu is not None:
            beside.append(asyncio.ensure_future(service.shared_gpu.watch()))
        await stopping
        for task in beside:
            task.cancel()
        in_time = await service.stop(delay_s=delay_s)
        return 0 if in_time and service.is_alive() else 1
    except asyncio.CancelledError:
        return 1
    finally:
        stopping.cancel()
