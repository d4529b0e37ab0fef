"""The vision tensors of a sharded checkpoint as one safetensors file, filled from byte ranges of the shards.

Owns the headers of remote shards, the new file's layout, and its completion: the file grows in order, so that
its length says where an interrupted transfer continues. ``hub`` makes the requests and says which tensors.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from encoder_service.errors import CheckpointError

# The number that a safetensors file begins with: the length of its JSON header. The limit is the format's.
LENGTH = struct.Struct("<Q")
MAX_HEADER_BYTES = 100_000_000
# Of the dtypes in which vision tensors are stored.
ITEM_BYTES = {"F32": 4, "BF16": 2, "F16": 2}


@dataclass(frozen=True)
class Shard:
    """A remote safetensors file. size: in bytes. sha256: of its content, or "" if it is not known."""

    name: str
    url: str
    size: int
    sha256: str


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a shard, with the methods of a safetensors slice. start, end: its bytes in the shard."""

    shard: Shard
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    def get_shape(self) -> tuple[int, ...]:
        return self.shape

    def get_dtype(self) -> str:
        return self.dtype

    @property
    def num_bytes(self) -> int:
        return self.end - self.start


def read_header(shard: Shard, read: Callable[[int, int], bytes]) -> tuple[bytes, dict[str, StoredTensor]]:
    """The bytes of a shard before its data, and its tensors by name. read: the bytes from start to end.

    Raises CheckpointError for a shard that is not a whole safetensors file.
    """
    if shard.size < LENGTH.size:
        raise _broken(shard, f"it has {shard.size} bytes")
    length = read(0, LENGTH.size)
    data_start = LENGTH.size + LENGTH.unpack(length)[0]
    if data_start > min(shard.size, MAX_HEADER_BYTES):
        raise _broken(shard, f"its header ends at byte {data_start}, it has {shard.size} bytes")
    text = read(LENGTH.size, data_start)
    try:
        entries = json.loads(text)
        entries.pop("__metadata__", None)
        tensors = {name: _stored(shard, data_start, entry) for name, entry in entries.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise _broken(shard, f"its header is invalid ({error!r})") from error
    ends = max((tensor.end for tensor in tensors.values()), default=data_start)
    if ends != shard.size:
        raise _broken(shard, f"its tensors end at byte {ends}, it has {shard.size} bytes")
    return length + text, tensors


def _stored(shard: Shard, data_start: int, entry: Mapping[str, Any]) -> StoredTensor:
    """Raises ValueError, TypeError or KeyError for an entry that is none."""
    dtype, (first, last) = entry["dtype"], entry["data_offsets"]
    shape = tuple(int(side) for side in entry["shape"])
    if not (type(first) is type(last) is int and 0 <= first <= last):
        raise ValueError(f"a tensor from byte {first} to {last}")
    if dtype in ITEM_BYTES and math.prod(shape) * ITEM_BYTES[dtype] != last - first:
        raise ValueError(f"{last - first} bytes for shape {list(shape)} of {dtype}")
    return StoredTensor(shard, str(dtype), shape, data_start + first, data_start + last)


def _broken(shard: Shard, reason: str) -> CheckpointError:
    return CheckpointError(f"{shard.url} is not a whole safetensors file: {reason}")


class VisionFile:
    """The layout of the file. num_bytes: its length when it is complete."""

    def __init__(self, tensors: Mapping[str, StoredTensor]) -> None:
        """tensors: of any shards, by their names, with dtypes of ITEM_BYTES."""
        # Wider types first: a tensor then begins at a multiple of its item size, as readers expect.
        self._tensors = sorted(
            tensors.values(), key=lambda one: (-ITEM_BYTES[one.dtype], one.shard.name, one.start)
        )
        offset, self._offsets = 0, {}
        for tensor in self._tensors:
            self._offsets[tensor] = offset
            offset += tensor.num_bytes
        self._header = self._encoded_header(tensors)
        self.num_bytes = len(self._header) + offset

    def _encoded_header(self, tensors: Mapping[str, StoredTensor]) -> bytes:
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        for name, tensor in tensors.items():
            start = self._offsets[tensor]
            header[name] = {
                "dtype": tensor.dtype,
                "shape": tensor.shape,
                "data_offsets": [start, start + tensor.num_bytes],
            }
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        return LENGTH.pack(len(text)) + text

    def continue_at(self, file: BinaryIO) -> int:
        """Makes the open file a beginning of this one and returns its length: what it already holds if that
        was begun with the same layout, otherwise the header."""
        file.seek(0)
        length = file.seek(0, 2) if file.read(len(self._header)) == self._header else 0
        if not len(self._header) <= length <= self.num_bytes:
            file.truncate(0)
            file.seek(0)
            file.write(self._header)
            file.flush()
            length = len(self._header)
        return length

    def missing(self, length: int) -> Iterable[tuple[Shard, int, int]]:
        """The ranges of shards that follow after ``length`` bytes of this file, in order. Tensors that are
        neighbours in both files are one range."""
        ranges: list[tuple[Shard, int, int]] = []
        for tensor in self._tensors:
            skipped = length - len(self._header) - self._offsets[tensor]
            start = tensor.start + max(0, skipped)
            if start >= tensor.end:
                continue
            if ranges and ranges[-1][0] == tensor.shard and ranges[-1][2] == start:
                ranges[-1] = (tensor.shard, ranges[-1][1], tensor.end)
            else:
                ranges.append((tensor.shard, start, tensor.end))
        return ranges

    def check_digests(self, path: Path, headers: Mapping[Shard, bytes]) -> None:
        """Compares the SHA-256 of each shard of which this file holds everything. headers: the bytes before
        the data of each shard. Raises CheckpointError."""
        with path.open("rb") as file:
            for shard, header in headers.items():
                parts = sorted(
                    (one for one in self._tensors if one.shard == shard), key=lambda one: one.start
                )
                is_whole = len(header) + sum(one.num_bytes for one in parts) == shard.size
                if not shard.sha256 or not is_whole:
                    continue
                hasher = hashlib.sha256(header)
                for one in parts:
                    file.seek(len(self._header) + self._offsets[one])
                    for piece in _pieces(file, one.num_bytes):
                        hasher.update(piece)
                if hasher.hexdigest() != shard.sha256:
                    raise CheckpointError(
                        f"{shard.url} was received with SHA-256 {hasher.hexdigest()}, the hub says"
                        f" {shard.sha256}: start again to fetch it again"
                    )


def _pieces(file: BinaryIO, num_bytes: int, piece_bytes: int = 1 << 20) -> Iterator[bytes]:
    while num_bytes > 0 and (piece := file.read(min(num_bytes, piece_bytes))):
        num_bytes -= len(piece)
        yield piece
