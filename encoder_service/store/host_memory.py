"""Host memory of arenas: a sealed ``memfd`` that other processes map read-only, or private memory.

Owns the allocation, its seals, the read-only descriptor and pinning. The seals fix the size, because a
truncation would kill readers with SIGBUS. They also refuse new writable mappings, even through ``/proc``:
only the mapping that was made before sealing can write. The memory is unmapped when ``close`` was called and
the last tensor over it is gone.
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

# From linux/fcntl.h, Linux 5.1: existing mappings may write, new ones may not. Python has no name for it
# before 3.15.
_F_SEAL_FUTURE_WRITE = 0x0010
_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_REGISTER_PORTABLE = 1
# From linux/mman.h.
_MADV_POPULATE_WRITE = 23


class SealedFile:
    """A memfd of fixed size: a writable mapping for this process, a read-only descriptor for others."""

    def __init__(self, name: str, size_bytes: int) -> None:
        """Allocates all pages, zeroed. Raises ConfigurationError if the host has too little memory."""
        self.size_bytes = size_bytes
        check_available(size_bytes)
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            # Where the kernel cannot seal against writers, the file's mode still refuses other users.
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
        """A new descriptor of the memory that can be mapped with PROT_READ only. The caller closes it. Raises
        InternalError after ``close``."""
        return duplicate(self.read_only_fd)

    def close(self) -> None:
        """Closes the descriptor; mappings stay. Idempotent."""
        descriptor, self.read_only_fd = self.read_only_fd, -1
        if descriptor >= 0:
            os.close(descriptor)


class HostMemory:
    """Host memory of an arena; see ``arena.ArenaMemory``."""

    kind: Literal["host", "device"] = "host"
    device_uuid = ""

    def __init__(self, size_bytes: int, *, pin: bool = False, is_exported: bool = True) -> None:
        """size_bytes is rounded up to whole pages. pin: page-lock the memory for copies by CUDA devices.
        is_exported: True for a memfd, whose pages are all allocated now; False for private memory, whose
        pages are allocated when they are written. Raises ConfigurationError if the host has too little memory
        or CUDA refuses to pin it."""
        self.size_bytes = -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._file = SealedFile("vision-encoder-arena", self.size_bytes) if is_exported else None
        if self._file is None:
            check_available(self.size_bytes)
            mapping = mmap.mmap(-1, self.size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        else:
            mapping = self._file.mapping
        with contextlib.suppress(OSError):  # the kernel may lack transparent huge pages
            mapping.madvise(mmap.MADV_HUGEPAGE)
        owner = _MappedBytes(mapping)
        if is_exported:
            # Fills the page table now instead of during the first copies. A kernel before 5.14 does not.
            with contextlib.suppress(OSError):
                mapping.madvise(_MADV_POPULATE_WRITE)
        if pin:
            _register(owner.address, self.size_bytes)
        self._finalizer = weakref.finalize(owner, _release, mapping, owner.address if pin else 0)
        self._finalizer.atexit = False
        self._tensor: torch.Tensor | None = torch.from_numpy(np.asarray(owner))

    @property
    def tensor(self) -> torch.Tensor:
        """uint8 [size_bytes], a view of the memory. Raises InternalError after ``close``."""
        if self._tensor is None:
            raise InternalError("the arena's memory was closed")
        return self._tensor

    def export_fd(self) -> int:
        """A new read-only descriptor, which the caller closes. Raises InternalError after ``close`` and for
        private memory."""
        if self._file is None:
            raise InternalError("this arena's memory is private and is not exported")
        return self._file.export_fd()

    def synchronize(self) -> None:
        """Returns at once, because no device works on host memory by itself."""

    def close(self) -> None:
        """Closes the descriptor. The memory is unmapped with the last tensor. Idempotent."""
        self._tensor = None
        if self._file is not None:
            self._file.close()


def check_available(size_bytes: int) -> None:
    """Raises ConfigurationError if the host has less memory than this. The kernel would not refuse the
    allocation, but kill processes when the pages are written."""
    available = available_bytes()
    if size_bytes > available:
        raise ConfigurationError(
            f"{size_bytes} bytes of host memory are more than the {available} available; lower --arena-bytes",
            size_bytes=size_bytes,
            available_bytes=available,
        )


def available_bytes() -> int:
    """Host memory that this process can still allocate: what the kernel has left, limited by what the limit
    of its control group leaves."""
    limits = [_fields("/proc/meminfo").get("MemAvailable:", sys.maxsize >> 10) << 10]
    # The container's own group in cgroup v2; "max" means no limit. Inactive cached files can be reclaimed.
    group = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):
        bound = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        limits.append(bound - used + _fields(group / "memory.stat").get("inactive_file", 0))
    return max(0, min(limits))


def _fields(path: str | Path) -> dict[str, int]:
    """The first number of each line, by the line's first word."""
    lines = (line.split() for line in Path(path).read_text().splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1}


def duplicate(descriptor: int) -> int:
    """A new close-on-exec descriptor of the same file. Raises InternalError for a closed one."""
    if descriptor < 0:
        raise InternalError("the memory's descriptor was closed")
    return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 0)


class _MappedBytes:
    """Keeps a mapping alive: numpy arrays, and tensors made from them, refer to this object."""

    def __init__(self, mapping: mmap.mmap) -> None:
        self.address = int(np.frombuffer(mapping, dtype=np.uint8).ctypes.data)
        self.__array_interface__ = {
            "shape": (len(mapping),),
            "typestr": "|u1",
            "data": (self.address, False),
            "version": 3,
        }


def _seal(descriptor: int) -> None:
    """Seals the size, and against new writers if the kernel supports it."""
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
    """Unpins the memory. The argument is the last reference to the mapping, so it is unmapped on return."""
    if registered_address:
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        runtime.cudaHostUnregister(registered_address)
    del mapping
