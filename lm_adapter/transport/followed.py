"""Files that a client follows while it runs: what is made of them is made anew when they change.

Owns the look at them. Contents are compared and not times, since a mounted Kubernetes Secret is swapped
through links. Files that are half replaced, unreadable or wrong leave what was, and are logged once.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeAlias, TypeVar

from lm_adapter.errors import InvalidRequest

__all__ = [
    "MAX_FILE_BYTES",
    "MAX_TOKEN_BYTES",
    "RECHECK_S",
    "FilePath",
    "Followed",
    "Token",
    "TokenFile",
    "read_file",
    "token_in",
    "token_source",
]

RECHECK_S = 1.0
"""How long a change may go unnoticed."""
MAX_FILE_BYTES = 4 << 20
MAX_TOKEN_BYTES = 4096

FilePath: TypeAlias = str | os.PathLike[str]
MadeT = TypeVar("MadeT")

_log = logging.getLogger(__name__)


class Followed(Generic[MadeT]):
    """What ``make`` makes of the files' contents, as they are now. Safe to ask from several threads."""

    def __init__(
        self,
        paths: Sequence[FilePath],
        make: Callable[[Sequence[bytes]], MadeT],
        *,
        what: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """make: of contents in the order of the paths; raises InvalidRequest for what cannot be used. what:
        the files' name in the log. Raises InvalidRequest, also for a file that cannot be read."""
        self._paths, self._make, self._what, self._clock = tuple(paths), make, what, clock
        self._lock = threading.Lock()
        self._seen: Sequence[bytes] | str = self._read()
        self._made = make(self._seen)
        self._due_s = clock() + RECHECK_S

    def current(self) -> MadeT:
        """Whoever asks while another thread looks has what was."""
        if self._clock() >= self._due_s and self._lock.acquire(blocking=False):
            try:
                self._look()
            finally:
                self._due_s = self._clock() + RECHECK_S
                self._lock.release()
        return self._made

    def _look(self) -> None:
        try:
            found = self._read()
        except InvalidRequest as error:
            self._keep(error.message, error)
            return
        if found == self._seen:
            return
        try:
            made = self._make(found)
            if self._read() != found:
                return  # replaced again in this very moment: what was checked may not be what was read
        except InvalidRequest as error:
            self._keep(found, error)
        else:
            self._made, self._seen = made, found
            _log.info("%s: read again", self._what)

    def _keep(self, seen: Sequence[bytes] | str, error: InvalidRequest) -> None:
        if seen != self._seen:
            self._seen = seen
            _log.warning("%s: kept as it was: %s", self._what, error.message)

    def _read(self) -> Sequence[bytes]:
        return [read_file(path) for path in self._paths]


@dataclass(frozen=True)
class TokenFile:
    """A file whose only word is a token. A client that is given it in the place of a token uses, within a
    second of a change, the one that is there."""

    path: FilePath

    def __post_init__(self) -> None:
        """Raises InvalidRequest."""
        if not os.fspath(self.path):
            raise InvalidRequest("a token file needs a path, found an empty one")


Token: TypeAlias = str | TokenFile | Callable[[], str]


def token_source(token: Token) -> Callable[[], str]:
    """What tells the token to use now. Raises InvalidRequest for a file without one."""
    if isinstance(token, str):
        return lambda: token
    if not isinstance(token, TokenFile):
        return token
    name = f"token file {os.fspath(token.path)}"
    return Followed([token.path], lambda contents: token_in(contents[0], name), what=name).current


def token_in(content: bytes, name: str) -> str:
    """The only word of a token's file. No error repeats what is in it. Raises InvalidRequest."""
    if len(content) > MAX_TOKEN_BYTES:
        raise InvalidRequest(f"{name} has more than {MAX_TOKEN_BYTES} bytes")
    words = content.split()
    if len(words) != 1:
        raise InvalidRequest(f"{name} has {len(words)} words, a token is 1")
    if not words[0].isascii() or not words[0].decode("ascii").isprintable():
        raise InvalidRequest(f"{name} has characters that no token has")
    return words[0].decode("ascii")


def read_file(path: FilePath) -> bytes:
    """Raises InvalidRequest."""
    try:
        with Path(path).open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise InvalidRequest(f"cannot read {os.fspath(path)}: {error.strerror or error}") from error
    if len(content) > MAX_FILE_BYTES:
        raise InvalidRequest(f"{os.fspath(path)} has more than {MAX_FILE_BYTES} bytes")
    return content
