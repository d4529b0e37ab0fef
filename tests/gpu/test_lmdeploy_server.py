"""A real LMDeploy and a real encoder on one GPU: tokens are those of LMDeploy's own tower, and no failure
ends the engine.

Needs LMDeploy's wheel, which nothing here installs. LMDEPLOY_GPU_ARGUMENTS: further arguments of both.
"""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from bench.harness.engine_checkpoints import write_checkpoint
from bench.harness.waiting import wait_until
from lm_adapter.engines.shared.rows import MAX_ROWS_BYTES
from tests.engines.agreement import agree
from tests.engines.pictures import SIZES, picture

pytest.importorskip("lmdeploy", reason="needs LMDeploy", exc_type=ImportError)
pytest.importorskip("httpx", reason="needs httpx", exc_type=ImportError)
lmdeploy = pytest.importorskip("bench.harness.lmdeploy")
given = pytest.importorskip("tests.lmdeploy.answers")
vllm = pytest.importorskip("bench.harness.vllm")
pytestmark = [pytest.mark.gpu, pytest.mark.whole_device, pytest.mark.timeout(600)]

DTYPE = "bfloat16"
# The small model needs few pages; the encoder is on the same GPU.
SHARE = ("--cache-max-entry-count", "0.1", "--max-batch-size", "64")
ARGUMENTS = (
    *(*SHARE, *given.LOGPROBS, *lmdeploy.SERVING, "--session-len", "4096"),
    *os.environ.get("LMDEPLOY_GPU_ARGUMENTS", "").split(),
)
NUM_ROUNDS = 3
CHUNK = 128
"""Most tokens of a prefill, except a larger image. LMDeploy takes 8192 by default."""
LARGE = 1344
PATCH = 32
"""Pixels of a row's edge."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "whole", "qwen3_vl", size="small")


@pytest.fixture(scope="module")
def images() -> list[bytes]:
    return [picture(random.getrandbits(32), *size) for size in SIZES]


def answer(server: Any, number: int, images: list[bytes]) -> dict[str, Any]:
    text, chosen = given.CASES[number]
    found: dict[str, Any] = given.answer(server, text, [images[index] for index in chosen])
    return found


@pytest.fixture(scope="module")
def tower(
    checkpoint: Path, images: list[bytes], tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """Answers of an LMDeploy with its own tower, each prompt in one prefill."""
    folder = tmp_path_factory.mktemp("tower")
    with lmdeploy.Lmdeploy(checkpoint, folder, None, ARGUMENTS, {}) as server:
        return [answer(server, number, images) for number in range(len(given.CASES))]


@pytest.fixture(scope="module")
def encoder(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with vllm.Encoder(checkpoint, DTYPE, tmp_path_factory.mktemp("encoder"), device="cuda") as running:
        yield running


@pytest.fixture(scope="module")
def server(
    tower: list[dict[str, Any]], checkpoint: Path, encoder: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    """After the tower's server, whose memory it needs. Prefill is in chunks, and its prefix cache is on."""
    folder = tmp_path_factory.mktemp("server")
    arguments = [*ARGUMENTS, "--enable-prefix-caching", "--max-prefill-token-num", str(CHUNK)]
    with lmdeploy.Lmdeploy(
        checkpoint, folder, encoder.target, arguments, {}, timeout_s=20.0, retry_s=2.0
    ) as running:
        yield running


def test_p39_rows_give_the_tokens_of_the_tower(
    tower: list[dict[str, Any]], images: list[bytes], server: Any
) -> None:
    """One prompt after the other, in chunks; again with the prefix cache; then sixteen at once, text beside
    images."""
    assert len({tuple(one["tokens"]) for one in tower}) == len(given.CASES)
    assert max(one["num_prompt"] for one in tower) > 2 * CHUNK
    for _ in range(NUM_ROUNDS):
        agree(tower, [answer(server, number, images) for number in range(len(given.CASES))], DTYPE)
    numbers = [random.randrange(len(given.CASES)) for _ in range(64)]
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda number: answer(server, number, images), numbers))
    agree([tower[number] for number in numbers], found, DTYPE)
    assert "is built without a vision tower" in server.log


def test_rows_come_from_the_encoders_gpu_memory(
    tower: list[dict[str, Any]], images: list[bytes], server: Any
) -> None:
    """Once the engine has attached itself, which the first image begins; their tokens are the tower's."""
    numbers = [number for number, (_, chosen) in enumerate(given.CASES) if chosen]
    assert "image rows go to the GPU: 1024 MiB of it are reserved" in server.log

    def last_way() -> str:
        return [": ".join(way) for way in re.findall(r"image rows come by (\w+): (.*)", server.log)][-1]

    def come_by_device() -> bool:
        server.tokens(given.ONE, [picture(random.getrandbits(32))])
        return last_way().startswith("device")

    wait_until(come_by_device, "rows by device memory")
    found = [answer(server, number, images) for number in numbers]
    agree([tower[number] for number in numbers], found, DTYPE)
    assert last_way().startswith("device")


def test_p12_a_second_turn_reuses_the_first_images_prefix(server: Any) -> None:
    """By content: of another picture of the same size nothing is taken."""
    image, other = (picture(random.getrandbits(32), 448, 448) for _ in range(2))
    num_rows = (448 // PATCH) ** 2
    assert given.num_cached(server, image) < num_rows
    assert given.num_cached(server, other, "A wave.", "And now?") < num_rows
    assert given.num_cached(server, image, "A wave.", "And now?") > num_rows


def test_p32_failures_end_their_requests_alone(
    tower: list[dict[str, Any]], images: list[bytes], server: Any, encoder: Any
) -> None:
    """Those beside them get their tokens: at a damaged image all, without the encoder text."""
    numbers = [*range(len(given.CASES))] * 2
    whole = picture(random.getrandbits(32))
    broken = whole[: len(whole) * 9 // 10]
    with ThreadPoolExecutor(16) as pool:
        failed = [pool.submit(server.generate, given.ONE, [broken]) for _ in range(4)]
        found = list(pool.map(lambda number: answer(server, number, images), numbers))
        assert {request.result().status_code for request in failed} == {400}
    agree([tower[number] for number in numbers], found, DTYPE)

    text = next(number for number, (_, chosen) in enumerate(given.CASES) if not chosen)
    encoder.kill()
    with ThreadPoolExecutor(8) as pool:
        new = [picture(random.getrandbits(32)) for _ in range(4)]
        failed = [pool.submit(server.generate, given.ONE, [image]) for image in new]
        agree([tower[text]] * 4, list(pool.map(lambda _: answer(server, text, images), range(4))), DTYPE)
        assert {request.result().status_code for request in failed} == {503}
    encoder.start()
    agree(tower, [answer(server, number, images) for number in range(len(given.CASES))], DTYPE)
    for image in new:
        server.tokens(given.ONE, [image])
    assert server.is_running


def test_p17_more_rows_than_may_wait_pass_through(checkpoint: Path, server: Any) -> None:
    """In sum: what stayed of each would keep the last ones waiting until their time limit."""
    vision = json.loads((checkpoint / "config.json").read_text())["vision_config"]
    width = vision["out_hidden_size"] * (1 + len(vision["deepstack_visual_indexes"]))
    num_bytes = (LARGE // PATCH) ** 2 * width * 2
    pictures = [picture(random.getrandbits(32), LARGE, LARGE) for _ in range(4)]
    asked = [random.choice(pictures) for _ in range(MAX_ROWS_BYTES // num_bytes + 16)]
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda one: server.generate(given.ONE, [one], max_tokens=1), asked))
    failed = [answer.text for answer in answers if answer.status_code != 200]
    assert not failed, (len(failed), failed[0])
