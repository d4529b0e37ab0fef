"""Where ``encode`` writes rows: one file, shards with an index, or a file per item.

Owns the names of files, what an earlier run left in them, and which of them are finished. ``rows_files`` owns
their format."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, NamedTuple, Protocol

from encoder_service.cli.inputs import Source
from encoder_service.cli.output import as_text
from encoder_service.cli.rows_files import (
    ROWS_FORMAT,
    Entry,
    GrowingFile,
    Header,
    beside,
    file_of,
    fitting,
    has_rows,
    read_header,
    write_file,
)

SUFFIX = ".safetensors"
PARTIAL = ".partial"
MAX_SHARD_ITEMS = 4096
"""Items that a shard's header has room for, unless their names are very long."""


class Recorded(NamedTuple):
    """An item that an earlier run has written."""

    key: bytes
    content_digest: bytes


@dataclass(frozen=True)
class Written:
    """Where an item's rows are once the run has ended, and its number there."""

    path: Path
    index: int


class CannotWrite(Exception):
    """``str(error)`` is a sentence for the user."""


class RowsOutput(Protocol):
    """Where rows go. Its methods raise OSError and CannotWrite. replaces: whether new rows of an item take
    the place of recorded ones. index: the file that says where each tensor is, once it is there."""

    replaces: ClassVar[bool]
    index: Path | None

    def recorded(self, name: str) -> Recorded | None:
        """What an earlier run has written of an item; None for a run that does not resume."""

    def write(self, entry: Entry) -> Written:
        """Writes an item's rows."""

    def finish(self, *, is_whole: bool) -> list[Path]:
        """Ends the run. is_whole: every item has its outcome. Returns the files with rows."""


class FilePerItem:
    """A file for each item, under the item's own path below a folder, with the suffix ``.safetensors``."""

    replaces: ClassVar[bool] = True
    index: Path | None = None

    def __init__(self, folder: Path, sources: Sequence[Source], *, resumes: bool) -> None:
        named: dict[tuple[str, ...], str] = {}
        for source in sources:
            other = named.setdefault(tuple(file_parts(source.name)), source.name)
            if other != source.name and os.path.abspath(other) != os.path.abspath(source.name):
                raise CannotWrite(f"{other} and {source.name} would have one file below {folder}: use --out")
        for parts, name in named.items():
            for depth in range(1, len(parts)):
                if other := named.get(parts[:depth], ""):
                    raise CannotWrite(
                        f"the file of {other} would be the folder of {name} below {folder}: use --out"
                    )
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._resumes = resumes
        self._num_written = 0

    def recorded(self, name: str) -> Recorded | None:
        if not self._resumes:
            return None
        try:
            found = recorded_items(read_header(self._path(name)))
        except (FileNotFoundError, ValueError):
            return None
        return found.get(as_text(name))

    def write(self, entry: Entry) -> Written:
        path = self._path(entry.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, file_of(replace(entry, index=0)))
        self._num_written += 1
        return Written(path, 0)

    def finish(self, *, is_whole: bool) -> list[Path]:  # noqa: ARG002 - every file is whole
        return [self._folder] if self._num_written else []

    def _path(self, name: str) -> Path:
        return self._folder.joinpath(*file_parts(name))


def file_parts(name: str) -> list[str]:
    """Folders and name of an item's file: the parts of its path, in which ``..`` is ``__``, or of its URL."""
    *folders, last = [part for part in re.split(r"/+", name) if part not in ("", ".")] or ["_"]
    safe = ["__" if part == ".." else fitting(part, "") for part in folders]
    return [*safe, fitting("__" if last == ".." else last, SUFFIX)]


class Appended:
    """Files to which items are appended: their locks, and the items that they have."""

    replaces: ClassVar[bool] = False
    index: Path | None = None

    def __init__(self, out: Path, sources: Sequence[Source]) -> None:
        self.out = Path(os.path.realpath(out))
        if self.out.exists() and not stat.S_ISREG(self.out.stat().st_mode):
            raise CannotWrite(f"cannot write {out}: it is no file")
        self.sources = sources
        self.found: dict[str, Recorded] = {}
        self.indices: set[int] = set()
        self.form = ""

    def recorded(self, name: str) -> Recorded | None:
        return self.found.get(as_text(name))

    def note(self, path: Path) -> list[int]:
        """Takes up the items of a file, and returns their numbers."""
        try:
            header = read_header(path)
            self.found.update(recorded_items(header))
        except ValueError as error:
            raise CannotWrite(f"cannot resume {path}: {error}") from error
        self.indices.update(header.indices)
        self.form = self.form or header.form
        return header.indices

    def resume(self, path: Path, num_names: int | None = None) -> GrowingFile:
        """num_names: of items that the file then has room for; None for all that are to come."""
        indices = self.note(path)
        file = self.open(path, self.names_to_come()[:num_names], resumes=True)
        if file.indices != indices:
            file.close()
            raise CannotWrite(f"another run wrote {path} just now: run the command again")
        return file

    def names_to_come(self) -> list[str]:
        return [source.name for source in self.sources if self.recorded(source.name) is None]

    def open(self, path: Path, names: Sequence[str], *, resumes: bool) -> GrowingFile:
        try:
            return GrowingFile(path, names, len(self.sources), resumes=resumes)
        except BlockingIOError as error:
            raise CannotWrite(f"another run writes {path} now") from error
        except FileExistsError as error:
            raise CannotWrite(
                f"{path} has rows of an interrupted run: --resume continues it; remove it for a new run"
            ) from error
        except ValueError as error:
            raise CannotWrite(f"cannot resume {path}: {error}") from error

    def numbered(self, entry: Entry) -> Entry:
        """With a number that no other item has: the one of its place among the inputs, if that is free.
        Raises CannotWrite for rows that are not like the others."""
        self.form = self.form or entry.form
        if entry.form != self.form:
            raise CannotWrite(
                f"{self.out} has {self.form}, the server now gives {entry.form}: write to another file"
            )
        index = entry.index if entry.index not in self.indices else max(self.indices, default=-1) + 1
        if index != entry.index:
            index = max(index, len(self.sources))  # the places of the other inputs stay theirs
        self.indices.add(index)
        return replace(entry, index=index)


class OneFile(Appended):
    """One file. While it grows it has another name: that of its end and ``.partial``."""

    def __init__(self, out: Path, sources: Sequence[Source], *, resumes: bool) -> None:
        super().__init__(out, sources)
        self.partial = beside(self.out, PARTIAL)
        if resumes and self.out.exists():
            if has_rows(self.partial):
                raise CannotWrite(f"{self.out} and {self.partial} both have rows: remove or rename one")
            self.note(self.out)  # raises for another file, which keeps its name
            replaced = self.open(self.partial, [], resumes=False)
            self.out.rename(self.partial)
            replaced.close()
        if resumes and self.partial.exists():
            self.file = self.resume(self.partial)
        else:
            self.file = self.open(self.partial, self.names_to_come(), resumes=False)

    def write(self, entry: Entry) -> Written:
        entry = self.numbered(entry)
        self.file.append(entry)
        return Written(self.out, entry.index)

    def finish(self, *, is_whole: bool) -> list[Path]:
        has_rows = bool(self.file.indices)
        if not has_rows:
            self.partial.unlink()
        elif is_whole:
            self.partial.replace(self.out)
        self.file.close()
        return [self.out if is_whole else self.partial] if has_rows else []


class Shards(Appended):
    """Files of about one size, ``<stem>-00001.safetensors`` and so on, and ``<stem>.safetensors.index.json``,
    which maps each tensor to its file as the index of a checkpoint does. The last one is ``.partial`` while
    it grows."""

    def __init__(self, out: Path, sources: Sequence[Source], max_bytes: int, *, resumes: bool) -> None:
        super().__init__(out, sources)
        self.stem = self.out.name.removesuffix(SUFFIX)
        self.max_bytes = max_bytes
        self.shards = self._finished_shards()
        self.index = self._index_path() if self.shards else None
        if self.shards and not resumes:
            raise CannotWrite(
                f"{self.shards[0]} exists: --resume continues with its run; remove its shards for a new one"
            )
        for shard in self.shards:
            self.note(shard)
        self.file: GrowingFile | None = None
        partial = self._partial_path()
        if resumes and partial.exists():
            self.file = self.resume(partial, 1)
        elif partial.exists():
            self.file = self.open(partial, self.names_to_come()[:MAX_SHARD_ITEMS], resumes=False)

    def write(self, entry: Entry) -> Written:
        entry = self.numbered(entry)
        file = self.file
        is_full = file is not None and file.indices and file.num_bytes + entry.rows.num_bytes > self.max_bytes
        if file is not None and (is_full or not file.has_room(entry)):
            self._finish_shard(file)
            file = None
        if file is None:
            names = [entry.name, *self.names_to_come()[: MAX_SHARD_ITEMS - 1]]
            file = self.file = self.open(self._partial_path(), names, resumes=False)
        file.append(entry)
        return Written(self._shard_path(len(self.shards) + 1), entry.index)

    def finish(self, *, is_whole: bool) -> list[Path]:
        file = self.file
        if file is None:
            return [*self.shards]
        if is_whole and file.indices:
            self._finish_shard(file)
            return [*self.shards]
        if not file.indices:
            file.path.unlink()
        file.close()
        return [*self.shards, file.path] if file.indices else [*self.shards]

    def _shard_path(self, number: int) -> Path:
        return self.out.with_name(f"{self.stem}-{number:05}{SUFFIX}")

    def _index_path(self) -> Path:
        return self.out.with_name(f"{self.out.name}.index.json")

    def _partial_path(self) -> Path:
        return beside(self._shard_path(len(self.shards) + 1), PARTIAL)

    def _finished_shards(self) -> list[Path]:
        shards: list[Path] = []
        while (path := self._shard_path(len(shards) + 1)).exists():
            shards.append(path)
        return shards

    def _finish_shard(self, file: GrowingFile) -> None:
        path = self._shard_path(len(self.shards) + 1)
        file.path.replace(path)
        file.close()
        self.shards.append(path)
        self.file = None
        weight_map: dict[str, str] = {}
        total_size = 0
        for shard in self.shards:
            header = read_header(shard)
            weight_map |= dict.fromkeys(header.tensors, as_text(shard.name))
            total_size += header.end_bytes
        metadata = {"format": ROWS_FORMAT, "num_items": len(self.sources), "total_size": total_size}
        index = json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=1)
        self.index = self._index_path()
        write_file(self.index, [index.encode()])


def open_output(
    out: Path | None, out_dir: Path | None, max_bytes: int | None, sources: Sequence[Source], *, resumes: bool
) -> RowsOutput | None:
    """What the options name; None for neither. max_bytes: of a shard. Raises CannotWrite."""
    try:
        if out_dir is not None:
            return FilePerItem(out_dir, sources, resumes=resumes)
        if out is None:
            return None
        if max_bytes is not None:
            return Shards(out, sources, max_bytes, resumes=resumes)
        return OneFile(out, sources, resumes=resumes)
    except OSError as error:
        raise CannotWrite(f"cannot write {out_dir or out}: {error.strerror or error}") from error


def recorded_items(header: Header) -> dict[str, Recorded]:
    """The items of a file, by the path that the user wrote; in files of older versions by name."""
    found = {}
    for index in header.indices:
        name = header.metadata.get(f"path.{index}", header.metadata.get(f"image.{index}", ""))
        key, digest = header.metadata[f"key.{index}"], header.metadata.get(f"content_digest.{index}", "")
        found[name] = Recorded(bytes.fromhex(key), bytes.fromhex(digest))
    return found


def size_bytes(text: str) -> int:
    """A number of bytes as ``5GB``, ``500MB``, ``2GiB`` or ``1000000``. Raises ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?)B)?", text.strip(), re.IGNORECASE)
    if match is None or not float(match[1]):
        raise ValueError(f"{text!r} is no size, needs a number and a unit, such as 2GB")
    power = " KMGT".index((match[2] or " ").upper())
    return int(float(match[1]) * (1024 if match[3] else 1000) ** power)
