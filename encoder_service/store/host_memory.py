"""Host memory that other processes map read-only: a sealed ``memfd``, on every machine.

Owns the allocation, its seals, the read-only descriptor and pinning. The seals keep the size (a reader can
never be cut off by a truncation, which would kill it) and refuse every new writable mapping, also through
``/proc``: only the mapping made here, before sealing, can write. The memory is unmapped when ``close`` was
called and the last tensor over it is gone, so that no view ever dangles.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import torch

from encoder_service.errors import ConfigurationError, InternalError

# linux/fcntl.h, Linux 5.1: mappings that exist may write, new ones may not. Python names it from 3.15 on.
_F_SEAL_FUTURE_WRITE = 0x0010
_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_REGISTER_PORTABLE = 1


class SealedFile:
    """A memfd of fixed size: a writable mapping for this process, a read-only descriptor for others."""

    def __init__(self, name: str, size_bytes: int) -> None:
        """All pages are there afterwards, zeroed. Raises ConfigurationError when the host lacks them."""
        self.size_bytes = size_bytes
        # A memfd has no limit of its own: asked for too much, the kernel would kill processes, not refuse.
        available = available_bytes()
        if size_bytes > available:
            raise ConfigurationError(
                f"{size_bytes} bytes of shared host memory are more than the {available} available",
                size_bytes=size_bytes,
                available_bytes=available,
            )
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            # Where sealing against writers is unknown, the file's mode still keeps out all but its owner.
            os.fchmod(descriptor, 0o400)
            os.posix_fallocate(descriptor, 0, size_bytes)
            self.mapping = mmap.mmap(descriptor, size_bytes)
            self.write_sealed = _seal(descriptor)
            self.read_only_fd = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigurationError(
                f"{size_bytes} bytes of shared host memory could not be had: {error.strerror}",
                size_bytes=size_bytes,
                errno=errno.errorcode.get(error.errno or 0, ""),
            ) from error
        finally:
            os.close(descriptor)

    def export_fd(self) -> int:
        """A new descriptor of the same memory that can be mapped with PROT_READ only; the caller closes it.
        Raises InternalError after ``close``."""
        return duplicate(self.read_only_fd)

    def close(self) -> None:
        """Gives up the descriptor; the mapping stays with whoever holds it. Twice is once."""
        descriptor, self.read_only_fd = self.read_only_fd, -1
        if descriptor >= 0:
            os.close(descriptor)


class HostMemory:
    """Bytes of host memory for an arena; see ``arena.ArenaMemory``."""

    kind = "host"
    device_uuid = ""

    def __init__(self, size_bytes: int, *, pin: bool = False) -> None:
        """size_bytes is rounded up to whole pages. pin: page-locks the memory for copies by CUDA devices.
        Raises ConfigurationError when the host lacks the memory or CUDA refuses it."""
        size_bytes = -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.size_bytes = size_bytes
        self.device = torch.device("cpu")
        self.pinned = pin
        self._file = SealedFile("vision-encoder-arena", size_bytes)
        self.write_sealed = self._file.write_sealed
        with contextlib.suppress(OSError):  # a kernel without transparent huge pages serves small ones
            self._file.mapping.madvise(mmap.MADV_HUGEPAGE)
        owner = _MappedBytes(self._file.mapping)
        # Enters every page in the page table now, not in the first copies.
        np.asarray(owner).fill(0)
        if pin:
            _register(owner.address, size_bytes)
        self._finalizer = weakref.finalize(owner, _release, self._file.mapping, owner.address if pin else 0)
        self._finalizer.atexit = False
        self._tensor: torch.Tensor | None = torch.from_numpy(np.asarray(owner))

    @property
    def tensor(self) -> torch.Tensor:
        """uint8 [size_bytes] over the memory itself. Raises InternalError after ``close``."""
        if self._tensor is None:
            raise InternalError("the arena's memory was closed")
        return self._tensor

    @property
    def mapped(self) -> bool:
        """Whether the memory is still there: until ``close`` and the end of the last tensor over it."""
        return self._finalizer.alive

    def export_fd(self) -> int:
        """A read-only descriptor; the caller closes it. Raises InternalError after ``close``."""
        return self._file.export_fd()

    def synchronize(self) -> None:
        """Host memory has no work in flight of its own."""

    def close(self) -> None:
        """No more tensors nor descriptors; unmaps with the last tensor. Twice is once."""
        self._tensor = None
        self._file.close()


def available_bytes() -> int:
    """Host memory that this process could still take: what the kernel has left, or less where the control
    group it runs in is bounded."""
    limits = [_fields("/proc/meminfo").get("MemAvailable:", sys.maxsize >> 10) << 10]
    # What a container sees as its own group, version 2; "max" is no bound. Cached files make room.
    group = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):
        bound = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        limits.append(bound - used + _fields(group / "memory.stat").get("inactive_file", 0))
    return max(0, min(limits))


def _fields(path: str | Path) -> dict[str, int]:
    """Name and number of each line."""
    lines = (line.split() for line in Path(path).read_text().splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1}


def duplicate(descriptor: int) -> int:
    """A new close-on-exec descriptor of the same file. Raises InternalError when it was closed."""
    if descriptor < 0:
        raise InternalError("the memory's descriptor was closed")
    return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 0)


class _MappedBytes:
    """What keeps a mapping alive: numpy, and through it every tensor, holds this object."""

    def __init__(self, mapping: mmap.mmap) -> None:
        self.address = int(np.frombuffer(mapping, dtype=np.uint8).ctypes.data)
        self.__array_interface__ = {
            "shape": (len(mapping),),
            "typestr": "|u1",
            "data": (self.address, False),
            "version": 3,
        }


def _seal(descriptor: int) -> bool:
    """Seals size and, where the kernel can, writing. Whether it could."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SIZE_SEALS | _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SIZE_SEALS | fcntl.F_SEAL_SEAL)
        return False
    return True


def _register(address: int, size_bytes: int) -> None:
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    status = int(runtime.cudaHostRegister(address, size_bytes, _REGISTER_PORTABLE))
    if status:
        raise ConfigurationError(
            f"CUDA could not pin {size_bytes} bytes of host memory: cudaHostRegister gave {status}",
            size_bytes=size_bytes,
            status=status,
        )


def _release(mapping: mmap.mmap, registered_address: int) -> None:
    """The last reference to the mapping is the argument's: it is unmapped when this returns."""
    if registered_address:
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        runtime.cudaHostUnregister(registered_address)
    del mapping
