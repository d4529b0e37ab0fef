"""Copies by address: what a step moves, in calls of the driver instead of tensor operations.

Owns how this machine copies (``Copies``): ``cuMemcpyAsync``, and for many copies in one call
``cuMemcpyBatchAsync`` (CUDA 12.8 and later); on a CPU plain moves of memory; torch where neither can be.
A tensor operation costs the host five times what the driver's call does, and its views as much again.
Who keeps the memory alive is the caller's business: torch's caching allocators, of device memory and of
pinned memory alike, know nothing of these copies and give a dropped piece to the next who asks.
"""

from __future__ import annotations

import ctypes
from typing import Protocol

import numpy as np
import numpy.typing as npt
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
# The legacy default stream, which cuMemcpyBatchAsync refuses: the null handle, and CU_STREAM_LEGACY.
LEGACY_STREAMS = (0, 1)


class Memory:
    """A contiguous tensor's memory. tensor: all of it as uint8 [num_bytes], which also keeps it."""

    __slots__ = ("address", "num_bytes", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.view(-1).view(torch.uint8)
        self.address = self.tensor.data_ptr()
        self.num_bytes = self.tensor.nbytes


class CopyList:
    """Up to so many copies: int64 addresses and sizes in bytes, where the driver reads them."""

    def __init__(
        self,
        destinations: npt.NDArray[np.int64],
        sources: npt.NDArray[np.int64],
        sizes: npt.NDArray[np.int64],
    ) -> None:
        """All three contiguous; they may be parts of what somebody fills for other ends too."""
        self.destinations, self.sources, self.sizes = destinations, sources, sizes
        assert all(one.flags.c_contiguous and one.dtype == np.int64 for one in self._arrays)
        self.pointers = tuple(one.ctypes.data for one in self._arrays)

    @classmethod
    def of_capacity(cls, capacity: int) -> CopyList:
        return cls(*np.zeros((3, capacity), np.int64))

    def first(self, count: int) -> list[list[int]]:
        """Destination, source and size of each of the first copies."""
        return [list(one) for one in zip(*(one[:count].tolist() for one in self._arrays), strict=True)]

    @property
    def _arrays(self) -> tuple[npt.NDArray[np.int64], ...]:
        return (self.destinations, self.sources, self.sizes)


class Copies(Protocol):
    """by_address: whether ``many`` is possible, which takes no tensors."""

    by_address: bool

    def one(self, destination: Memory, source: Memory, num_bytes: int, stream: int) -> None:
        """Enqueues a copy between the starts of two memories in the stream with this handle, which is of the
        thread's current device. Host memory is pinned. Raises InternalError when the driver refuses."""

    def many(self, copies: CopyList, count: int, stream: int) -> None:
        """Enqueues the first ``count`` copies, none of them empty, in no order among themselves. What they
        read and write lives until they are over; ``copies`` only has to live through the call."""


class HostCopies:
    """On a CPU: done when the call returns."""

    by_address = True

    def one(self, destination: Memory, source: Memory, num_bytes: int, stream: int) -> None:  # noqa: ARG002
        ctypes.memmove(destination.address, source.address, num_bytes)

    def many(self, copies: CopyList, count: int, stream: int) -> None:  # noqa: ARG002
        for destination, source, size in copies.first(count):
            ctypes.memmove(destination, source, size)


class TorchCopies:
    """Tensor operations: where the driver's functions are not to be had."""

    by_address = False

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def one(self, destination: Memory, source: Memory, num_bytes: int, stream: int) -> None:
        if self._device.type == "cuda" and stream != torch._C._cuda_getCurrentRawStream(self._index):
            with torch.cuda.stream(torch.cuda.ExternalStream(stream, self._device)):  # type: ignore[no-untyped-call]
                self._copy(destination, source, num_bytes)
        else:
            self._copy(destination, source, num_bytes)

    def many(self, copies: CopyList, count: int, stream: int) -> None:
        raise NotImplementedError("torch copies tensors, not addresses")

    @property
    def _index(self) -> int:
        return torch.cuda.current_device() if self._device.index is None else self._device.index

    @staticmethod
    def _copy(destination: Memory, source: Memory, num_bytes: int) -> None:
        destination.tensor[:num_bytes].copy_(source.tensor[:num_bytes], non_blocking=True)


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
    """``cuMemcpyAsync`` and ``cuMemcpyBatchAsync``, by the addresses of the functions. Without the second,
    and in the legacy default stream, which it refuses, many copies are as many calls of the first.

    Both are called with the interpreter's lock held: they only enqueue, and a thread that lets go of the lock
    may wait for another's switch interval until it has it back.
    """

    by_address = True

    def __init__(self, single: int, batch: int | None) -> None:
        size_type, pointer = ctypes.c_size_t, ctypes.c_void_p
        # CUresult cuMemcpyAsync(CUdeviceptr dst, CUdeviceptr src, size_t ByteCount, CUstream hStream)
        self._single = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, size_type, pointer)(
            single
        )
        # Destinations, sources, sizes, their number, attributes, where each begins, their number, the index
        # of a failed copy, stream.
        prototype = ctypes.PYFUNCTYPE(
            ctypes.c_int, *[pointer] * 3, size_type, *[pointer] * 2, size_type, pointer, pointer
        )
        self._batch = None if batch is None else prototype(batch)
        self._attributes = _Attributes(source_access_order=SOURCE_IN_STREAM_ORDER, flags=OVERLAP_WITH_COMPUTE)
        self._first, self._failed = size_type(0), size_type(0)
        self._constants = tuple(
            ctypes.addressof(one) for one in (self._attributes, self._first, self._failed)
        )

    @property
    def takes_many(self) -> bool:
        """Whether many copies are one call."""
        return self._batch is not None

    def one(self, destination: Memory, source: Memory, num_bytes: int, stream: int) -> None:
        status = self._single(destination.address, source.address, num_bytes, stream)
        if status:
            raise InternalError(f"cuMemcpyAsync of {num_bytes} bytes failed with CUDA error {status}")

    def many(self, copies: CopyList, count: int, stream: int) -> None:
        batch = self._batch
        if batch is None or stream in LEGACY_STREAMS:
            for destination, source, size in copies.first(count):
                if status := self._single(destination, source, size, stream):
                    raise InternalError(f"cuMemcpyAsync of {size} bytes failed with CUDA error {status}")
            return
        attributes, first, failed = self._constants
        status = batch(*copies.pointers, count, attributes, first, 1, failed, stream)
        if status:
            raise InternalError(
                f"cuMemcpyBatchAsync of {count} copies failed with CUDA error {status} at copy "
                f"{self._failed.value}"
            )


def copies_of(device: torch.device) -> Copies:
    """How ``device`` is copied to, from and on. A GPU's way is tried out first, and the log says where it is
    not the best one."""
    if device.type != "cuda":
        return HostCopies()
    with torch.cuda.device(device):
        return _copies_of_gpu(device)


def _copies_of_gpu(device: torch.device) -> Copies:
    try:
        driver = load_driver("libcuda.so.1")
        single = address_of(driver.cuMemcpyAsync)
        _try_out(DriverCopies(single, None), device)
    except (OSError, AttributeError, InternalError) as error:
        log.warning("a step copies through torch", reason=str(error))
        return TorchCopies(device)
    try:
        copies = DriverCopies(single, find_batch_function(driver))
        _try_out(copies, device)
    except (AttributeError, InternalError) as error:
        log.warning("copies go to the device one by one", reason=str(error))
        return DriverCopies(single, None)
    return copies


def load_driver(library: str) -> ctypes.CDLL:
    """Raises OSError where there is none."""
    return ctypes.CDLL(library)


def address_of(function: object) -> int:
    address = ctypes.cast(function, ctypes.c_void_p).value  # type: ignore[arg-type]
    assert address is not None
    return address


def find_batch_function(driver: ctypes.CDLL) -> int:
    """The address of cuMemcpyBatchAsync in the form of BATCH_VERSION, which later drivers have too. Raises
    AttributeError where there is no such symbol, InternalError for an older driver."""
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
    """Raises InternalError unless copies to the device, on it and from it arrive. At start, so that no batch
    is the first to find out."""
    with torch.inference_mode(False), torch.no_grad():
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        handle = stream.cuda_stream
        given = torch.arange(1024, dtype=torch.int32).view(torch.uint8).pin_memory()
        back = torch.zeros(4096, dtype=torch.uint8).pin_memory()
        there, beside = (torch.zeros(4096, dtype=torch.uint8, device=device) for _ in range(2))
        stream.wait_stream(torch.cuda.current_stream(device))
        pieces = CopyList.of_capacity(2)
        for index, (start, size) in enumerate(((0, 1000), (1024, 3072))):
            pieces.destinations[index] = there.data_ptr() + start
            pieces.sources[index] = given.data_ptr() + start
            pieces.sizes[index] = size
        copies.many(pieces, 2, handle)
        copies.one(Memory(beside), Memory(there), 4000, handle)
        copies.one(Memory(back), Memory(beside), 4096, handle)
        stream.synchronize()
    expected = given.clone()
    expected[1000:1024] = 0
    expected[4000:] = 0
    if not torch.equal(back, expected):
        raise InternalError("the driver did not copy what it was given")
