"""Which frames of a clip are taken, how large they become, and when they are shown.

Owns the arithmetic of both families' reference processors: the index rule, the target size, timestamps.
Pure numbers; frames come from ``video_stream``, settings from ``video_settings``.

Sources: ``Qwen3VLVideoProcessor.sample_frames`` and ``smart_resize``, ``default_sample_indices_fn`` and
``VideoMetadata.timestamps`` of the reference package; ``Kimi_K25VideoProcessor`` samples by the second and
resizes each frame as an image, see ``moonvit.limited_size``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from encoder_service.errors import AspectRatioExceeded
from encoder_service.ingest.video_settings import QwenVideoSettings

MAX_ASPECT_RATIO = 200
# What a clip without a rate of its own counts as: the reference's own default.
DEFAULT_SOURCE_FPS = 24.0


def qwen_indices(
    num_source_frames: int, source_fps: float, *, fps: float, min_frames: int, max_frames: int
) -> list[int]:
    """Frames spread evenly from the first to the last, as many as ``fps`` asks for within the bounds and
    never more than there are. num_source_frames: at least 1."""
    wanted = int(num_source_frames / source_fps * fps)
    count = min(max(wanted, min_frames), max_frames, num_source_frames)
    indices = np.linspace(0, num_source_frames - 1, count).round().astype(int)
    return [int(index) for index in indices]


def moonvit_indices(
    num_source_frames: int, source_fps: float, *, fps: float, max_frames: int | None
) -> list[int]:
    """The first frame of each of so many equal spans, one at least. Where more frames are asked for than
    there
    are the reference fails; here each is taken once."""
    count = max(1, int(num_source_frames / source_fps * fps))
    count = min(count, num_source_frames, num_source_frames if max_frames is None else max_frames)
    return [int(index) for index in np.arange(count, dtype=int) * num_source_frames // count]


def timestamps_of(indices: Sequence[int], source_fps: float) -> tuple[float, ...]:
    """Seconds of frames by their place in the file, at its average rate."""
    return tuple(index / source_fps for index in indices)


def qwen_target_size(
    num_frames: int, height: int, width: int, *, factor: int, temporal: int, settings: QwenVideoSettings
) -> tuple[int, int]:
    """Target (height, width): multiples of ``factor``, so that all frames together stay inside the area.

    ``smart_resize`` step for step in float64. The budget counts the frames sampled, of which a single one
    counts as a whole temporal patch: the reference refuses it, and its frame would be repeated to that.
    Raises AspectRatioExceeded.
    """
    num_frames = max(num_frames, temporal)
    max_pixels = settings.max_pixels
    if settings.cap_pixels_per_frame:
        cap = min(settings.max_video_tokens * factor * factor, max_pixels // num_frames)
        max_pixels = max(cap, int(settings.min_pixels * 1.05)) * num_frames
    if height < factor or width < factor:
        grow = max(factor / height, factor / width)
        height, width = int(height * grow), int(width * grow)
    ratio = max(height, width) / min(height, width)
    if ratio > MAX_ASPECT_RATIO:
        raise AspectRatioExceeded(
            f"the clip's frames count as {width}x{height}, their longer side {ratio:.1f} times the shorter, "
            f"the limit is {MAX_ASPECT_RATIO}",
            height=height,
            width=width,
            max_aspect_ratio=MAX_ASPECT_RATIO,
        )
    rounded = round(height / factor) * factor, round(width / factor) * factor
    volume = round(num_frames / temporal) * temporal * rounded[0] * rounded[1]
    if volume > max_pixels:
        shrink = math.sqrt((num_frames * height * width) / max_pixels)
        return (
            max(factor, math.floor(height / shrink / factor) * factor),
            max(factor, math.floor(width / shrink / factor) * factor),
        )
    if volume < settings.min_pixels:
        grow = math.sqrt(settings.min_pixels / (num_frames * height * width))
        return math.ceil(height * grow / factor) * factor, math.ceil(width * grow / factor) * factor
    return rounded
