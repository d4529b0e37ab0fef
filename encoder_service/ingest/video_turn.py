"""How a clip's coded pixels become upright ones, as its display matrix says.

Owns the quarter turns; ``video_stream`` applies them.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from av.video.frame import VideoFrame


class Turn(NamedTuple):
    """How coded pixels become upright ones: sides swapped first, then mirrored."""

    swaps_sides: bool = False
    mirrors_x: bool = False
    mirrors_y: bool = False

    def apply(self, image_HWC: np.ndarray) -> np.ndarray:
        """uint8 [H, W, 3], contiguous."""
        if self.swaps_sides:
            image_HWC = image_HWC.swapaxes(0, 1)
        if self.mirrors_x:
            image_HWC = image_HWC[:, ::-1]
        if self.mirrors_y:
            image_HWC = image_HWC[::-1]
        return np.ascontiguousarray(image_HWC)


def turn_of(frame: VideoFrame) -> Turn:
    """The quarter turn and mirroring nearest to the frame's display matrix: [a b u; c d v; x y w], by which
    (x, y) is shown at (a x + c y, b x + d y), with y downwards (ISO/IEC 14496-12, section 6.2.2)."""
    side_data: Mapping[str, Any] = frame.side_data
    matrix = bytes(side_data.get("DISPLAYMATRIX", b""))
    if len(matrix) != 36:
        return Turn()
    a, b, _, c, d, *_ = struct.unpack("=9i", matrix)
    if abs(b) + abs(c) > abs(a) + abs(d):
        return Turn(True, c < 0, b < 0)
    return Turn(False, a < 0, d < 0)
