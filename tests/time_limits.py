"""What pytest-timeout leaves out: its alarm rings once, in a test's first attempt.

Owns a limit for each attempt, since ``--reruns`` repeats a test under the first one's timer, which has rung
if the first attempt hung: the second would hang for ever. And an alarm that goes on ringing, for a test whose
own clean-up hangs once it was interrupted.
"""

from __future__ import annotations

import signal
from collections.abc import Generator

import pytest

AGAIN_S = 60.0
"""Between the alarms of a test that does not end."""

_settings = pytest.StashKey[object]()


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: object) -> Generator[None, object, object]:
    item.stash[_settings] = settings
    result = yield
    left_s, _ = signal.getitimer(signal.ITIMER_REAL)
    if left_s:  # 0 where a thread watches the time
        signal.setitimer(signal.ITIMER_REAL, left_s, AGAIN_S)
    return result


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if getattr(item, "execution_count", 1) > 1 and _settings in item.stash:
        item.ihook.pytest_timeout_cancel_timer(item=item)
        item.ihook.pytest_timeout_set_timer(item=item, settings=item.stash[_settings])
