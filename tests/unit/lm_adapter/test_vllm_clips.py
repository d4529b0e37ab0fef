"""Clips as vLLM carries them: what the encoder says of them, and which options go to it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from lm_adapter.engines.shared.error_text import status_of
from lm_adapter.engines.shared.geometry import Geometry
from lm_adapter.engines.vllm.api_server.clips import ClipFile, sampling_options
from lm_adapter.engines.vllm.settings import given_sizes
from lm_adapter.errors import InvalidRequest, InvalidRows, ItemFailed
from lm_adapter.items import ClipItem, Grid, PreprocessOptions
from lm_adapter.keys import content_digest
from lm_adapter.types import KeyState, PrefetchStatus

GEOMETRY = Geometry("qwen3_vl", width=12, dtype="float32", num_levels=2, merge_size=2, merges_time=False)
GRID = Grid(2, 4, 6)
NUM_ROWS = 12
OPTIONS = PreprocessOptions(fps=3.0)
STATUS = PrefetchStatus(b"key", b"digest", KeyState.IN_FLIGHT, GRID, 12, timestamps_s=(0.0, 0.5, 1.1))


class Encoder:
    def __init__(self, status: PrefetchStatus | ItemFailed) -> None:
        self._status = status
        self.asked: list[tuple[list[Any], float]] = []

    async def prefetch(self, items: list[Any], *, timeout_s: float) -> list[Any]:
        self.asked.append((items, timeout_s))
        return [self._status]


def announced(status: PrefetchStatus | ItemFailed) -> tuple[Any, Encoder]:
    encoder: Any = Encoder(status)
    call = ClipFile.read(b"clip", OPTIONS).announced(encoder, 7.0, geometry=GEOMETRY, max_tokens=NUM_ROWS)
    return asyncio.run(call), encoder


def test_grid_and_times_are_the_encoders() -> None:
    """The last frame fills the last temporal patch."""
    clip, encoder = announced(STATUS)
    assert (clip.data, clip.digest, clip.options) == (b"clip", content_digest(b"clip"), OPTIONS)
    assert (clip.grid, clip.patch_times_s) == (GRID, (0.25, 1.1))
    assert encoder.asked == [([ClipItem(b"clip", content_digest(b"clip"), OPTIONS)], 7.0)]


def test_the_encoders_failure_is_the_clips() -> None:
    failure = ItemFailed("the file is no clip", reason="UNDECODABLE_CLIP", status=3)
    assert announced(failure)[0] is failure


@pytest.mark.parametrize("status", [replace(STATUS, timestamps_s=()), replace(STATUS, grid_thw=None)])
def test_p22_an_encoder_that_says_nothing_of_clips_is_noticed(status: PrefetchStatus) -> None:
    found, _ = announced(status)
    assert isinstance(found, ItemFailed)
    assert "older than this plugin" in found.message


def test_p22_times_that_do_not_fit_the_grid_are_refused_with_both_figures() -> None:
    found, _ = announced(replace(STATUS, timestamps_s=(0.0, 0.5)))
    assert isinstance(found, InvalidRows)
    assert "2 timestamps are of 1 temporal patches, its grid_thw is [2, 4, 6]" in found.message


@pytest.mark.parametrize("grid", [Grid(0, 4, 6), Grid(2, 0, 6), Grid(2, 3, 8), Grid(2, 8, 3)])
def test_p22_a_grid_without_whole_patches_is_refused_with_both_figures(grid: Grid) -> None:
    with pytest.raises(InvalidRows) as error:
        announced(replace(STATUS, grid_thw=grid))
    assert f"grid_thw is {list(grid)}, expected positive sides, h and w multiples of 2" in str(error.value)


def test_p22_a_clip_of_more_tokens_than_the_model_takes_is_refused_before_they_are_made() -> None:
    found, _ = announced(replace(STATUS, grid_thw=Grid(2, 40_000, 60_000)))
    assert isinstance(found, InvalidRequest)
    assert status_of(found) == 400
    assert "grid_thw [2, 40000, 60000] has 1200000000 tokens, the model takes at most 12" in found.message


def test_p12_another_choice_of_frames_is_another_item() -> None:
    clips = [
        ClipFile.read(data, options)
        for data in (b"clip", b"other")
        for options in (OPTIONS, PreprocessOptions(), PreprocessOptions(fps=4.0))
    ]
    assert len({clip.name for clip in clips}) == len(clips)
    assert ClipFile.read(b"clip", PreprocessOptions(fps=3.0)).name == clips[0].name


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ({}, {}),
        ({"num_frames": -1}, {}),
        ({"fps": 1, "min_frames": 6}, {"fps": 1, "min_frames": 6}),
        ({"fps": 29.97, "max_frames": 100}, {"fps": 29.97, "max_frames": 100}),
        ({"fps": 60, "max_frames": 4000}, {"fps": 30, "max_frames": 768}),
    ],
)
def test_sampling_options_go_to_the_encoder_within_vllms_bounds(
    given: dict[str, Any], asked: dict[str, Any]
) -> None:
    assert sampling_options(given, max_fps=30, max_frames=768) == asked


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"num_frames": 32}, r"\['num_frames'\], the encoder takes \['fps', 'min_frames', 'max_frames'\]"),
        ({"video_backend": "opencv", "fps": 2}, "video_backend"),
        ({"fps": 0}, "fps of a clip is 0, needs a number above 0"),
        ({"fps": "2"}, "fps of a clip is '2'"),
        ({"fps": float("nan")}, "fps of a clip is nan"),
        ({"fps": True}, "fps of a clip is True"),
        ({"max_frames": 2.5}, "max_frames of a clip is 2.5, needs a whole number above 0"),
    ],
)
def test_options_that_the_encoder_has_not_are_refused(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        sampling_options(given, max_fps=30, max_frames=768)


def test_sizes_that_a_request_leaves_to_the_checkpoint_are_not_sent() -> None:
    """The encoder refuses two that contradict each other, and takes one alone."""
    size = {"shortest_edge": 9, "longest_edge": 5}
    for options, sizes in (
        ({}, {}),
        ({"size": None}, {}),
        ({"max_pixels": 50_176}, {"max_pixels": 50_176}),
        ({"size": {"longest_edge": 50_176}}, {"max_pixels": 50_176}),
        ({"size": size}, {"min_pixels": 9, "max_pixels": 5}),
        ({"size": size, "max_pixels": 70}, {"min_pixels": 9, "max_pixels": 70}),
        ({"size": size, "min_pixels": None}, {"min_pixels": 9, "max_pixels": 5}),
    ):
        assert given_sizes(options) == sizes
