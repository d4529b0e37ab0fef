"""How long the next batch waits, by what the device still has."""

from __future__ import annotations

import pytest

from encoder_service.scheduler.timeline import LEAD_S, LIKELY, DeviceTimeline


def test_the_next_batch_waits_for_most_of_what_the_device_has() -> None:
    timeline = DeviceTimeline()
    assert timeline.batch_delay_s(5.0) == 0.0
    timeline.launched(5.0, 40_000.0)
    timeline.launched(5.01, 20_000.0)
    assert timeline.batch_delay_s(5.01) == pytest.approx(LIKELY * 0.06 - 0.01 - LEAD_S)
    assert timeline.batch_delay_s(6.0) == 0.0  # the first takes longer than predicted
    timeline.finished(6.0)
    assert timeline.batch_delay_s(6.005) == pytest.approx(LIKELY * 0.02 - 0.005 - LEAD_S)
    timeline.finished(6.1)
    assert timeline.batch_delay_s(6.1) == 0.0
    timeline.launched(9.0, 10_000.0)
    assert timeline.batch_delay_s(9.0) == pytest.approx(LIKELY * 0.01 - LEAD_S)
