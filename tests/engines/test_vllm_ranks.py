"""A vLLM of several processes: every rank reads rows for itself, and each API server learns of failures."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.harness.vllm import Encoder
from bench.harness.waiting import wait_until
from lm_adapter.shm.attachment import TRANSPORTS
from tests.engines.agreement import agree
from tests.engines.conftest import DTYPES
from tests.engines.faults import NUM_BYTES
from tests.engines.pictures import CASES, TEXT, picture, with_pixels
from tests.engines.stack import Stack, figures_of

FAMILY = "qwen3_vl"
NUM_REQUESTS = 24
# More than the rows of two images, and less than those of three.
RESIDENT_BYTES = 160_000
# Workers that wait call sched_yield() in a loop. On two cores with Linux 6.18 even a process that only sleeps
# was seen to stand still for six seconds beside them, and an answer took 25.
TIMEOUT_S = 60.0
SPREAD = {
    "ranks": ("--tensor-parallel-size", "2", "--api-server-count", "2"),
    "engines": ("--data-parallel-size", "2", "--api-server-count", "2"),
}
pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.parametrize("family", [FAMILY], indirect=True, scope="session"),
]


@pytest.fixture(scope="module", params=["ranks", pytest.param("engines", marks=pytest.mark.extended)])
def spread(
    request: pytest.FixtureRequest,
    family: str,
    encoder: Encoder,
    checkpoints: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Stack]:
    """It starts while the encoder is away. Requests of three images get their rows in portions."""
    folder = tmp_path_factory.mktemp("spread")
    arguments = SPREAD[request.param]
    checkpoint, dtype = checkpoints[family], DTYPES[family]
    settings: dict[str, Any] = {"timeout_s": TIMEOUT_S, "max_resident_bytes": RESIDENT_BYTES}
    encoder.stop()
    with Stack(encoder, checkpoint, dtype, folder, arguments=arguments, **settings) as running:
        yield running


def test_p32_a_start_and_text_need_no_encoder(spread: Stack, encoder: Encoder) -> None:
    try:
        text = spread.chat(TEXT)
        image = spread.chat(with_pixels(CASES[0], [picture(random.getrandbits(32))]))
    finally:
        encoder.start()
    assert text.status_code == 200
    assert image.status_code == 503
    assert "UNAVAILABLE" in image.text
    wait_until_answered(spread)


def wait_until_answered(spread: Stack) -> None:
    """Each API server connects again by itself, which takes seconds on a machine whose cores are all in use.
    Of so many requests at once each server gets some."""

    def are_answered() -> bool:
        return {answer.status_code for answer in asked_at_once(spread)} == {200}

    wait_until(are_answered, "answers of the encoder that is back")


def asked_at_once(spread: Stack) -> list[httpx.Response]:
    """Answers to eight requests with pictures that are new."""
    pictures = [with_pixels(CASES[0], [picture(random.getrandbits(32))]) for _ in range(8)]
    with ThreadPoolExecutor(len(pictures)) as pool:
        return list(pool.map(spread.chat, pictures))


def test_tokens_are_those_of_one_process_with_a_tower(
    tower: dict[str, Any], images: list[bytes], spread: Stack, family: str
) -> None:
    numbers = [*range(len(CASES)), *(random.randrange(len(CASES)) for _ in range(NUM_REQUESTS))]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda number: spread.answer(with_pixels(CASES[number], images)), numbers))
    agree([tower["answers"][number] for number in numbers], found, DTYPES[family])


def test_every_rank_has_read(spread: Stack, images: list[bytes]) -> None:
    """An image counts once in vLLM's metrics, in the engine that had it."""
    before = figures_of(spread)
    spread.answer(with_pixels(CASES[0], [picture(random.getrandbits(32))]))
    wait_until(
        lambda: (
            sum((figures_of(spread) - before)[f"rows_bytes_total {way}"] for way in TRANSPORTS) == NUM_BYTES
        ),
        "the metric of an image's bytes",
    )
    spread.answer(with_pixels(CASES[0], images))
    ways = dict(re.findall(r"\((?:Worker|Engine)\w* pid=(\d+)\).*image rows come by (\w+)", spread.vllm.log))
    assert list(ways.values()) == ["host", "host"]


def test_p32_failures_reach_the_api_server_that_asked(spread: Stack, encoder: Encoder) -> None:
    """Through each of them: connections are shared among them."""
    encoder.stop()
    try:
        answers = asked_at_once(spread)
    finally:
        encoder.start()
    assert {answer.status_code for answer in answers} == {503}
    assert all("UNAVAILABLE" in answer.text for answer in answers)
    assert spread.chat(TEXT).status_code == 200
    wait_until_answered(spread)
