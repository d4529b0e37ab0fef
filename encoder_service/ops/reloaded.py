"""Files that are read again when their contents change: certificates and tokens.

Contents are compared, not times: a mounted secret changes when its symbolic link is swapped. A thread reads
them, so that nobody who asks for the content waits for a volume. A change counts once two reads in a row
find it: what another process is still writing is not used.
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

# Between two reads. A change is used after at most twice this time.
RECHECK_S = 0.5
MAX_FILE_BYTES = 4 << 20


class Reloaded(Generic[Content]):
    """What ``parse`` makes of the files' bytes. Keeps the last valid result while the files are unreadable or
    wrong. Thread-safe. Its thread ends with the object."""

    def __init__(self, files: Sequence[Path], parse: Callable[..., Content]) -> None:
        """Raises ConfigurationError for a file that cannot be read, and as ``parse``."""
        self._files, self._parse = files, parse
        self._found: list[bytes] | str = list(map(read, files))
        self._is_handled = True
        self._content = parse(*self._found)
        if files:
            threading.Thread(target=_follow, args=(weakref.ref(self),), name="reload", daemon=True).start()

    def current(self) -> Content:
        return self._content

    def check(self) -> None:
        """Reads the files once, and uses a change that the read before found too."""
        try:
            found: list[bytes] | str = list(map(read, self._files))
        except ConfigurationError as error:
            found = error.message
        if found != self._found:
            self._found, self._is_handled = found, False
        elif not self._is_handled:
            self._is_handled = True
            self._use(found)

    def _use(self, found: list[bytes] | str) -> None:
        names = ", ".join(map(str, self._files))
        try:
            if isinstance(found, str):
                raise ConfigurationError(found)
            self._content = self._parse(*found)
            log.info("files read again", files=names)
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
    """The file's bytes. Raises ConfigurationError, also for anything but a regular file, which could keep its
    reader waiting, and for a file above MAX_FILE_BYTES."""
    try:
        if not stat.S_ISREG(file.stat().st_mode):
            raise ConfigurationError(f"{file} is not a regular file")
        # Between the two, a FIFO may take the file's place.
        with open(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as opened:
            content = opened.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigurationError(f"cannot read {file}: {error.strerror or error}") from None
    if len(content) > MAX_FILE_BYTES:
        raise ConfigurationError(f"{file} has more than {MAX_FILE_BYTES} bytes")
    return content
