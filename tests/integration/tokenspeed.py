"""What a gateway and a prefill rank send to TokenSpeed's encode worker."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Sequence
from typing import Any, Self

import grpc
import httpx
import torch
import zmq

from bench.harness.waiting import PATIENCE_S
from encoder_service.types import Grid
from vision_encoder.tokenspeed import common_pb2 as common
from vision_encoder.tokenspeed import tokenspeed_encoder_pb2 as encoder
from vision_encoder.tokenspeed import tokenspeed_scheduler_pb2 as scheduler

PATCH_DIM = 3 * 2 * 16 * 16
GRID = Grid(1, 8, 12)
NUM_ROWS = 24
SUCCESS, FAILED = b"5", b"0"
# Of engines, which a stand-in tells apart by them.
_PORTS = itertools.count(1024)


def image(pixels: torch.Tensor, grid: Grid = GRID, **fields: Any) -> scheduler.MultimodalItem:
    """An item as SMG 1.13 sends it for Qwen, its pixels inline."""
    found = scheduler.MultimodalItem(
        modality=common.IMAGE,
        content_hash=secrets.token_bytes(32),
        placeholders=[scheduler.PlaceholderRange(offset=5, length=grid.num_patches // 4)],
    )
    found.encoder_input.CopyFrom(tensor(pixels))
    found.model_specific_tensors["image_grid_thw"].CopyFrom(tensor(torch.tensor([list(grid)])))
    for name, value in fields.items():
        if isinstance(value, list):
            del getattr(found, name)[:]
            getattr(found, name).extend(value)
        else:
            setattr(found, name, value)
    return found


def tensor(values: torch.Tensor) -> scheduler.TensorData:
    data = values.reshape(-1).view(torch.uint8).numpy().tobytes()
    return scheduler.TensorData(
        shape=values.shape, dtype=str(values.dtype).removeprefix("torch."), inline=data
    )


def random_pixels(num_patches: int = GRID.num_patches) -> torch.Tensor:
    return torch.randn(num_patches, PATCH_DIM) * 0.5


def encode(
    channel: grpc.Channel, items: Sequence[scheduler.MultimodalItem], rooms: Sequence[int]
) -> encoder.EncodeResponse:
    """Raises grpc.RpcError."""
    call = channel.unary_unary(
        "/tokenspeed.grpc.encoder.TokenSpeedEncoder/Encode",
        encoder.EncodeRequest.SerializeToString,
        encoder.EncodeResponse.FromString,
    )
    request = encoder.EncodeRequest(
        request_id="request",
        mm_inputs=scheduler.MultimodalInputs(items=items),
        items=[encoder.EncodeItemAssignment(bootstrap_room=room) for room in rooms],
    )
    answer: encoder.EncodeResponse = call(request, timeout=PATIENCE_S)
    return answer


def request(room: int, host: str = "127.0.0.1", /, **changed: object) -> list[bytes]:
    """What a rank of ``host`` sends to get all of four rows of 2 elements, with deepstack."""
    fields: dict[str, object] = {
        "room": room,
        "host": host,
        "port": 41234,
        "session": f"{host}:15499",
        "main": b"address.",
        "deepstack": b"address.",
        "num_rows": 4,
        "width": 2,
        "dtype": "float32",
        "has_deepstack": 1,
        "num_ranks": 1,
        "row_start": 0,
        "span": 4,
    }
    assert changed.keys() <= fields.keys()
    values = (fields | changed).values()
    return [value if isinstance(value, bytes) else str(value).encode() for value in values]


class Rank:
    """A prefill rank: memory for rows, and TokenSpeed's messages. bootstrap: the URL of the encoder's."""

    def __init__(self, bootstrap: str, *, num_rows: int = NUM_ROWS, width: int = 64, levels: int = 2) -> None:
        self.main = torch.full((num_rows, width), -1.0)
        self.deepstack = torch.full((num_rows, width * levels), -1.0)
        self.session = f"127.0.0.1:{next(_PORTS)}"
        self._context = zmq.Context()
        self._statuses = self._context.socket(zmq.PULL)
        self.port = self._statuses.bind_to_random_port("tcp://127.0.0.1")
        params = {"engine_rank": -1, "target_dp_group": -1}
        sizes = httpx.get(bootstrap, params=params).json()
        assert sizes == {"prefill_tp_size": 1, "prefill_dp_size": 1, "prefill_pp_size": 1}
        found = httpx.get(bootstrap, params={"engine_rank": 0, "target_dp_group": 0}).json()
        self._control = self._context.socket(zmq.PUSH)
        self._control.connect(f"tcp://{found['rank_ip']}:{found['rank_port']}")
        self.send([b"None", b"127.0.0.1", str(self.port).encode(), self.session.encode(), bytes(8), bytes(8)])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)

    def send(self, parts: Sequence[bytes]) -> None:
        self._control.send_multipart(list(parts))

    def parts(self, room: int, /, **changed: object) -> list[bytes]:
        """A request for all rows."""
        fields: dict[str, object] = {
            "port": self.port,
            "session": self.session,
            "main": self.main.data_ptr().to_bytes(8, "little"),
            "deepstack": self.deepstack.data_ptr().to_bytes(8, "little"),
            "num_rows": len(self.main),
            "width": self.main.shape[1],
            "dtype": str(self.main.dtype),
            "has_deepstack": int(self.deepstack.shape[1] > 0),
            "span": len(self.main),
        }
        return request(room, **fields | changed)

    def want(self, room: int, /, **changed: object) -> None:
        self.send(self.parts(room, **changed))

    def status(self) -> tuple[int, bytes]:
        assert self._statuses.poll(int(PATIENCE_S * 1000)), "no status came"
        room, status, rank = self._statuses.recv_multipart()
        assert rank == b"0"
        return int(room), status

    def is_quiet(self) -> bool:
        return not self._statuses.poll(0)

    @property
    def rows(self) -> torch.Tensor:
        return torch.cat([self.main, self.deepstack], 1)


def new_room() -> int:
    return secrets.randbits(63)
