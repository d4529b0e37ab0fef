"""Host memory of arenas: a sealed ``memfd`` that other processes map read-only, or private memory.

Owns the allocation, its seals, the read-only descriptor and pinning. The seals fix the size, since a
truncation would kill readers with SIGBUS, and refuse new writable mappings, also through ``/proc``: only the
mapping made here before sealing can write. The memory is unmapped when ``close`` was called and the last
tensor over it is gone.
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
from typing import Any, Literal

import numpy as np
import torch

from encoder_service.errors import ConfigurationError, InternalError

# linux/fcntl.h, Linux 5.1: existing mappings may write, new ones may not. Python has no name for it before
# 3.15.
_F_SEAL_FUTURE_WRITE = 0x0010
_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_REGISTER_PORTABLE = 1


class SealedFile:
    """A memfd of fixed size: a writable mapping for this process, a read-only descriptor for others."""

    def __init__(self, name: str, size_bytes: int) -> None:
        """All pages are there afterwards, zeroed. Raises ConfigurationError when the host lacks them."""
        self.size_bytes = size_bytes
        check_available(size_bytes)
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            # A kernel that cannot seal against writers still refuses other users, by the file's mode.
            os.fchmod(descriptor, 0o400)
            os.posix_fallocate(descriptor, 0, size_bytes)
            self.mapping = mmap.mmap(descriptor, size_bytes)
            _seal(descriptor)
            self.read_only_fd = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigurationError(
                f"{size_bytes} bytes of shared host memory could not be allocated: {error.strerror}",
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
        """Closes the descriptor; mappings stay. Idempotent."""
        descriptor, self.read_only_fd = self.read_only_fd, -1
        if descriptor >= 0:
            os.close(descriptor)


class HostMemory:
    """Bytes of host memory for an arena; see ``arena.ArenaMemory``."""

    kind: Literal["host", "device"] = "host"
    device_uuid = ""

    def __init__(self, size_bytes: int, *, pin: bool = False, is_exported: bool = True) -> None:
        """size_bytes is rounded up to whole pages. pin: page-locks the memory for copies by CUDA devices.
        is_exported: a memfd, all of whose pages are taken now; else private memory, whose pages are taken as
        they are written. Raises ConfigurationError when the host lacks the memory or CUDA refuses it."""
        self.size_bytes = -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._file = SealedFile("vision-encoder-arena", self.size_bytes) if is_exported else None
        if self._file is None:
            check_available(self.size_bytes)
            mapping = mmap.mmap(-1, self.size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        else:
            mapping = self._file.mapping
        with contextlib.suppress(OSError):  # a kernel without transparent huge pages uses small ones
            mapping.madvise(mmap.MADV_HUGEPAGE)
        owner = _MappedBytes(mapping)
        if is_exported:  # enters every page in the page table now, not in the first copies
            np.asarray(owner).fill(0)
        if pin:
            _register(owner.address, self.size_bytes)
        self._finalizer = weakref.finalize(owner, _release, mapping, owner.address if pin else 0)
        self._finalizer.atexit = False
        self._tensor: torch.Tensor | None = torch.from_numpy(np.asarray(owner))

    @property
    def tensor(self) -> torch.Tensor:
        """uint8 [size_bytes] over the memory itself. Raises InternalError after ``close``."""
        if self._tensor is None:
            raise InternalError("the arena's memory was closed")
        return self._tensor

    def export_fd(self) -> int:
        """A read-only descriptor; the caller closes it. Raises InternalError after ``close``, and for private
        memory."""
        if self._file is None:
            raise InternalError("this arena's memory is private and is not exported")
        return self._file.export_fd()

    def synchronize(self) -> None:
        """Returns at once: nothing works on host memory by itself."""

    def close(self) -> None:
        """Closes the descriptor; the memory is unmapped with the last tensor. Idempotent."""
        self._tensor = None
        if self._file is not None:
            self._file.close()


def check_available(size_bytes: int) -> None:
    """Raises ConfigurationError when the host has less. The kernel itself would not refuse: it would kill
    processes once the pages are written."""
    available = available_bytes()
    if size_bytes > available:
        raise ConfigurationError(
            f"{size_bytes} bytes of host memory are more than the {available} available",
            size_bytes=size_bytes,
            available_bytes=available,
        )


def available_bytes() -> int:
    """Host memory that this process could still take: what the kernel has left, and no more than its control
    group's limit leaves."""
    limits = [_fields("/proc/meminfo").get("MemAvailable:", sys.maxsize >> 10) << 10]
    # A container's own group, version 2; "max" means no limit. Inactive cached files can be reclaimed.
    group = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):
        bound = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        limits.append(bound - used + _fields(group / "memory.stat").get("inactive_file", 0))
    return max(0, min(limits))


def _fields(path: str | Path) -> dict[str, int]:
    """The first number of each line, by name."""
    lines = (line.split() for line in Path(path).read_text().splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1}


def duplicate(descriptor: int) -> int:
    """A new close-on-exec descriptor of the same file. Raises InternalError for one that was closed."""
    if descriptor < 0:
        raise InternalError("the memory's descriptor was closed")
    return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 0)


class _MappedBytes:
    """Keeps a mapping alive: numpy, and through it every tensor over the mapping, refers to this object."""

    def __init__(self, mapping: mmap.mmap) -> None:
        self.address = int(np.frombuffer(mapping, dtype=np.uint8).ctypes.data)
        self.__array_interface__ = {
            "shape": (len(mapping),),
            "typestr": "|u1",
            "data": (self.address, False),
            "version": 3,
        }


def _seal(descriptor: int) -> None:
    """Seals the size, and writing where the kernel supports it."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SIZE_SEALS | _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SIZE_SEALS | fcntl.F_SEAL_SEAL)


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
    """The argument is the last reference to the mapping, which is unmapped on return."""
    if registered_address:
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        runtime.cudaHostUnregister(registered_address)
    del mapping
