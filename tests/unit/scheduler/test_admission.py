"""Permits: bounds hold, nothing leaks, refusals say both numbers."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from encoder_service.errors import QueueFull
from encoder_service.scheduler.admission import Admission


def test_refusal_names_held_needed_and_limit() -> None:
    admission = Admission(max_patches=10, max_bytes=100)
    admission.acquire(90)
    with pytest.raises(QueueFull, match="holds 90 content bytes of 100, the item needs 11") as caught:
        admission.acquire(11)
    assert caught.value.retryable
    assert caught.value.retry_after_ms > 0
    assert caught.value.details["max_bytes"] == "100"


def test_patches_are_refused_separately_and_bytes_stay_held_until_release() -> None:
    admission = Admission(max_patches=10, max_bytes=100)
    first, second = admission.acquire(10), admission.acquire(10)
    first.add_patches(8)
    with pytest.raises(QueueFull, match="holds 8 patches of 10, the item needs 3"):
        second.add_patches(3)
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
            permit.add_patches(num_patches)
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
