"""Files that are read again when their contents change: certificates and tokens.

Contents are compared, not times: a mounted secret changes when its symbolic link is swapped.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import structlog

from encoder_service.errors import ConfigurationError

log = structlog.get_logger(__name__)
Content = TypeVar("Content")

# A change of the files is noticed after at most this time.
RECHECK_S = 1.0
MAX_FILE_BYTES = 4 << 20


class Reloaded(Generic[Content]):
    """What ``parse`` makes of the files' bytes. Keeps the last valid result while the files are unreadable or
    wrong. Thread-safe."""

    def __init__(
        self,
        files: Sequence[Path],
        parse: Callable[..., Content],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises ConfigurationError for a file that cannot be read, and as ``parse``."""
        self._files, self._parse, self._clock = files, parse, clock
        self._lock = threading.Lock()
        self._checked_s = clock()
        self._bytes = list(map(read, files))
        self._content = parse(*self._bytes)

    def current(self) -> Content:
        with self._lock:
            now_s = self._clock()
            if now_s - self._checked_s >= RECHECK_S:
                self._checked_s = now_s
                self._reload()
            return self._content

    def _reload(self) -> None:
        names = ", ".join(map(str, self._files))
        try:
            found = list(map(read, self._files))
            if found == self._bytes:
                return
            self._bytes = found
            self._content = self._parse(*found)
            log.info("files read again", files=names)
        except ConfigurationError as error:
            log.warning("files are not usable, the former contents stay", files=names, reason=error.message)


def read(file: Path) -> bytes:
    """The file's bytes. Raises ConfigurationError, also for a file above MAX_FILE_BYTES."""
    try:
        with file.open("rb") as opened:
            content = opened.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigurationError(f"cannot read {file}: {error.strerror or error}") from None
    if len(content) > MAX_FILE_BYTES:
        raise ConfigurationError(f"{file} has more than {MAX_FILE_BYTES} bytes")
    return content
