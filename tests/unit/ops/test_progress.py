"""Progress of a start: few lines, also for long work and for many steps."""

from __future__ import annotations

from itertools import pairwise

import pytest
from structlog.testing import capture_logs

from encoder_service.ops.progress import EVERY_S, MAX_LINES, Progress


@pytest.mark.parametrize(
    ("num_steps", "step_s", "num_lines"),
    [(1000, 0.001, 1), (1000, 1.0, 1 + MAX_LINES), (3, 60.0, 3), (1, 60.0, 1), (0, 0.0, 1)],
)
def test_lines_are_bounded_and_say_how_far_it_is(num_steps: int, step_s: float, num_lines: int) -> None:
    now = [0.0]
    with capture_logs() as logs:
        progress = Progress("capturing graphs", num_steps, lambda: now[0])
        for _ in range(num_steps):
            now[0] += step_s
            progress.step()
    assert len(logs) == num_lines
    assert all(line["event"] == "capturing graphs" and line["of"] == num_steps for line in logs)
    done = [line["done"] for line in logs]
    assert done == sorted({*done})
    assert all(line["seconds"] == pytest.approx(line["done"] * step_s, abs=0.1) for line in logs[1:])
    assert all(later["seconds"] - line["seconds"] >= EVERY_S for line, later in pairwise(logs[1:]))
