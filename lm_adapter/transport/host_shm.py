"""Rows in the encoder's shared host memory: mapped read-only, copied or borrowed. numpy only.

Owns one host arena's mapping. Which bytes of it are whose rows, and whether a copy is to be trusted, is
``reading``'s.
"""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from lm_adapter.transport.mapping import MappingFailed, check_sealed

if TYPE_CHECKING:
    import torch

    from lm_adapter.transport.buffers import Bytes

__all__ = ["HostArena", "host_tensor"]

_WARM_STEP_BYTES = 64 << 20


class HostArena:
    """A host arena as its readers see it. The memory stays mapped until ``close`` was called and the last
    borrowed view is gone."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        """fd: a sealed memfd, which stays the caller's. Raises MappingFailed."""
        check_sealed(fd, size_bytes)
        try:
            mapping = mmap.mmap(fd, size_bytes, prot=mmap.PROT_READ)
        except (OSError, OverflowError) as error:
            raise MappingFailed(f"{size_bytes} bytes of host memory cannot be mapped: {error}") from error
        self.size_bytes = size_bytes
        self._bytes: npt.NDArray[np.uint8] | None = np.frombuffer(mapping, dtype=np.uint8)

    def read(self, offset_bytes: int, num_bytes: int) -> bytes:
        """A copy of a few bytes, by any thread."""
        return self.borrow(offset_bytes, num_bytes).tobytes()

    def borrow(self, offset_bytes: int, num_bytes: int) -> npt.NDArray[np.uint8]:
        """A read-only view. Raises MappingFailed after ``close``."""
        view = self._bytes
        if view is None:
            raise MappingFailed(f"a mapping of {self.size_bytes} bytes was closed")
        return view[offset_bytes : offset_bytes + num_bytes]

    def copy(self, offset_bytes: int, num_bytes: int, out: Bytes | None) -> tuple[Bytes, None]:
        """The bytes in fresh memory, or in ``out``; complete on return. Raises MappingFailed."""
        source = self.borrow(offset_bytes, num_bytes)
        if out is None:
            out = np.empty(num_bytes, dtype=np.uint8)
        if isinstance(out, np.ndarray):
            np.copyto(out, source)
        else:
            out.copy_(host_tensor(source))
        return out, None

    def copy_now(self, offset_bytes: int, num_bytes: int, out: Bytes | None) -> Bytes:
        """``copy``, complete on return in any case."""
        return self.copy(offset_bytes, num_bytes, out)[0]

    def finish(self) -> None:
        """Reads of host memory are complete when they return."""

    def give_up(self, event: object) -> None:
        """A view keeps host memory mapped: nothing is to be waited for."""

    def warm(self) -> None:
        """Enters every page in this process's page table, so that the first copies do not."""
        for start in range(0, self.size_bytes, _WARM_STEP_BYTES):
            view = self._bytes
            if view is None:
                return
            view[start : start + _WARM_STEP_BYTES : mmap.PAGESIZE].max()

    def close(self) -> None:
        """Gives the mapping up; it ends with the last view. Twice is once."""
        self._bytes = None


def host_tensor(source: npt.NDArray[np.uint8]) -> torch.Tensor:
    """A tensor over bytes that may be read-only, without torch's warning of it; keeps them alive."""
    import torch

    if source.flags.writeable:
        return torch.from_numpy(source)
    from lm_adapter.transport.borrowed import borrow

    return borrow(int(source.ctypes.data), source.nbytes, torch.device("cpu"), source)
