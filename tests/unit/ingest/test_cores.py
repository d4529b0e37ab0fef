"""The default number of decoding threads: the cores that this process may keep busy."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from encoder_service.ingest import cores


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
