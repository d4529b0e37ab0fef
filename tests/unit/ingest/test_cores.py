"""How many threads decode when nobody says: the cores that this process may keep busy."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from encoder_service.ingest import cores


@pytest.mark.parametrize(
    ("text", "quota"),
    [
        ("max 100000\n", None),
        ("-1 100000", None),
        ("", None),
        ("200000", None),
        ("200000 0", None),
        ("some words", None),
        ("200000 100000\n", 2.0),
        ("150000 100000", 1.5),
        ("10000 100000", 0.1),
    ],
)
def test_quota(text: str, quota: float | None) -> None:
    assert cores.quota_of(text) == quota


@pytest.mark.parametrize(
    ("scheduled", "quota", "usable"),
    [
        (16, "max 100000", 16),
        (16, "", 16),
        (16, "350000 100000", 4),
        (2, "400000 100000", 2),
        (8, "1 100000", 1),
    ],
)
def test_the_smaller_of_affinity_and_quota(
    scheduled: int, quota: str, usable: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cores, "num_scheduled", lambda: scheduled)
    monkeypatch.setattr(cores, "read_quota", lambda: quota)
    assert cores.usable_cores() == usable


def test_quota_is_read_where_either_version_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CPU_MAX", "CFS_QUOTA_US", "CFS_PERIOD_US"):
        monkeypatch.setattr(cores, name, tmp_path / name)
    assert cores.read_quota() == ""
    (tmp_path / "CFS_QUOTA_US").write_text("300000\n")
    assert cores.read_quota() == ""  # its period is missing
    (tmp_path / "CFS_PERIOD_US").write_text("100000\n")
    assert cores.quota_of(cores.read_quota()) == 3.0
    (tmp_path / "CPU_MAX").write_text("500000 100000\n")
    assert cores.quota_of(cores.read_quota()) == 5.0


def test_this_machine_has_some() -> None:
    assert 1 <= cores.usable_cores() <= (os.cpu_count() or 1)
