"""TokenSpeed's encode worker over real sockets: calls of a gateway in, rows into the memory of prefill ranks.

A stand-in for Mooncake copies within this process. tests/tokenspeed runs the real one.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import torch
import zmq

from bench.harness.ports import free_port
from bench.harness.waiting import PATIENCE_S, wait_until
from encoder_service.errors import ConfigurationError
from encoder_service.ingest import pixel_segments
from encoder_service.towers import load_tower
from encoder_service.types import Grid
from lm_adapter import CacheTier, ImageItem, VisionEncoderClient
from tests.integration.conftest import RunningService, Serve
from tests.integration.held import wait_until_free
from tests.integration.images import photo
from tests.integration.tokenspeed import (
    FAILED,
    GRID,
    SUCCESS,
    Rank,
    encode,
    image,
    new_room,
    random_pixels,
)
from tests.parity.tower_cases import run_tower
from tests.unit.protocols.mooncake_engine import fake_mooncake
from vision_encoder.tokenspeed import common_pb2 as common
from vision_encoder.tokenspeed import tokenspeed_scheduler_pb2 as scheduler

pytestmark = pytest.mark.without_device


class Served:
    """A service as an encode worker, with a gateway's calls."""

    def __init__(self, service: RunningService, channel: grpc.Channel) -> None:
        self.service = service
        self.bootstrap = f"http://{service.service.addresses['tokenspeed_bootstrap']}/route"
        self.channel = channel

    def encode(self, item: scheduler.MultimodalItem, room: int) -> None:
        """Raises grpc.RpcError."""
        assert encode(self.channel, [item], [room]).accepted

    def refusal(self, items: Sequence[scheduler.MultimodalItem], room: int) -> str:
        """The status and the message of a call with one room."""
        with pytest.raises(grpc.RpcError) as refused:
            encode(self.channel, items, [room])
        return f"{refused.value.code().name} {refused.value.details()}"

    def probe(self, name: str, request: Any, answer: Any) -> Any:
        call = self.channel.unary_unary(
            f"/tokenspeed.grpc.scheduler.TokenSpeedScheduler/{name}",
            request.SerializeToString,
            answer.FromString,
        )
        return call(request(), timeout=PATIENCE_S)

    def health(self) -> tuple[bool, str]:
        health = self.probe("HealthCheck", scheduler.HealthCheckRequest, scheduler.HealthCheckResponse)
        return health.healthy, health.message


@contextlib.contextmanager
def serving(serve: Serve, **settings: object) -> Iterator[Served]:
    fields = {"serve_tokenspeed": "127.0.0.1:0", "tokenspeed_bootstrap_port": 0} | settings
    with (
        serve(**fields) as service,
        grpc.insecure_channel(service.service.addresses["tokenspeed"]) as channel,
    ):
        yield Served(service, channel)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Takes the place of /dev/shm; Mooncake's stand-in is there, too."""
    folder = tmp_path_factory.mktemp("shm")
    with pytest.MonkeyPatch.context() as patch, fake_mooncake():
        defaults: Any = pixel_segments.PixelSegments.__init__.__kwdefaults__
        patch.setitem(defaults, "folder", str(folder))
        yield folder


@pytest.fixture(scope="module")
def shared(serve: Serve, folder: Path) -> Iterator[Served]:
    settings = {
        "tokenspeed_send_bytes": 1 << 20,
        "max_undelivered_bytes": 1 << 20,
        "tokenspeed_receivers": ("192.0.2.0/24",),
    }
    with serving(serve, **settings) as served:
        yield served


@pytest.fixture
def served(shared: Served) -> Iterator[Served]:
    """Holds nothing at a test's end."""
    yield shared
    held = ("ve_tokenspeed_rooms", "ve_tokenspeed_send_bytes")
    wait_until(lambda: not any(map(shared.service.metric, held)), "the rooms' end")
    wait_until_free(shared.service)


@pytest.fixture(scope="module")
def tower(checkpoints: dict[str, Path]) -> Any:
    return load_tower(checkpoints["qwen3_vl"], device=torch.device("cpu"), dtype=torch.float32).tower


def assert_rows(rows: torch.Tensor, tower: Any, pixels: torch.Tensor) -> None:
    tolerance = 1e-4 if rows.dtype == torch.float32 else 1e-2
    expected = run_tower(tower, pixels.float(), [GRID])
    torch.testing.assert_close(rows.float(), expected, rtol=tolerance, atol=tolerance)


def test_what_a_gateway_asks_at_its_start(served: Served, checkpoints: dict[str, Path]) -> None:
    assert served.health() == (True, "")
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
    with pytest.raises(grpc.RpcError) as refused:
        served.probe("GetLoads", scheduler.GetLoadsRequest, scheduler.GetLoadsResponse)
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("query", ["?engine_rank=1&target_dp_group=0", "", "?engine_rank=x"])
def test_there_is_one_rank(served: Served, query: str) -> None:
    assert httpx.get(served.bootstrap + query).status_code == 404


@pytest.mark.parametrize("is_early", [True, False], ids=["rank first", "item first"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_are_the_towers_in_either_order(
    served: Served, tower: Any, is_early: bool, dtype: torch.dtype
) -> None:
    """dtype: of the pixels, and the rank's."""
    pixels, room = random_pixels().to(dtype), new_room()
    with Rank(served.bootstrap) as rank:
        rank.main, rank.deepstack = rank.main.to(dtype), rank.deepstack.to(dtype)
        if is_early:
            rank.want(room)
            wait_until(lambda: served.service.metric("ve_tokenspeed_rooms") == 1)
        served.encode(image(pixels), room)
        if not is_early:
            rank.want(room, session="192.0.2.1:5000")  # allowed by a setting
        assert rank.status() == (room, SUCCESS)
        assert_rows(rank.rows, tower, pixels)
    assert served.service.metric('ve_requests_total{method="tokenspeed/Encode",status="OK"}') >= 1


def test_p19_pixels_in_shared_memory(served: Served, tower: Any, folder: Path) -> None:
    pixels, room, name = random_pixels(), new_room(), f"smg-tokenspeed-1-{secrets.token_hex(4)}"
    (folder / name).write_bytes(bytes(32) + pixels.numpy().tobytes())
    item = image(pixels)
    item.encoder_input.shm.CopyFrom(
        common.ShmHandle(name=name, offset=32, nbytes=pixels.nbytes, owner_id="smg:1")
    )
    with Rank(served.bootstrap) as rank:
        served.encode(item, room)
        assert (folder / name).exists(), "its owner unlinks it"
        (folder / name).unlink()  # as the gateway does once it has its answer
        rank.want(room)
        assert rank.status() == (room, SUCCESS)
        assert_rows(rank.rows, tower, pixels)
    item.encoder_input.shm.name = f"smg-other-{name}"
    item.content_hash = secrets.token_bytes(32)
    assert served.refusal([item], new_room()).startswith("FAILED_PRECONDITION")
    assert served.service.metric('ve_pixel_segments_total{outcome="NAME"}') == 1


def test_p13_p15_equal_items_are_encoded_once_by_the_gateways_digest(served: Served, tower: Any) -> None:
    """The pixels of a later one are not looked at. Rows of a file with this digest are others."""
    pixels, rooms = random_pixels(), [new_room() for _ in range(10)]
    first = image(pixels)
    other = image(random_pixels(), content_hash=first.content_hash)
    misses = served.service.metric('ve_stage_seconds_count{stage="tower"}')
    with Rank(served.bootstrap) as rank, ThreadPoolExecutor(8) as pool:
        assert encode(served.channel, [first, first], rooms[:2]).accepted
        list(pool.map(lambda room: served.encode(other, room), rooms[2:]))
        for room in rooms:
            rank.main.fill_(-1)
            rank.want(room)
            assert rank.status() == (room, SUCCESS)
            assert_rows(rank.rows, tower, pixels)
    assert served.service.metric('ve_stage_seconds_count{stage="tower"}') == misses + 1
    file = ImageItem(photo(), digest=first.content_hash)
    with VisionEncoderClient(served.service.target, namespace="tokenspeed") as client:
        assert client.encode_one(file).tier is CacheTier.MISS
        assert client.encode_one(file).tier is CacheTier.HOST


NAN = random_pixels()
NAN[3, 5] = float("nan")


@pytest.mark.parametrize(
    ("items", "text"),
    [
        ([image(NAN)], "NaN"),
        ([image(NAN, Grid(1, 64, 96))], "rows have 1179648 bytes, tokenspeed_send_bytes is 1048576"),
        ([], "the call has 0 items and 1 rooms"),
        ([image(NAN), image(NAN)], "the call has 2 items and 1 rooms"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_p33_wrong_items_are_refused_and_their_ranks_told(
    served: Served, items: Sequence[scheduler.MultimodalItem], text: str
) -> None:
    room = new_room()
    with Rank(served.bootstrap) as rank:
        rank.want(room)
        wait_until(lambda: served.service.metric("ve_tokenspeed_rooms") == 1)
        assert text in served.refusal(items, room)
        assert rank.status() == (room, FAILED)


def test_p33_a_message_with_a_long_part_ends_its_connection_alone(served: Served) -> None:
    room = new_room()
    with Rank(served.bootstrap) as rank, Rank(served.bootstrap) as other:
        other.want(room, session=b"1" * 100_000)
        served.encode(image(random_pixels()), room)
        rank.want(room)
        assert rank.status() == (room, SUCCESS)


def test_p37_a_stop_waits_for_ranks_and_tells_those_that_are_left(serve: Serve, folder: Path) -> None:
    rooms = [new_room(), new_room()]
    with contextlib.ExitStack() as stack:
        with serving(serve, drain_grace_s=20) as served:
            rank = stack.enter_context(Rank(served.bootstrap))
            rank.want(rooms[1], num_ranks=2)
            served.encode(image(random_pixels()), rooms[0])
            served.service.loop.call_soon_threadsafe(served.service.service.request_stop)
            wait_until(lambda: served.health() == (False, "draining"))
            rank.want(rooms[0])
        assert [rank.status(), rank.status()] == [(rooms[0], SUCCESS), (rooms[1], FAILED)]


def test_p46_the_control_port_is_taken(serve: Serve, folder: Path) -> None:
    bootstrap_port = free_port(2)
    with zmq.Context() as context, context.socket(zmq.PULL) as taken:
        taken.bind(f"tcp://127.0.0.1:{bootstrap_port + 1}")
        with (
            pytest.raises(ConfigurationError, match=f"cannot listen on 127.0.0.1:{bootstrap_port + 1}"),
            serving(serve, tokenspeed_bootstrap_port=bootstrap_port),
        ):
            pass
