"""Admission permits: the bounds hold, releases return to zero, refusals name both numbers."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from encoder_service.errors import QueueFull
from encoder_service.scheduler.admission import (
    MAX_RETRY_AFTER_MS,
    MIN_RETRY_AFTER_MS,
    RETRY_AFTER_MS,
    Admission,
    Pace,
    UndeliveredBytes,
)


def test_patches_and_later_bytes_are_refused_separately_and_held_until_release() -> None:
    admission = Admission(max_patches=10, max_bytes=100)
    first, second = admission.acquire(10), admission.acquire(0)
    second.add_bytes(10)
    for take in (second.add_bytes, admission.acquire):
        with pytest.raises(
            QueueFull, match="holds 20 content bytes of 100, the item needs 81, 80 are left to this caller"
        ) as caught:
            take(81)
        assert caught.value.retryable
        assert caught.value.retry_after_ms > 0
        assert caught.value.details["max_bytes"] == "100"
    first.add_patches(8, 1)
    with pytest.raises(QueueFull, match="holds 8 patches of 10, the item needs 3"):
        second.add_patches(3, 1)
    assert admission.num_bytes == 20
    second.release()
    assert (admission.num_patches, admission.num_bytes) == (8, 10)
    first.release()
    first.release()
    assert (admission.num_patches, admission.num_bytes) == (0, 0)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 12), st.booleans()), max_size=40))
def test_p17_counts_never_pass_the_bounds_and_return_to_zero(steps: list[tuple[int, int, bool]]) -> None:
    admission = Admission(max_patches=20, max_bytes=100)
    held = []
    for num_bytes, num_patches, release_one in steps:
        try:
            permit = admission.acquire(num_bytes)
        except QueueFull:
            continue
        held.append(permit)
        try:
            permit.add_patches(num_patches, 1)
        except QueueFull:
            held.remove(permit)
            permit.release()
        assert admission.num_patches <= 20
        assert admission.num_bytes <= 100
        if release_one and held:
            held.pop(0).release()
        assert admission.num_bytes == sum(permit.num_bytes for permit in held)
        assert admission.num_patches == sum(permit.num_patches for permit in held)
    for permit in held:
        permit.release()
    assert (admission.num_patches, admission.num_bytes) == (0, 0)


def test_retry_advice_follows_the_rate_at_which_patches_are_released() -> None:
    now = [0.0]
    admission = Admission(max_patches=1000, max_bytes=1 << 30, clock=lambda: now[0])
    held = [admission.acquire(1) for _ in range(11)]
    for permit in held[:10]:
        permit.add_patches(100, 1)

    def advice(needed: int) -> int:
        with pytest.raises(QueueFull) as caught:
            held[10].add_patches(needed, 1)
        return caught.value.retry_after_ms

    assert advice(100) == RETRY_AFTER_MS  # no release was seen yet
    for permit in held[:9]:  # 100 patches every tenth of a second
        now[0] += 0.1
        permit.release()
        held[10].add_patches(100, 1)
    little, much = advice(100), advice(900)
    assert MIN_RETRY_AFTER_MS <= little < much <= MAX_RETRY_AFTER_MS
    now[0] += 3600  # no release for an hour
    assert advice(100) == MAX_RETRY_AFTER_MS


@settings(deadline=None)
@given(st.floats(1, 1e6), st.floats(0.01, 10))
def test_retry_advice_equals_a_steady_rate(amount: float, every_s: float) -> None:
    now = [0.0]
    pace = Pace(lambda: now[0])
    for _ in range(int(60 / every_s) + 1):
        now[0] += every_s
        pace.note(amount)
    exact_ms = every_s * 1e3
    expected = min(MAX_RETRY_AFTER_MS, max(MIN_RETRY_AFTER_MS, exact_ms))
    # Seen right after an amount, the average is at most one interval too high.
    assert expected / (1 + every_s / 5) - 1 <= pace.retry_after_ms(amount) <= expected * 1.05 + 1


FLOOD, PROBE = ("namespace flood",), ("namespace probe",)


def test_p69_one_caller_takes_three_quarters_and_another_finds_room() -> None:
    admission = Admission(max_patches=1000, max_bytes=1000)
    flood = admission.acquire(750, FLOOD)
    flood.add_patches(750, 1)
    for unit, take in (("content bytes", flood.add_bytes), ("patches", partial(flood.add_patches, seqlen=1))):
        with pytest.raises(QueueFull, match=f"holds 750 {unit} of 1000, the item needs 1, 0 are left"):
            take(1)
    admission.acquire(250, PROBE).add_patches(250, 1)


def test_p69_prefetches_leave_half_of_the_patches_to_calls_that_wait() -> None:
    admission = Admission(max_patches=1000, max_bytes=1000)
    permit = admission.acquire(0, FLOOD)
    for _ in range(5):
        permit.add_patches(100, 1, is_prefetch=True)
    with pytest.raises(QueueFull, match="500 patches of 1000, the item needs 1, 0 are left to a prefetch"):
        admission.acquire(0, PROBE).add_patches(1, 1, is_prefetch=True)
    permit.add_patches(100, 1)
    alone = Admission(max_patches=1000, max_bytes=1000)
    alone.acquire(0, FLOOD).add_patches(1000, 1, is_prefetch=True)


def test_p69_unread_rows_of_one_caller_leave_room_for_another() -> None:
    undelivered, rows = UndeliveredBytes(1000), [object() for _ in range(40)]
    for row in rows:  # encodes that were admitted before continue
        undelivered.add(row, 100, FLOOD)
    with pytest.raises(QueueFull, match="4000 bytes of rows wait to be read, at most 1000 may"):
        undelivered.check_room(FLOOD)
    undelivered.check_room(PROBE)
    for row in rows[3:]:
        undelivered.remove(row, 100)
    undelivered.check_room(FLOOD)
    for row in rows[:3]:
        undelivered.remove(row, 100)
    assert (undelivered.num_bytes, undelivered.fill()) == (0, 0.0)


def test_p64_the_fill_is_1_where_a_caller_is_refused() -> None:
    admission, holder = Admission(max_patches=16_000, max_bytes=1 << 20), ("peer 10.0.0.1", "namespace a")
    permit = admission.acquire(0, holder)
    permit.add_patches(9_000, 1)
    with pytest.raises(QueueFull):
        permit.add_patches(1, 1)
    assert admission.fill() == 1.0


def test_content_is_counted_once_until_its_message_and_its_items_are_released() -> None:
    admission = Admission(max_patches=100, max_bytes=100)
    message = admission.acquire(80)
    items = [admission.acquire(30, within=message) for _ in range(2)]
    items[0].add_patches(10, 10)
    message.release()
    message.release()
    assert (admission.num_bytes, admission.num_patches) == (80, 10)
    items[0].release()
    items[0].release()
    assert (admission.num_bytes, admission.num_patches, admission.num_squares) == (80, 0, 0)
    items[1].release()
    assert admission.num_bytes == 0


def test_content_whose_message_is_released_is_counted_again() -> None:
    admission = Admission(max_patches=100, max_bytes=100)
    message = admission.acquire(80)
    message.release()
    late = admission.acquire(30, within=message)
    assert admission.num_bytes == 30
    with pytest.raises(QueueFull):
        admission.acquire(80, within=message)
    late.release()
    assert admission.num_bytes == 0
