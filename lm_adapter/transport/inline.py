"""Rows that arrive as chunks in the stream: one destination per item, each chunk copied into it once."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from lm_adapter.errors import InvalidRows

__all__ = ["InlineRowsBuffer"]


class InlineRowsBuffer:
    """The destination of one item's rows. Chunks come in order of offset, without gaps."""

    def __init__(self, rows_bytes: int, num_chunks: int, out: npt.NDArray[Any] | None = None) -> None:
        """out: uint8 [rows_bytes] of the caller's; without it the memory is allocated, and touched only as
        chunks arrive."""
        self._payload = np.empty(rows_bytes, dtype=np.uint8) if out is None else out
        self._view = self._payload.data
        self._num_chunks = num_chunks
        self._num_arrived = 0
        self._offset_bytes = 0

    @property
    def complete(self) -> bool:
        return self._offset_bytes == len(self._view) and self._num_arrived == self._num_chunks

    @property
    def num_bytes(self) -> int:
        """That have arrived, from the first on."""
        return self._offset_bytes

    @property
    def payload(self) -> npt.NDArray[Any]:
        """uint8 [rows_bytes]; filled once ``complete``."""
        return self._payload

    def write(self, offset_bytes: int, data: memoryview) -> None:
        """Copies one chunk. Raises InvalidRows for a chunk out of order, out of range or too many, and for
        a last chunk that leaves the rows short."""
        end_bytes = offset_bytes + len(data)
        if offset_bytes != self._offset_bytes:
            raise InvalidRows(
                "chunk_offset",
                f"a rows chunk starts at byte {offset_bytes}, expected {self._offset_bytes}",
                found=offset_bytes,
                expected=self._offset_bytes,
            )
        if end_bytes > len(self._view):
            raise InvalidRows(
                "chunk_range",
                f"a rows chunk ends at byte {end_bytes}, the rows have {len(self._view)}",
                found=end_bytes,
                expected=len(self._view),
            )
        self._num_arrived += 1
        if self._num_arrived > self._num_chunks:
            raise InvalidRows(
                "num_chunks",
                f"{self._num_arrived} rows chunks arrived, {self._num_chunks} were announced",
                found=self._num_arrived,
                expected=self._num_chunks,
            )
        self._view[offset_bytes:end_bytes] = data
        self._offset_bytes = end_bytes
        if self._num_arrived == self._num_chunks and end_bytes != len(self._view):
            raise InvalidRows(
                "rows_bytes",
                f"{self._num_chunks} rows chunks brought {end_bytes} bytes, the rows have {len(self._view)}",
                found=end_bytes,
                expected=len(self._view),
            )
