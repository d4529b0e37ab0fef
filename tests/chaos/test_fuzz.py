"""Hundreds of bad inputs; ``fuzz_run`` as a program sends ten thousand."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.chaos.fuzz_run import fuzz

NUM_INPUTS = 400


@pytest.mark.extended
def test_p33_bad_inputs_crash_nothing_and_leave_nothing(tmp_path: Path) -> None:
    report = fuzz(NUM_INPUTS, random.SystemRandom().randrange(1 << 30), tmp_path)
    assert report.complaints == [], f"seed {report.seed}"
    assert report.num_inputs == NUM_INPUTS
    assert len(report.answers) > 8, report.answers  # the inputs fail in many ways
    assert report.answers["rows"] > 10
