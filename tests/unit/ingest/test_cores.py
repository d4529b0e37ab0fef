"""The default number of decoding threads: the cores that this process may keep busy."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from encoder_service.ingest import cores
from encoder_service.ingest.cores import decoder_threads, num_clip_workers


@pytest.mark.parametrize(
    ("quota", "usable"),
    [
        (None, 16),
        ("max 100000\n", 16),
        ("some words", 16),
        ("200000 0", 16),
        ("350000 100000\n", 4),
        ("3200000 100000", 16),
        ("1 100000", 1),
    ],
)
def test_the_smaller_of_affinity_and_quota(
    quota: str | None, usable: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(16))
    monkeypatch.setattr(cores, "CPU_MAX", tmp_path / "cpu.max")
    if quota is not None:
        (tmp_path / "cpu.max").write_text(quota)
    assert cores.usable_cores() == usable


def test_decoders_of_clips_have_as_many_threads_as_there_are_cores() -> None:
    assert [num_clip_workers(num) for num in (1, 2, 4, 8, 16, 32, 64)] == [1, 1, 2, 4, 4, 4, 8]
    for num in range(4, 65):
        assert num / 2 <= num_clip_workers(num) * decoder_threads(num) <= num
