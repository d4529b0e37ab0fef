"""The files of rows that ``encode`` writes: safetensors, and how one grows while rows come.

A safetensors file is the length of its header, the header (JSON) and the tensors' bytes. This header has
room: lines of entries, then spaces, once for the metadata and once for the tensors::

    {"__metadata__":{"format":"vision_encoder.rows.v1","num_items":"2"
    ,"key.0":"...","image.0":"a.png"
    (spaces)
    }
    ,"rows.0":{"dtype":"F32","shape":[64,128],"data_offsets":[24,32792]}
    (spaces)
    }

An item is appended as its bytes, then a line in each room, so that the file can be read after every item.
What a kill cut off (bytes without a line, or a part of a line) is dropped when the file is opened again;
until then other readers of safetensors may refuse the file.

Item i has ``rows.<i>`` [rows, width] and ``grid_thw.<i>`` int64 [3]; a clip also ``timestamps_s.<i>`` float64
[frames] and, for rows in chunks, ``chunk_grids.<i>`` int64 [chunks, 3]. Metadata of an item: ``key.<i>`` and
``content_digest.<i>`` (hexadecimal), ``image.<i>`` (the file's name) and ``path.<i>`` (as the user wrote it),
escaped where they are no text; of the file: ``format``, ``num_items``, ``dtype``, ``num_deepstack_levels``.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from encoder_service.cli.output import as_text

if TYPE_CHECKING:
    from lm_adapter import EncodedRows

ROWS_FORMAT = "vision_encoder.rows.v1"
DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
"""Of any safetensors file."""
FILE_METADATA_BYTES = 256
METADATA_BYTES, TENSORS_BYTES = 320, 512
"""Upper bounds of one item's entries: of the metadata without its two names, and of four tensors."""


class Tensor(NamedTuple):
    dtype: str
    shape: Sequence[int]
    data: bytes | memoryview


@dataclass(frozen=True)
class Entry:
    """One item's rows and what names them."""

    index: int
    name: str
    rows: EncodedRows

    def metadata(self) -> dict[str, str]:
        return {
            f"key.{self.index}": self.rows.key.hex(),
            f"content_digest.{self.index}": self.rows.content_digest.hex(),
            f"image.{self.index}": as_text(os.path.basename(self.name)),
            f"path.{self.index}": as_text(self.name),
        }

    def file_metadata(self) -> dict[str, str]:
        return {"dtype": self.rows.dtype, "num_deepstack_levels": str(self.rows.num_deepstack_levels)}

    @property
    def form(self) -> str:
        return form_of(self.file_metadata(), self.rows.width)

    def tensors(self) -> dict[str, Tensor]:
        """In the order of their bytes. Each is aligned to its type: of every model, a row's bytes are a
        multiple of eight."""
        rows = self.rows
        arrays = {"grid_thw": np.array(rows.grid_thw, "<i8")}
        if rows.timestamps_s:
            arrays["timestamps_s"] = np.array(rows.timestamps_s, "<f8")
        if rows.chunk_grids:
            arrays["chunk_grids"] = np.array(rows.chunk_grids, "<i8")
        tensors = {
            f"{name}.{self.index}": Tensor(
                "F64" if array.dtype == "<f8" else "I64", array.shape, array.tobytes()
            )
            for name, array in arrays.items()
        }
        shape = (rows.num_rows, rows.width)
        tensors[f"rows.{self.index}"] = Tensor(DTYPES[rows.dtype], shape, rows.raw().data.cast("B"))
        return tensors


def form_of(metadata: dict[str, str], width: int) -> str:
    """What all rows of a file have in common. metadata: the file's."""
    dtype, num_levels = metadata.get("dtype"), metadata.get("num_deepstack_levels")
    return f"{dtype} rows of width {width} with {num_levels} deepstack levels"


def room_bytes(names: Iterable[str]) -> tuple[int, int]:
    """Upper bounds of the metadata's and the tensors' lines of items with these names."""
    texts = [len(json.dumps(as_text(name))) for name in names]
    return FILE_METADATA_BYTES + 2 * sum(texts) + METADATA_BYTES * len(texts), TENSORS_BYTES * len(texts)


def line_of(entries: dict[str, Any]) -> bytes:
    return b"," + json.dumps(entries, separators=(",", ":"))[1:-1].encode() + b"\n"


def first_line(num_items: int) -> bytes:
    metadata = {"format": ROWS_FORMAT, "num_items": str(num_items)}
    return b'{"__metadata__":' + json.dumps(metadata, separators=(",", ":"))[:-1].encode() + b"\n"


@dataclass
class Room:
    """A part of the header that lines are appended to. at_bytes, end_bytes: offsets in the file."""

    at_bytes: int
    end_bytes: int

    @property
    def left_bytes(self) -> int:
        return self.end_bytes - self.at_bytes


@dataclass
class Header:
    """What a file says of its items. data_bytes: where the data begins; end_bytes: of all whole items, in the
    data. rooms: for the metadata and the tensors; None if nothing can be appended."""

    metadata: dict[str, str]
    tensors: dict[str, dict[str, Any]]
    data_bytes: int
    end_bytes: int = 0
    rooms: tuple[Room, Room] | None = None
    indices: list[int] = field(default_factory=list)
    """Of the items that are whole."""
    form: str = ""
    """Of their rows; empty without items."""

    def check(self) -> None:
        """Raises ValueError, and TypeError and the like, for JSON that is no header of safetensors."""
        for name, text in self.metadata.items():
            if not isinstance(text, str):
                raise ValueError(f"its metadata {name!r} is no text")
            if name.startswith("key.") and name != f"key.{int(name[4:])}":
                raise ValueError(f"{name!r} has no number")
        for name, each in self.tensors.items():
            begin, end = each["data_offsets"]
            numbers = [begin, end, *each["shape"]]
            if any(type(number) is not int or number < 0 for number in numbers) or begin > end:
                raise ValueError(f"the shape or data_offsets of {name!r} are none")

    def find_items(self, file_bytes: int) -> None:
        """Drops what belongs to no whole item. A file with such entries is continued in a copy."""
        held_bytes = file_bytes - self.data_bytes
        whole = {name for name, each in self.tensors.items() if each["data_offsets"][1] <= held_bytes}
        names = (name.partition(".") for name in self.metadata if name.startswith("key."))
        self.indices = [int(i) for _, _, i in names if {f"rows.{i}", f"grid_thw.{i}"} <= whole]
        indices = {str(index) for index in self.indices}
        num_entries = len(self.tensors) + len(self.metadata)
        self.tensors = {
            name: each for name, each in self.tensors.items() if name.rpartition(".")[2] in indices
        }
        self.metadata = {
            name: text
            for name, text in self.metadata.items()
            if "." not in name or name.rpartition(".")[2] in indices
        }
        if len(self.tensors) + len(self.metadata) < num_entries:
            self.rooms = None
        self.end_bytes = max((each["data_offsets"][1] for each in self.tensors.values()), default=0)
        if self.indices:
            self.form = form_of(self.metadata, self.tensors[f"rows.{self.indices[0]}"]["shape"][-1])


def read_header(path: Path) -> Header:
    """Of a file of this format, whoever wrote it. Raises OSError, and ValueError for another file."""
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(LENGTH_BYTES), "little")
        text = file.read(header_bytes) if header_bytes <= MAX_HEADER_BYTES else b""
        file_bytes = os.fstat(file.fileno()).st_size
    if not text or len(text) < header_bytes:
        raise ValueError("it is no whole safetensors file")
    try:
        header = _parse_lines(text) if b"\n" in text else _parse_whole(text)
        if header.metadata.get("format") != ROWS_FORMAT:
            raise ValueError(f"its format is {header.metadata.get('format')!r}, needs {ROWS_FORMAT!r}")
        header.check()
        header.find_items(file_bytes)
    except (AttributeError, IndexError, KeyError, RecursionError, TypeError) as error:
        raise ValueError(f"its header is none of safetensors: {error!r}") from error
    return header


def has_rows(path: Path) -> bool:
    """Whether an item is whole there."""
    try:
        return bool(read_header(path).indices)
    except (FileNotFoundError, ValueError):
        return False


def _parse_whole(text: bytes) -> Header:
    entries: dict[str, Any] = json.loads(text)
    metadata = entries.pop("__metadata__", {})
    return Header(metadata, entries, LENGTH_BYTES + len(text))


def _parse_lines(text: bytes) -> Header:
    """Takes whole lines. A room whose spaces follow a part of a line has nothing left."""
    begin, _, rest = text.partition(b"\n")
    parsed: list[dict[str, Any]] = [json.loads(begin + b"}}")["__metadata__"], {}]
    rooms = [Room(0, 0), Room(0, 0)]
    part, at = 0, LENGTH_BYTES + len(begin) + 1
    for line in rest.split(b"\n"):
        if line == b"}":
            part += 1
        elif not line.strip():
            rooms[part] = Room(at, at + len(line))
        else:
            with contextlib.suppress(ValueError):
                parsed[part].update(json.loads(b"{" + line[1:] + b"}"))
        at += len(line) + 1
    return Header(parsed[0], parsed[1], LENGTH_BYTES + len(text), rooms=(rooms[0], rooms[1]))


class GrowingFile:
    """A file of rows that is open for appending. Raises OSError; BlockingIOError while another process has it
    open, FileExistsError if it has rows and is not to be resumed."""

    def __init__(self, path: Path, names: Sequence[str], num_items: int, *, resumes: bool = False) -> None:
        """names: of the items that it needs room for. resumes: keeps the whole items of the file."""
        self.path = path
        self._fd = _open_locked(path)
        try:
            self._begin(names, num_items, resumes=resumes)
        except BaseException:
            self.close()
            raise

    def _begin(self, names: Sequence[str], num_items: int, *, resumes: bool) -> None:
        if not resumes and has_rows(self.path):
            raise FileExistsError(self.path)
        kept = read_header(self.path) if resumes and os.fstat(self._fd).st_size else None
        metadata_bytes, tensors_bytes = room_bytes(names)
        self.indices = [] if kept is None else kept.indices
        self.has_file_metadata = kept is not None and "dtype" in kept.metadata
        if (
            kept is not None
            and kept.rooms is not None
            and _continues(kept, metadata_bytes, tensors_bytes, num_items)
        ):
            self._rooms, self._data_bytes, self._end_bytes = kept.rooms, kept.data_bytes, kept.end_bytes
        else:
            self._create(kept, metadata_bytes, tensors_bytes, num_items)
        os.ftruncate(self._fd, self._data_bytes + self._end_bytes)

    @property
    def num_bytes(self) -> int:
        """Of all tensors."""
        return self._end_bytes

    def has_room(self, entry: Entry) -> bool:
        metadata_bytes, tensors_bytes = room_bytes([entry.name])
        metadata, tensors = self._rooms
        return metadata_bytes <= metadata.left_bytes and tensors_bytes <= tensors.left_bytes

    def append(self, entry: Entry) -> None:
        """Raises OSError; the file then has the items that it had."""
        tensors: dict[str, Any] = {}
        at = self._end_bytes
        try:
            for name, tensor in entry.tensors().items():
                end = at + len(tensor.data)
                tensors[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [at, end]}
                _write(self._fd, tensor.data, self._data_bytes + at)
                at = end
        except OSError:
            os.ftruncate(self._fd, self._data_bytes + self._end_bytes)
            raise
        metadata = entry.metadata() if self.has_file_metadata else entry.file_metadata() | entry.metadata()
        self._end_bytes, self.has_file_metadata = at, True
        for room, entries in zip(self._rooms, (metadata, tensors), strict=True):
            line = line_of(entries)
            assert len(line) <= room.left_bytes
            _write(self._fd, line, room.at_bytes)
            room.at_bytes += len(line)
        self.indices.append(entry.index)

    def close(self) -> None:
        """Unlocks it: whoever renames or removes the file does so before."""
        os.close(self._fd)

    def _create(self, kept: Header | None, metadata_bytes: int, tensors_bytes: int, num_items: int) -> None:
        """An empty file; or a copy with the kept items and more room, which takes the open one's place when
        it is whole."""
        first = first_line(num_items)
        lines = [b"", b""]
        if kept is not None:
            texts = {name: kept.metadata[name] for name in kept.metadata.keys() - {"format", "num_items"}}
            lines = [line_of(entries) if entries else b"" for entries in (texts, kept.tensors)]
        metadata = first + lines[0] + b" " * metadata_bytes + b"\n}\n"
        header = metadata + lines[1] + b" " * tensors_bytes
        header += b" " * (-(len(header) + 2) % LENGTH_BYTES) + b"\n}"
        if len(header) > MAX_HEADER_BYTES:
            raise OSError(
                0,
                f"its header needs {len(header)} bytes, the format has {MAX_HEADER_BYTES}: use --shard-size",
            )
        self._data_bytes = LENGTH_BYTES + len(header)
        self._end_bytes = 0 if kept is None else kept.end_bytes
        rooms = [
            Room(LENGTH_BYTES + len(first + lines[0]), LENGTH_BYTES + len(metadata) - 3),
            Room(LENGTH_BYTES + len(metadata + lines[1]), LENGTH_BYTES + len(header) - 2),
        ]
        self._rooms = rooms[0], rooms[1]
        head = len(header).to_bytes(LENGTH_BYTES, "little") + header
        if kept is None:
            os.ftruncate(self._fd, 0)
            _write(self._fd, head, 0)
            return
        longer = beside(self.path, ".longer")
        with self.path.open("rb") as old, longer.open("wb") as new:
            new.write(head)
            old.seek(kept.data_bytes)
            shutil.copyfileobj(old, new, 1 << 20)
        fd = _open_locked(longer)
        longer.replace(self.path)
        os.close(self._fd)  # once the path has the locked copy
        self._fd = fd


def _continues(kept: Header, metadata_bytes: int, tensors_bytes: int, num_items: int) -> bool:
    """Whether a file can be appended to as it is."""
    assert kept.rooms is not None
    metadata, tensors = kept.rooms
    has_room = metadata_bytes <= metadata.left_bytes and tensors_bytes <= tensors.left_bytes
    return has_room and kept.metadata.get("num_items") == str(num_items)


def file_of(entry: Entry) -> list[bytes | memoryview]:
    """The parts of a file with one item."""
    tensors, described, at = entry.tensors(), {}, 0
    for name, tensor in tensors.items():
        offsets = [at, at := at + len(tensor.data)]
        described[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": offsets}
    metadata = {"format": ROWS_FORMAT, "num_items": "1"} | entry.file_metadata() | entry.metadata()
    header = json.dumps({"__metadata__": metadata} | described, separators=(",", ":")).encode()
    header += b" " * (-len(header) % LENGTH_BYTES)
    return [len(header).to_bytes(LENGTH_BYTES, "little"), header, *(each.data for each in tensors.values())]


def write_file(path: Path, parts: Iterable[bytes | memoryview]) -> None:
    """Written beside the path, under a name of its own, and moved there when it is whole. Raises OSError."""
    partial = beside(path, f".{secrets.token_hex(4)}.partial")
    try:
        with partial.open("xb") as file:
            for part in parts:
                file.write(part)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def beside(path: Path, suffix: str) -> Path:
    """A path with a suffix, and with a shorter name where a file system would refuse it."""
    return path.with_name(fitting(path.name, suffix))


def fitting(name: str, suffix: str) -> str:
    """A name with a suffix, in the 255 bytes that a file's name may have: a longer one ends with a digest."""
    import hashlib

    data = os.fsencode(name)
    if len(data) + len(suffix) <= 255:
        return name + suffix
    digest = hashlib.sha256(data).hexdigest()[:16]
    return f"{os.fsdecode(data[: 255 - len(suffix) - 17])}~{digest}{suffix}"


def _open_locked(path: Path) -> int:
    """A descriptor of the file, which this process alone has locked. Its mode is the umask's."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(fd), path.stat()):
                return fd
        except FileNotFoundError:
            pass  # renamed or removed between the opening and the lock, as below
        except OSError:
            os.close(fd)
            raise
        os.close(fd)


def _write(fd: int, data: bytes | memoryview, at_bytes: int) -> None:
    view = memoryview(data)
    while view:
        num_bytes = os.pwrite(fd, view, at_bytes)
        view, at_bytes = view[num_bytes:], at_bytes + num_bytes
