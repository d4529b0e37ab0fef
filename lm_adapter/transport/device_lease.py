"""Rows in the encoder's device memory: mapped read-only for one GPU of this process, copied or borrowed.

Owns one device arena's mapping and the order of copies on the caller's stream. Copies run on the stream that
is current for the caller; an event tells when a copy is complete. torch and cuda-bindings are imported when
an arena is mapped.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from lm_adapter.transport import mapping as mappings
from lm_adapter.transport.mapping import MappingFailed

if TYPE_CHECKING:
    import torch

    from lm_adapter.transport.buffers import Bytes

__all__ = ["DeviceArena", "Event", "device_in_use", "resolve_device"]


class Event(Protocol):
    """torch.cuda.Event, as far as it is needed."""

    def synchronize(self) -> None: ...


class _Copied:
    """The event behind a copy; waiting for it leaves captures of other threads alone, which a plain wait may
    end."""

    def __init__(self, event: Event) -> None:
        self._event = event

    def synchronize(self) -> None:
        with mappings.relaxed_capture():
            self._event.synchronize()


class DeviceArena:
    """A device arena as its readers see it: the face of ``host_shm.HostArena``, on a GPU."""

    def __init__(self, fd: int, size_bytes: int, device: torch.device) -> None:
        """fd: an exported allocation, which stays the caller's. device: the GPU that reads. Raises
        MappingFailed, MissingDependency."""
        import torch

        self._torch = torch
        self.size_bytes = size_bytes
        self._mapping = mappings.map_device(fd, size_bytes, device)
        self._device = self._mapping.device

    def read(self, offset_bytes: int, num_bytes: int) -> bytes:
        """A copy of a few bytes, by any thread, on a stream of its own: neither waits for the caller's
        streams nor disturbs a capture of theirs."""
        import torch

        source = self.borrow(offset_bytes, num_bytes)
        if self._device.type != "cuda":
            return bytes(source.numpy())
        with mappings.relaxed_capture():
            stream: Any = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            with torch.cuda.stream(stream):
                return bytes(source.cpu().numpy())

    def borrow(self, offset_bytes: int, num_bytes: int) -> torch.Tensor:
        """A view, to read only. Raises MappingFailed after ``close``."""
        return self._mapping.tensor[offset_bytes : offset_bytes + num_bytes]

    def copy(self, offset_bytes: int, num_bytes: int, out: Bytes | None) -> tuple[Bytes, Event | None]:
        """The bytes in fresh memory of this GPU, or in ``out``, in the order of the caller's current stream.
        The event, where there is one, tells when the copy is complete. Raises MappingFailed."""
        import torch

        source = self.borrow(offset_bytes, num_bytes)
        with self._beside_captures():
            if isinstance(out, np.ndarray):
                torch.from_numpy(out).copy_(source)  # waits
                return out, None
            if out is None:
                out = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
            out.copy_(source, non_blocking=True)
            if self._device.type != "cuda":
                return out, None
            # A copy between two GPUs runs on the stream of its source.
            return out, _Copied(torch.cuda.current_stream(self._device).record_event())

    def copy_now(self, offset_bytes: int, num_bytes: int, out: Bytes | None) -> Bytes:
        """``copy``, complete on return: one copy and one wait for the caller's current stream, which takes as
        long as that for an event behind the copy, and two calls less."""
        torch = self._torch
        source = self._mapping.tensor[offset_bytes : offset_bytes + num_bytes]
        with self._beside_captures():
            if isinstance(out, np.ndarray):
                torch.from_numpy(out).copy_(source)  # waits
                return out
            rows = torch.empty(num_bytes, dtype=torch.uint8, device=self._device) if out is None else out
            rows.copy_(source, non_blocking=True)
            if self._device.type == "cuda":
                try:
                    torch.cuda.current_stream(self._device).synchronize()
                except BaseException:
                    self.give_up(None)
                    raise
            return rows

    def finish(self) -> None:
        """Waits for what the caller's current stream has been given."""
        import torch

        if self._device.type == "cuda":
            with self._beside_captures():
                torch.cuda.current_stream(self._device).synchronize()

    def _beside_captures(self) -> AbstractContextManager[None]:
        """Memory from the driver and waits, inside, leave a capture of another thread alone; by default they
        fail during one, and it with them."""
        return mappings.relaxed_capture() if self._device.type == "cuda" else nullcontext()

    def give_up(self, event: Event | None) -> None:
        """A read that nobody waits for; the mapping's end does. event: of its copy, None for borrowed rows
        that any stream may still read."""
        self._mapping.wait_for(event)

    def warm(self) -> None:
        """A device mapping has no page faults."""

    def close(self) -> None:
        """Gives the mapping up; it ends with the last view. Twice is once."""
        self._mapping.close()


def device_in_use() -> int | None:
    """The GPU that is current for the calling thread, where this process uses CUDA already; None where it
    does not: it is not started for rows' sake."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    index: int = torch.cuda.current_device()
    return index


def resolve_device(device: str | int | torch.device) -> torch.device:
    """The GPU of this name, with its index. Raises MappingFailed where it is not to be seen."""
    try:
        import torch
    except ImportError as error:
        raise MappingFailed("torch is not installed") from error
    if torch.cuda._is_in_bad_fork():
        raise MappingFailed("this process was forked from one that used CUDA, and cannot use it")
    if not torch.cuda.is_available():
        raise MappingFailed("no CUDA device is visible to this process")
    found = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if found.type != "cuda":
        raise MappingFailed(f"rows go to a CUDA device by lease, {found} is none")
    index = found.index if found.index is not None else torch.cuda.current_device()
    if index >= torch.cuda.device_count():
        raise MappingFailed(f"device {index} of {torch.cuda.device_count()} CUDA devices does not exist")
    return torch.device("cuda", index)
