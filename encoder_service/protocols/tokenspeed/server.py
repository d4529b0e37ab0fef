"""TokenSpeed's encode worker: SMG gateways send it items, prefill workers get the rows.

Owns the calls of SMG 1.13 (``vision_encoder.tokenspeed``), and TokenSpeed 0.1.1's bootstrap, by which prefill
workers find the service. ``wire`` reads the messages, ``rooms`` decides who gets which rows, ``mooncake``
sends them.

The gateway has decoded and preprocessed the pixels. The gateway's content digest is used as
the item's. All items are in one namespace, NAMESPACE. The protocol has no tokens: any caller that reaches the
address may encode. Messages count with those of the service; calls have a limit of the same size, counted
apart.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
import torch
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from encoder_service.config import Settings
from encoder_service.errors import InvalidRequest, UnsupportedContent
from encoder_service.ingest.identity import check_digest, dtype_name
from encoder_service.ingest.pixel_segments import FOLDER, PixelSegments
from encoder_service.ingest.workers import MAX_COPIED_ON_LOOP_BYTES
from encoder_service.json_reader import JsonReader
from encoder_service.ops.logs import REQUEST_ID_KEY, bind_request, request_id_of
from encoder_service.ops.metrics import Metrics
from encoder_service.ops.tokens import NamespaceTokens
from encoder_service.own_thread import on_own_thread
from encoder_service.pipeline import EncodeResult, Pipeline, holder_of
from encoder_service.protocols.base import Backend
from encoder_service.protocols.tokenspeed import wire
from encoder_service.protocols.tokenspeed.mooncake import Mooncake
from encoder_service.protocols.tokenspeed.room import CallItem
from encoder_service.protocols.tokenspeed.rooms import Rooms
from encoder_service.protocols.tokenspeed.sending import RankSender
from encoder_service.protocols.zmq_push import AllowedReceivers, Sender
from encoder_service.rpc import convert, observed
from encoder_service.rpc.gate import CallGate, CallPermits
from encoder_service.rpc.item_reader import ItemReader, Use
from encoder_service.rpc.server import GrpcServer
from encoder_service.scheduler.admission import Admission, Permit, UndeliveredBytes
from encoder_service.types import Item
from vision_encoder.layout.host import host_id
from vision_encoder.tokenspeed import tokenspeed_encoder_pb2 as encoder
from vision_encoder.tokenspeed import tokenspeed_scheduler_pb2 as scheduler

Context = grpc.aio.ServicerContext[Any, Any]

NAMESPACE = "tokenspeed"
# Of the gateway's segments.
SEGMENT_PREFIX = "smg-tokenspeed-"
SEND_TIMEOUT_S = 5.0


def model_info(pipeline: Pipeline) -> scheduler.GetModelInfoResponse:
    """The model as the gateway shows it and makes pixels for it. Raises CheckpointError."""
    tower, folder = pipeline.model.tower, pipeline.model.folder
    config = JsonReader.of_file(folder / "config.json").values
    text = config.get("text_config")
    text = text if isinstance(text, dict) else config

    def number(name: str) -> int:
        value = text.get(name)
        return value if type(value) is int and 0 <= value < 1 << 31 else 0

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
        supported_modalities=[
            number for number, modality in wire.MODALITIES.items() if modality in tower.modalities
        ],
        model_dtype=dtype_name(tower.dtype),
        multimodal_encoder_dtype=dtype_name(tower.dtype),
    )


def server_info(
    settings: Settings, model_path: str, segments: PixelSegments | None
) -> scheduler.GetServerInfoResponse:
    """What the gateway asks of the worker. segments: as of ``Backend``."""
    fields: dict[str, str | int] = {
        "disaggregation_mode": "encode",
        "disaggregation_bootstrap_port": settings.tokenspeed_bootstrap_port,
        "model_path": model_path,
    }
    if segments is not None and SEGMENT_PREFIX.startswith(segments.prefixes):
        # A gateway whose id is equal sees the same shared memory, and may send pixels by it.
        fields["shm_namespace_id"] = f"{host_id()}:{os.stat(FOLDER).st_dev}"
    info = scheduler.GetServerInfoResponse()
    info.server_args.update(fields)
    info.scheduler_info.update(fields)
    return info


@dataclass(frozen=True)
class EncodeCalls:
    """A gateway's calls to encode. max_row_bytes: of one item's rows."""

    pipeline: Pipeline
    reader: ItemReader
    rooms: Rooms
    max_row_bytes: int

    async def encode(self, request: encoder.EncodeRequest, context: Context) -> encoder.EncodeResponse:
        """Answers once the items are encoded; their rows are sent afterwards. An item that fails ends its
        room and fails the call. A call that the gate refuses does not come here: its rooms expire."""
        call = observed.this_call()
        if request.request_id:
            call.request_id = request_id_of([(REQUEST_ID_KEY, request.request_id)])
            bind_request(call.request_id)
        items = request.mm_inputs.items
        call.namespace, call.num_items = NAMESPACE, len(items)
        rooms = [assignment.bootstrap_room for assignment in request.items]
        most = convert.MAX_ITEMS_PER_REQUEST
        if len(items) != len(rooms) or not 1 <= len(items) <= most:
            error = InvalidRequest(
                f"the call has {len(items)} items and {len(rooms)} rooms, needed are as many, 1 to {most}"
            )
            for room in rooms[:most]:
                self.rooms.refuse(room, error)
            raise error
        remaining_s = context.time_remaining()
        deadline_s = None if remaining_s is None else self.pipeline.clock() + remaining_s
        work = (
            self._encode_item(CallItem(call, index), item, room, deadline_s)
            for index, (item, room) in enumerate(zip(items, rooms, strict=True))
        )
        for failure in await asyncio.gather(*work, return_exceptions=True):
            if failure is not None:
                raise failure
        return encoder.EncodeResponse(accepted=True)

    async def _encode_item(
        self, item: CallItem, message: scheduler.MultimodalItem, number: int, deadline_s: float | None
    ) -> None:
        async def encode(content: Item, permit: Permit | None) -> EncodeResult:
            return await self.pipeline.encode(
                content, namespace=NAMESPACE, permit=permit, deadline_s=deadline_s
            )

        with self.rooms.encoding(number, item) as room:
            self.rooms.deliver(room, await self._ask(message, encode, item.call.permit))

    async def _ask(
        self, message: scheduler.MultimodalItem, question: Use[EncodeResult], permit: Permit | None
    ) -> EncodeResult:
        """Calls ``question`` with the item. permit: counts the call's message. Raises InvalidRequest,
        GridMismatch, PixelTensorMismatch, InvalidDigest, UnsupportedContent, TransportUnavailable, QueueFull,
        and what ``question`` raises."""
        tower = self.pipeline.model.tower
        modality = wire.modality_of(message, tower.modalities)
        if message.content_hash:
            check_digest(message.content_hash, "content_hash")
        grid = wire.grid_of(message, modality)
        wire.check_rows(message, grid, tower, self.max_row_bytes)
        match message.encoder_input.WhichOneof("payload"):
            case "shm":
                return await self.reader.use(wire.segment_item(message, modality, grid), question)
            case "inline" if message.ByteSize() > MAX_COPIED_ON_LOOP_BYTES:
                holder, workers = holder_of(NAMESPACE), self.pipeline.workers
                item = await workers.run(holder, wire.inline_item, message, modality, grid)
                return await question(item, permit)
            case "inline":
                return await question(wire.inline_item(message, modality, grid), permit)
            case payload:
                raise UnsupportedContent(
                    f"pixels by {payload or 'nothing'} are not taken, inline and shm are"
                )


class TokenSpeedServer:
    """``open`` binds the ports, ``attach`` starts to answer; ``leave``, ``drain`` and ``stop`` at the end.

    address: for gateways. app: for prefill workers, served by the composition root. segment_prefixes: which
    segments of shared memory are read where the settings name none.
    """

    segment_prefixes = (SEGMENT_PREFIX,)

    def __init__(
        self,
        settings: Settings,
        metrics: Metrics,
        not_ready_because: Callable[[], str | None],
        admission: Admission,
    ) -> None:
        """not_ready_because: why the service takes no work now, or None. admission: the service's limit
        on the content of calls in progress."""
        self.address = ""
        self.app = Starlette(routes=[Route("/route", self._route)])
        self._settings, self._metrics = settings, metrics
        self._not_ready_because = not_ready_because
        self._sender = Sender(SEND_TIMEOUT_S)
        self._admission = admission
        self._gate = CallGate(
            NamespaceTokens(), CallPermits(settings.max_calls), admission, settings.max_message_bytes
        )
        self._grpc = GrpcServer(settings, self._gate)
        self._mooncake: Mooncake | None = None
        self._rooms: Rooms | None = None
        self._control_port = 0
        self._listening: asyncio.Task[None] | None = None
        self._is_attached = False
        self._refused: Counter[str] = Counter()
        metrics.gauge(
            "ve_tokenspeed_rooms",
            "Items whose prefill workers have not got their rows yet.",
            lambda: 0 if self._rooms is None else len(self._rooms),
        )
        metrics.gauge(
            "ve_tokenspeed_send_bytes",
            "Bytes of the send buffer that rows take.",
            lambda: 0 if self._mooncake is None else self._mooncake.held_bytes,
        )
        metrics.counter_view(
            "ve_tokenspeed_refused_messages",
            "Messages of prefill workers that were not taken, whose item did not come, or whose status could "
            "not be sent, by reason.",
            lambda: self._refused,
            "reason",
        )

    # -- life ------------------------------------------------------------------------------------------

    @property
    def num_calls(self) -> int:
        return self._gate.permits.num_calls

    async def open(self) -> None:
        """Binds the gRPC and the control port. Raises ConfigurationError."""
        settings = self._settings
        self._mooncake = await on_own_thread(Mooncake, settings, torch.device(settings.device))
        self._rooms = Rooms(
            AllowedReceivers("tokenspeed_receivers", settings.tokenspeed_receivers),
            RankSender(self._sender, self._mooncake, self._refused),
            UndeliveredBytes(settings.max_undelivered_bytes),
            self._metrics,
            self._refused,
        )
        (self.address,) = self._grpc.bind((settings.serve_tokenspeed,))
        host, bootstrap_port = self.address.rpartition(":")[0], settings.tokenspeed_bootstrap_port
        puller, self._control_port = self._sender.bind_puller(
            host, bootstrap_port and bootstrap_port + 1, wire.MAX_PART_BYTES
        )
        self._listening = asyncio.get_running_loop().create_task(self._rooms.listen(puller))

    async def attach(self, backend: Backend) -> None:
        """Takes work from now on. Raises CheckpointError."""
        assert self._mooncake is not None
        assert self._rooms is not None
        pipeline = backend.pipeline
        reader = ItemReader(self._admission, pipeline.workers.executor, backend.segments)
        calls = EncodeCalls(pipeline, reader, self._rooms, self._mooncake.size_bytes)
        model = model_info(pipeline)
        server = server_info(self._settings, model.model_path, backend.segments)
        self._is_attached = True

        async def health(*_: object) -> scheduler.HealthCheckResponse:
            why = self._not_ready_because()
            return scheduler.HealthCheckResponse(healthy=why is None, message=why or "")

        async def models(*_: object) -> scheduler.GetModelInfoResponse:
            return model

        async def servers(*_: object) -> scheduler.GetServerInfoResponse:
            return server

        encode = observed.observed(
            "tokenspeed/Encode", self._gate.passed(calls.encode, encoder.EncodeRequest), self._metrics, ""
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
        """Health checks of gateways fail from now on."""
        await self._grpc.set_serving(False)

    async def drain(self, ends_s: float) -> None:
        """Returns once all rows have been delivered, or at that time."""
        if self._rooms is not None:
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
        """``GET /route``: how many ranks there are, or where one is. The service is one rank."""
        if not self._is_attached:
            return Response(status_code=503)
        rank = request.query_params.get("engine_rank")
        if rank == "-1":
            return JSONResponse({"prefill_tp_size": 1, "prefill_dp_size": 1, "prefill_pp_size": 1})
        if rank != "0":
            return Response("there is one rank, 0", 404)
        # The address by which the worker has reached the service.
        return JSONResponse({"rank_ip": request.scope["server"][0], "rank_port": self._control_port})
