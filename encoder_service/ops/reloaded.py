"""Files that are followed while the process runs: certificates and tokens.

Contents are compared, not modification times, because a mounted secret changes when its symbolic link is
replaced. A thread reads the files, so that users of the content never wait for a slow volume. A change is
used once two reads in a row return it, so that a file that is still being written is not used.
"""

from __future__ import annotations

import os
import stat
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import structlog

from encoder_service.errors import ConfigurationError

log = structlog.get_logger(__name__)
Content = TypeVar("Content")

# Time between two reads. A change is used after at most twice this time.
RECHECK_S = 0.5
MAX_FILE_BYTES = 4 << 20


class Reloaded(Generic[Content]):
    """The result of ``parse`` for the bytes of some files. Keeps the last valid result while a file cannot be
    read or parsed. Thread-safe. Its thread ends with the object."""

    def __init__(self, files: Sequence[Path], parse: Callable[..., Content]) -> None:
        """parse: called with the bytes of each file; raises ConfigurationError if they are not valid. Raises
        as ``parse`` and ``read``."""
        self._files, self._parse = files, parse
        self._last_read: list[bytes] | str = list(map(read, files))  # or the error's message
        self._is_handled = True
        self._content = parse(*self._last_read)
        if files:
            threading.Thread(target=_follow, args=(weakref.ref(self),), name="reload", daemon=True).start()

    def current(self) -> Content:
        return self._content

    def check(self) -> None:
        """Reads the files once. Uses a change if the previous read returned the same contents."""
        try:
            contents: list[bytes] | str = list(map(read, self._files))
        except ConfigurationError as error:
            contents = error.message
        if contents != self._last_read:
            self._last_read, self._is_handled = contents, False
        elif not self._is_handled:
            self._is_handled = True
            self._use(contents)

    def _use(self, contents: list[bytes] | str) -> None:
        names = ", ".join(map(str, self._files))
        try:
            if isinstance(contents, str):
                raise ConfigurationError(contents)
            self._content = self._parse(*contents)
            log.info("changed files are used", files=names)
        except ConfigurationError as error:
            log.warning("files are not usable, the former contents stay", files=names, reason=error.message)


def _follow(reference: weakref.ref[Reloaded[Any]]) -> None:
    while True:
        time.sleep(RECHECK_S)
        reloaded = reference()
        if reloaded is None:
            return
        try:
            reloaded.check()
        except Exception:
            log.exception("files could not be checked")
        del reloaded


def read(file: Path) -> bytes:
    """The file's bytes. Raises ConfigurationError if the file cannot be read, is not a regular file, or has
    more than MAX_FILE_BYTES."""
    try:
        if not stat.S_ISREG(file.stat().st_mode):  # a FIFO could block its reader
            raise ConfigurationError(f"{file} is not a regular file")
        # O_NONBLOCK, because a FIFO may have replaced the file meanwhile.
        with open(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as opened:
            content = opened.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigurationError(f"cannot read {file}: {error.strerror or error}") from None
    if len(content) > MAX_FILE_BYTES:
        raise ConfigurationError(f"{file} has more than {MAX_FILE_BYTES} bytes")
    return content
