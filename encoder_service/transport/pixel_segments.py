"""One segment of shared memory with a caller's pixels: attached, consumed once, ended exactly once.

Owns an open segment's life. Where segments come from is ``pixel_folder``'s (named files) and ``pixel_book``'s
(memfds that the broker was given), which tensor lies in one ``pixel_layout``'s, and whose request it belongs
to ``pixel_input``'s.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from encoder_service.errors import Cancelled, TransportUnavailable
from encoder_service.transport.pixel_layout import PixelLayout, read_tensor


@dataclass(frozen=True, slots=True)
class SegmentRef:
    """Which segment a request means: name, or segment_id of the connection owner_id. ends: with the reading
    of the request, whatever comes of it; otherwise it stays its publisher's."""

    name: str = ""
    segment_id: bytes = b""
    owner_id: str = ""
    ends: bool = False


@dataclass
class PixelCounters:
    """Figures for operators. Thread-safe: the event loop, workers and the broker's thread count."""

    published: int = 0
    """memfds that the broker took."""
    consumed: int = 0
    """Tensors copied out."""
    consumed_bytes: int = 0
    unlinked: int = 0
    """Names that this process removed."""
    already_gone: int = 0
    """Names that were to be removed and that somebody had removed, or had given to another file."""
    not_unlinked: int = 0
    """Names that the kernel did not let us remove."""
    swept: int = 0
    """Names of dead publishers."""
    refused: Counter[str] = field(default_factory=Counter)
    """Segments by the cause of their refusal."""
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, **figures: int) -> None:
        """By the names of the figures."""
        with self._lock:
            for name, more in figures.items():
                setattr(self, name, getattr(self, name) + more)

    def add_refused(self, cause: str) -> None:
        with self._lock:
            self.refused[cause] += 1


def refuse(counters: PixelCounters, cause: str, message: str) -> TransportUnavailable:
    """The error for a segment that cannot be taken; its caller may send the tensor inline."""
    counters.add_refused(cause)
    return TransportUnavailable(f"{message}; send the pixels inline", pixels=cause)


class PixelSegment:
    """An attached segment. Whoever attached it calls ``close``, on every way out; the first call counts.

    The descriptor lives until ``close`` and the end of a copy under way: its number must not become another
    file's while a worker reads. The name goes with the first ``close``.
    """

    def __init__(
        self, descriptor: int, counters: PixelCounters, unlink: Callable[[], None] | None = None
    ) -> None:
        """Takes the descriptor over. unlink: removes the name, where that is this side's to do."""
        self.file_bytes = os.fstat(descriptor).st_size
        self._descriptor = descriptor
        self._counters = counters
        self._unlink = unlink
        self._lock = threading.Lock()
        self._closed = False
        self._reading = False

    def consume(self, layout: PixelLayout) -> torch.Tensor:
        """The tensor in memory of its own; the segment is ended. Takes as long as the copy. Raises
        PixelTensorMismatch, TransportUnavailable when the kernel does not let it be read, Cancelled when it
        was closed before."""
        with self._lock:
            if self._closed or self._reading:
                raise Cancelled("the segment was given up before it was read")
            self._reading = True
        try:
            # Its size again: the one seen at the attach may be history.
            layout.check_fits(os.fstat(self._descriptor).st_size)
            tensor = read_tensor(self._descriptor, layout)
        except OSError as error:
            raise refuse(self._counters, "UNREADABLE", f"the segment gave {error.strerror}") from error
        finally:
            self.close()
            with self._lock:
                self._reading = False
                self._close_descriptor()
        self._counters.add(consumed=1, consumed_bytes=layout.num_bytes)
        return tensor

    def close(self) -> None:
        """Ends the segment, from any thread. Twice is once."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            unlink, self._unlink = self._unlink, None
            if unlink is not None:
                unlink()
            if not self._reading:
                self._close_descriptor()

    def _close_descriptor(self) -> None:
        """With the lock held."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
