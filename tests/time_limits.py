"""pytest-timeout's alarm, repeated: a test whose clean-up hangs after the first alarm fails too."""

from __future__ import annotations

import signal
from collections.abc import Generator

import pytest

AGAIN_S = 60.0
"""Between the alarms of a test that does not end."""


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: object) -> Generator[None, object, object]:
    result = yield
    left_s, _ = signal.getitimer(signal.ITIMER_REAL)
    if left_s:  # 0 where a thread watches the time
        signal.setitimer(signal.ITIMER_REAL, left_s, AGAIN_S)
    return result
