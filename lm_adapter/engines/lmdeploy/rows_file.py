"""Rows on their way from the API server's process to the engine's.

Owns the memory, which has no name: a memfd. The engine's process opens it by way of /proc; whatever ends, by
whichever signal, the kernel frees it. LMDeploy pickles requests, and its engine ends when one cannot be
unpickled: a handle therefore holds only numbers, and is opened later, where a failure ends its request alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import mmap
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lm_adapter.types import EncodedRows

ALIGNMENT = mmap.ALLOCATIONGRANULARITY


class RowsFile:
    """A request's rows. They are freed when neither this object, nor a handle of it in this process, nor a
    mapping exists."""

    def __init__(self, rows: Sequence[EncodedRows], give_back: Callable[[], None]) -> None:
        """give_back: called on the running loop when this process frees the rows. Raises OSError if there is
        no memory or no descriptor; ``give_back`` is called then too."""
        loop = asyncio.get_running_loop()
        try:
            self.fd = os.memfd_create("vision-encoder-rows")
        except OSError:
            give_back()
            raise
        weakref.finalize(self, _free, self.fd, loop, give_back).atexit = False
        self._rows = rows
        self.inode = os.fstat(self.fd).st_ino

    def write(self) -> list[RowsHandle]:
        """Copies the rows. Returns a handle for each image, in order. Raises OSError without memory."""
        handles, offset = [], 0
        for rows in self._rows:
            data: Any = rows.raw()
            left, at = memoryview(data).cast("B"), offset
            while left:
                num_written = os.pwrite(self.fd, left, at)
                left, at = left[num_written:], at + num_written
            shape = rows.num_rows, rows.width
            handles.append(RowsHandle(os.getpid(), self.fd, self.inode, offset, shape, rows.dtype, self))
            offset += -(-rows.num_bytes // ALIGNMENT) * ALIGNMENT
        self._rows = ()
        return handles


def _free(fd: int, loop: asyncio.AbstractEventLoop, give_back: Callable[[], None]) -> None:
    os.close(fd)
    # Not at once: this may run wherever an object is collected, and ``give_back`` takes a lock.
    with contextlib.suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(give_back)


@dataclass(frozen=True, eq=False)
class RowsHandle:
    """Rows [shape] in a RowsFile, offset in bytes. file: keeps them; None in another process."""

    pid: int
    fd: int
    inode: int
    offset: int
    shape: tuple[int, int]
    dtype: str
    file: RowsFile | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return RowsHandle, (self.pid, self.fd, self.inode, self.offset, self.shape, self.dtype)

    def open(self) -> torch.Tensor:
        """[num_rows, width], in shared memory; who writes to it gets pages of his own. Raises OSError if the
        rows have been freed."""
        fd = os.open(f"/proc/{self.pid}/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            status = os.fstat(fd)
            dtype: torch.dtype = getattr(torch, self.dtype)
            num_bytes = math.prod(self.shape) * dtype.itemsize
            if status.st_ino != self.inode or status.st_size < self.offset + num_bytes:
                raise FileNotFoundError(f"descriptor {self.fd} of process {self.pid} has other content")
            memory = mmap.mmap(fd, num_bytes, access=mmap.ACCESS_COPY, offset=self.offset)
        finally:
            os.close(fd)
        return torch.frombuffer(memory, dtype=dtype).view(self.shape)
