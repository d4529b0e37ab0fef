"""A real SMG gateway, the service as its encode worker, and TokenSpeed's own receiver."""

from __future__ import annotations

import shlex
import socket
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
import torch
from smg.launch_router import parse_router_args

from bench.harness.tokenspeed import SHM, Gateway, PrefillWorker, ReceivingEngine, blocks, jpeg
from bench.harness.waiting import PATIENCE_S, wait_until
from encoder_service.cli import serve as cli_serve
from encoder_service.config import parse_settings
from encoder_service.towers import Tower, load_tower
from tests.engines.pictures import clip
from tests.families import REPRESENTATIVE
from tests.integration.tokenspeed import FAILED, SUCCESS, Rank, encode, image, new_room, random_pixels
from tests.tokenspeed.conftest import DTYPES, WAYS

NUM_REQUESTS = 64


@pytest.fixture(scope="session")
def towers(checkpoints: dict[str, Path]) -> dict[str, Tower]:
    """The service's own."""
    return {
        family: load_tower(path, device=torch.device("cpu"), dtype=getattr(torch, DTYPES[family])).tower
        for family, path in checkpoints.items()
    }


@pytest.fixture(autouse=True)
def leaves_nothing(gateways: dict[str, Gateway]) -> Iterator[None]:
    """In shared memory, and in the encoders."""
    yield
    wait_until(
        lambda: not [path.name for path in SHM.iterdir() if path.name.startswith("smg-")], "no segment"
    )
    encoders = [each for gateway in gateways.values() for each in gateway.encoders if each.is_running]
    wait_until(lambda: not sum(each.metric("ve_tokenspeed_rooms") for each in encoders), "the rooms' end")


def assert_rows(prefill: PrefillWorker, gateway: Gateway, tower: Tower, room: int) -> None:
    """The receiver's rows are the tower's of the pixels that the gateway sent, rounded to bfloat16."""
    sent = gateway.sent[room]
    pixels = sent.pixels.float().reshape(len(sent.pixels), -1)
    inputs = tower.prepare([sent.grid]).with_pixels(pixels.to(tower.dtype))
    with torch.inference_mode():
        expected = tower(inputs).float()
    torch.testing.assert_close(prefill.rows(room).float(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("family", REPRESENTATIVE)
def test_images_give_the_towers_rows(
    family: str, gateways: dict[str, Gateway], prefill: PrefillWorker, towers: dict[str, Tower]
) -> None:
    gateway = gateways[family]
    rooms = gateway.rooms_of(jpeg(1, 64, 64)) + gateway.rooms_of(jpeg(2, 640, 480), jpeg(3, 96, 64))
    assert len(rooms) == 3
    for room in rooms:
        assert_rows(prefill, gateway, towers[family], room)
    ways = {gateway.sent[room].via for room in rooms}
    assert ways == {"inline"} if WAYS[family] == "inline" else "shm" in ways
    assert {gateway.sent[room].pixels.dtype for room in rooms} == {getattr(torch, DTYPES[family])}
    assert gateway.rooms_of() == []  # text alone


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5"])
def test_a_clip(
    family: str, gateways: dict[str, Gateway], prefill: PrefillWorker, towers: dict[str, Tower]
) -> None:
    gateway = gateways[family]
    (room,) = gateway.rooms_of(clip(4, num_frames=24, fps=6, width=160, height=128))
    assert gateway.sent[room].grid.t > 1
    assert_rows(prefill, gateway, towers[family], room)


def test_p25_64_requests_at_once(
    gateways: dict[str, Gateway], prefill: PrefillWorker, towers: dict[str, Tower]
) -> None:
    """Of 32 images, over two encoders: each is encoded once by an encoder at most."""
    gateway, before = gateways["qwen3_vl"], set(gateways["qwen3_vl"].sent)
    images = [jpeg(1000 + seed, 160, 128) for seed in range(32)]
    with ThreadPoolExecutor(NUM_REQUESTS) as pool:
        answers = list(pool.map(gateway.ask, images * (NUM_REQUESTS // 32)))
    assert Counter(answer.status_code for answer in answers) == {200: NUM_REQUESTS}
    rooms = [room for room in gateway.sent if room not in before]
    assert len(rooms) == NUM_REQUESTS
    assert {gateway.sent[room].encoder for room in rooms} == {0, 1}
    for room in rooms:
        assert_rows(prefill, gateway, towers["qwen3_vl"], room)
    wait_until(lambda: not sum(each.metric("ve_tokenspeed_send_bytes") for each in gateway.encoders))
    misses = sum(each.metric('ve_items_total{tier="miss"}') for each in gateway.encoders)
    assert misses <= len(before) + 2 * len(images)


def test_a_prefill_worker_that_is_gone_fails_its_item_alone(
    gateways: dict[str, Gateway], prefill: PrefillWorker, towers: dict[str, Tower]
) -> None:
    """Its process, which has got rows before, is killed."""
    gateway = gateways["qwen3_5"]
    encoder, rooms = gateway.encoders[0], [new_room(), new_room()]
    with (
        grpc.insecure_channel(f"127.0.0.1:{encoder.port}") as channel,
        Rank(f"http://127.0.0.1:{encoder.bootstrap_port}/route", levels=0) as rank,
        ReceivingEngine() as engine,
    ):
        for room, status in zip(rooms, (SUCCESS, FAILED), strict=True):
            rank.want(room, session=engine.session, main=engine.memory)
            encode(channel, [image(random_pixels())], [room])
            assert rank.status() == (room, status)
            engine.kill()
    assert encoder.metric('ve_item_failures_total{reason="TRANSPORT_UNAVAILABLE"}') == 1
    assert encoder.metric("ve_tokenspeed_send_bytes"), "a failed write may still read"
    (other,) = gateway.rooms_of(jpeg(500))
    assert_rows(prefill, gateway, towers["qwen3_5"], other)


def test_p17_a_host_that_does_not_answer_delays_no_other(
    gateways: dict[str, Gateway], prefill: PrefillWorker, towers: dict[str, Tower]
) -> None:
    """A port that takes connections and says nothing: Mooncake's engine waits a minute for it."""
    gateway = gateways["qwen3_5"]
    encoder, room = gateway.encoders[0], new_room()
    with (
        socket.create_server(("127.0.0.2", 0)) as silent,
        grpc.insecure_channel(f"127.0.0.1:{encoder.port}") as channel,
        Rank(f"http://127.0.0.1:{encoder.bootstrap_port}/route", levels=0) as rank,
    ):
        silent.settimeout(PATIENCE_S)
        rank.want(room, session=f"127.0.0.2:{silent.getsockname()[1]}")
        encode(channel, [image(random_pixels())], [room])
        with silent.accept()[0]:
            (other,) = gateway.rooms_of(jpeg(501))
            assert_rows(prefill, gateway, towers["qwen3_5"], other)
            assert rank.is_quiet()
        silent.close()
        assert rank.status() == (room, FAILED)


def test_the_documents_other_commands_are_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    """They need models and hosts that are not here."""
    (block,) = blocks("sh")
    commands = [shlex.split(line) for line in block.replace("\\\n", " ").splitlines() if line]
    assert len(commands) == 4
    for words in commands:
        while "=" in words[0]:
            monkeypatch.setenv(*words.pop(0).split("=", 1))
        if words[0] == "python":
            assert parse_router_args(words[3:]).epd_disaggregation
        else:
            options = cli_serve.serve_command().make_context("serve", words[2:]).params
            assert parse_settings(**cli_serve.given_options(options)).serve_tokenspeed
    assert parse_settings(model=Path("model")).tokenspeed_rdma == "mlx5_0"


def test_an_encoder_is_killed_meanwhile(
    gateways: dict[str, Gateway], prefill: PrefillWorker, towers: dict[str, Tower]
) -> None:
    """Requests for the other encoder succeed; those of the dead one fail, and later ones go to the other."""
    gateway = gateways["qwen3_vl"]
    ends_s = time.monotonic() + 60

    def ask(seed: int) -> int:
        return gateway.ask(jpeg(200 + seed, 96, 64)).status_code

    with ThreadPoolExecutor(8) as pool:
        before = list(pool.map(ask, range(8)))
        gateway.encoders[1].kill()
        during = list(pool.map(ask, range(8, 56)))
    assert set(before) == {200}
    assert during.count(200) >= 12, during  # those for the other one, and all once the gateway has noticed
    while {ask(300 + seed) for seed in range(6)} != {200}:
        assert time.monotonic() < ends_s, "the gateway still asks the dead encoder"
    assert gateway.encoders[0].is_running
    (room,) = gateway.rooms_of(jpeg(400))
    assert gateway.sent[room].encoder == 0
    assert_rows(prefill, gateway, towers["qwen3_vl"], room)
