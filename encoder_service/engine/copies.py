"""Many copies from host to device in one call to the driver.

Owns which way this machine has: ``cuMemcpyBatchAsync`` (CUDA 12.8 and later), or on a CPU plain moves of
memory. Addresses go in, no tensors: a tensor operation for each copy costs the host several microseconds,
and with it a step would grow by that for every item. Who keeps the memory alive is the caller's business:
torch's caching allocators know nothing of these copies.
"""

from __future__ import annotations

import ctypes
from typing import Protocol

import numpy as np
import structlog
import torch

from encoder_service.errors import InternalError

log = structlog.get_logger(__name__)

# The function as this version of CUDA had it; 13.0 dropped an argument, and drivers keep both.
BATCH_VERSION = 12080
# Sources are read in the stream's order, not within the call.
SOURCE_IN_STREAM_ORDER = 1
# A hint: the copies of a batch are to hide behind the forward pass of the one before.
OVERLAP_WITH_COMPUTE = 1


class CopyList:
    """Up to ``capacity`` copies: int64 addresses and sizes in bytes, where the driver reads them."""

    def __init__(self, capacity: int) -> None:
        self._numbers = np.zeros((3, capacity), np.int64)
        self.destinations, self.sources, self.sizes = self._numbers
        self.pointers = tuple(row.ctypes.data for row in self._numbers)


class BatchCopies(Protocol):
    def copy(self, copies: CopyList, count: int, stream: int) -> None:
        """Enqueues the first ``count`` copies, none of them empty, in no order among themselves, in the
        stream with this handle. What they read and write lives until they are over; ``copies`` only has to
        live through the call. Raises InternalError when the driver refuses."""


class HostCopies:
    """On a CPU: done when the call returns."""

    def copy(self, copies: CopyList, count: int, stream: int) -> None:  # noqa: ARG002
        for destination, source, size in copies._numbers[:, :count].T.tolist():
            ctypes.memmove(destination, source, size)


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes. Zero locations: the driver finds out from the addresses."""

    _fields_ = (
        ("source_access_order", ctypes.c_int),
        ("source_hint", _Location),
        ("destination_hint", _Location),
        ("flags", ctypes.c_uint),
    )


class DriverCopies:
    """``cuMemcpyBatchAsync``. The stream may not be the legacy default one, which the driver refuses."""

    def __init__(self, function: int) -> None:
        size_type, pointer = ctypes.c_size_t, ctypes.c_void_p
        # Destinations, sources, sizes, their number, attributes, where each begins, their number, the index
        # of a failed copy, stream.
        prototype = ctypes.CFUNCTYPE(
            ctypes.c_int, *[pointer] * 3, size_type, *[pointer] * 2, size_type, pointer, pointer
        )
        self._call = prototype(function)
        self._attributes = _Attributes(source_access_order=SOURCE_IN_STREAM_ORDER, flags=OVERLAP_WITH_COMPUTE)
        self._first, self._failed = size_type(0), size_type(0)
        self._constants = tuple(
            ctypes.addressof(one) for one in (self._attributes, self._first, self._failed)
        )

    def copy(self, copies: CopyList, count: int, stream: int) -> None:
        attributes, first, failed = self._constants
        status = self._call(*copies.pointers, count, attributes, first, 1, failed, stream)
        if status:
            raise InternalError(
                f"cuMemcpyBatchAsync of {count} copies failed with CUDA error {status} at copy "
                f"{self._failed.value}"
            )


def batch_copies_of(device: torch.device) -> BatchCopies | None:
    """How ``device`` takes many copies at once; None where the driver cannot, which the log says. A GPU has
    to be the thread's current one; its way is tried out first."""
    if device.type != "cuda":
        return HostCopies()
    try:
        copies = DriverCopies(_find_function("libcuda.so.1"))
        _try_out(copies, device)
    except (OSError, AttributeError, InternalError) as error:
        log.warning("copies go to the device one by one", reason=str(error))
        return None
    return copies


def _find_function(library: str) -> int:
    """The address of the function in the form of BATCH_VERSION, which later drivers have too. Raises OSError
    or AttributeError where there is no such library or symbol, InternalError for an older driver."""
    driver = ctypes.CDLL(library)
    find = driver.cuGetProcAddress_v2
    find.argtypes = (
        ctypes.c_char_p,
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_uint64,
        ctypes.c_void_p,
    )
    function, found = ctypes.c_void_p(), ctypes.c_int()
    status = find(
        b"cuMemcpyBatchAsync", ctypes.addressof(function), BATCH_VERSION, 0, ctypes.addressof(found)
    )
    if status or not function.value:
        raise InternalError(
            f"the driver has no cuMemcpyBatchAsync of CUDA {BATCH_VERSION // 1000}."
            f"{BATCH_VERSION % 1000 // 10}: error {status}, query {found.value}"
        )
    return function.value


def _try_out(copies: DriverCopies, device: torch.device) -> None:
    """Raises InternalError unless two copies arrive. At start, so that no batch is the first to find out."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    source = torch.arange(1024, dtype=torch.int32).view(torch.uint8).pin_memory()
    target = torch.zeros(4096, dtype=torch.uint8, device=device)
    stream.wait_stream(torch.cuda.current_stream(device))
    pieces = CopyList(2)
    for index, (start, size) in enumerate(((0, 1000), (1024, 3072))):
        pieces.destinations[index] = target.data_ptr() + start
        pieces.sources[index] = source.data_ptr() + start
        pieces.sizes[index] = size
    copies.copy(pieces, 2, stream.cuda_stream)
    stream.synchronize()
    arrived = target.cpu()
    if not torch.equal(arrived[:1000], source[:1000]) or not torch.equal(arrived[1024:], source[1024:]):
        raise InternalError("cuMemcpyBatchAsync did not copy what it was given")
