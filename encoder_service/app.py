"""Composition root: builds the service, starts it, drains it. The only file that knows everything.

Life: settings -> bind addresses -> load tower and preprocessor -> warm up -> serve -> (signal) readiness
drops -> in-flight work finishes within the grace -> stop. A device fault leaves service at once: health
says not serving, what waits fails with a retryable error, the process exits non-zero for its supervisor.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import signal
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import structlog
import torch
from rich.console import Console
from rich.progress import Progress

from encoder_service import __version__
from encoder_service.admin.gauges import register_segments
from encoder_service.admin.plane import AdminPlane
from encoder_service.broker import Broker, BrokerLimits, broker_options
from encoder_service.config import Settings
from encoder_service.engine.device import DeviceEngine
from encoder_service.engine.fast_path import build_graph_runner
from encoder_service.engine.faults import first_line
from encoder_service.engine.graphs import CaptureRecord, GraphRunner
from encoder_service.errors import ConfigurationError, DeviceFault, StartupError
from encoder_service.ingest.cores import num_clip_workers, usable_cores
from encoder_service.ingest.decode import DecodeLimits
from encoder_service.ingest.pixel_segments import PixelSegments
from encoder_service.ingest.registry import load_preprocessor
from encoder_service.ingest.urls import MAX_FETCHES, open_urls
from encoder_service.ingest.video.source import clip_limits
from encoder_service.ingest.workers import IngestWorkers
from encoder_service.ops.allocator import return_freed_memory
from encoder_service.ops.descriptors import raise_limit
from encoder_service.ops.http_server import HttpLimits, HttpServer
from encoder_service.ops.metrics import Metrics
from encoder_service.ops.traces import start_traces
from encoder_service.own_thread import on_own_thread
from encoder_service.pipeline import Pipeline, ServedModel
from encoder_service.protocols.base import Backend, ProtocolServer
from encoder_service.protocols.sglang.server import SglangServer
from encoder_service.protocols.zmq_push import MAX_SENDS
from encoder_service.rpc.item_reader import ItemReader
from encoder_service.rpc.server import (
    EXTRA_CONNECTIONS,
    SERVICE,
    call_gate,
    is_reachable,
    method_handlers,
    open_grpc,
    open_tokens,
)
from encoder_service.rpc.server_info import server_info
from encoder_service.rpc.servicer import VisionEncoderServicer
from encoder_service.scheduler.admission import Admission, UndeliveredBytes
from encoder_service.scheduler.planner import MAX_ITEMS_PER_BATCH, Planner
from encoder_service.store.embedding_store import EmbeddingStore, open_store
from encoder_service.towers.optional import unusable_kernels
from encoder_service.towers.registry import load_tower
from encoder_service.types import Grid
from vision_encoder.v1 import encoder_pb2 as pb

log = structlog.get_logger(__name__)

# A batch that outlives the grace gets this long to end before the process leaves it.
ENGINE_STOP_S = 5.0
# After SIGTERM the health check says NOT_SERVING and work is still taken: gateways check each half second.
LEAVE_S = 2.0
# After a device fault: long enough for the streams in flight to carry the failure to their callers.
FAULT_GRACE_S = 2.0
# A piece that a clip is encoded in; at least one frame pair or chunk.
CLIP_PIECE_PATCHES = 8192
# At the end, for spans that are not sent yet; the collector may be gone.
LAST_SPANS_S = 3.0
# Readers copy announced rows within milliseconds; those that do not report reads are not waited for longer.
UNREAD_DRAIN_S = 2.0
DRAIN_POLL_S = 0.05
# What the process itself opens: files, the device, event loops, the collector of spans.
OWN_DESCRIPTORS = 256
# Copies between tiers end within this time, or the device hangs.
STORE_STOP_S = 5.0


class FrontDoor:
    """A server of another system's protocol with its HTTP server. address: host:port, once started."""

    def __init__(self, name: str, server: ProtocolServer, listen: str) -> None:
        self.name, self.server, self.address = name, server, ""
        self._listen = listen
        self._http: HttpServer | None = None

    async def start(self, settings: Settings) -> None:
        """Raises ConfigurationError."""
        limits = HttpLimits(settings.max_connections, settings.max_message_bytes, settings.max_queued_bytes)
        self._http = HttpServer(self.server.app, self._listen, limits)
        self.address = self._http.address
        self._http.start()
        await self.server.open()
        if is_reachable(self.address):
            log.warning("a protocol without tokens can be reached", protocol=self.name, listen=self.address)

    async def stop(self) -> None:
        if self._http is not None:
            await self._http.stop()
        await self.server.stop()


class Service:
    """One service process: ``start``, then ``wait`` until asked to stop or a fault, then ``stop``."""

    def __init__(self, settings: Settings) -> None:
        """Raises ConfigurationError."""
        self.settings = settings
        self.metrics = Metrics()
        self.addresses: tuple[str, ...] = ()
        self.store: EmbeddingStore | None = None
        self.broker: Broker | None = None
        self.pipeline: Pipeline | None = None
        self.requests = Admission(0, settings.max_queued_bytes)
        """Bytes of the messages of calls in progress."""
        self._instance_id = uuid.uuid4().hex
        self._info: pb.GetServerInfoResponse | None = None
        self._engine: DeviceEngine | None = None
        num_threads = settings.ingest_threads or usable_cores()
        self._workers = IngestWorkers(num_threads, num_clip_workers(num_threads), settings.max_decoded_bytes)
        self._tokens = open_tokens(settings)
        self.gate = call_gate(settings, self._tokens, self.metrics, self.requests)
        self._grpc = open_grpc(settings, self.gate)
        self._urls = open_urls(settings, self.metrics)
        self._segments: PixelSegments | None = None
        self._admin = AdminPlane(settings, self.metrics)
        self._tokenspeed = None
        self._doors: list[FrontDoor] = []
        if settings.serve_sglang:
            sglang = SglangServer(settings, self.metrics, self.not_ready_because)
            self._doors.append(FrontDoor("sglang", sglang, settings.serve_sglang))
        if settings.serve_tokenspeed:
            # Not at the top: a process that has another version of these messages can still import this file.
            from encoder_service.protocols.tokenspeed.server import TokenSpeedServer

            self._tokenspeed = TokenSpeedServer(settings, self.metrics, self.not_ready_because)
            host = settings.serve_tokenspeed.rpartition(":")[0]
            bootstrap = f"{host}:{settings.tokenspeed_bootstrap_port}"
            self._doors.append(FrontDoor("tokenspeed", self._tokenspeed, bootstrap))
        self._stop_traces: Callable[[], None] | None = None
        self._not_ready: str | None = "starting"
        self._fault: DeviceFault | None = None
        self._ended = asyncio.Event()

    @property
    def admin_address(self) -> str:
        """host:port; empty where there is no admin plane."""
        return self._admin.address

    @property
    def sglang_address(self) -> str:
        """host:port; empty where SGLang is not served."""
        return self._door_address("sglang")

    @property
    def tokenspeed_address(self) -> str:
        """host:port for gateways; empty where TokenSpeed is not served."""
        return "" if self._tokenspeed is None else self._tokenspeed.address

    @property
    def tokenspeed_bootstrap(self) -> str:
        """host:port for prefill workers; empty where TokenSpeed is not served."""
        return self._door_address("tokenspeed")

    def _door_address(self, name: str) -> str:
        return next((door.address for door in self._doors if door.name == name), "")

    # -- what the admin plane asks ---------------------------------------------------------------------

    def is_alive(self) -> bool:
        return self._fault is None

    def not_ready_because(self) -> str | None:
        return self._not_ready

    def info(self) -> pb.GetServerInfoResponse | None:
        return self._info

    # -- life ------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Everything up to readiness. Raises StartupError; nothing is left running then."""
        settings = self.settings
        try:
            self.addresses = self._grpc.bind(settings.listen)
            self._admin.open(self)
            for door in self._doors:
                await door.start(settings)
            started_s = time.monotonic()
            if settings.traces != "off":
                self._stop_traces = start_traces(__version__)
            # Before the model, which takes longer: memory that is not there and a taken socket fail at once.
            self._segments = self._open_segments()
            self.store = store = await on_own_thread(self._open_store)
            self.broker = await on_own_thread(self._open_broker, store)
            model = await on_own_thread(load_model, settings)
            graphs = await on_own_thread(capture_graphs, model, settings)
            self._engine = self._build_engine(model, graphs)
            self.pipeline = self._build_pipeline(model, self._engine, store)
            await on_own_thread(self._engine.warm_up, warm_up_grids(model, settings))
            self._engine.start()
            unusable = await on_own_thread(unusable_kernels, model.tower.device)
            self._info = server_info(settings, model, store, self._instance_id, self._own_segments, unusable)
            self._admin.attach(self.pipeline, self._engine, self.broker)
            await self._grpc.start(
                {SERVICE: method_handlers(self._build_servicer(self.pipeline, self._info), self.gate)}
            )
            backend = Backend(self.pipeline, self._urls, self._segments)
            for door in self._doors:
                await door.server.attach(backend)
        except BaseException as error:
            await self._release()
            if isinstance(error, Exception) and not isinstance(error, StartupError):
                # Out of device memory, unreadable files, a kernel that the device refuses.
                log.debug("start failed", exc_info=error)
                raise StartupError(first_line(error)) from error
            raise
        self._not_ready = None
        self.metrics.ready.set(1)
        log.info(
            "ready",
            model=model.name,
            family=model.family,
            device=str(model.tower.device),
            dtype=str(model.tower.dtype).removeprefix("torch."),
            listen=",".join(self.addresses),
            admin=self.admin_address,
            sglang=self.sglang_address,
            tokenspeed=self.tokenspeed_address,
            load_s=round(time.monotonic() - started_s, 2),
        )

    async def wait(self) -> DeviceFault | None:
        """Returns when ``request_stop`` was called (None) or the device failed (its fault)."""
        await self._ended.wait()
        return self._fault

    def request_stop(self) -> None:
        self._ended.set()

    async def stop(self, *, delay_s: float = 0.0) -> bool:
        """Drains and stops. False when work outlived the grace and was cut off. delay_s: how long work is
        still taken while the health check already says that it is not."""
        self._not_ready = "draining" if self._fault is None else "device fault"
        self.metrics.ready.set(0)
        await self._grpc.set_serving(False)
        await asyncio.gather(
            asyncio.sleep(delay_s if self._fault is None else 0.0),
            *(door.server.leave() for door in self._doors),
        )
        grace_s = self.settings.drain_grace_s if self._fault is None else FAULT_GRACE_S
        ends_s = time.monotonic() + grace_s
        in_time = await self.pipeline.drain(grace_s) if self.pipeline is not None else True
        await self._wait_for_readers(min(ends_s, time.monotonic() + UNREAD_DRAIN_S))
        for door in self._doors:
            await door.server.drain(ends_s)
        await self._grpc.stop(max(0.0, ends_s - time.monotonic()))
        await self._release()
        log.info("stopped", in_time=in_time)
        return in_time

    async def _wait_for_readers(self, ends_s: float) -> None:
        """Returns once readers have reported all announced rows as read, or the time is up."""
        while self.store is not None and self.store.num_unread() and time.monotonic() < ends_s:  # noqa: ASYNC110
            await asyncio.sleep(DRAIN_POLL_S)

    async def _release(self) -> None:
        """Gives back everything that ``start`` took."""
        await self._grpc.stop(0)
        # Not on the loop, which a second signal and the admin plane still need.
        if self._engine is not None and not await on_own_thread(self._engine.stop, ENGINE_STOP_S):
            log.error("a batch is still running and is left behind", waited_s=ENGINE_STOP_S)
        await self._admin.stop()
        for door in self._doors:
            await door.stop()
        if self.broker is not None:  # readers unmap once their connection ends
            await on_own_thread(self.broker.stop)
        if self.store is not None:
            await self._close_store(self.store)
        if self._segments is not None:
            self._segments.close()
        if self._urls is not None:
            await self._urls.close()
        self._workers.shutdown()
        if self._stop_traces is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(on_own_thread(self._stop_traces), LAST_SPANS_S)

    async def _close_store(self, store: EmbeddingStore) -> None:
        """Memory that a copy may still write is left to the end of the process."""
        store.freeze()
        try:
            await asyncio.wait_for(on_own_thread(store.wait_for_copies), STORE_STOP_S)
        except TimeoutError:
            log.error("copies between tiers have not ended", waited_s=STORE_STOP_S)
        except Exception as error:
            log.warning("the device failed before the store's end", error=first_line(error))
        else:
            store.close()

    # -- building --------------------------------------------------------------------------------------

    def _build_engine(self, model: ServedModel, graphs: GraphRunner | None) -> DeviceEngine:
        loop = asyncio.get_running_loop()

        def on_fault(fault: DeviceFault) -> None:
            loop.call_soon_threadsafe(self._leave_service, fault)

        return DeviceEngine(
            model.tower,
            model.preprocessor,
            Planner(
                self.settings.max_patches_per_batch,
                MAX_ITEMS_PER_BATCH,
                None if graphs is None else graphs.ladder,
            ),
            self.metrics,
            clock=time.monotonic,
            on_fault=on_fault,
            num_threads=self.settings.torch_threads,
            graphs=graphs,
        )

    @property
    def _own_segments(self) -> PixelSegments | None:
        """Segments that callers of the service's own protocol may name."""
        return self._segments if self.settings.shm_prefixes else None

    def _open_segments(self) -> PixelSegments | None:
        settings = self.settings
        prefixes = settings.shm_prefixes
        if self._tokenspeed is not None and not prefixes:
            prefixes = self._tokenspeed.segment_prefixes
        if not prefixes:
            return None
        segments = PixelSegments(
            prefixes,
            max_tensor_bytes=settings.max_message_bytes,
            allowed_uids=settings.shm_allowed_uids,
        )
        register_segments(self.metrics, segments)
        return segments

    def _open_store(self) -> EmbeddingStore:
        return open_store(self.settings, on_copy_error=self._report_copy_error)

    def _report_copy_error(self, error: Exception) -> bool:
        """A copy between tiers may be the first to find a device fault."""
        return self._engine is not None and self._engine.report(error)

    def _open_broker(self, store: EmbeddingStore) -> Broker | None:
        """The broker, serving."""
        if not self.settings.broker_path:
            return None
        options = broker_options(self.settings, self._instance_id)
        broker = Broker(options, store.arenas(), self._tokens.opens)
        broker.start()
        return broker

    def _build_pipeline(self, model: ServedModel, engine: DeviceEngine, store: EmbeddingStore) -> Pipeline:
        settings = self.settings
        return Pipeline(
            model=model,
            store=store,
            admission=Admission(settings.max_queued_patches, settings.max_queued_bytes, time.monotonic),
            engine=engine,
            workers=self._workers,
            metrics=self.metrics,
            max_patches_per_item=settings.max_patches_per_item,
            undelivered=UndeliveredBytes(settings.max_undelivered_bytes),
            max_clip_patches=settings.max_clip_patches,
            clip_piece_patches=min(CLIP_PIECE_PATCHES, settings.max_patches_per_batch),
        )

    def _build_servicer(self, pipeline: Pipeline, info: pb.GetServerInfoResponse) -> VisionEncoderServicer:
        return VisionEncoderServicer(
            pipeline,
            info,
            ItemReader(self.requests, self._workers.executor, self._own_segments, self._urls),
            self.metrics,
        )

    def _leave_service(self, fault: DeviceFault) -> None:
        self._fault = fault
        self._not_ready = "device fault"
        if self.store is not None:
            self.store.freeze()
        self.metrics.ready.set(0)
        self._ended.set()


def load_model(settings: Settings) -> ServedModel:
    """The checkpoint's tower and preprocessor. Raises StartupError; runs on a worker thread."""
    device = torch.device(settings.device)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ConfigurationError(f"device {settings.device} was asked for, but torch sees no CUDA device")
        if (device.index or 0) >= torch.cuda.device_count():
            raise ConfigurationError(
                f"device {settings.device} was asked for, but torch sees "
                f"{torch.cuda.device_count()} device(s)"
            )
    default = torch.bfloat16 if device.type == "cuda" else torch.float32
    dtype = default if settings.dtype is None else getattr(torch, settings.dtype)
    loaded = load_tower(settings.model, device=device, dtype=dtype)
    limits = DecodeLimits(settings.max_encoded_bytes, settings.max_image_pixels)
    clips = clip_limits(settings, settings.max_image_pixels, settings.ingest_threads or usable_cores())
    preprocessor = load_preprocessor(settings.model, loaded.tower.family, limits, clips, settings.transparent)
    if preprocessor.patch_dim != loaded.tower.patch_dim:
        raise ConfigurationError(
            f"{settings.model}: the processor makes patches of {preprocessor.patch_dim} elements, the tower "
            f"takes {loaded.tower.patch_dim}"
        )
    name = settings.model_name or settings.model.resolve().name
    return ServedModel(
        name,
        loaded.tower.family,
        loaded.fingerprint,
        loaded.tower,
        preprocessor,
    )


def capture_graphs(model: ServedModel, settings: Settings) -> GraphRunner | None:
    """The fast path, every graph captured, or None where the plain tower serves. Runs on a thread of its
    own; shows its progress on a terminal. Raises ConfigurationError."""
    device = model.tower.device
    if device.type != "cuda" or settings.tower == "plain":
        return None
    torch.cuda.set_device(device)
    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        bar = progress.add_task("capturing graphs", total=None)

        def show(_: CaptureRecord, left: int) -> None:
            done = int(progress.tasks[bar].completed) + 1
            progress.update(bar, completed=done, total=done + left)

        return build_graph_runner(
            model.tower,
            attention=settings.attention,
            deterministic=settings.deterministic,
            max_patches=settings.max_patches_per_batch,
            longest_item=model.preprocessor.longest_item,
            bucket_sizes=settings.bucket_sizes,
            choices_dir=choices_folder(settings),
            progress=show,
        )


def choices_folder(settings: Settings) -> Path | None:
    """None if no choices are kept, also for a user without a home."""
    try:
        return Path(settings.choices_dir).expanduser() if settings.choices_dir else None
    except RuntimeError:
        return None


def warm_up_grids(model: ServedModel, settings: Settings) -> list[Grid]:
    """Grids to run before readiness: the smallest, and on a GPU one near the batch's budget, so that
    libraries choose their kernels and the allocator its blocks before the first caller waits for it."""
    merge = model.tower.merge_size
    grids = [Grid(1, merge, merge)]
    if model.tower.device.type == "cuda":
        side = int(min(settings.max_patches_per_batch, settings.max_patches_per_item) ** 0.5)
        side = max(merge, side // merge * merge)
        grids.append(Grid(1, side, side))
    return grids


def within_descriptors(settings: Settings, limit: int) -> Settings:
    """The settings, with fewer connections if all that the limits allow would need more descriptors than
    ``limit``. At least a quarter of them is for connections."""
    num_protocols = bool(settings.serve_sglang) + bool(settings.serve_tokenspeed)
    num_grpc = len(settings.listen) + bool(settings.serve_tokenspeed)
    num_http = bool(settings.admin_listen) + num_protocols
    num_addresses = num_http + num_grpc * (1 + EXTRA_CONNECTIONS)  # gRPC accepts some more, and ends them
    num_others = OWN_DESCRIPTORS + MAX_FETCHES * bool(settings.url_allow) + 2 * MAX_SENDS * num_protocols
    if settings.broker_path:
        num_others += BrokerLimits.within(limit).num_descriptors
    num_needed = num_others + math.ceil(num_addresses * settings.max_connections)
    if num_needed <= limit:
        return settings
    num_left = max(limit - num_others, limit // 4)
    reduced = max(1, int(num_left / num_addresses))
    log.warning(
        "fewer connections are taken than set: the limit on descriptors is low",
        needed=num_needed,
        limit=limit,
        max_connections=settings.max_connections,
        taken_on_one_address=reduced,
        remedy=f"raise the hard limit (ulimit -Hn) to {num_needed}, or lower max_connections",
    )
    return settings.model_copy(update={"max_connections": reduced})


async def serve(settings: Settings, announce: Callable[[Service], None]) -> int:
    """Runs the service until a signal or a fault; the process's exit code. ``announce`` is called once
    when it is ready. Raises StartupError when it cannot start. A second signal cuts the grace short."""
    delay_s = 0.0
    service = Service(within_descriptors(settings, raise_limit()))
    loop = asyncio.get_running_loop()
    main = asyncio.current_task()
    assert main is not None

    def on_signal(number: signal.Signals) -> None:
        nonlocal delay_s
        if service._ended.is_set():
            main.cancel()
        delay_s = LEAVE_S if number is signal.SIGTERM else 0.0
        service.request_stop()

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
            stopping.cancel()
            return 0
        starting.result()
        gc.freeze()  # what is there now stays: no collection has to walk through torch and the model again
        announce(service)
        trimming = asyncio.ensure_future(return_freed_memory(lambda: service.gate.permits.num_calls))
        await stopping
        trimming.cancel()
        in_time = await service.stop(delay_s=delay_s)
        return 0 if in_time and service.is_alive() else 1
    except asyncio.CancelledError:
        return 1
    finally:
        stopping.cancel()
