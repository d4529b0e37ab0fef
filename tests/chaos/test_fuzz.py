"""Hundreds of bad inputs; ``fuzz_run`` as a program sends ten thousand."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.chaos.fuzz_run import fuzz


@pytest.mark.extended
def test_p33_bad_inputs_crash_nothing_and_leave_nothing(tmp_path: Path) -> None:
    answers, complaints = fuzz(400, random.SystemRandom().randrange(1 << 30), tmp_path)
    assert complaints == []
    assert len(answers) > 8, answers  # the inputs fail in many ways
    assert answers["rows"] > 10
