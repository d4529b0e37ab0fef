"""A clip on its way through vLLM: the undecoded file, and what the encoder says of it.

Owns the options of a clip and the request that announces it. How many frames are taken, their times and the
grid follow from the container and the sampling rules, both of which are the encoder's. Imports neither vLLM
nor torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from lm_adapter.checks import check_grid
from lm_adapter.client import AsyncVisionEncoderClient
from lm_adapter.clip_texts import qwen_patch_times
from lm_adapter.engines.shared.geometry import Geometry
from lm_adapter.errors import EncoderError, InvalidRequest, InvalidRows, ItemFailed
from lm_adapter.items import ClipItem, Grid, PreprocessOptions
from lm_adapter.keys import content_digest

SAMPLING = ("fps", "min_frames", "max_frames")
"""Names in vLLM's ``media_io_kwargs`` that the encoder has options for."""
NO_OPTIONS, NO_GRID = PreprocessOptions(), Grid(0, 0, 0)


@dataclass(frozen=True, eq=False)
class ClipFile:
    """digest: BLAKE3 of the data. options: with which it is announced. grid, patch_times_s: of the temporal
    patches, as many as the grid's t, from the encoder's answer. A file without data stands for the largest
    clip while vLLM measures itself."""

    data: bytes = field(repr=False)
    digest: bytes = b""
    options: PreprocessOptions = NO_OPTIONS
    grid: Grid = NO_GRID
    patch_times_s: tuple[float, ...] = ()

    @property
    def is_announced(self) -> bool:
        return bool(self.patch_times_s)

    @classmethod
    def read(cls, data: bytes, options: PreprocessOptions) -> ClipFile:
        return cls(data, content_digest(data), options)

    @property
    def name(self) -> bytes:
        """Another one for other content and for other frames of the same content."""
        return self.digest + json.dumps(self.options.given(), sort_keys=True).encode()

    async def announced(
        self, client: AsyncVisionEncoderClient, left_s: float, *, geometry: Geometry, max_tokens: int
    ) -> ClipFile | EncoderError:
        """The same clip with the encoder's facts, once the encode has begun; or why there are none. left_s:
        for the answer. max_tokens: of a prompt, which a clip's placeholders have to fit. Raises
        EncoderError."""
        item = ClipItem(self.data, digest=self.digest, options=self.options)
        (status,) = await client.prefetch([item], timeout_s=left_s)
        if isinstance(status, ItemFailed):
            return status
        if status.grid_thw is None or not status.timestamps_s:
            return ItemFailed("the encoder states no timestamps of clips: it is older than this plugin")
        check_grid(status.grid_thw, geometry.merge_size)
        num_rows = geometry.num_rows(status.grid_thw)
        if num_rows > max_tokens:
            return InvalidRequest(
                f"a clip of grid_thw {list(status.grid_thw)} has {num_rows} tokens, the model takes at most "
                f"{max_tokens} (max_model_len)",
                reason="ROWS_TOO_LARGE",
            )
        times_s = qwen_patch_times(status.timestamps_s)
        if len(times_s) != status.grid_thw.t:
            return InvalidRows(
                "timestamps_s",
                f"the encoder's {len(status.timestamps_s)} timestamps are of {len(times_s)} temporal "
                f"patches, its grid_thw is {list(status.grid_thw)}",
                found=len(times_s),
                expected=status.grid_thw.t,
            )
        return replace(self, grid=status.grid_thw, patch_times_s=tuple(times_s))


def sampling_of(given: Mapping[str, Any], *, max_fps: float, max_frames: int) -> dict[str, Any]:
    """What the encoder is asked for by ``media_io_kwargs`` of clips. max_fps, max_frames: vLLM's own, to
    which it cuts what is above. Raises ValueError for options that the encoder has not."""
    # All frames, of which vLLM's processor takes those that fps asks for.
    asked = {name: value for name, value in given.items() if (name, value) != ("num_frames", -1)}
    unknown = sorted(set(asked) - set(SAMPLING))
    if unknown:
        raise ValueError(f"media_io_kwargs of clips has {unknown}, the encoder takes {list(SAMPLING)}")
    for name, value in asked.items():
        kinds: Any = int | float if name == "fps" else int
        if isinstance(value, bool) or not isinstance(value, kinds) or not value > 0:
            kind = "number" if name == "fps" else "whole number"
            raise ValueError(f"{name} of a clip is {value!r}, needs a {kind} above 0")
    bounds = {"fps": max_fps, "max_frames": max_frames}
    return {name: min(value, bounds.get(name, value)) for name, value in asked.items()}
