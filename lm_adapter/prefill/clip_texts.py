"""The texts between the frames of a clip in a prompt: timestamps of the sampled frames.

Owns the families' rules and formats. The seconds come with a clip's result; the engine puts the texts
into the prompt. Standard library only.

Qwen3-VL and Qwen3.5 write one text per temporal patch, the mean of its first and last frame's time, the last
frame repeated to fill it (``_calculate_timestamps``). Qwen2.5-VL and Qwen3-Omni write none; their times are
in the positions. GLM writes the first frame's time after each temporal patch (``replace_video_token``). Kimi
writes one per chunk, its first frame's time.
Times stay Python floats: bfloat16 has steps of a quarter of a second one minute into a clip.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

from lm_adapter.errors import InvalidRequest


def qwen_patch_times(timestamps_s: Sequence[float], *, temporal_patch_size: int = 2) -> list[float]:
    """Seconds of each temporal patch, as many as the grid's t. timestamps_s: of the sampled frames, in order.

    Raises InvalidRequest without frames, and for times that are negative, not finite or run backwards.
    """
    times = _checked(timestamps_s, temporal_patch_size)
    times += [times[-1]] * (-len(times) % temporal_patch_size)
    return [
        (times[first] + times[first + temporal_patch_size - 1]) / 2
        for first in range(0, len(times), temporal_patch_size)
    ]


def qwen_frame_texts(timestamps_s: Sequence[float], *, temporal_patch_size: int = 2) -> list[str]:
    """``<0.3 seconds>`` for each temporal patch. Arguments and errors as of ``qwen_patch_times``."""
    times = qwen_patch_times(timestamps_s, temporal_patch_size=temporal_patch_size)
    return [f"<{seconds:.1f} seconds>" for seconds in times]


def qwen_patch_distance_s(timestamps_s: Sequence[float], *, temporal_patch_size: int = 2) -> float:
    """Seconds from one temporal patch to the next, of which Qwen2.5-VL makes positions: the reference's
    ``second_per_grid_ts``, which is a float32. 1 for a single frame. Arguments and errors as of
    ``qwen_patch_times``."""
    times = _checked(timestamps_s, temporal_patch_size)
    if len(times) == 1:
        return 1.0
    distance = temporal_patch_size * (times[-1] - times[0]) / (len(times) - 1)
    (rounded,) = struct.unpack("f", struct.pack("f", distance))
    return float(rounded)


def glm_patch_times(timestamps_s: Sequence[float], *, temporal_patch_size: int = 2) -> list[float]:
    """Seconds of each temporal patch, as many as the grid's t: its first frame's. Arguments and errors as of
    ``qwen_patch_times``."""
    return _checked(timestamps_s, temporal_patch_size)[::temporal_patch_size]


def glm_frame_texts(
    timestamps_s: Sequence[float], *, temporal_patch_size: int = 2, whole_seconds: bool = False
) -> list[str]:
    """``0.3 seconds`` after each temporal patch. whole_seconds: ``0``, as in GLM-4.1V and 4.5V. Arguments and
    errors as of ``qwen_patch_times``."""
    times = glm_patch_times(timestamps_s, temporal_patch_size=temporal_patch_size)
    return [str(int(seconds)) if whole_seconds else f"{seconds:.1f} seconds" for seconds in times]


def kimi_chunk_texts(timestamps_s: Sequence[float], *, chunk_frames: int = 4) -> list[str]:
    """``00:00:01.500`` for each chunk of up to ``chunk_frames`` frames. Errors as of ``qwen_patch_times``.

    Hours start again after a day, as in the reference.
    """
    texts = []
    for seconds in _checked(timestamps_s, chunk_frames)[::chunk_frames]:
        whole = int(seconds)
        clock = f"{whole // 3600 % 24:02d}:{whole // 60 % 60:02d}:{whole % 60:02d}"
        texts.append(f"{clock}.{int(seconds % 1 * 1000):03d}")
    return texts


def _checked(timestamps_s: Sequence[float], group: int) -> list[float]:
    times = [float(seconds) for seconds in timestamps_s]
    if not times or group < 1:
        raise InvalidRequest(f"needs 1 frame or more in groups of 1 or more, got {len(times)} and {group}")
    before = 0.0
    for index, seconds in enumerate(times):
        if not math.isfinite(seconds) or seconds < before:
            raise InvalidRequest(
                f"timestamp {index} is {seconds} s, needs a finite number of at least {before} s"
            )
        before = seconds
    return times
