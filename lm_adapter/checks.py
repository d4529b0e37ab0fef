"""Validates rows before an engine uses them.

Owns the rules for rows: they must match the model's geometry as announced by the server, and what the prompt
expects. Shape legend: R rows, D language-model width, L deepstack levels.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lm_adapter.errors import InvalidRequest, InvalidRows
from lm_adapter.items import Grid, Item
from lm_adapter.types import ITEMSIZE_BYTES, ROW_DTYPES, EncodedRows, ModelInfo
from vision_encoder.layout.keys import DIGEST_BYTES

if TYPE_CHECKING:
    import torch


class RowsHeader(NamedTuple):
    """The description of an item's rows in its result message, which precedes the rows themselves."""

    grid_thw: Grid
    num_rows: int
    width: int
    dtype: str
    num_deepstack_levels: int
    num_bytes: int
    chunk_grids: tuple[Grid, ...] = ()

    def rows(self, payload: npt.NDArray[np.uint8] | torch.Tensor, **fields: Any) -> EncodedRows:
        """payload: uint8 [num_bytes]. fields: the remaining fields of EncodedRows."""
        shape = {name: value for name, value in self._asdict().items() if name != "num_bytes"}
        return EncodedRows(payload=payload, **shape, **fields)


def check_rows(
    rows: EncodedRows,
    *,
    grid: Grid | tuple[int, int, int],
    width: int,
    dtype: str,
    num_deepstack_levels: int,
    spatial_merge_size: int,
    merges_time: bool,
    finite: bool = False,
) -> None:
    """Compares rows with what a prompt expects. Raises InvalidRows with the found and the expected value.

    grid: [t, h, w] in patches; width: D * (1 + L); dtype: ``float32``, ``bfloat16`` or ``float16``;
    finite: also check every element for NaN and infinity, which reads the whole payload.
    """
    expect("grid_thw", tuple(rows.grid_thw), tuple(grid))
    _check_geometry(rows, width, dtype, num_deepstack_levels, spatial_merge_size, merges_time)
    check_header(rows)
    if finite:
        _check_finite(rows)


def check_models(header: RowsHeader, models: Sequence[ModelInfo]) -> None:
    """Checks that a result has the geometry of one of the announced models. Raises InvalidRows with the
    mismatch for the first model. A model whose announced width is not D * (1 + L) matches nothing."""
    failure: InvalidRows | None = None
    for model in models:
        try:
            expect("width", model.width, model.out_width * (1 + model.num_deepstack_levels))
            geometry = model.width, model.dtype, model.num_deepstack_levels
            _check_geometry(header, *geometry, model.spatial_merge_size, model.merges_time)
            return
        except InvalidRows as error:
            failure = failure or error
    if failure is not None:
        raise failure


def check_header(header: RowsHeader | EncodedRows) -> None:
    """Checks a result for consistency: known dtype, positive sizes, width divisible by 1 + L, byte count.
    Raises InvalidRows."""
    if header.dtype not in ROW_DTYPES:
        raise InvalidRows(
            "dtype",
            f"rows have {header.dtype}, expected one of {', '.join(ROW_DTYPES)}",
            found=header.dtype,
            expected=", ".join(ROW_DTYPES),
        )
    for name, value in (("num_rows", header.num_rows), ("width", header.width)):
        if value < 1:
            raise InvalidRows(name, f"{name} is {value}, expected at least 1", found=value, expected=1)
    levels = 1 + header.num_deepstack_levels
    if header.width % levels:
        raise InvalidRows(
            "width",
            f"width {header.width} is not a multiple of {levels}, 1 + {header.num_deepstack_levels} "
            "deepstack levels",
            found=header.width,
            expected=f"a multiple of {levels}",
        )
    needed = header.num_rows * header.width * ITEMSIZE_BYTES[header.dtype]
    expect("rows_bytes", header.num_bytes, needed)


def check_digest(field: str, found: bytes, expected: bytes | None) -> None:
    """Checks that a key or digest has 32 bytes and equals ``expected``, if given. Raises InvalidRows."""
    if len(found) != DIGEST_BYTES:
        raise InvalidRows(
            field,
            f"{field} has {len(found)} bytes, expected {DIGEST_BYTES}",
            found=len(found),
            expected=DIGEST_BYTES,
        )
    if expected is not None:
        expect(field, found.hex(), expected.hex())


def check_grid(grid: Grid, spatial_merge_size: int) -> None:
    """Checks that a grid has whole merged patches. Raises InvalidRows."""
    if min(grid) < 1 or grid.h % spatial_merge_size or grid.w % spatial_merge_size:
        raise InvalidRows(
            "grid_thw",
            f"grid_thw is {list(grid)}, expected positive sides, h and w multiples of {spatial_merge_size}",
            found=list(grid),
            expected=f"multiples of {spatial_merge_size}",
        )


def _check_geometry(
    header: RowsHeader | EncodedRows,
    width: int,
    dtype: str,
    num_deepstack_levels: int,
    spatial_merge_size: int,
    merges_time: bool,
) -> None:
    grid = header.grid_thw
    if spatial_merge_size < 1:
        expect("spatial_merge_size", spatial_merge_size, 1)
    check_grid(grid, spatial_merge_size)
    chunks = header.chunk_grids
    if chunks:
        _check_chunks(grid, chunks, merges_time)
    needed = grid.num_rows(spatial_merge_size, merges_time=merges_time, num_chunks=len(chunks) or 1)
    if header.num_rows != needed:
        raise InvalidRows(
            "num_rows",
            f"the result has {header.num_rows} rows, grid_thw {list(grid)} needs {needed}",
            found=header.num_rows,
            expected=needed,
        )
    if (header.num_deepstack_levels, header.width, header.dtype) != (num_deepstack_levels, width, dtype):
        expect("num_deepstack_levels", header.num_deepstack_levels, num_deepstack_levels)
        expect("width", header.width, width)
        expect("dtype", header.dtype, dtype)


def _check_chunks(grid: Grid, chunks: Sequence[Grid], merges_time: bool) -> None:
    """Checks that the chunks of a clip add up to its grid. Raises InvalidRows."""
    whole = [sum(chunk.t for chunk in chunks), grid.h, grid.w]
    if (
        not merges_time
        or whole != list(grid)
        or any(chunk.t < 1 or chunk[1:] != grid[1:] for chunk in chunks)
    ):
        raise InvalidRows(
            "chunk_grids",
            f"the chunks {[list(chunk) for chunk in chunks[:16]]} are not those of a clip of {list(grid)}",
            found=[list(chunk) for chunk in chunks[:16]],
            expected=list(grid),
        )


def expect(field: str, found: object, expected: object) -> None:
    """Raises InvalidRows unless both are the same."""
    if found != expected:
        raise InvalidRows(field, f"{field} is {found}, expected {expected}", found=found, expected=expected)


def _check_finite(rows: EncodedRows) -> None:
    raw = rows.raw()
    # bfloat16: all eight exponent bits set means NaN or infinity.
    bad = (raw & 0x7F80) == 0x7F80 if rows.dtype == "bfloat16" else ~np.isfinite(raw)
    num_bad = int(np.count_nonzero(bad))
    if num_bad:
        first_row = int(np.argwhere(bad)[0][0])
        raise InvalidRows(
            "finite",
            f"{num_bad} of {raw.size} elements are NaN or infinite, the first in row {first_row}; expected 0",
            found=num_bad,
            expected=0,
        )


def check_items(items: Iterable[Item]) -> list[Item]:
    """The items as a list. Raises InvalidRequest for anything else."""
    if isinstance(items, Item | bytes | str) or not isinstance(items, Iterable):
        raise InvalidRequest(
            f"items is a {type(items).__name__}, needs items such as ImageItem.from_path(path)"
        )
    for index, item in enumerate(items := list(items)):
        if not isinstance(item, Item):
            raise InvalidRequest(
                f"items[{index}] is a {type(item).__name__}, needs an ImageItem, ClipItem, FramesItem, "
                "PixelItem, DigestItem or UrlItem"
            )
    return items


def check_keys(keys: Sequence[bytes], name: str = "keys") -> list[bytes]:
    """The keys as a list. name: of the argument. Raises InvalidRequest for what is no key of 32 bytes."""
    if isinstance(keys, bytes):
        raise InvalidRequest(f"{name} is of type bytes, needs a sequence of them: [{name}]")
    for position, key in enumerate(keys):
        if not isinstance(key, bytes) or len(key) != DIGEST_BYTES:
            found = f"has {len(key)} bytes" if isinstance(key, bytes) else f"is a {type(key).__name__}"
            raise InvalidRequest(f"{name}[{position}] {found}, needs {DIGEST_BYTES} bytes")
    return list(keys)


def check_routes(keys: Sequence[bytes], routing_digests: Sequence[bytes]) -> dict[int, bytes]:
    """The routing digest of each key. Raises InvalidRequest."""
    if len(routing_digests) != len(keys):
        raise InvalidRequest(
            f"routing_digests has {len(routing_digests)} digests, keys has {len(keys)} keys: each needs one"
        )
    return dict(enumerate(check_keys(routing_digests, "routing_digests")))
