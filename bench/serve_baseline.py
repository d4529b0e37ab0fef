"""What a team would write in a day: the reference model behind the same gRPC API, in a plain loop.

Owns that service. A thread of the gRPC server decodes with the reference's own processor; one forward at a
time runs on the device, for one image or, ``batched``, for whatever waits when it is free, up to a few; rows
go back inline. Nothing is cached, planned or overlapped on purpose. torch's own attention, eager.
"""

from __future__ import annotations

import io
import queue
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import torch
from blake3 import blake3
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from transport_processes import serve_commands

from encoder_service.app import load_model
from encoder_service.config import parse_settings
from encoder_service.pipeline import Delivered
from encoder_service.rpc import convert
from encoder_service.rpc.server_info import server_info
from encoder_service.types import CacheTier, EncodedItem, Grid, StageTimings
from vision_encoder.v1 import encoder_pb2 as pb

SERVICE = "vision_encoder.v1.VisionEncoder"
NUM_THREADS = 32
STOP_S = 2.0


class PlainService:
    """Answers ``start``. max_batch: images in one forward."""

    def start(self, settings: dict[str, Any], max_batch: int) -> dict[str, Any]:
        from tests.parity.reference import ReferenceTower, import_reference

        self._settings = parse_settings(**settings)
        device = torch.device(self._settings.device)
        on_host = parse_settings(**(settings | {"device": "cpu"}))
        model = load_model(on_host)
        self._info = server_info(on_host, model)
        self._levels = model.tower.num_deepstack_levels
        self._dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self._info.models[0].dtype = convert.dtype_to_proto(self._dtype)
        self._reference = ReferenceTower(self._settings.model, device=device, dtype=self._dtype)
        self._processor = import_reference().AutoImageProcessor.from_pretrained(self._settings.model)
        self._max_batch = max_batch
        self._waiting: queue.Queue[tuple[torch.Tensor, Grid, Future[torch.Tensor]]] = queue.Queue()
        if self._settings.torch_threads:
            torch.set_num_threads(self._settings.torch_threads)
        threading.Thread(target=self._loop, daemon=True).start()
        self._server = grpc.server(
            ThreadPoolExecutor(NUM_THREADS),
            options=[("grpc.max_receive_message_length", self._settings.max_message_bytes)],
        )
        handlers = {
            "GetServerInfo": grpc.unary_unary_rpc_method_handler(
                lambda _request, _context: self._info,
                pb.GetServerInfoRequest.FromString,
                pb.GetServerInfoResponse.SerializeToString,
            ),
            "Encode": grpc.unary_stream_rpc_method_handler(
                self._encode, pb.EncodeRequest.FromString, convert.serialize_event
            ),
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()
        return {"target": f"127.0.0.1:{port}"}

    def stop(self) -> None:
        if hasattr(self, "_server"):
            self._server.stop(STOP_S).wait()

    def _encode(
        self, request: pb.EncodeRequest, _context: grpc.ServicerContext
    ) -> Iterator[pb.ItemEvent | bytes]:
        for index, item in enumerate(request.items):
            data = item.encoded
            started_s = time.perf_counter()
            image = Image.open(io.BytesIO(data)).convert("RGB")
            inputs = self._processor(images=[image], return_tensors="pt")
            grid = Grid(*inputs["image_grid_thw"][0].tolist())
            decoded_s = time.perf_counter()
            future: Future[torch.Tensor] = Future()
            self._waiting.put((inputs["pixel_values"], grid, future))
            rows = future.result()
            ended_s = time.perf_counter()
            digest = blake3(data).digest()
            encoded = EncodedItem(digest, digest, grid, rows, self._levels)
            timings = StageTimings(
                decode_ms=(decoded_s - started_s) * 1e3,
                tower_ms=(ended_s - decoded_s) * 1e3,
                total_ms=(ended_s - started_s) * 1e3,
            )
            delivered = Delivered(encoded, CacheTier.MISS, timings)
            yield convert.result_event(index, delivered, self._settings.chunk_bytes)
            yield from convert.chunk_events(index, rows, self._settings.chunk_bytes)

    @torch.inference_mode()
    def _loop(self) -> None:
        while True:
            batch = [self._waiting.get()]
            while len(batch) < self._max_batch and not self._waiting.empty():
                batch.append(self._waiting.get())
            try:
                pixels = torch.cat([pixels for pixels, _, _ in batch])
                rows = self._reference.rows(pixels, [grid for _, grid, _ in batch]).cpu()
                counts = [grid.num_patches // self._merge_area for _, grid, _ in batch]
                for (_, _, future), own in zip(batch, rows.split(counts), strict=True):
                    future.set_result(own.contiguous())
            except Exception as error:
                for _, _, future in batch:
                    future.set_exception(error)

    @property
    def _merge_area(self) -> int:
        return int(self._info.models[0].spatial_merge_size) ** 2


def main() -> None:
    service = PlainService()
    serve_commands({"start": service.start})
    service.stop()


if __name__ == "__main__":
    main()
