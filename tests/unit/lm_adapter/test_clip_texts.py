"""Timestamps in prompts; that they are the reference's (p07) is in tests/conformance."""

from __future__ import annotations

import math
import random
import secrets

import pytest

from lm_adapter.errors import InvalidRequest
from lm_adapter.prefill.clip_texts import (
    glm_frame_texts,
    glm_patch_times,
    kimi_chunk_texts,
    qwen_frame_texts,
    qwen_patch_distance_s,
    qwen_patch_times,
)


def test_patches_and_chunks_of_other_sizes() -> None:
    assert qwen_patch_times([0.0, 1.0, 2.0, 3.0, 4.0], temporal_patch_size=4) == [1.5, 4.0]
    assert kimi_chunk_texts([1.0, 2.0, 3.0], chunk_frames=2) == ["00:00:01.000", "00:00:03.000"]


def test_patches_of_qwen2_5_are_as_far_apart_as_their_frames_on_average() -> None:
    assert qwen_patch_distance_s([3.0]) == 1.0
    assert qwen_patch_distance_s([1.0, 1.5, 2.0, 2.5, 3.0]) == 1.0
    # Times that a caller states of frames it has taken itself.
    assert qwen_patch_distance_s([0.0, 0.4, 1.0, 1.5]) == 1.0


def test_glm_has_the_first_time_of_each_patch() -> None:
    times = [0.0, 0.5, 1.25, 1.5, 61.96]
    assert glm_patch_times(times) == [0.0, 1.25, 61.96]
    assert glm_frame_texts(times) == ["0.0 seconds", "1.2 seconds", "62.0 seconds"]
    assert glm_frame_texts(times, whole_seconds=True) == ["0", "1", "61"]


def test_kimis_clock_has_hours_and_no_days() -> None:
    assert kimi_chunk_texts([3661.5]) == ["01:01:01.500"]
    assert kimi_chunk_texts([86_400.0]) == ["00:00:00.000"]


def test_p08_times_are_never_narrower_than_a_double() -> None:
    """An hour into a clip frames lie 1/60 s apart, where float32 and bfloat16 give other tenths."""
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    first = random.Random(seed).uniform(3600, 7200)
    times = [first + n / 60 for n in range(200)]
    assert qwen_patch_times(times) == [(a + b) / 2 for a, b in zip(times[::2], times[1::2], strict=True)]
    assert all(type(seconds) is float for seconds in qwen_patch_times(times))


@pytest.mark.parametrize("times", [[], [-0.1], [math.nan], [math.inf], [1.0, 0.5]])
def test_times_that_cannot_be_are_refused(times: list[float]) -> None:
    for texts in (qwen_frame_texts, kimi_chunk_texts, glm_frame_texts, qwen_patch_distance_s):
        with pytest.raises(InvalidRequest):
            texts(times)
