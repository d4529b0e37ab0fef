"""Maps host memory that the encoder shares, read-only, and reads the caller's current GPU and stream.

Owns host mappings and copies from them. ``device`` owns device memory; it is imported when a client attaches
to a device arena. This module does not import torch."""

from __future__ import annotations

import fcntl
import mmap
import os
import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from lm_adapter.errors import MappingFailed

_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_WARM_STEP_BYTES = 64 << 20


class HostMemory:
    """A mapped host arena. Must not be used after ``unmap``."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        """fd: a sealed memfd; the caller closes it. Raises MappingFailed."""
        self._bytes: npt.NDArray[np.uint8] = np.frombuffer(_map_sealed(fd, size_bytes), dtype=np.uint8)
        # Touch every page once, so that the first copies cause no page faults.
        for start in range(0, size_bytes, _WARM_STEP_BYTES):
            self._bytes[start : start + _WARM_STEP_BYTES : mmap.PAGESIZE].max()

    def read(self, offset_bytes: int, num_bytes: int) -> bytes:
        """A copy of a few bytes."""
        return self._bytes[offset_bytes : offset_bytes + num_bytes].tobytes()

    def copy(self, offset_bytes: int, num_bytes: int, _stream: object = None) -> npt.NDArray[np.uint8]:
        """A private copy, uint8 [num_bytes], complete on return."""
        out = np.empty(num_bytes, dtype=np.uint8)
        np.copyto(out, self._bytes[offset_bytes : offset_bytes + num_bytes])
        return out

    def unmap(self) -> None:
        """Unmaps the memory. All copies must have ended. Can be repeated."""
        self._bytes = np.empty(0, dtype=np.uint8)


def map_words(fd: int, size_bytes: int) -> memoryview:
    """Maps a sealed memfd as read-only 64-bit words. Raises MappingFailed."""
    if size_bytes % 8:
        raise MappingFailed(f"a layout of 64-bit words has {size_bytes} bytes")
    return memoryview(_map_sealed(fd, size_bytes)).cast("Q")


def current_device() -> int | None:
    """The calling thread's current GPU; None if this process does not use CUDA. Does not initialise CUDA."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    index: int = torch.cuda.current_device()
    return index


def current_stream() -> Any:
    """The calling thread's current CUDA stream, None if this process does not use CUDA."""
    torch: Any = sys.modules.get("torch")
    return torch.cuda.current_stream() if torch is not None and torch.cuda.is_initialized() else None


def _map_sealed(fd: int, size_bytes: int) -> mmap.mmap:
    """Maps ``fd`` read-only. Raises MappingFailed unless it is a memfd of this size that can neither shrink
    nor grow: reading a truncated page would kill this process."""
    found_bytes = os.fstat(fd).st_size
    if size_bytes < 1 or found_bytes != size_bytes:
        raise MappingFailed(
            f"the shared memory has {found_bytes} bytes, {size_bytes} were announced",
            details={"found": found_bytes, "expected": size_bytes},
        )
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise MappingFailed("the shared memory is not a memfd and could shrink") from error
    if seals & _SIZE_SEALS != _SIZE_SEALS:
        raise MappingFailed(
            f"the shared memory has seals {seals:#x}, {_SIZE_SEALS:#x} are needed",
            details={"found": seals, "expected": _SIZE_SEALS},
        )
    try:
        return mmap.mmap(fd, size_bytes, prot=mmap.PROT_READ)
    except (OSError, OverflowError) as error:
        raise MappingFailed(f"{size_bytes} bytes of host memory cannot be mapped: {error}") from error
