"""Waiting for what another thread or process brings about."""

from __future__ import annotations

import time
from collections.abc import Callable

# Longer than anything takes on a loaded machine.
PATIENCE_S = 60.0


def wait_until(
    condition: Callable[[], object], what: str = "the condition", timeout_s: float = PATIENCE_S
) -> None:
    """Fails when the condition does not come true."""
    ends_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < ends_s, f"{what} did not come within {timeout_s:g} s"
        time.sleep(0.005)
