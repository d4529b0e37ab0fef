"""Maps device memory that the encoder exports as a file descriptor, read-only, for one GPU of this process.

Owns a mapping, copies from it, and unmapping. The GPU that holds the memory need not be visible to this
process. Copies go to private memory on a stream of this module and are complete on return. Driver calls and
waits use the relaxed capture mode, so they neither fail nor invalidate a CUDA graph capture in another
thread. Needs torch and the package cuda-bindings."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from lm_adapter.errors import MappingFailed, MissingDependency

if TYPE_CHECKING:
    import torch


class DeviceMemory:
    """A mapped device arena. Must not be used after ``unmap``."""

    def __init__(self, fd: int, size_bytes: int, device: torch.device) -> None:
        """fd: the exported allocation; the caller closes it. size_bytes: of the whole allocation. device: the
        GPU that reads. Raises MappingFailed if this GPU cannot access the memory, and MissingDependency
        without cuda-bindings."""
        import torch

        self._torch = torch
        self._driver = load_driver()
        self.size_bytes = size_bytes
        self.device = resolve_device(device)
        self._unmap_steps: list[tuple[str, tuple[Any, ...]]] = []
        with self._driver_calls():
            self._address = self._map(fd)
        with relaxed_capture():
            self._stream: Any = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def read(self, offset_bytes: int, num_bytes: int) -> bytes:
        """A copy of a few bytes, on the host."""
        with relaxed_capture():
            return bytes(self.copy(offset_bytes, num_bytes).cpu().numpy())

    def copy(self, offset_bytes: int, num_bytes: int, stream: Any = None) -> torch.Tensor:
        """A private copy, uint8 [num_bytes] on ``device``, complete on return. Does not wait for other
        streams. Raises MemoryError, MappingFailed.

        stream: the stream on which the caller uses the rows, by default the current one. The copy is
        allocated from the pool of this module's stream; ``record_stream`` keeps the allocator from reusing
        its memory while ``stream`` still uses it.
        """
        cuda = self._torch.cuda
        if stream is None or stream.device != self.device:
            stream = cuda.current_stream(self.device)
        with relaxed_capture():
            try:
                with cuda.stream(self._stream):
                    out = self._torch.empty(num_bytes, dtype=self._torch.uint8, device=self.device)
            except self._torch.OutOfMemoryError as error:
                raise MemoryError(str(error)) from error
            event = cuda.Event()
            try:
                with self._context():
                    _call(
                        self._driver,
                        "cuMemcpyDtoDAsync",
                        out.data_ptr(),
                        self._address + offset_bytes,
                        num_bytes,
                        self._stream.cuda_stream,
                    )
                event.record(self._stream)
                event.synchronize()
            except BaseException:
                # The copy may still be running: wait before its memory goes back to the allocator.
                self._stream.synchronize()
                raise
            out.record_stream(stream)
        return out

    def unmap(self) -> None:
        """Unmaps the memory. All copies must have ended. Can be repeated; after MappingFailed, a repeat
        continues with the step that failed."""
        if self._unmap_steps:
            with self._driver_calls():
                while self._unmap_steps:
                    name, arguments = self._unmap_steps[-1]
                    _call(self._driver, name, *arguments)
                    self._unmap_steps.pop()

    def _map(self, fd: int) -> int:
        driver, size_bytes = self._driver, self.size_bytes
        kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        handle = _call(driver, "cuMemImportFromShareableHandle", fd, kind)
        try:
            pointer = _call(driver, "cuMemAddressReserve", size_bytes, 0, 0, 0)
            self._unmap_steps.append(("cuMemAddressFree", (pointer, size_bytes)))
            _call(driver, "cuMemMap", pointer, size_bytes, 0, handle, 0)
            self._unmap_steps.append(("cuMemUnmap", (pointer, size_bytes)))
            access = driver.CUmemAccessDesc()
            location = driver.CUmemLocation()
            location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
            location.id = self.device.index
            access.location = location
            access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READ
            _call(driver, "cuMemSetAccess", pointer, size_bytes, [access], 1)
        except BaseException:
            with contextlib.suppress(MappingFailed):
                self.unmap()
            raise
        finally:
            _call(driver, "cuMemRelease", handle)  # the mapping keeps the memory alive
        return int(pointer)

    @contextlib.contextmanager
    def _driver_calls(self) -> Iterator[None]:
        with self._context(), relaxed_capture():
            yield

    @contextlib.contextmanager
    def _context(self) -> Iterator[None]:
        """Makes the device's primary context current on this thread."""
        _call(self._driver, "cuCtxPushCurrent", primary_context(self.device.index))
        try:
            yield
        finally:
            _call(self._driver, "cuCtxPopCurrent")


def resolve_device(device: str | int | torch.device) -> torch.device:
    """The named GPU, or the current one without an index. Raises MappingFailed if it is not visible."""
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
        raise MappingFailed(f"device arenas are read by a CUDA device, got {found}")
    index = found.index if found.index is not None else torch.cuda.current_device()
    if index >= torch.cuda.device_count():
        raise MappingFailed(f"device {index} of {torch.cuda.device_count()} CUDA devices does not exist")
    return torch.device("cuda", index)


@contextlib.contextmanager
def relaxed_capture() -> Iterator[None]:
    """Calls of this thread neither fail nor invalidate a capture of another thread. Raises MissingDependency
    without cuda-bindings."""
    driver = load_driver()
    relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    previous = _call(driver, "cuThreadExchangeStreamCaptureMode", relaxed)
    try:
        yield
    finally:
        _call(driver, "cuThreadExchangeStreamCaptureMode", previous)


@functools.cache
def load_driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise MissingDependency(
            "cuda-bindings", "mapping the encoder's device memory", "pip install '.[cuda]' in a checkout"
        ) from error
    return driver


def _call(driver: Any, name: str, *arguments: Any) -> Any:
    """Calls a driver function and returns its result. Raises MappingFailed with the driver's error name."""
    try:
        status, *results = getattr(driver, name)(*arguments)
    except RuntimeError as error:  # the package is there, the driver's library is not
        raise MappingFailed(f"{name} cannot be called: {error}", details={"call": name}) from error
    if int(status):
        raise MappingFailed(
            f"{name} failed with {getattr(status, 'name', status)}",
            details={"call": name, "status": int(status)},
        )
    return results[0] if results else None


@functools.cache
def primary_context(index: int) -> Any:
    """The context that torch uses on the device, retained for the life of the process."""
    driver = load_driver()
    _call(driver, "cuInit", 0)
    return _call(driver, "cuDevicePrimaryCtxRetain", _call(driver, "cuDeviceGet", index))
