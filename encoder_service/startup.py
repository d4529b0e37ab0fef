"""What the service does before its first request: limits, model, graphs, engine, pipeline, broker.

Functions from settings to parts. ``serve`` calls them in order and owns the parts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

import structlog
import torch

from encoder_service.admin.gauges import register_segments
from encoder_service.broker import Broker, BrokerLimits, broker_options
from encoder_service.checkpoints.hub_id import HubId, hub_id
from encoder_service.config import AUTO, Settings
from encoder_service.defaults import check_plain_attention
from encoder_service.engine.device import DeviceEngine
from encoder_service.engine.fast_path import build_graph_runner
from encoder_service.engine.faults import first_line
from encoder_service.engine.graphs import GraphRunner
from encoder_service.errors import ConfigurationError, DeviceFault
from encoder_service.ingest.cores import usable_cores
from encoder_service.ingest.decode import DecodeLimits
from encoder_service.ingest.pixel_segments import PixelSegments
from encoder_service.ingest.registry import load_preprocessor
from encoder_service.ingest.urls import MAX_FETCHES
from encoder_service.ingest.video.source import clip_limits
from encoder_service.ingest.workers import IngestWorkers
from encoder_service.ops.metrics import Metrics
from encoder_service.ops.tokens import NamespaceTokens
from encoder_service.pipeline import Pipeline, ServedModel
from encoder_service.protocols.zmq_push import MAX_SENDS
from encoder_service.rpc.server import EXTRA_CONNECTIONS
from encoder_service.scheduler.admission import Admission, UndeliveredBytes
from encoder_service.scheduler.planner import MAX_ITEMS_PER_BATCH, Planner
from encoder_service.store.embedding_store import EmbeddingStore
from encoder_service.store.host_memory import available_bytes
from encoder_service.towers.checkpoint import read_config
from encoder_service.towers.config import stated_dtype
from encoder_service.towers.registry import load_tower
from encoder_service.types import Grid

log = structlog.get_logger(__name__)

# Descriptors that the process itself opens: files, the device, event loops, the collector of spans.
OWN_DESCRIPTORS = 256
# Patches of the pieces that a clip is encoded in. A piece has at least one frame pair or chunk.
CLIP_PIECE_PATCHES = 8192


def within_descriptors(settings: Settings, limit: int) -> Settings:
    """The settings, with max_connections reduced if all connections together could need more descriptors
    than ``limit``. At least a quarter of the limit is for connections."""
    num_protocols = bool(settings.serve_sglang) + bool(settings.serve_tokenspeed)
    num_grpc = len(settings.listen) + bool(settings.serve_tokenspeed)
    num_http = bool(settings.admin_listen) + bool(settings.http_listen) + num_protocols
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
        "fewer connections are accepted than set: the limit on descriptors is low",
        needed=num_needed,
        limit=limit,
        max_connections=settings.max_connections,
        taken_on_one_address=reduced,
        remedy=f"raise the hard limit (ulimit -Hn) to {num_needed}, or lower max_connections",
    )
    return settings.model_copy(update={"max_connections": reduced})


def open_segments(settings: Settings, prefixes: tuple[str, ...], metrics: Metrics) -> PixelSegments | None:
    """Reads pixels from shared-memory segments with these prefixes. None without a prefix."""
    if not prefixes:
        return None
    segments = PixelSegments(
        prefixes, max_tensor_bytes=settings.max_message_bytes, allowed_uids=settings.shm_allowed_uids
    )
    register_segments(metrics, segments)
    return segments


def start_broker(
    settings: Settings, instance_id: str, store: EmbeddingStore, tokens: NamespaceTokens
) -> Broker | None:
    """The broker, serving; None without broker_path. Raises ConfigurationError."""
    if not settings.broker_path:
        return None
    broker = Broker(broker_options(settings, instance_id), store.arenas(), tokens.opens)
    broker.start()
    return broker


def load_model(settings: Settings) -> ServedModel:
    """The checkpoint's tower and preprocessor. Raises StartupError; runs on a worker thread. Files of a hub
    id that are missing are fetched first."""
    model = hub_id(settings.model)
    folder = settings.model if model is None else fetched(model)
    started_s = time.monotonic()
    loaded = load_tower(folder, device=torch.device(settings.device), dtype=tower_dtype(settings, folder))
    limits = DecodeLimits(settings.max_encoded_bytes, settings.max_image_pixels)
    clips = clip_limits(settings, settings.max_image_pixels, settings.ingest_threads or usable_cores())
    preprocessor = load_preprocessor(folder, loaded.tower.family, limits, clips, settings.transparent)
    if preprocessor.patch_dim != loaded.tower.patch_dim:
        raise ConfigurationError(
            f"{settings.model}: the processor makes patches of {preprocessor.patch_dim} elements, the tower "
            f"takes {loaded.tower.patch_dim}"
        )
    num_bytes = sum(parameter.nbytes for parameter in loaded.tower.parameters())
    seconds = round(time.monotonic() - started_s, 1)
    log.info("vision tensors loaded", folder=str(folder), mib=num_bytes >> 20, seconds=seconds)
    name = settings.model_name or (folder.resolve().name if model is None else model.name)
    return ServedModel(
        name,
        loaded.tower.family,
        loaded.fingerprint,
        loaded.tower,
        preprocessor,
        folder,
    )


def tower_dtype(settings: Settings, folder: Path) -> torch.dtype:
    """The dtype of weights and rows. ``auto`` agrees with vLLM's, also on a CPU: bfloat16 for a checkpoint in
    bfloat16 or float32. Raises CheckpointError."""
    if settings.dtype != AUTO:
        dtype: torch.dtype = getattr(torch, settings.dtype)
        return dtype
    stated = stated_dtype(read_config(folder))
    if stated == "float16":
        log.warning(
            "the checkpoint is float16, in which the tower does not run: rows are bfloat16",
            remedy="start the engine with --dtype bfloat16",
        )
    elif stated != "bfloat16":
        log.info("rows are bfloat16, as with an engine's --dtype auto", checkpoint_dtype=stated)
    return torch.bfloat16


def fetched(model: HubId) -> Path:
    """The folder of the model's checkpoint. Raises CheckpointError."""
    from encoder_service.checkpoints.hub import fetch  # takes half a second, which a folder does not need

    return fetch(model)


def capture_graphs(model: ServedModel, settings: Settings) -> GraphRunner | None:
    """The fast path, every graph captured, or None where the plain tower serves. Runs on a thread of its
    own. Raises ConfigurationError."""
    device = model.tower.device
    if device.type != "cuda" or settings.tower == "plain":
        check_plain_attention(settings, str(device))
        return None
    torch.cuda.set_device(device)
    return build_graph_runner(
        model.tower,
        attention=settings.attention,
        deterministic=settings.deterministic,
        max_patches=settings.max_patches_per_batch,
        longest_item=model.preprocessor.longest_item,
        bucket_sizes=settings.bucket_sizes,
        choices_dir=choices_folder(settings),
        choices_seed=Path(settings.choices_seed).expanduser() if settings.choices_seed else None,
    )


def failure_text(error: Exception, device: str) -> str:
    """What to do about an error of a library at the start."""
    text = first_line(error)
    if isinstance(error, torch.OutOfMemoryError) and device != "cpu":
        free, total = torch.cuda.mem_get_info(device)
        return (
            f"{device} has too little memory: {free} of its {total} bytes are free; lower "
            f"--max-patches-per-batch or --device-arena-bytes, or end other processes there ({text})"
        )
    if isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error):
        return (
            f"the host has too little memory: {available_bytes()} bytes are available; lower --arena-bytes, "
            f"or end other processes ({text})"
        )
    if "no kernel image" in str(error):
        return (
            f"torch {torch.__version__} has no kernels for {torch.cuda.get_device_name(device)}: install a "
            f"build of torch for it ({text})"
        )
    return f"{text}; --log-level debug logs where"


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


def build_engine(
    settings: Settings,
    model: ServedModel,
    graphs: GraphRunner | None,
    metrics: Metrics,
    on_fault: Callable[[DeviceFault], None],
) -> DeviceEngine:
    """The engine, not started. on_fault: is called once, on a thread of the engine."""
    ladder = None if graphs is None else graphs.ladder
    return DeviceEngine(
        model.tower,
        model.preprocessor,
        Planner(settings.max_patches_per_batch, MAX_ITEMS_PER_BATCH, ladder),
        metrics,
        clock=time.monotonic,
        on_fault=on_fault,
        num_threads=settings.torch_threads,
        graphs=graphs,
    )


def build_pipeline(
    settings: Settings,
    model: ServedModel,
    engine: DeviceEngine,
    store: EmbeddingStore,
    workers: IngestWorkers,
    metrics: Metrics,
    admission: Admission,
) -> Pipeline:
    return Pipeline(
        model=model,
        store=store,
        admission=admission,
        engine=engine,
        workers=workers,
        metrics=metrics,
        max_patches_per_item=settings.max_patches_per_item,
        undelivered=UndeliveredBytes(settings.max_undelivered_bytes),
        max_clip_patches=settings.max_clip_patches,
        clip_piece_patches=min(CLIP_PIECE_PATCHES, settings.max_patches_per_batch),
    )
