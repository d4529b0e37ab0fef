"""A real LMDeploy and a real encoder on one GPU: tokens are those of LMDeploy's own tower, and no failure
ends the engine.

Needs LMDeploy's wheel, which nothing here installs. LMDEPLOY_GPU_ARGUMENTS: further arguments of both.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from bench.harness.engine_checkpoints import write_checkpoint
from tests.engines.agreement import agree
from tests.engines.pictures import SIZES, picture

pytest.importorskip("lmdeploy", reason="needs LMDeploy", exc_type=ImportError)
pytest.importorskip("httpx", reason="needs httpx", exc_type=ImportError)
lmdeploy = pytest.importorskip("bench.harness.lmdeploy")
given = pytest.importorskip("tests.lmdeploy.answers")
vllm = pytest.importorskip("bench.harness.vllm")
pytestmark = [pytest.mark.gpu, pytest.mark.whole_device, pytest.mark.timeout(900)]

SHARE = ("--cache-max-entry-count", "0.3")
ARGUMENTS = (
    *(*SHARE, *given.LOGPROBS, *lmdeploy.SERVING, "--session-len", "4096"),
    *os.environ.get("LMDEPLOY_GPU_ARGUMENTS", "").split(),
)
NUM_ROUNDS = 3


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "whole", "qwen3_vl", size="small")


@pytest.fixture(scope="module")
def images() -> list[bytes]:
    return [picture(random.getrandbits(32), *size) for size in SIZES]


@pytest.fixture(scope="module")
def tower(
    checkpoint: Path, images: list[bytes], tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """Answers of an LMDeploy with its own tower."""
    folder = tmp_path_factory.mktemp("tower")
    with lmdeploy.Lmdeploy(checkpoint, folder, None, ARGUMENTS, {}) as server:
        return given.answers(server, images)


@pytest.fixture(scope="module")
def encoder(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with vllm.Encoder(checkpoint, "bfloat16", tmp_path_factory.mktemp("encoder"), device="cuda") as running:
        yield running


@pytest.fixture(scope="module")
def server(
    tower: list[dict[str, Any]], checkpoint: Path, encoder: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    """After the tower's server, whose memory it needs. Prefill is in chunks, and its prefix cache is on."""
    folder = tmp_path_factory.mktemp("server")
    arguments = [*ARGUMENTS, "--enable-prefix-caching", "--max-prefill-token-num", "256"]
    with lmdeploy.Lmdeploy(
        checkpoint, folder, encoder.target, arguments, {}, timeout_s=20.0, retry_s=2.0
    ) as running:
        yield running


def test_p39_rows_give_the_tokens_of_the_tower(
    tower: list[dict[str, Any]], images: list[bytes], server: Any
) -> None:
    """Alone, again out of caches, and sixteen at once."""
    for _ in range(NUM_ROUNDS):
        agree(tower, given.answers(server, images), "bfloat16")
    numbers = [random.randrange(len(images)) for _ in range(64)]
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda number: given.answers(server, [images[number]])[0], numbers))
    agree([tower[number] for number in numbers], found, "bfloat16")
    assert "is built without a vision tower" in server.log


def test_p12_a_second_turn_reuses_the_first_images_prefix(server: Any) -> None:
    image, other = (picture(random.getrandbits(32), 448, 448) for _ in range(2))
    num_rows = 14 * 14
    assert given.num_cached(server, image) < num_rows
    assert given.num_cached(server, other, "A wave.", "And now?") < num_rows
    assert given.num_cached(server, image, "A wave.", "And now?") > num_rows


def test_p32_failures_end_their_requests_alone(server: Any, encoder: Any) -> None:
    broken = picture(random.getrandbits(32))
    response = server.generate(given.ONE, [broken[: len(broken) * 9 // 10]])
    assert response.status_code == 400, response.text
    encoder.kill()
    away = server.generate(given.ONE, [picture(random.getrandbits(32))])
    assert away.status_code == 503, away.text
    assert server.generate("Say something about waves.", []).status_code == 200
    encoder.start()
    for _ in range(NUM_ROUNDS):
        server.tokens(given.ONE, [picture(random.getrandbits(32))])
    assert server.is_running


def test_p17_more_rows_than_may_wait_pass_through(server: Any) -> None:
    """What stayed of one picture would keep others waiting for ever."""
    with ThreadPoolExecutor(32) as pool:
        pictures = [picture(random.getrandbits(32), 448, 448) for _ in range(128)]
        answers = list(pool.map(lambda one: server.generate(given.ONE, [one], max_tokens=1), pictures))
    assert {answer.status_code for answer in answers} == {200}
