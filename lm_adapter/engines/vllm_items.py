"""The images of a vLLM request: embedding keys beside vLLM's features, and the rows that they need.

Owns the form of ``ec_transfer_params`` (built by the front, read by the connector), the geometry of rows that
the language model takes, and the comparison of both with vLLM's placeholders. vLLM's identifiers (the UUID of
the client, or a hash of it if there are processor arguments) name places in its caches and are never keys.
Imports neither vLLM nor torch: requests and configs are read by attribute.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from lm_adapter.checks import check_rows
from lm_adapter.engines.hf_checkpoint import vision_interface
from lm_adapter.errors import EncoderError, InvalidRequest, InvalidRows
from lm_adapter.items import Grid
from lm_adapter.types import ITEMSIZE_BYTES, ROW_DTYPES, EncodedRows
from vision_encoder.layout.keys import DIGEST_BYTES

__all__ = [
    "PARAMS_FIELD",
    "Geometry",
    "KeyedItem",
    "WantedRows",
    "read_params",
    "transfer_params",
    "wanted_rows",
]

PARAMS_FIELD = "vision_encoder"
"""The field of ``ec_transfer_params`` that belongs to this project."""
MAX_REPLY_CHARS = 64
GRID_FIELDS = ("image_grid_thw", "video_grid_thw", "grid_thws")
PIXEL_FIELDS = ("pixel_values", "pixel_values_videos")


@dataclass(frozen=True)
class Geometry:
    """The rows that a language model can take. width: D * (1 + num_levels) elements."""

    width: int
    dtype: str
    num_levels: int
    merge_size: int
    merges_time: bool
    check_finite: bool = False

    @classmethod
    def of_model(cls, model_config: Any, *, check_finite: bool = False) -> Geometry:
        """From vLLM's ModelConfig. Raises InvalidRequest for other families and dtypes."""
        config = model_config.hf_config
        interface = vision_interface(config.to_dict())
        dtype = str(model_config.dtype).removeprefix("torch.")
        if dtype not in ROW_DTYPES:
            raise InvalidRequest(f"the model runs in {dtype}, rows come in {', '.join(ROW_DTYPES)}")
        levels = interface.num_deepstack_levels
        return cls(
            width=config.get_text_config().hidden_size * (1 + levels),
            dtype=dtype,
            num_levels=levels,
            merge_size=interface.merge_size,
            merges_time=interface.merges_time,
            check_finite=check_finite,
        )

    def num_rows(self, grid: Grid) -> int:
        """Visual tokens of one item of this grid."""
        frames = 1 if self.merges_time else grid.t
        return frames * grid.h * grid.w // self.merge_size**2

    def num_bytes(self, grid: Grid) -> int:
        return self.num_rows(grid) * self.width * ITEMSIZE_BYTES[self.dtype]

    def check(self, rows: EncodedRows, grid: Grid) -> None:
        """Raises InvalidRows unless the rows fit the model and a prompt with this grid."""
        check_rows(
            rows,
            grid=grid,
            width=self.width,
            dtype=self.dtype,
            num_deepstack_levels=self.num_levels,
            spatial_merge_size=self.merge_size,
            merges_time=self.merges_time,
            finite=self.check_finite,
        )
        self.check_size(rows, grid)

    def check_size(self, rows: EncodedRows, grid: Grid) -> None:
        """Raises InvalidRows for another grid, or another number of rows than a prompt with this grid has
        placeholders for. A clip of several chunks has more rows."""
        num_rows = self.num_rows(grid)
        if rows.grid_thw != grid or rows.num_rows != num_rows:
            raise InvalidRows(
                "num_rows",
                f"the result has {rows.num_rows} rows with grid_thw {list(rows.grid_thw)}, "
                f"expected {num_rows} with {list(grid)}",
                found=rows.num_rows,
                expected=num_rows,
            )

    def zeros(self, num_rows: int) -> EncodedRows:
        """Zeros in place of rows that are missing, for a request that is about to be rejected."""
        payload = np.zeros(num_rows * self.width * ITEMSIZE_BYTES[self.dtype], dtype=np.uint8)
        grid = Grid(1, self.merge_size, self.merge_size * num_rows)
        return EncodedRows(b"", b"", grid, num_rows, self.width, self.dtype, self.num_levels, payload)


class KeyedItem(NamedTuple):
    """One image of a request."""

    key: bytes
    grid: Grid


@dataclass(frozen=True)
class WantedRows:
    """One feature of a request. identifier: its name in vLLM's caches. end: the token after its placeholders.
    key: None for pixels that vLLM encodes by itself. grid: as the request claims; zeros for pixels with which
    vLLM keeps none."""

    identifier: str
    end: int
    key: bytes | None
    grid: Grid
    num_bytes: int


def transfer_params(items: Sequence[tuple[bytes, Grid]], reply: str = "") -> dict[str, Any]:
    """``ec_transfer_params`` of a request with these items (key, grid), in prompt order. reply: a name that
    the connector's report of a failure carries."""
    ours: dict[str, Any] = {"items": [{"key": key.hex(), "grid_thw": list(grid)} for key, grid in items]}
    if reply:
        ours["reply"] = reply
    return {PARAMS_FIELD: ours}


def read_params(params: object) -> tuple[list[KeyedItem], str]:
    """Items and reply name of ``ec_transfer_params``; no items if it lacks ``PARAMS_FIELD``. Raises
    InvalidRequest."""
    ours = params.get(PARAMS_FIELD) if isinstance(params, Mapping) else None
    if ours is None:
        return [], ""
    if not isinstance(ours, Mapping) or not isinstance(ours.get("items"), list):
        raise _invalid(f"{PARAMS_FIELD} has no list of items")
    reply = ours.get("reply", "")
    if not isinstance(reply, str) or len(reply) > MAX_REPLY_CHARS:
        raise _invalid(f"reply is a text of at most {MAX_REPLY_CHARS} characters, found {reply!r:.80}")
    return [_item(number, item) for number, item in enumerate(ours["items"])], reply


def wanted_rows(request: Any, geometry: Geometry, *, has_tower: bool) -> tuple[list[WantedRows], str]:
    """A vLLM request's features with their keys, in prompt order, and its reply name.

    Features with pixels belong to vLLM's tower, if it has one. Raises InvalidRequest, with both figures, if
    items, grids and placeholders do not match.
    """
    items, reply = read_params(request.ec_transfer_params)
    features = request.mm_features
    for_tower = [has_tower and _has_pixels(feature) for feature in features]
    if for_tower.count(False) != len(items):
        raise _invalid(
            f"the prompt has {for_tower.count(False)} images without pixels, {PARAMS_FIELD} has {len(items)} "
            "items"
        )
    remaining = enumerate(items)
    wanted = []
    for feature, is_for_tower in zip(features, for_tower, strict=True):
        position = feature.mm_position
        end = position.offset + position.length
        described = _grid_of(feature)
        if is_for_tower:
            grid = Grid(*described) if described is not None and len(described) == 3 else Grid(0, 0, 0)
            wanted.append(WantedRows(feature.identifier, end, None, grid, 0))
            continue
        number, (key, grid) = next(remaining)
        _check_grid(number, grid, described, geometry)
        num_rows, num_places = geometry.num_rows(grid), position.get_num_embeds()
        if num_rows != num_places:
            raise _invalid(f"item {number} has {num_rows} rows, the prompt has {num_places} placeholders")
        wanted.append(WantedRows(feature.identifier, end, key, grid, geometry.num_bytes(grid)))
    return wanted, reply


def _check_grid(number: int, grid: Grid, described: tuple[int, ...] | None, geometry: Geometry) -> None:
    """described: the grid that vLLM made the placeholders for. Raises InvalidRequest."""
    if grid.h % geometry.merge_size or grid.w % geometry.merge_size:
        raise _invalid(
            f"item {number} has grid_thw {list(grid)}, h and w are multiples of {geometry.merge_size}"
        )
    if described is not None and described != tuple(grid):
        raise _invalid(
            f"item {number} has grid_thw {list(grid)}, its placeholders were made for {list(described)}"
        )


def _item(number: int, item: object) -> KeyedItem:
    if not isinstance(item, Mapping):
        raise _invalid(f"item {number} is a {type(item).__name__}, needs an object")
    try:
        key = bytes.fromhex(item.get("key", ""))
    except (TypeError, ValueError):
        key = b""
    if len(key) != DIGEST_BYTES:
        raise _invalid(f"item {number} has a key of {len(key)} bytes in hexadecimal, needs {DIGEST_BYTES}")
    grid = item.get("grid_thw")
    sides = [side for side in grid if type(side) is int and side > 0] if isinstance(grid, list) else []
    if len(sides) != 3 or not isinstance(grid, list) or len(grid) != 3:
        raise _invalid(f"item {number} has grid_thw {grid!r:.80}, needs three positive integers")
    return KeyedItem(key, Grid(*sides))


def _has_pixels(feature: Any) -> bool:
    return feature.data is not None and any(name in feature.data for name in PIXEL_FIELDS)


def _grid_of(feature: Any) -> tuple[int, ...] | None:
    """The grid that vLLM made the placeholders for; None if the feature has none."""
    for name in GRID_FIELDS:
        if feature.data is not None and name in feature.data:
            return tuple(int(side) for side in feature.data[name].data.reshape(-1))
    return None


def _invalid(message: str) -> EncoderError:
    return InvalidRequest(message, reason="INVALID_TRANSFER_PARAMS")
