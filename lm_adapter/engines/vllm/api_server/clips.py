"""A clip on its way through vLLM: the undecoded file, and the encoder's facts about it.

Owns the options of a clip and the call that announces it. The encoder opens the container and has the
sampling rules, so it decides the number of frames, their times and the grid. Imports neither vLLM nor torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from lm_adapter.checks import check_grid
from lm_adapter.client import AsyncVisionEncoderClient
from lm_adapter.engines.shared.geometry import Geometry
from lm_adapter.errors import EncoderError, InvalidRequest, InvalidRows, ItemFailed
from lm_adapter.items import ClipItem, Grid, PreprocessOptions
from lm_adapter.keys import content_digest
from lm_adapter.prefill.clip_texts import glm_patch_times, qwen_patch_times

SAMPLING = ("fps", "min_frames", "max_frames")
"""Names in vLLM's ``media_io_kwargs`` for which the encoder has options."""
NO_OPTIONS, NO_GRID = PreprocessOptions(), Grid(0, 0, 0)


@dataclass(frozen=True, eq=False)
class ClipFile:
    """digest: BLAKE3 of the data. options: those with which the clip is announced. grid: from the encoder's
    answer. patch_times_s: from the same answer, one for each temporal patch. A file without data stands for
    the largest clip while vLLM measures its memory."""

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
        """Differs for other content, and for other frames of the same content."""
        return self.digest + json.dumps(self.options.given(), sort_keys=True).encode()

    async def announced(
        self, client: AsyncVisionEncoderClient, left_s: float, *, geometry: Geometry, max_tokens: int
    ) -> ClipFile | EncoderError:
        """The same clip with the encoder's facts, once the encode has begun; or an error. left_s: time for
        the answer. max_tokens: limit on the tokens of a prompt, and so on a clip's placeholders. Raises
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
        patch_times = glm_patch_times if geometry.family.startswith("glm") else qwen_patch_times
        times_s = patch_times(status.timestamps_s)
        if len(times_s) != status.grid_thw.t:
            return InvalidRows(
                "timestamps_s",
                f"the encoder's {len(status.timestamps_s)} timestamps are of {len(times_s)} temporal "
                f"patches, its grid_thw is {list(status.grid_thw)}",
                found=len(times_s),
                expected=status.grid_thw.t,
            )
        return replace(self, grid=status.grid_thw, patch_times_s=tuple(times_s))


def sampling_options(options: Mapping[str, Any], *, max_fps: float, max_frames: int) -> dict[str, Any]:
    """The encoder's options for ``media_io_kwargs`` of clips. max_fps, max_frames: vLLM's limits; larger
    values are clamped. Raises ValueError for options that the encoder does not have."""
    # num_frames = -1 means all frames; vLLM's processor then samples them by fps.
    requested = {name: value for name, value in options.items() if (name, value) != ("num_frames", -1)}
    unknown = sorted(set(requested) - set(SAMPLING))
    if unknown:
        raise ValueError(f"media_io_kwargs of clips has {unknown}, the encoder takes {list(SAMPLING)}")
    for name, value in requested.items():
        kinds: Any = int | float if name == "fps" else int
        if isinstance(value, bool) or not isinstance(value, kinds) or not value > 0:
            kind = "number" if name == "fps" else "whole number"
            raise ValueError(f"{name} of a clip is {value!r}, needs a {kind} above 0")
    bounds = {"fps": max_fps, "max_frames": max_frames}
    return {name: min(value, bounds.get(name, value)) for name, value in requested.items()}
