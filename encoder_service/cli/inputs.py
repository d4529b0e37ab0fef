"""What ``encode`` and ``bench`` read: files, folders, patterns and URLs, as the user names them.

Owns how arguments become sources, in order, and what of a folder is left out. Reads no image."""

from __future__ import annotations

import glob
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

IMAGE_SUFFIXES = frozenset(
    (
        ".apng", ".avif", ".bmp", ".dib", ".gif", ".j2k", ".jfif", ".jp2", ".jpe", ".jpeg", ".jpg", ".mpo",
        ".pbm", ".pcx", ".pgm", ".png", ".pnm", ".ppm", ".qoi", ".sgi", ".tga", ".tif", ".tiff", ".webp",
    )
)  # fmt: skip
CLIP_SUFFIXES = frozenset((".m4v", ".mkv", ".mov", ".mp4", ".webm"))
MAX_NAMED = 5
"""Left-out names of one folder that a note lists."""


@dataclass(frozen=True)
class Source:
    """One image or clip: a path as the user wrote it, or a URL. problem: why there is nothing to read."""

    name: str
    problem: str = ""

    @property
    def is_url(self) -> bool:
        return self.name.startswith(("http://", "https://"))


@dataclass
class Inputs:
    """The sources of a run, in order. notes: what was left out, a line each."""

    sources: list[Source] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, name: str) -> None:
        """A file, a folder, a pattern that no file has as its name, or a URL."""
        source = Source(name)
        if source.is_url:
            self.sources.append(source)
        elif os.path.isdir(name):
            self._add_folder(name)
        elif glob.has_magic(name) and not os.path.lexists(name):
            self._add_pattern(name)
        else:
            self.sources.append(source)

    def add_listed(self, name: str) -> None:
        """An entry of a list: nothing in it is a pattern."""
        if os.path.isdir(name):
            self._add_folder(name)
        else:
            self.sources.append(Source(name))

    def _add_pattern(self, pattern: str) -> None:
        names = sorted(name for name in glob.iglob(pattern, recursive=True) if not os.path.isdir(name))
        self.sources += map(Source, names) if names else [Source(pattern, "no file matches the pattern")]

    def _add_folder(self, folder: str) -> None:
        hidden: list[str] = []
        unknown: list[str] = []
        before = len(self.sources)

        def on_error(error: OSError) -> None:
            self.sources.append(Source(str(error.filename), f"cannot be read: {error.strerror}"))

        for parent, folders, files in os.walk(folder, onerror=on_error):
            hidden += (os.path.join(parent, name) for name in [*folders, *files] if name.startswith("."))
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            for name in sorted(name for name in files if not name.startswith(".")):
                path = os.path.join(parent, name)
                if Path(name).suffix.lower() not in IMAGE_SUFFIXES | CLIP_SUFFIXES:
                    unknown.append(path)
                elif not os.path.exists(path) or os.path.isfile(path):  # a dangling link fails by name
                    self.sources.append(Source(path))
        for paths, what in ((hidden, "hidden"), (unknown, "without the suffix of an image or clip")):
            if paths:
                named = ", ".join(paths[:MAX_NAMED]) + (", ..." if len(paths) > MAX_NAMED else "")
                self.notes.append(f"left out of {folder}: {len(paths)} {what}: {named}")
        if len(self.sources) == before:
            self.sources.append(Source(folder, "the folder has no image and no clip"))


def expand(arguments: Iterable[str]) -> Inputs:
    """``-`` stands for a list on standard input."""
    inputs = Inputs()
    for argument in arguments:
        if argument == "-":
            for name in listed(sys.stdin.buffer.read()):
                inputs.add_listed(name)
        else:
            inputs.add(argument)
    return inputs


def listed(data: bytes) -> Iterator[str]:
    """The paths and URLs of a list, one a line. A list with a NUL is separated by NULs, for names with line
    breaks."""
    lines = data.split(b"\0") if b"\0" in data else data.splitlines()
    return (os.fsdecode(line) for line in lines if line)
