"""TokenSpeed's encode worker: SMG gateways send it items, prefill workers get the rows.

Owns the calls of SMG 1.13 (``vision_encoder.tokenspeed``) and TokenSpeed 0.1.1's bootstrap: what the gateway
asks of a worker at its start, items as the pipeline's, how prefill workers find the service. Who gets which
rows is ``tokenspeed_rooms``', how they travel is ``mooncake``'s.

The gateway has decoded and preprocessed the pixels; its digest of the content is the item's, in one
namespace, NAMESPACE. The protocol has no tokens: any caller that reaches the address may encode. Calls and
bytes have bounds of the same size as the service's own, counted apart.
"""

from __future__ import annotations

import asyncio
import os
import struct
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import structlog
import torch
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from encoder_service.config import Settings
from encoder_service.errors import (
    GridMismatch,
    InvalidRequest,
    PixelTensorMismatch,
    TransportUnavailable,
    UnsupportedContent,
)
from encoder_service.ingest.identity import check_digest, dtype_name
from encoder_service.ingest.pixel_segments import FOLDER, MAX_RANK, PixelSegments
from encoder_service.json_reader import JsonReader
from encoder_service.ops.logs import REQUEST_ID_KEY, bind_request, request_id_of
from encoder_service.ops.metrics import Metrics
from encoder_service.ops.tokens import NamespaceTokens
from encoder_service.own_thread import on_own_thread
from encoder_service.pipeline import EncodeResult, Pipeline, holder_of
from encoder_service.protocols.base import Backend
from encoder_service.protocols.tokenspeed.mooncake import Mooncake
from encoder_service.protocols.tokenspeed.rooms import MAX_PART_BYTES, Rooms
from encoder_service.protocols.zmq_push import Receivers, Sender
from encoder_service.rpc import convert, observed
from encoder_service.rpc.gate import CallGate, CallPermits
from encoder_service.rpc.item_reader import INLINE_BYTES, ItemReader
from encoder_service.rpc.server import GrpcServer
from encoder_service.scheduler.admission import Admission, UnreadBytes
from encoder_service.towers.tower import Tower
from encoder_service.types import Grid, Item, Modality, PixelValues
from vision_encoder.layout.host import host_id
from vision_encoder.tokenspeed import common_pb2 as common
from vision_encoder.tokenspeed import tokenspeed_encoder_pb2 as encoder
from vision_encoder.tokenspeed import tokenspeed_scheduler_pb2 as scheduler
from vision_encoder.v1 import encoder_pb2 as pb

log = structlog.get_logger(__name__)
Context = grpc.aio.ServicerContext[Any, Any]

NAMESPACE = "tokenspeed"
# Of the gateway's segments.
SEGMENT_PREFIX = "smg-tokenspeed-"
MODALITIES = {common.IMAGE: Modality.IMAGE, common.VIDEO: Modality.VIDEO}
DTYPES = {dtype_name(dtype): dtype for dtype in (torch.bfloat16, torch.float16, torch.float32)}
# Qwen's, and Kimi's.
GRIDS = {Modality.IMAGE: ("image_grid_thw", "grid_thws"), Modality.VIDEO: ("video_grid_thw", "grid_thws")}
GRID_FORMATS = {"int64": "<3q", "int32": "<3i", "uint32": "<3I"}
MAX_SIDE = 1 << 20
# Ranges of one item's placeholders: a clip has one or more for each frame.
MAX_PLACES = 65_536
SEND_TIMEOUT_S = 5.0


def grid_of(message: scheduler.MultimodalItem, modality: Modality) -> Grid:
    """Raises InvalidRequest, GridMismatch."""
    tensors = message.model_specific_tensors
    name = next((name for name in GRIDS[modality] if name in tensors), None)
    if name is None:
        raise InvalidRequest(f"the item has no {' and no '.join(GRIDS[modality])}")
    tensor = tensors[name]
    format_ = GRID_FORMATS.get(tensor.dtype)
    if format_ is None:
        raise InvalidRequest(f"{name} is {tensor.dtype[:32]!r}, needed is one of {', '.join(GRID_FORMATS)}")
    shape = tensor.shape[: MAX_RANK + 1]  # not a list of all that was sent
    if shape not in ([1, 3], [3]) or len(tensor.inline) != struct.calcsize(format_):
        raise GridMismatch(
            f"{name} has shape {shape} and {len(tensor.inline)} bytes inline, "
            f"needed is [1, 3] and {struct.calcsize(format_)}"
        )
    grid = Grid(*struct.unpack(format_, tensor.inline))
    if not all(1 <= side <= MAX_SIDE for side in grid):
        raise GridMismatch(f"{name} is {list(grid)}, allowed are sides from 1 to {MAX_SIDE}")
    return grid


def check_rows(message: scheduler.MultimodalItem, grid: Grid, tower: Tower, max_bytes: int) -> None:
    """Whether the prompt has as many placeholders as there will be rows, and whether they fit into the send
    buffer of ``max_bytes``. Raises GridMismatch, InvalidRequest, TransportUnavailable."""
    tower.check_grid(grid)
    if len(message.placeholders) > MAX_PLACES:
        raise InvalidRequest(
            f"the item has {len(message.placeholders)} ranges of placeholders, at most {MAX_PLACES} are taken"
        )
    found, needed = sum(place.length for place in message.placeholders), tower.num_rows(grid)
    if found != needed:
        raise GridMismatch(f"the item has {found} placeholders, grid {list(grid)} gives {needed} rows")
    num_bytes = needed * tower.width * tower.dtype.itemsize
    if num_bytes > max_bytes:
        raise TransportUnavailable(
            f"the item's rows have {num_bytes} bytes, tokenspeed_send_bytes is {max_bytes}",
            found_bytes=num_bytes,
            max_bytes=max_bytes,
        )


def pixels_shape(tensor: scheduler.TensorData) -> tuple[torch.dtype, tuple[int, ...]]:
    """Raises PixelTensorMismatch."""
    dtype = DTYPES.get(tensor.dtype)
    if dtype is None:
        raise PixelTensorMismatch(
            f"encoder_input is {tensor.dtype[:32]!r}, needed is one of {', '.join(DTYPES)}"
        )
    if not 1 <= len(tensor.shape) <= MAX_RANK:
        raise PixelTensorMismatch(
            f"encoder_input has {len(tensor.shape)} dimensions, 1 to {MAX_RANK} are accepted"
        )
    return dtype, tuple(tensor.shape)


def segment_item(message: scheduler.MultimodalItem, modality: Modality, grid: Grid) -> pb.Item:
    """An item in a gateway's shared memory, as a message of the service's own. Raises PixelTensorMismatch."""
    tensor = message.encoder_input
    dtype, shape = pixels_shape(tensor)
    item = pb.Item(
        modality=convert.MODALITY_NUMBERS[modality],
        content_digest=message.content_hash,
        pixels=pb.PixelTensor(
            grid_thw=convert.grid_to_proto(grid),
            shm=pb.ShmTensor(
                name=tensor.shm.name.removeprefix("/"),
                dtype=convert.DTYPE_NUMBERS[dtype],
                shape=shape,
                offset_bytes=tensor.shm.offset,
            ),
        ),
    )
    wanted = convert.segment_from_proto(item)
    if wanted is not None and tensor.shm.nbytes != wanted.num_bytes:
        raise PixelTensorMismatch(
            f"the segment has {tensor.shm.nbytes} bytes, shape {shape} of {dtype} needs {wanted.num_bytes}",
            found_bytes=tensor.shm.nbytes,
            needed_bytes=wanted.num_bytes,
        )
    return item


def inline_item(message: scheduler.MultimodalItem, modality: Modality, grid: Grid) -> Item:
    """Raises PixelTensorMismatch."""
    tensor = message.encoder_input
    pixels = convert.tensor_of(tensor.inline, *pixels_shape(tensor))
    return Item(modality, PixelValues(pixels, grid), message.content_hash or None)


def model_info(pipeline: Pipeline) -> scheduler.GetModelInfoResponse:
    """What the gateway shows of the model and what it makes pixels for. Raises CheckpointError."""
    tower, folder = pipeline.model.tower, pipeline.model.folder
    config = JsonReader.of_file(folder / "config.json").values
    text = config.get("text_config")
    text = text if isinstance(text, dict) else config

    def number(name: str) -> int:
        found = text.get(name)
        return found if type(found) is int and 0 <= found < 1 << 31 else 0

    architectures, path = config.get("architectures"), str(folder.resolve())
    return scheduler.GetModelInfoResponse(
        model_path=path,
        tokenizer_path=path,
        served_model_name=pipeline.model.name,
        model_type=str(config.get("model_type", "")),
        architectures=[str(name) for name in architectures] if isinstance(architectures, list) else [],
        max_context_length=number("max_position_embeddings"),
        max_req_input_len=number("max_position_embeddings"),
        vocab_size=number("vocab_size"),
        eos_token_ids=[number("eos_token_id")],
        bos_token_id=number("bos_token_id"),
        supports_vision=True,
        supports_multimodal=True,
        supported_modalities=[number for number, each in MODALITIES.items() if each in tower.modalities],
        model_dtype=dtype_name(tower.dtype),
        multimodal_encoder_dtype=dtype_name(tower.dtype),
    )


class TokenSpeedServer:
    """``open`` binds the ports, ``attach`` starts to answer; ``leave``, ``drain`` and ``stop`` at the end.

    app: for prefill workers, served by the composition root. not_ready_because: why no work is taken now, or
    None. segment_prefixes: of the pixels in shared memory that are taken unless the settings have others.
    """

    segment_prefixes = (SEGMENT_PREFIX,)

    def __init__(
        self, settings: Settings, metrics: Metrics, not_ready_because: Callable[[], str | None]
    ) -> None:
        """Raises ConfigurationError where pyzmq is not installed."""
        self.address = ""
        self._settings, self._metrics = settings, metrics
        self._not_ready_because = not_ready_because
        self._sender = Sender("tokenspeed", SEND_TIMEOUT_S)
        self._rooms = Rooms(
            Receivers("tokenspeed_receivers", settings.tokenspeed_receivers),
            self._sender,
            UnreadBytes(settings.max_undelivered_bytes),
        )
        self._admission = Admission(0, settings.max_queued_bytes)
        self._gate = CallGate(
            NamespaceTokens(), CallPermits(settings.max_calls), self._admission, settings.max_message_bytes
        )
        self._grpc = GrpcServer(settings, self._gate)
        self._mooncake: Mooncake | None = None
        self._pipeline: Pipeline | None = None
        self._reader: ItemReader | None = None
        self._control_port = 0
        self._listening: asyncio.Task[None] | None = None
        self.app = Starlette(routes=[Route("/route", self._route)])
        metrics.gauge(
            "ve_tokenspeed_rooms",
            "Items whose prefill workers have not got their rows yet.",
            self._rooms.__len__,
        )
        metrics.gauge(
            "ve_tokenspeed_send_bytes",
            "Buffer that rows on their way take.",
            lambda: 0 if self._mooncake is None else self._mooncake.held_bytes,
        )
        metrics.counter_view(
            "ve_tokenspeed_refused_messages",
            "Messages of prefill workers that were not taken, whose item did not come, or whose status could "
            "not be sent, by reason.",
            lambda: self._rooms.refused,
            "reason",
        )

    # -- life ------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Binds the gRPC and the control port. Raises ConfigurationError."""
        device = torch.device(self._settings.device)
        self._mooncake = await on_own_thread(Mooncake, self._settings, device)
        (self.address,) = self._grpc.bind((self._settings.serve_tokenspeed,))
        host = self.address.rpartition(":")[0]
        bootstrap_port = self._settings.tokenspeed_bootstrap_port
        puller, self._control_port = self._sender.bind_puller(
            host, bootstrap_port and bootstrap_port + 1, MAX_PART_BYTES
        )
        self._listening = asyncio.get_running_loop().create_task(self._rooms.listen(puller))

    async def attach(self, backend: Backend) -> None:
        """Takes work from now on. Raises CheckpointError."""
        assert self._mooncake is not None
        pipeline, segments = backend.pipeline, backend.segments
        model = model_info(pipeline)
        server = self._server_info(model.model_path, segments)
        self._reader = ItemReader(self._admission, pipeline.workers.executor, segments)
        self._rooms.attach(pipeline, self._mooncake)
        self._pipeline = pipeline

        async def health(*_: object) -> scheduler.HealthCheckResponse:
            why = self._not_ready_because()
            return scheduler.HealthCheckResponse(healthy=why is None, message=why or "")

        async def models(*_: object) -> scheduler.GetModelInfoResponse:
            return model

        async def servers(*_: object) -> scheduler.GetServerInfoResponse:
            return server

        encode = observed.observed(
            "tokenspeed/Encode", self._gate.passed(self._encode, encoder.EncodeRequest), self._metrics, ""
        )
        probes = (
            ("HealthCheck", health, scheduler.HealthCheckRequest, scheduler.HealthCheckResponse),
            ("GetModelInfo", models, scheduler.GetModelInfoRequest, scheduler.GetModelInfoResponse),
            ("GetServerInfo", servers, scheduler.GetServerInfoRequest, scheduler.GetServerInfoResponse),
        )
        await self._grpc.start(
            {
                "tokenspeed.grpc.encoder.TokenSpeedEncoder": {
                    "Encode": grpc.stream_unary_rpc_method_handler(
                        encode, None, encoder.EncodeResponse.SerializeToString
                    )
                },
                "tokenspeed.grpc.scheduler.TokenSpeedScheduler": {
                    name: grpc.stream_unary_rpc_method_handler(
                        self._gate.passed_aside(answer, request), None, response.SerializeToString
                    )
                    for name, answer, request, response in probes
                },
            }
        )

    async def leave(self) -> None:
        """Gateways learn from their health checks that the service takes no more work."""
        await self._grpc.set_serving(False)

    async def drain(self, ends_s: float) -> None:
        """Returns once all rows have been delivered, or at that time."""
        await self._rooms.drain(ends_s)

    async def stop(self) -> None:
        await self._grpc.stop(0)
        if self._listening is not None:
            self._listening.cancel()
            await asyncio.gather(self._listening, return_exceptions=True)
        if self._mooncake is not None:
            self._mooncake.close()
        await on_own_thread(self._sender.close)  # may take LINGER_MS

    # -- prefill workers -------------------------------------------------------------------------------

    async def _route(self, request: Request) -> Response:
        """``GET /route``: how many ranks there are, or where one is. This service is one rank."""
        if self._pipeline is None:
            return Response(status_code=503)
        rank = request.query_params.get("engine_rank")
        if rank == "-1":
            return JSONResponse({"prefill_tp_size": 1, "prefill_dp_size": 1, "prefill_pp_size": 1})
        if rank != "0":
            return Response("there is one rank, 0", 404)
        # The address at which the worker has reached this one.
        return JSONResponse({"rank_ip": request.scope["server"][0], "rank_port": self._control_port})

    # -- gateways --------------------------------------------------------------------------------------

    async def _encode(self, request: encoder.EncodeRequest, context: Context) -> encoder.EncodeResponse:
        """Answers once the items are encoded; their rows travel afterwards. A failed item fails its room, and
        the call. The rooms of a call that the gate refuses are not known."""
        call = observed.this_call()
        if request.request_id:
            call.request_id = request_id_of([(REQUEST_ID_KEY, request.request_id)])
            bind_request(call.request_id)
        items, rooms = request.mm_inputs.items, [each.bootstrap_room for each in request.items]
        most = convert.MAX_ITEMS_PER_REQUEST
        if len(items) != len(rooms) or not 1 <= len(items) <= most:
            error = InvalidRequest(
                f"the call has {len(items)} items and {len(rooms)} rooms, needed are as many, 1 to {most}"
            )
            for room in rooms[:most]:
                self._rooms.refuse(room, error)
            raise error
        remaining_s = context.time_remaining()
        work = (
            self._encode_item(call, index, item, room, remaining_s)
            for index, (item, room) in enumerate(zip(items, rooms, strict=True))
        )
        for failure in await asyncio.gather(*work, return_exceptions=True):
            if failure is not None:
                raise failure
        return encoder.EncodeResponse(accepted=True)

    async def _encode_item(
        self,
        call: observed.Call,
        index: int,
        message: scheduler.MultimodalItem,
        number: int,
        remaining_s: float | None,
    ) -> None:
        pipeline = self._pipeline
        assert pipeline is not None
        deadline_s = None if remaining_s is None else pipeline.clock() + remaining_s

        async def encode(item: Item) -> EncodeResult:
            return await pipeline.encode(item, namespace=NAMESPACE, deadline_s=deadline_s)

        with self._rooms.encoding(number, call, index) as room:
            self._rooms.deliver(room, await self._ask(pipeline, message, encode))

    async def _ask(
        self,
        pipeline: Pipeline,
        message: scheduler.MultimodalItem,
        question: Callable[[Item], Awaitable[EncodeResult]],
    ) -> EncodeResult:
        """Raises InvalidRequest, GridMismatch, PixelTensorMismatch, InvalidDigest, UnsupportedContent,
        TransportUnavailable, QueueFull, and what ``question`` raises."""
        modality = MODALITIES.get(message.modality)
        if modality is None or modality not in pipeline.model.tower.modalities:
            raise UnsupportedContent(f"modality {message.modality} is not taken, image and video are")
        if message.content_hash:
            check_digest(message.content_hash, "content_hash")
        grid = grid_of(message, modality)
        assert self._mooncake is not None
        check_rows(message, grid, pipeline.model.tower, self._mooncake.size_bytes)
        match message.encoder_input.WhichOneof("payload"):
            case "shm":
                assert self._reader is not None
                return await self._reader.ask(segment_item(message, modality, grid), question)
            case "inline" if message.ByteSize() > INLINE_BYTES:
                workers = pipeline.workers
                item = await workers.run(holder_of(NAMESPACE), inline_item, message, modality, grid)
                return await question(item)
            case "inline":
                return await question(inline_item(message, modality, grid))
            case found:
                raise UnsupportedContent(f"pixels by {found or 'nothing'} are not taken, inline and shm are")

    def _server_info(
        self, model_path: str, segments: PixelSegments | None
    ) -> scheduler.GetServerInfoResponse:
        info = scheduler.GetServerInfoResponse()
        found: dict[str, str | int] = {
            "disaggregation_mode": "encode",
            "disaggregation_bootstrap_port": self._settings.tokenspeed_bootstrap_port,
            "model_path": model_path,
        }
        if segments is not None and SEGMENT_PREFIX.startswith(segments.prefixes):
            # Equal to the gateway's: both see the same shared memory, and it may use it.
            found["shm_namespace_id"] = f"{host_id()}:{os.stat(FOLDER).st_dev}"
        info.server_args.update(found)
        info.scheduler_info.update(found)
        return info
