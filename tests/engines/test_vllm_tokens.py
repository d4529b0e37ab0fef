"""Pixels in vLLM against rows from us, for all three models: offline beside vLLM's tower, and from a server
that has none."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lm_adapter import ImageItem, VisionEncoderClient
from lm_adapter.engines.vllm_items import transfer_params
from lm_adapter.items import Grid
from tests.engines.agreement import agree, compared, of_response
from tests.engines.conftest import DTYPES
from tests.engines.pictures import CASES, SIZES, Case, picture, with_pixels, with_rows
from tests.engines.processes import ROOT, VLLM_ENVIRONMENT, Encoder, Stack, environment

pytestmark = pytest.mark.timeout(600)


NUM_SETS = 4

Rows = list[tuple[bytes, Grid]]


@pytest.fixture(scope="session")
def image_sets() -> list[list[bytes]]:
    """Of which one is taken for each family (offline.py)."""
    return [[picture(random.getrandbits(32), *size) for size in SIZES] for _ in range(NUM_SETS)]


@pytest.fixture(scope="session")
def row_sets(image_sets: list[list[bytes]], encoder: Encoder) -> list[Rows]:
    with VisionEncoderClient(encoder.target) as client:
        statuses = [client.prefetch([ImageItem(image) for image in images]) for images in image_sets]
    return [[(status.key, status.grid_thw) for status in one] for one in statuses]  # type: ignore[union-attr,misc]


@pytest.fixture(scope="session")
def images(image_sets: list[list[bytes]], offline: dict[str, Any]) -> list[bytes]:
    return image_sets[offline["chosen"]]


@pytest.fixture(scope="session")
def rows(row_sets: list[Rows], offline: dict[str, Any]) -> Rows:
    return row_sets[offline["chosen"]]


@pytest.fixture(scope="session")
def offline(
    family: str,
    checkpoints: dict[str, Path],
    image_sets: list[list[bytes]],
    row_sets: list[Rows],
    encoder: Encoder,
) -> dict[str, Any]:
    """Answers of one vLLM process, with its tower in place: to pixels, to rows, and to other pixels."""

    def asked_with_rows(case: Case, rows: Rows) -> dict[str, Any]:
        messages, used = with_rows(case, rows, family)
        return {"messages": messages, "extra": {"ec_transfer_params": transfer_params(used)} if used else {}}

    settings = {
        "model": str(checkpoints[family]),
        "dtype": DTYPES[family],
        "encoder": encoder.target,
        "pixels": [
            [{"messages": with_pixels(case, images), "extra": {}} for case in CASES] for images in image_sets
        ],
        "rows": [[asked_with_rows(case, rows) for case in CASES] for rows in row_sets],
    }
    completed = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "engines" / "offline.py")],
        input=json.dumps(settings),
        env=environment(**VLLM_ENVIRONMENT, VLLM_ENABLE_V1_MULTIPROCESSING="0"),
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr[-6000:]
    answers: dict[str, Any] = json.loads(completed.stdout.strip().splitlines()[-1])
    print(f"tokens that are sure to be compared, by set of pictures: {answers['decided']}")
    return answers


def test_offline_rows_give_the_tokens_of_pixels(family: str, offline: dict[str, Any]) -> None:
    agree(offline["pixels"], offline["rows"], DTYPES[family])


def test_other_pictures_would_be_noticed(family: str, offline: dict[str, Any]) -> None:
    with pytest.raises(AssertionError):
        agree(offline["other pixels"], offline["rows"], DTYPES[family])


def test_the_server_without_a_tower_gives_the_tokens_of_pixels(
    family: str, offline: dict[str, Any], images: list[bytes], stack: Stack
) -> None:
    """Ordinary requests through the front; chunked prefill is on, and cuts images."""
    found = []
    for case in CASES:
        response = stack.chat(with_pixels(case, images))
        assert response.status_code == 200, response.text
        found.append(of_response(response.json()))
    agree(offline["pixels"], found, DTYPES[family])


def test_metadata_only_requests_go_without_the_front(
    family: str, offline: dict[str, Any], rows: list[tuple[bytes, Grid]], stack: Stack
) -> None:
    """With processor arguments vLLM names the images anew; the keys still find their rows."""
    for number, arguments in ((2, None), (3, {"min_pixels": 65536}), (4, None)):
        messages, used = with_rows(CASES[number], rows, family)
        fields: dict[str, Any] = {"ec_transfer_params": transfer_params(used)}
        if arguments and family != "kimi_k25":
            fields["mm_processor_kwargs"] = arguments
        response = stack.chat(messages, direct=True, **fields)
        assert response.status_code == 200, response.text
        compared(offline["pixels"][number], of_response(response.json()), DTYPES[family])


def test_sixteen_at_once_are_not_mixed_up(
    family: str, offline: dict[str, Any], images: list[bytes], stack: Stack
) -> None:
    """p02, p25: requests of all kinds in the same batches."""
    numbers = [random.randrange(len(CASES)) for _ in range(32)]

    def ask(number: int) -> dict[str, Any]:
        response = stack.chat(with_pixels(CASES[number], images))
        assert response.status_code == 200, response.text
        return of_response(response.json())

    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(ask, numbers))
    agree([offline["pixels"][number] for number in numbers], found, DTYPES[family])
    assert stack.vllm.is_running
