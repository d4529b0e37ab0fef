"""Named segments: which files of the shared memory folder are taken, and how their names go.

Owns the folder's descriptor, the rules about names and files, unlinking, and the sweep of what dead
publishers left. A name alone is no right: what it leads to has to be a plain file of an allowed user, which
others cannot write, and with no other name.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Collection
from pathlib import Path

import structlog

from encoder_service.errors import ConfigurationError
from encoder_service.transport.pixel_names import judged, publisher_of
from encoder_service.transport.pixel_segments import PixelCounters, PixelSegment, SegmentRef, refuse

log = structlog.get_logger(__name__)

MAX_NAME_BYTES = 255
_OPEN_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
"""Without waiting: a name may lead to a pipe or a device."""


class SegmentFolder:
    """Segments by name. Thread-safe."""

    def __init__(
        self,
        path: str,
        prefixes: Collection[str],
        counters: PixelCounters,
        *,
        allowed_uids: Collection[int] = (),
    ) -> None:
        """prefixes: names have to begin with one of them. allowed_uids: whose files are taken; none: this
        process's own. The folder is commonly sticky, where nobody else's file can be unlinked but by root: a
        service with other users' files needs its publishers to unlink. Raises ConfigurationError."""
        self.prefixes = tuple(prefixes)
        self._allowed_uids = frozenset(allowed_uids) or frozenset({os.geteuid()})
        self._counters = counters
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigurationError(f"shared memory folder {path}: {error.strerror}") from error

    def attach(self, ref: SegmentRef) -> PixelSegment:
        """The open segment; unlinked when it ends, if the request says so. Raises TransportUnavailable for
        what is not taken; nothing is unlinked then."""
        name = ref.name
        self._check_name(name)
        try:
            descriptor = os.open(name, _OPEN_FLAGS, dir_fd=self._descriptor)
        except OSError as error:
            causes = {errno.ENOENT: "NOT_FOUND", errno.ELOOP: "NO_PLAIN_FILE", errno.EACCES: "NOT_READABLE"}
            raise refuse(
                self._counters,
                causes.get(error.errno or 0, "NOT_OPENED"),
                f"segment {name!r} cannot be opened: {error.strerror}",
            ) from error
        try:
            found = os.fstat(descriptor)
            self._check_file(name, found)
            return PixelSegment(
                descriptor,
                self._counters,
                (lambda: self._unlink(name, found)) if ref.ends else None,
            )
        except BaseException:
            os.close(descriptor)
            raise

    def sweep(self) -> int:
        """Unlinks what publishers that are dead by now left under our prefixes; how many. Only names that say
        who made them (``pixel_names``) are judged, and only files of allowed users."""
        try:
            found = os.listdir(self._descriptor)
        except OSError as error:
            log.warning("segments of dead publishers are not swept", cause=error.strerror)
            return 0
        told = {name: publisher_of(name) for name in found if name.startswith(self.prefixes)}
        publishers = [(name, publisher.is_lock) for name, publisher in told.items() if publisher is not None]
        num_swept = 0
        # Locks last: without its lock a name says that its publisher is dead.
        for name, is_lock in sorted(publishers, key=lambda one: one[1]):
            with judged(name, self._descriptor) as is_dead:
                if is_dead and self._sweep_one(name) and not is_lock:
                    num_swept += 1
        self._counters.add(swept=num_swept)
        return num_swept

    def _sweep_one(self, name: str) -> bool:
        """Whether this sweep removed it."""
        try:
            found = os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)
            if not stat.S_ISREG(found.st_mode) or found.st_uid not in self._allowed_uids:
                return False
            os.unlink(name, dir_fd=self._descriptor)
        except FileNotFoundError:
            return False  # another sweep was faster
        except OSError as error:
            log.warning("a dead publisher's segment stays", name=name, cause=error.strerror)
            return False
        log.info("a dead publisher's segment was swept", name=name, num_bytes=found.st_size)
        return True

    def close(self) -> None:
        """Twice is once."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _check_name(self, name: str) -> None:
        """Raises TransportUnavailable."""
        num_bytes = len(name.encode(errors="surrogatepass"))
        if num_bytes > MAX_NAME_BYTES:
            raise refuse(
                self._counters,
                "NAME",
                f"a segment's name has {num_bytes} bytes, at most {MAX_NAME_BYTES} are taken",
            )
        if "/" in name or not name.isprintable() or name in (".", ".."):
            raise refuse(self._counters, "NAME", f"{name!r} is no segment's name")
        if not name.startswith(self.prefixes):
            raise refuse(
                self._counters, "NAME", f"segment {name!r} begins with none of {', '.join(self.prefixes)}"
            )

    def _check_file(self, name: str, found: os.stat_result) -> None:
        """Raises TransportUnavailable. Files that others may write are refused, since then the pixels are
        nobody's word; those with a second name, since it may be another's file under a name of the caller's
        choice."""
        for cause, wrong, why in (
            ("NO_PLAIN_FILE", not stat.S_ISREG(found.st_mode), "is no plain file"),
            (
                "USER",
                found.st_uid not in self._allowed_uids,
                f"is of user {found.st_uid}, taken are those of {sorted(self._allowed_uids)}",
            ),
            (
                "MODE",
                bool(found.st_mode & stat.S_IWOTH),
                f"may be written by others: {found.st_mode & 0o777:o}",
            ),
            ("NOT_FOUND", found.st_nlink == 0, "was unlinked meanwhile"),
            ("LINKS", found.st_nlink > 1, f"has {found.st_nlink} names, 1 is taken"),
        ):
            if wrong:
                raise refuse(self._counters, cause, f"segment {name!r} {why}")

    def _unlink(self, name: str, opened: os.stat_result) -> None:
        """Removes the name while it leads to the file that was opened. A user whose files we take could put
        another file of its own there between the look and the unlink, and nobody else in a sticky folder."""
        try:
            found = os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)
            if (found.st_dev, found.st_ino) != (opened.st_dev, opened.st_ino):
                self._counters.add(already_gone=1)
                log.warning("a segment's name leads to another file and is left alone", name=name)
                return
            os.unlink(name, dir_fd=self._descriptor)
        except FileNotFoundError:
            self._counters.add(already_gone=1)
        except OSError as error:
            self._counters.add(not_unlinked=1)
            log.warning("a segment stays", name=name, cause=error.strerror)
        else:
            self._counters.add(unlinked=1)


def segment_folder(
    path: Path, prefixes: Collection[str], allowed_uids: Collection[int], counters: PixelCounters
) -> SegmentFolder | None:
    """None where no prefix is allowed: named segments are off. Raises ConfigurationError."""
    return SegmentFolder(str(path), prefixes, counters, allowed_uids=allowed_uids) if prefixes else None
