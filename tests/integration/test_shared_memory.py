"""Rows from a running service through shared memory: by place, by directory, with losses, until its end."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from lm_adapter import EncodedRows, ImageItem, VisionEncoderClient
from tests.integration.conftest import RunningService, running
from tests.integration.images import photo


@pytest.fixture
def broker_path() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        yield f"{folder}/b.sock"


@pytest.fixture
def sharing(checkpoints: dict[str, Path], device: torch.device, broker_path: str) -> Iterator[RunningService]:
    with running(checkpoints["qwen3_vl"], device, broker_path=broker_path) as found:
        yield found


def items(*seeds: int) -> list[ImageItem]:
    return [ImageItem(photo(seed=seed)) for seed in seeds]


def values(outcomes: list[object]) -> list[np.ndarray]:
    assert all(isinstance(one, EncodedRows) for one in outcomes), outcomes
    return [one.numpy() for one in outcomes]  # type: ignore[attr-defined]


def test_rows_are_the_same_inline_by_place_and_by_directory(
    sharing: RunningService, shared_kind: str
) -> None:
    with (
        VisionEncoderClient(sharing.target, timeout_s=60) as client,
        VisionEncoderClient(sharing.target, timeout_s=60, transports=("inline",)) as inline,
    ):
        assert client.wait_transport().name == shared_kind
        placed = client.encode(items(71, 72))
        listed = client.encode(items(71, 72))
        fetched = client.fetch([one.key for one in placed])  # type: ignore[union-attr]
        expected = values(inline.encode(items(71, 72)))
        for found in (placed, listed, fetched):
            for got, want in zip(values(found), expected, strict=True):
                np.testing.assert_array_equal(got, want)
        assert placed[0].timings.total_ms > 0  # type: ignore[union-attr]
        assert listed[0].timings.total_ms == 0, "no call was made"  # type: ignore[union-attr]


def test_the_end_of_the_service_ends_the_attachment_within_a_second(
    checkpoints: dict[str, Path], device: torch.device, broker_path: str, shared_kind: str
) -> None:
    with running(checkpoints["qwen3_vl"], device, broker_path=broker_path) as sharing:
        client = VisionEncoderClient(sharing.target, timeout_s=60)
        assert client.wait_transport().name == shared_kind
        client.encode(items(73))
    started = time.monotonic()
    while client.transport.name != "inline":
        assert time.monotonic() - started < 1.0
        time.sleep(0.01)
    client.close()


@pytest.mark.extended
def test_p21_late_readers_over_a_small_arena_see_no_wrong_byte(
    sharing: RunningService, shared_kind: str
) -> None:
    with (
        VisionEncoderClient(sharing.target, timeout_s=60) as client,
        VisionEncoderClient(sharing.target, timeout_s=60, transports=("inline",)) as inline,
    ):
        assert client.wait_transport().name == shared_kind
        seeds = list(range(100, 120))
        expected = dict(zip(seeds, values(inline.encode(items(*seeds))), strict=True))
        failures: list[BaseException] = []

        def read(number: int) -> None:
            random = np.random.default_rng(number)
            try:
                for _ in range(10):
                    seed = int(random.choice(seeds))
                    np.testing.assert_array_equal(values(client.encode(items(seed)))[0], expected[seed])
                    time.sleep(float(random.uniform(0, 0.1)))
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=read, args=(number,)) for number in range(32)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert not failures, failures[0]
