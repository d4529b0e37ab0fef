"""TokenSpeed's encode worker over real sockets: calls of a gateway in, rows into the memory of prefill ranks.

The engine is a stand-in for Mooncake that copies within this process. tests/tokenspeed runs the real one.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
import secrets
import socket
import sys
import threading
import types
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import grpc
import httpx
import pytest
import torch
import zmq

from encoder_service.errors import ConfigurationError
from encoder_service.ingest import pixel_segments
from encoder_service.towers import load_tower
from encoder_service.types import Grid
from lm_adapter import CacheTier, ImageItem, VisionEncoderClient
from tests.integration.conftest import RunningService, running
from tests.integration.held import wait_until_free
from tests.integration.images import photo
from tests.integration.tokenspeed import (
    FAILED,
    GRID,
    NUM_ROWS,
    PATCH_DIM,
    SUCCESS,
    Rank,
    encode,
    image,
    new_room,
    random_pixels,
    tensor,
)
from tests.parity.tower_cases import run_tower
from tests.ports import free_port
from tests.waiting import PATIENCE_S, wait_until
from vision_encoder.tokenspeed import common_pb2 as common
from vision_encoder.tokenspeed import tokenspeed_encoder_pb2 as encoder
from vision_encoder.tokenspeed import tokenspeed_scheduler_pb2 as scheduler

pytestmark = pytest.mark.without_device

SHORT_S = 2.0
FOREIGN = "192.0.2.1"


class Engine:
    """Mooncake's engine, for memory of this process. refused: sessions whose writes fail. gate: cleared, it
    holds writes. silent: sessions that do not answer, so that all writes of their engine wait for the event.
    """

    refused: ClassVar[set[str]] = set()
    silent: ClassVar[dict[str, threading.Event]] = {}
    gate = threading.Event()
    sessions: ClassVar[list[str]] = []

    registered: ClassVar[list[tuple[int, int]]] = []
    register_status = 0
    topology = '{"cpu:0": [["mlx5_0"], []]}'

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def initialize(self, *arguments: str) -> int:
        self.started_with = arguments
        return 0

    def get_local_topology(self) -> str:
        return self.topology

    def register_memory(self, address: int, num_bytes: int) -> int:
        self.registered.append((address, num_bytes))
        return self.register_status

    def batch_transfer_sync_write(
        self, session: str, sources: Sequence[int], addresses: Sequence[int], lengths: Sequence[int]
    ) -> int:
        self.sessions.append(session)
        assert self.gate.wait(PATIENCE_S)
        with self._lock:
            if session in self.silent:
                assert self.silent[session].wait(PATIENCE_S)
                return -1
        if session in self.refused:
            return -1
        for source, address, num_bytes in zip(sources, addresses, lengths, strict=True):
            ctypes.memmove(address, source, num_bytes)
        return 0


class Served:
    """A service as an encode worker, with a gateway's calls."""

    def __init__(self, service: RunningService, channel: grpc.Channel) -> None:
        self.service = service
        self.bootstrap = f"http://{service.service.addresses['tokenspeed_bootstrap']}/route"
        self.channel = channel

    def encode(self, item: scheduler.MultimodalItem, room: int) -> None:
        """Raises grpc.RpcError."""
        assert self.send([item], [room]).accepted

    def send(self, items: Sequence[scheduler.MultimodalItem], rooms: Sequence[int]) -> encoder.EncodeResponse:
        return encode(self.channel, items, rooms)

    def refusal(self, item: scheduler.MultimodalItem, room: int) -> tuple[str, str]:
        with pytest.raises(grpc.RpcError) as found:
            self.encode(item, room)
        return found.value.code().name, found.value.details()  # type: ignore[attr-defined]

    def probe(self, name: str, request: Any, answer: Any) -> Any:
        call = self.channel.unary_unary(
            f"/tokenspeed.grpc.scheduler.TokenSpeedScheduler/{name}",
            request.SerializeToString,
            answer.FromString,
        )
        return call(request(), timeout=PATIENCE_S)

    def metric(self, line: str) -> float:
        text = self.service.service.metrics.exposition().decode()
        return sum(float(found.rpartition(" ")[2]) for found in text.splitlines() if found.startswith(line))

    def is_free(self) -> bool:
        server = self.service.service.protocols["tokenspeed"].server
        assert server is not None
        assert server._mooncake is not None
        figures = (len(server._rooms), server._rooms.unread.num_bytes, server._admission.num_bytes)
        return not any((*figures, server._mooncake.held_bytes))


@contextlib.contextmanager
def serving(model: Path, device: torch.device, **settings: object) -> Iterator[Served]:
    given = {
        "serve_tokenspeed": "127.0.0.1:0",
        "tokenspeed_bootstrap_port": 0,
        **settings,
    }
    with (
        running(model, device, **given) as service,
        grpc.insecure_channel(service.service.addresses["tokenspeed"]) as channel,
    ):
        yield Served(service, channel)


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Mooncake's stand-in and a folder of shared memory."""
    folder = tmp_path_factory.mktemp("shm")
    Engine.gate.set()
    with pytest.MonkeyPatch.context() as patch:
        module = types.ModuleType("mooncake.engine")
        module.TransferEngine = Engine  # type: ignore[attr-defined]
        patch.setitem(sys.modules, "mooncake", types.ModuleType("mooncake"))
        patch.setitem(sys.modules, "mooncake.engine", module)
        patch.setattr("encoder_service.protocols.tokenspeed.server.SEND_TIMEOUT_S", 1.0)
        patch.setattr("encoder_service.protocols.tokenspeed.mooncake.QUARANTINE_S", 0.5)
        patch.setitem(pixel_segments.PixelSegments.__init__.__kwdefaults__, "folder", str(folder))
        yield folder


@pytest.fixture(scope="module")
def shared(checkpoints: dict[str, Path], device: torch.device, patched: Path) -> Iterator[Served]:
    with serving(checkpoints["qwen3_vl"], device, tokenspeed_send_bytes=1 << 20) as found:
        yield found


@pytest.fixture
def served(shared: Served) -> Iterator[Served]:
    """Holds nothing at a test's end."""
    yield shared
    Engine.gate.set()
    Engine.refused.clear()
    for answered in Engine.silent.values():
        answered.set()
    Engine.silent.clear()
    wait_until(shared.is_free, "the rooms' end")
    wait_until_free(shared.service)
    Engine.sessions.clear()


@pytest.fixture
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ROOM_S", "SEND_S"):
        monkeypatch.setattr(f"encoder_service.protocols.tokenspeed.rooms.{name}", SHORT_S)


@pytest.fixture(scope="module")
def tower(checkpoints: dict[str, Path]) -> Any:
    return load_tower(checkpoints["qwen3_vl"], device=torch.device("cpu"), dtype=torch.float32).tower


def assert_rows(found: torch.Tensor, tower: Any, pixels: torch.Tensor, grid: Grid = GRID) -> None:
    torch.testing.assert_close(found, run_tower(tower, pixels, [grid]), rtol=1e-4, atol=1e-5)


# -- what a gateway asks at its start ------------------------------------------------------------------


def test_probes(served: Served, checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def health() -> tuple[bool, str]:
        found = served.probe("HealthCheck", scheduler.HealthCheckRequest, scheduler.HealthCheckResponse)
        return found.healthy, found.message

    assert health() == (True, "")
    monkeypatch.setattr(served.service.service, "not_ready", "draining")
    assert health() == (False, "draining")
    model = served.probe("GetModelInfo", scheduler.GetModelInfoRequest, scheduler.GetModelInfoResponse)
    assert model.model_type == "qwen3_vl"
    assert model.architectures == ["Qwen3VLForConditionalGeneration"]
    assert model.multimodal_encoder_dtype == "float32"
    assert list(model.supported_modalities) == [common.IMAGE, common.VIDEO]
    assert model.model_path == str(checkpoints["qwen3_vl"])
    assert (model.vocab_size, model.served_model_name) == (640, "qwen3_vl")
    server = served.probe("GetServerInfo", scheduler.GetServerInfoRequest, scheduler.GetServerInfoResponse)
    assert server.server_args["disaggregation_mode"] == "encode"
    assert server.server_args["shm_namespace_id"].count("-") == 4
    with pytest.raises(grpc.RpcError) as found:
        served.probe("GetLoads", scheduler.GetLoadsRequest, scheduler.GetLoadsResponse)
    assert found.value.code() is grpc.StatusCode.UNIMPLEMENTED  # type: ignore[attr-defined]


@pytest.mark.parametrize("query", ["?engine_rank=1&target_dp_group=0", "", "?engine_rank=x"])
def test_there_is_one_rank(served: Served, query: str) -> None:
    assert httpx.get(served.bootstrap + query).status_code == 404


# -- items ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_early", [True, False], ids=["rank first", "item first"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_are_the_towers_in_either_order(
    served: Served, tower: Any, is_early: bool, dtype: torch.dtype
) -> None:
    pixels, room = random_pixels().to(dtype), new_room()
    with Rank(served.bootstrap) as rank:
        if is_early:
            rank.want(room)
            wait_until(lambda: served.metric("ve_tokenspeed_rooms") == 1)
        served.encode(image(pixels), room)
        if not is_early:
            rank.want(room)
        assert rank.status() == (room, SUCCESS)
        assert_rows(rank.rows, tower, pixels.float())
    assert served.metric('ve_deliveries_total{transport="mooncake"}') >= 1
    assert served.metric('ve_requests_total{method="tokenspeed/Encode",status="OK"}') >= 1


def test_a_rank_gets_rows_in_its_own_dtype(served: Served, tower: Any) -> None:
    pixels, room = random_pixels(), new_room()
    with Rank(served.bootstrap) as rank:
        rank.main, rank.deepstack = rank.main.bfloat16(), rank.deepstack.bfloat16()
        served.encode(image(pixels), room)
        rank.want(room, dtype="bfloat16")  # also without "torch."
        assert rank.status() == (room, SUCCESS)
        torch.testing.assert_close(rank.rows.float(), run_tower(tower, pixels, [GRID]), rtol=1e-2, atol=1e-2)


def test_ranks_of_a_group_get_their_spans(served: Served, tower: Any) -> None:
    pixels, room = random_pixels(), new_room()
    spans = ((0, 10), (10, 14), (24, 0))
    with contextlib.ExitStack() as stack:
        ranks = [stack.enter_context(Rank(served.bootstrap, num_rows=count)) for _, count in spans]
        for rank, (start, _) in zip(ranks[:2], spans, strict=False):
            rank.want(room, need=3, row_start=start, span=NUM_ROWS)
        served.encode(image(pixels), room)
        assert all(rank.is_quiet() for rank in ranks)
        ranks[2].want(room, need=3, row_start=24, span=NUM_ROWS, main=bytes(8), deepstack=bytes(8))
        assert [rank.status() for rank in ranks] == [(room, SUCCESS)] * 3
        assert_rows(torch.cat([rank.rows for rank in ranks]), tower, pixels)


def test_p19_pixels_in_shared_memory(served: Served, tower: Any, patched: Path) -> None:
    pixels, room, name = random_pixels(), new_room(), f"smg-tokenspeed-1-{secrets.token_hex(4)}"
    (patched / name).write_bytes(bytes(32) + pixels.numpy().tobytes())
    item = image(pixels)
    item.encoder_input.shm.CopyFrom(
        common.ShmHandle(name=name, offset=32, nbytes=pixels.nbytes, owner_id="smg:1")
    )
    with Rank(served.bootstrap) as rank:
        served.encode(item, room)
        assert (patched / name).exists(), "its owner unlinks it"
        (patched / name).unlink()  # as the gateway does once it has its answer
        rank.want(room)
        assert rank.status() == (room, SUCCESS)
        assert_rows(rank.rows, tower, pixels)
        for wrong, reason in (("../etc/passwd", "NAME"), ("other-1", "NAME"), (name, "NOT_FOUND")):
            item.encoder_input.shm.name = wrong
            item.content_hash = secrets.token_bytes(32)
            assert served.refusal(item, new_room())[0] == "FAILED_PRECONDITION"
            assert served.metric(f've_pixel_segments_total{{outcome="{reason}"}}')


def test_p13_p15_equal_items_are_encoded_once_by_the_gateways_digest(served: Served, tower: Any) -> None:
    """Also two of one call, and the pixels of a later one are not looked at."""
    pixels, before = random_pixels(), served.metric("ve_items_total")
    first = image(pixels)
    other = image(random_pixels(), content_hash=first.content_hash)
    rooms = [new_room() for _ in range(10)]
    misses = served.metric('ve_stage_seconds_count{stage="tower"}')
    with Rank(served.bootstrap) as rank, ThreadPoolExecutor(8) as pool:
        assert served.send([first, first], rooms[:2]).accepted
        list(pool.map(lambda room: served.encode(other, room), rooms[2:]))
        for room in rooms:
            rank.main.fill_(-1)
            rank.want(room)
            assert rank.status() == (room, SUCCESS)
            assert_rows(rank.rows, tower, pixels)
    wait_until(lambda: served.metric("ve_items_total") == before + 10)
    assert served.metric('ve_stage_seconds_count{stage="tower"}') == misses + 1


def test_p41_a_gateways_rows_are_not_those_of_a_file_with_its_digest(served: Served) -> None:
    item, room = image(random_pixels()), new_room()
    file = ImageItem(photo(), digest=item.content_hash)
    with (
        Rank(served.bootstrap) as rank,
        VisionEncoderClient(served.service.target, namespace="tokenspeed") as client,
    ):
        served.encode(item, room)
        rank.want(room)
        assert rank.status() == (room, SUCCESS)
        assert client.encode_one(file).tier is CacheTier.MISS
        assert client.encode_one(file).tier is CacheTier.HOST


@pytest.mark.parametrize(
    ("changed", "code", "text"),
    [
        ({"modality": common.AUDIO}, "INVALID_ARGUMENT", "modality 2"),
        ({"modality": common.VIDEO}, "INVALID_ARGUMENT", "no video_grid_thw and no grid_thws"),
        ({"content_hash": b"short"}, "INVALID_ARGUMENT", "content_hash has 5 bytes, needs 32"),
        (
            {"placeholders": [scheduler.PlaceholderRange()] * 65_537},
            "INVALID_ARGUMENT",
            "65537 ranges of placeholders, at most 65536",
        ),
        ({"placeholders": []}, "INVALID_ARGUMENT", r"0 placeholders, grid \[1, 8, 12\] gives 24 rows"),
    ],
)
def test_p33_a_wrong_item_is_refused_and_its_rank_told(
    served: Served, changed: dict[str, Any], code: str, text: str
) -> None:
    room = new_room()
    with Rank(served.bootstrap) as rank:
        status, details = served.refusal(image(random_pixels(), **changed), room)
        assert status == code
        assert re.search(text, details)
        rank.want(room)
        assert rank.status() == (room, FAILED)


def test_p33_wrong_tensors_are_refused_and_ranks_told(served: Served) -> None:
    def wrong(change: Any) -> scheduler.MultimodalItem:
        item = image(random_pixels())
        change(item)
        return item

    def put(tensor_: scheduler.TensorData, **fields: Any) -> None:
        for name, value in fields.items():
            if name == "shape":
                del tensor_.shape[:]
                tensor_.shape.extend(value)
            else:
                setattr(tensor_, name, value)

    nan = random_pixels()
    nan[3, 5] = float("nan")
    grid = "image_grid_thw"
    cases = (
        (lambda item: put(item.encoder_input, shape=[95, PATCH_DIM]), "bytes, shape"),
        (lambda item: put(item.encoder_input, dtype="int8"), "encoder_input is 'int8'"),
        (lambda item: put(item.encoder_input, shape=[2] * 9), "9 dimensions"),
        (lambda item: item.encoder_input.remote.CopyFrom(common.RemoteTensorHandle()), "by remote"),
        (lambda item: item.ClearField("encoder_input"), "by nothing"),
        (lambda item: put(item.model_specific_tensors[grid], inline=bytes(23)), "23 bytes inline"),
        (lambda item: put(item.model_specific_tensors[grid], dtype="float32"), "is 'float32'"),
        (
            lambda item: item.model_specific_tensors[grid].CopyFrom(tensor(torch.tensor([[1, -8, 12]]))),
            r"[1, -8, 12]",
        ),
        (lambda item: item.encoder_input.CopyFrom(tensor(nan)), "NaN"),
    )
    with Rank(served.bootstrap) as rank:
        for change, text in cases:
            room = new_room()
            rank.want(room)
            status, details = served.refusal(wrong(change), room)
            assert status == "INVALID_ARGUMENT", details
            assert text in details
            assert rank.status() == (room, FAILED)


def test_items_and_rooms_go_in_pairs(served: Served) -> None:
    room = new_room()
    with Rank(served.bootstrap) as rank:
        rank.want(room)
        for items in ([], [image(random_pixels())] * 2):
            with pytest.raises(grpc.RpcError) as found:
                served.send(items, [room])
            assert f"{len(items)} items and 1 rooms" in found.value.details()  # type: ignore[attr-defined]
        assert rank.status() == (room, FAILED)


def test_a_room_has_one_item(served: Served, tower: Any) -> None:
    pixels, room = random_pixels(), new_room()
    with Rank(served.bootstrap) as rank:
        served.encode(image(pixels), room)
        assert "already has an item" in served.refusal(image(random_pixels()), room)[1]
        rank.want(room)
        assert rank.status() == (room, SUCCESS)
        assert_rows(rank.rows, tower, pixels)


# -- ranks that do not keep to it ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"hidden": 65}, "row width is 65, the encoder's is 64"),
        ({"span": 23, "num_rows": 23}, "row count is 23, the encoder's is 24"),
        ({"row_start": 1}, "rows 1 to 25 are wanted of 24"),
        ({"has_deepstack": 0}, "deepstack is False, the encoder's is True"),
        ({"main": bytes(8)}, "no memory"),
        ({"deepstack": bytes(8)}, "no memory"),
    ],
)
def test_p22_memory_for_other_rows_is_not_written_to(
    served: Served, changed: dict[str, object], text: str, capfd: pytest.CaptureFixture[str]
) -> None:
    room = new_room()
    failures = served.metric('ve_item_failures_total{reason="TRANSPORT_UNAVAILABLE"}')
    with Rank(served.bootstrap) as rank:
        served.encode(image(random_pixels()), room)
        rank.want(room, **changed)
        assert rank.status() == (room, FAILED)
        assert (rank.rows == -1).all()
        assert not Engine.sessions
    assert served.metric('ve_item_failures_total{reason="TRANSPORT_UNAVAILABLE"}') == failures + 1


def test_p33_broken_messages_are_counted_and_harm_nobody(served: Served, tower: Any) -> None:
    pixels, room = random_pixels(), new_room()
    before = served.metric("ve_tokenspeed_refused_messages_total")
    with Rank(served.bootstrap) as rank:
        good = rank.parts(room)
        broken: list[list[bytes]] = [good[:count] for count in (1, 2, 6, 12)]
        for name, values in {
            "room": (b"-1", b"x", b"9" * 20, b""),
            "port": (b"0", b"1e3"),
            "session": (b"127.0.0.1", b"localhost:5", b"\xff\xff:5"),
            "main": (b"1234",),
            "deepstack": (b"",),
            "num_rows": (b"-1",),
            "hidden": (b"1" * 30,),
            "dtype": (b"int4",),
            "need": (b"0", b"257"),
            "has_deepstack": (b"yes",),
            "row_start": (b" 1",),
            "span": (b"\x00",),
            "endpoint": (b"*", b"127.0.0.1;tcp://evil"),
        }.items():
            broken += [rank.parts(room, **{name: value}) for value in values]
        for parts in (*broken, [b""], [b"", b""]):
            rank.send(parts)
        served.encode(image(pixels), room)
        wait_until(lambda: served.metric("ve_tokenspeed_refused_messages_total") == before + len(broken) + 2)
        rank.want(room)
        assert rank.status() == (room, SUCCESS)
        assert_rows(rank.rows, tower, pixels)


def test_a_message_with_a_long_part_ends_its_connection_alone(served: Served) -> None:
    room = new_room()
    with Rank(served.bootstrap) as rank, Rank(served.bootstrap) as other:
        other.want(room, session=b"1" * 100_000)
        served.encode(image(random_pixels()), room)
        rank.want(room)
        assert rank.status() == (room, SUCCESS)


@pytest.mark.parametrize("field", ["endpoint", "session"])
def test_p46_rows_do_not_go_to_a_host_that_a_message_names(served: Served, field: str) -> None:
    room = new_room()
    before = served.metric('ve_tokenspeed_refused_messages_total{reason="PERMISSION_DENIED"}')
    with Rank(served.bootstrap) as rank:
        served.encode(image(random_pixels()), room)
        rank.want(room, **{field: FOREIGN if field == "endpoint" else f"{FOREIGN}:5000"})
        wait_until(
            lambda: (
                served.metric('ve_tokenspeed_refused_messages_total{reason="PERMISSION_DENIED"}')
                == before + 1
            )
        )
        assert not Engine.sessions
        rank.want(room)  # the room is as it was
        assert rank.status() == (room, SUCCESS)


def test_p46_a_network_of_the_list_may_receive(
    checkpoints: dict[str, Path], device: torch.device, patched: Path
) -> None:
    room = new_room()
    with (
        serving(checkpoints["qwen3_5"], device, tokenspeed_receivers=("192.0.2.0/24",)) as served,
        Rank(served.bootstrap, levels=0) as rank,
    ):
        served.encode(image(random_pixels()), room)
        rank.want(room, session=f"{FOREIGN}:5000")
        assert rank.status() == (room, SUCCESS)
        assert Engine.sessions.pop() == f"{FOREIGN}:5000"


# -- what never comes, or fails ------------------------------------------------------------------------


@pytest.mark.usefixtures("short_waits")
def test_a_room_whose_rank_never_comes_ends_and_gives_its_rows_back(served: Served) -> None:
    room = new_room()
    served.encode(image(random_pixels()), room)
    server = served.service.service.protocols["tokenspeed"].server
    assert server is not None
    assert server._rooms.unread.num_bytes == NUM_ROWS * 192 * 4
    wait_until(served.is_free)
    assert served.metric('ve_item_failures_total{reason="DEADLINE_EXCEEDED"}')
    with Rank(served.bootstrap) as late:
        late.want(room)
        assert late.status() == (room, FAILED)


def test_p46_rows_that_nobody_fetches_refuse_further_items_of_gateways_alone(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, rooms = served.service.service.protocols["tokenspeed"].server, [new_room(), new_room()]
    assert server is not None
    monkeypatch.setattr(server._rooms.unread, "max_bytes", 1)
    monkeypatch.setattr(server._rooms.unread._shares, "limit", 1)
    with Rank(served.bootstrap) as rank, VisionEncoderClient(served.service.target) as client:
        served.encode(image(random_pixels()), rooms[0])
        code, details = served.refusal(image(random_pixels()), rooms[1])
        assert code == "RESOURCE_EXHAUSTED"
        assert "wait to be read, at most 1 may" in details
        client.encode_one(ImageItem(photo()))
        for room in rooms:
            rank.want(room)
        assert {rank.status(), rank.status()} == {(rooms[0], SUCCESS), (rooms[1], FAILED)}


@pytest.mark.usefixtures("short_waits")
def test_a_group_without_one_of_its_ranks_fails_as_a_whole(served: Served) -> None:
    room = new_room()
    with Rank(served.bootstrap) as rank:
        served.encode(image(random_pixels()), room)
        rank.want(room, need=2)
        assert rank.status() == (room, FAILED)
        assert (rank.rows == -1).all()


@pytest.mark.usefixtures("short_waits")
def test_a_rank_whose_item_never_comes_is_told(served: Served) -> None:
    room, line = new_room(), 've_tokenspeed_refused_messages_total{reason="DEADLINE_EXCEEDED"}'
    before = served.metric(line)
    with Rank(served.bootstrap) as rank:
        rank.want(room)
        assert rank.status() == (room, FAILED)
    assert served.metric(line) == before + 1


def test_a_refused_write_fails_its_item_alone(
    served: Served, tower: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("encoder_service.protocols.tokenspeed.mooncake.QUARANTINE_S", 3.0)
    pixels, rooms = random_pixels(), [new_room(), new_room()]
    with Rank(served.bootstrap) as dead, Rank(served.bootstrap) as alive:
        Engine.refused.add(dead.session)
        for room in rooms:
            served.encode(image(pixels), room)
        dead.want(rooms[0])
        alive.want(rooms[1])
        assert dead.status() == (rooms[0], FAILED)
        assert served.metric("ve_tokenspeed_send_bytes"), "a failed write may still read"
        assert alive.status() == (rooms[1], SUCCESS)
        assert_rows(alive.rows, tower, pixels)


@pytest.mark.usefixtures("short_waits")
def test_a_write_that_stands_still_ends_the_room_and_keeps_its_memory(served: Served) -> None:
    room = new_room()
    with Rank(served.bootstrap) as rank:
        Engine.gate.clear()
        served.encode(image(random_pixels()), room)
        rank.want(room)
        assert rank.status() == (room, FAILED)
        wait_until_free(served.service)
        assert served.metric("ve_tokenspeed_send_bytes")
        Engine.gate.set()
        wait_until(served.is_free)


def test_p17_a_host_that_does_not_answer_delays_no_other(served: Served, tower: Any) -> None:
    pixels, rooms = random_pixels(), [new_room() for _ in range(10)]
    silent, answered = "127.0.0.2:5", threading.Event()
    with Rank(served.bootstrap) as dead, Rank(served.bootstrap) as alive:
        alive.want(rooms[9])
        served.encode(image(pixels), rooms[9])
        assert alive.status() == (rooms[9], SUCCESS)
        Engine.silent[silent] = answered
        for room in rooms[:8]:
            served.encode(image(pixels), room)
            dead.want(room, session=silent)
        wait_until(lambda: served.metric("ve_tokenspeed_send_bytes") == 8 * NUM_ROWS * 192 * 4)
        alive.main.fill_(-1)
        served.encode(image(pixels), rooms[8])
        alive.want(rooms[8])
        assert alive.status() == (rooms[8], SUCCESS)
        assert_rows(alive.rows, tower, pixels)
        assert dead.is_quiet()
        assert Engine.sessions.count(silent) == 1, "the others can still be given up"
        answered.set()
        assert {dead.status() for _ in range(8)} == {(room, FAILED) for room in rooms[:8]}


def test_a_rank_that_takes_no_status_costs_nobody(served: Served) -> None:
    rooms, line = (
        [new_room(), new_room()],
        've_tokenspeed_refused_messages_total{reason="TRANSPORT_UNAVAILABLE"}',
    )
    before = served.metric(line)
    with Rank(served.bootstrap) as rank:
        for room in rooms:
            served.encode(image(random_pixels()), room)
        rank.want(rooms[0], port=1)
        rank.want(rooms[1])
        assert rank.status() == (rooms[1], SUCCESS)
    wait_until(lambda: served.metric(line) == before + 1)


def test_p25_more_rows_at_once_than_the_buffer_holds(served: Served, tower: Any) -> None:
    """64 items of 18 KiB for one host, whose share is half of 1 MiB."""
    pixels = [random_pixels() for _ in range(4)]
    expected = [run_tower(tower, each, [GRID]) for each in pixels]
    items = [image(each) for each in pixels]
    rooms = {new_room(): index % 4 for index in range(64)}
    memory = {room: torch.full((2, NUM_ROWS * 128), -1.0) for room in rooms}
    with Rank(served.bootstrap) as rank, ThreadPoolExecutor(16) as pool:
        calls = [pool.submit(served.encode, items[index], room) for room, index in rooms.items()]
        for room, (main, deepstack) in memory.items():
            addresses = (each.data_ptr().to_bytes(8, "little") for each in (main, deepstack))
            rank.want(room, main=next(addresses), deepstack=next(addresses))
        assert {rank.status() for _ in rooms} == {(room, SUCCESS) for room in rooms}
        for call in calls:
            call.result()
    for room, (main, deepstack) in memory.items():
        parts = (main[: NUM_ROWS * 64].view(NUM_ROWS, 64), deepstack.view(NUM_ROWS, 128))
        torch.testing.assert_close(torch.cat(parts, 1), expected[rooms[room]], rtol=1e-4, atol=1e-5)


def test_rows_above_the_buffer_are_refused_before_the_encode_with_both_numbers(
    checkpoints: dict[str, Path], device: torch.device, patched: Path
) -> None:
    grid, room, num_bytes = Grid(1, 64, 96), new_room(), 1536 * 192 * 4
    with (
        serving(checkpoints["qwen3_vl"], device, tokenspeed_send_bytes=1 << 20) as served,
        Rank(served.bootstrap, num_rows=1536) as rank,
    ):
        code, details = served.refusal(image(random_pixels(grid.num_patches), grid), room)
        assert code == "FAILED_PRECONDITION"
        assert f"rows have {num_bytes} bytes, tokenspeed_send_bytes is {1 << 20}" in details
        assert not served.metric('ve_stage_seconds_count{stage="tower"}')
        rank.want(room)
        assert rank.status() == (room, FAILED)


def test_p37_a_stop_waits_for_ranks_and_tells_those_that_are_left(
    checkpoints: dict[str, Path], device: torch.device, patched: Path
) -> None:
    rooms = [new_room(), new_room()]
    with contextlib.ExitStack() as stack:
        with serving(checkpoints["qwen3_vl"], device, drain_grace_s=4) as served:
            rank = stack.enter_context(Rank(served.bootstrap))
            rank.want(rooms[1], need=2)
            served.encode(image(random_pixels()), rooms[0])
            rank.want(rooms[0])
        assert {rank.status(), rank.status()} == {(rooms[0], SUCCESS), (rooms[1], FAILED)}


def test_p46_what_is_registered_for_rdma_is_a_send_buffer(
    checkpoints: dict[str, Path], device: torch.device, patched: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over TCP nothing is."""
    assert not Engine.registered
    pixels, room = random_pixels(), new_room()
    with (
        serving(checkpoints["qwen3_vl"], device, tokenspeed_rdma="mlx5_0") as served,
        Rank(served.bootstrap) as rank,
    ):
        server, store = served.service.service.protocols["tokenspeed"].server, served.service.service.store
        assert server is not None
        assert server._mooncake is not None
        assert store is not None
        (engine,) = server._mooncake._engines.values()
        assert engine.started_with == ("127.0.0.1", "P2PHANDSHAKE", "rdma", "mlx5_0")
        ((address, num_bytes),) = Engine.registered
        assert (address, num_bytes) == (server._mooncake._buffer.data_ptr(), 256 << 20)
        for _, arena in store.arenas():
            start = arena._memory.tensor.data_ptr()
            assert start + arena.size_bytes <= address or address + num_bytes <= start
        rooms = [room, new_room()]
        with socket.create_server(("127.0.0.1", 0)) as listening:
            port = listening.getsockname()[1]
            rank.want(rooms[0], session=f"127.0.0.1:{port}")
            served.encode(image(pixels), rooms[0])
            assert rank.status() == (rooms[0], SUCCESS)
        num_writes = len(Engine.sessions)
        rank.want(rooms[1], session=f"127.0.0.2:{port}")
        served.encode(image(pixels), rooms[1])
        assert rank.status() == (rooms[1], FAILED), "nothing listens there"
        assert len(Engine.sessions) == num_writes
        assert list(server._mooncake._engines.values()) == [engine]
    monkeypatch.setattr(Engine, "register_status", -1)
    with (
        pytest.raises(ConfigurationError, match=f"cannot register {256 << 20} bytes of host memory"),
        serving(checkpoints["qwen3_vl"], device, tokenspeed_rdma="auto"),
    ):
        pass
    monkeypatch.setattr(Engine, "topology", '{"cpu:0": [[], []]}')
    with (
        pytest.raises(ConfigurationError, match="'mlx5_1', and Mooncake finds no such device"),
        serving(checkpoints["qwen3_vl"], device, tokenspeed_rdma="mlx5_1"),
    ):
        pass


def test_without_mooncake_the_service_does_not_start(
    checkpoints: dict[str, Path], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    with (
        pytest.raises(ConfigurationError, match=r"needs Mooncake.*vision-encoder\[tokenspeed\]"),
        serving(checkpoints["qwen3_vl"], device),
    ):
        pass


def test_p46_the_control_port_is_taken(
    checkpoints: dict[str, Path], device: torch.device, patched: Path
) -> None:
    bootstrap_port = free_port(2)
    with zmq.Context() as context, context.socket(zmq.PULL) as taken:
        taken.bind(f"tcp://127.0.0.1:{bootstrap_port + 1}")
        with (
            pytest.raises(ConfigurationError, match=f"cannot listen on 127.0.0.1:{bootstrap_port + 1}"),
            serving(checkpoints["qwen3_vl"], device, tokenspeed_bootstrap_port=bootstrap_port),
        ):
            pass
