"""Waiting for what another thread or process brings about."""

from __future__ import annotations

import time
from collections.abc import Callable

# Longer than anything takes on a loaded machine.
PATIENCE_S = 60.0
QUIET_S = 1.0


def settled(figure: Callable[[], int]) -> int:
    """The figure once it has not changed for QUIET_S: calls are counted when they end, which may be after the
    answer that they served. Fails if it changes for longer than PATIENCE_S."""
    ends_s = time.monotonic() + PATIENCE_S
    last, since_s = figure(), time.monotonic()
    while time.monotonic() - since_s < QUIET_S:
        assert time.monotonic() < ends_s, f"a quiet figure did not come within {PATIENCE_S:g} s"
        time.sleep(0.05)
        if (found := figure()) != last:
            last, since_s = found, time.monotonic()
    return last


def wait_until(
    condition: Callable[[], object], what: str = "the condition", timeout_s: float = PATIENCE_S
) -> None:
    """Fails when the condition does not come true."""
    ends_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < ends_s, f"{what} did not come within {timeout_s:g} s"
        time.sleep(0.005)
