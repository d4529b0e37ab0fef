"""Pixel tensors in a gateway's named POSIX shared memory, copied into the service's own memory.

Owns which segments are accepted, and the copy. A name alone grants no access: it must lead to a regular file
of an allowed user, which others cannot write and which has no second name. The file is read (``pread``) and
never mapped: if its owner truncates it, a mapping would kill the process with SIGBUS, while a read just ends
early. The service never unlinks the file, which belongs to its owner.
"""

from __future__ import annotations

import errno
import math
import os
import re
import stat
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from encoder_service.errors import ConfigurationError, PixelTensorMismatch, TransportUnavailable

FOLDER = "/dev/shm"  # noqa: S108
NAME = re.compile(r"[A-Za-z0-9_.-]{1,255}")
MAX_RANK = 8
# O_NONBLOCK, because a name may lead to a pipe or a device.
OPEN_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
CAUSES = {errno.ENOENT: "NOT_FOUND", errno.ELOOP: "NO_PLAIN_FILE", errno.EACCES: "NOT_READABLE"}


@dataclass(frozen=True)
class SegmentTensor:
    """The stated location of a tensor: row-major at an offset of the named segment."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset_bytes: int = 0

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class PixelSegments:
    """Reads segments by name. Thread-safe, except that ``outcomes`` may miss a count under contention.

    outcomes: number of segments by outcome: ``copied`` or the cause of the refusal.
    """

    def __init__(
        self,
        prefixes: Collection[str],
        *,
        max_tensor_bytes: int,
        allowed_uids: Collection[int] = (),
        folder: str = FOLDER,
    ) -> None:
        """prefixes: a name must begin with one of them. allowed_uids: users whose files are accepted; empty
        for this process's user only. Raises ConfigurationError for a folder that cannot be opened."""
        self.prefixes = tuple(prefixes)
        self.max_tensor_bytes = max_tensor_bytes
        self.outcomes: Counter[str] = Counter()
        self._allowed_uids = frozenset(allowed_uids) or frozenset({os.geteuid()})
        try:
            self._folder = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigurationError(f"shared memory folder {folder}: {error.strerror}") from error

    def close(self) -> None:
        """Closes the folder. Idempotent."""
        folder, self._folder = self._folder, -1
        if folder >= 0:
            os.close(folder)

    def check(self, wanted: SegmentTensor) -> None:
        """Checks what can be checked without the file. Raises PixelTensorMismatch."""
        shape = wanted.shape
        check_rank(len(shape))
        if not 0 < wanted.num_bytes <= self.max_tensor_bytes:
            raise PixelTensorMismatch(
                f"pixel tensor of shape {shape} has {wanted.num_bytes} bytes, 1 to {self.max_tensor_bytes} "
                "are accepted",
                found_bytes=wanted.num_bytes,
                max_bytes=self.max_tensor_bytes,
            )

    def read(self, wanted: SegmentTensor) -> torch.Tensor:
        """Copies the tensor into new memory. Blocks for the time of the copy. Raises TransportUnavailable for
        a segment that is not accepted, PixelTensorMismatch for one that is too short or is truncated
        meanwhile."""
        self.check(wanted)
        with self._opened(wanted.name) as descriptor:
            file_bytes = os.fstat(descriptor).st_size
            end = wanted.offset_bytes + wanted.num_bytes
            if end > file_bytes:
                raise PixelTensorMismatch(
                    f"the segment has {file_bytes} bytes, a tensor of shape {wanted.shape} of {wanted.dtype} "
                    f"at offset {wanted.offset_bytes} needs {end}",
                    found_bytes=file_bytes,
                    needed_bytes=end,
                )
            tensor = torch.empty(wanted.shape, dtype=wanted.dtype)
            view = tensor.reshape(-1).view(torch.uint8).numpy().data
            done = 0
            while done < len(view):
                try:
                    num_read = os.preadv(descriptor, [view[done:]], wanted.offset_bytes + done)
                except OSError as error:
                    raise self._refused("UNREADABLE", f"the segment gave {error.strerror}") from error
                if not num_read:
                    raise PixelTensorMismatch(
                        f"the segment was cut to {os.fstat(descriptor).st_size} bytes while it was read, "
                        f"{end} are needed",
                        found_bytes=os.fstat(descriptor).st_size,
                        needed_bytes=end,
                    )
                done += num_read
        self.outcomes["copied"] += 1
        return tensor

    @contextmanager
    def _opened(self, name: str) -> Iterator[int]:
        """Opens a segment. Refuses a file that other users can write, because they could change it, and a
        file with a second name, because it may belong to someone else."""
        if not NAME.fullmatch(name) or name in (".", "..") or not name.startswith(self.prefixes):
            raise self._refused("NAME", f"{name[:64]!r} is no segment's name with a prefix that is accepted")
        try:
            descriptor = os.open(name, OPEN_FLAGS, dir_fd=self._folder)
        except OSError as error:
            cause = CAUSES.get(error.errno or 0, "NOT_OPENED")
            raise self._refused(cause, f"segment {name!r} cannot be opened: {error.strerror}") from error
        try:
            found = os.fstat(descriptor)
            for cause, is_wrong, why in (
                ("NO_PLAIN_FILE", not stat.S_ISREG(found.st_mode), "is no plain file"),
                ("USER", found.st_uid not in self._allowed_uids, f"belongs to user {found.st_uid}"),
                ("MODE", bool(found.st_mode & stat.S_IWOTH), f"is writable by others: {found.st_mode:o}"),
                ("NOT_FOUND", found.st_nlink == 0, "was unlinked meanwhile"),
                ("LINKS", found.st_nlink > 1, f"has {found.st_nlink} names, 1 is accepted"),
            ):
                if is_wrong:
                    raise self._refused(cause, f"segment {name!r} {why}")
            yield descriptor
        finally:
            os.close(descriptor)

    def _refused(self, cause: str, message: str) -> TransportUnavailable:
        self.outcomes[cause] += 1
        return TransportUnavailable(f"{message}; send the pixels inline", pixels=cause)


def check_rank(num_dimensions: int) -> None:
    """Raises PixelTensorMismatch."""
    if not 1 <= num_dimensions <= MAX_RANK:
        raise PixelTensorMismatch(
            f"pixel tensor has {num_dimensions} dimensions, 1 to {MAX_RANK} are accepted",
            found=num_dimensions,
        )
