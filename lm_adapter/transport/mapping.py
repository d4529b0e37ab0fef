"""Maps memory that the encoder shares, by descriptor, read-only, as a torch tensor without a copy.

Owns the mapping and its end. Where descriptors come from, how often an arena is mapped and which rows to
trust are others' business. A device allocation is mapped with read access for one GPU, this process's own,
whether or not the GPU that holds the bytes is visible here: the tensor says it is on the GPU that reads it,
so that copies run on that GPU's streams and never touch the other's context. A host mapping has PROT_READ;
writing to its tensor kills the process, as writing to any read-only page does.

Torch's caching allocator knows nothing of these mappings: its statistics, pools and captured graphs stay as
they are, and a copy out of a mapping may be captured. Mapping is allowed while another thread captures a
graph, and so is unmapping where every read was waited for. What has to be waited for first, and when that is
a whole device, is ``unmapping``'s.

torch, and for device memory the package cuda-bindings, are imported when something is mapped.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import mmap
import os
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from lm_adapter.errors import EncoderError, MissingDependency
from lm_adapter.transport.borrowed import borrow
from lm_adapter.transport.unmapping import Unmapping

if TYPE_CHECKING:
    import torch

    from lm_adapter.transport.device_lease import Event

__all__ = [
    "Mapping",
    "MappingFailed",
    "check_sealed",
    "device_uuid",
    "map_device",
    "map_host",
    "relaxed_capture",
]

_REGISTER_PORTABLE_READ_ONLY = 0x01 | 0x08
_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class MappingFailed(EncoderError):
    """This memory cannot be mapped here; another way of delivery is needed."""

    default_reason = "MAPPING_FAILED"


@dataclass(eq=False)
class Mapping:
    """Mapped memory. pinned: host memory that the GPU copies from directly. The memory stays mapped until
    ``close`` was called and the last tensor made from ``tensor`` is gone."""

    size_bytes: int
    device: torch.device
    pinned: bool
    _tensor: torch.Tensor | None
    _finalizer: weakref.finalize[..., Any]
    _unmapping: Unmapping | None = None

    @property
    def tensor(self) -> torch.Tensor:
        """uint8 [size_bytes], to read only. Raises MappingFailed after ``close``."""
        if self._tensor is None:
            raise MappingFailed(f"a mapping of {self.size_bytes} bytes was closed")
        return self._tensor

    @property
    def mapped(self) -> bool:
        """Whether the memory is still mapped: until ``close`` and the end of the last view, on a GPU also
        until the driver has allowed it."""
        return self._finalizer.alive or (self._unmapping is not None and not self._unmapping.done)

    def wait_for(self, event: Event | None) -> None:
        """Before device memory is unmapped: a copy out of it that its reader gave up; None for reads that no
        event tells the end of, which the whole device is waited for."""
        if self._unmapping is not None:
            self._unmapping.wait_for(event)

    def close(self) -> None:
        """Gives up the tensor; unmaps with the last view of it. The caller has waited for the copies that
        read through it, or handed their events to ``wait_for``. Twice is once."""
        if self._tensor is not None:
            self._tensor = None
            if self._finalizer.alive:
                self.wait_for(None)  # somebody holds a view, and may have kernels read it until its end


def map_host(fd: int, size_bytes: int, *, pin: bool = False) -> Mapping:
    """Maps a sealed memfd; the descriptor stays the caller's. pin: page-locks it for the GPU where that is
    possible; ``pinned`` says whether it was. Raises MappingFailed for memory that could shrink under the
    reader or has another size."""
    import torch

    check_sealed(fd, size_bytes)
    try:
        mapping = mmap.mmap(fd, size_bytes, prot=mmap.PROT_READ)
    except OSError as error:
        raise MappingFailed(f"{size_bytes} bytes of host memory cannot be mapped: {error}") from error
    owner = _Owner(int(np.frombuffer(mapping, dtype=np.uint8).ctypes.data))
    pinned = pin and _register(owner.address, size_bytes)
    finalizer = weakref.finalize(owner, _unmap_host, mapping, owner.address if pinned else 0)
    finalizer.atexit = False
    device = torch.device("cpu")
    tensor = borrow(owner.address, size_bytes, device, owner)
    return Mapping(size_bytes, device, pinned, tensor, finalizer)


def map_device(fd: int, size_bytes: int, device: torch.device) -> Mapping:
    """Maps an exported device allocation for reading by ``device``; the descriptor stays the caller's.

    size_bytes: of the whole allocation, as its exporter gives it. Raises MappingFailed where this GPU cannot
    reach the memory, and MissingDependency without cuda-bindings.
    """
    import torch

    driver = _load_driver()
    index = torch.cuda.current_device() if device.index is None else device.index
    device = torch.device("cuda", index)
    with _device_context(driver, index), _relaxed_capture(driver):
        owner, finalizer, unmapping = _map_allocation(driver, fd, size_bytes, index)
    tensor = borrow(owner.address, size_bytes, device, owner)
    return Mapping(size_bytes, device, False, tensor, finalizer, unmapping)


@contextlib.contextmanager
def relaxed_capture() -> Iterator[None]:
    """What this thread does inside neither fails nor spoils a capture that another thread has under way.
    Raises MissingDependency without cuda-bindings."""
    with _relaxed_capture(_load_driver()):
        yield


def device_uuid(device: torch.device) -> str:
    """A GPU's UUID as NVML and nvidia-smi write it; what the encoder's arenas are labelled with."""
    import torch

    text = str(torch.cuda.get_device_properties(device).uuid)
    return text if text.startswith(("GPU-", "MIG-")) else f"GPU-{text}"


@dataclass(eq=False)
class _Owner:
    """What every tensor over a mapping keeps alive."""

    address: int


def _map_allocation(
    driver: Any, fd: int, size_bytes: int, index: int
) -> tuple[_Owner, weakref.finalize[..., Any], Unmapping]:
    kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    handle = _call(driver, "cuMemImportFromShareableHandle", fd, kind)
    # The mapping keeps the memory: the handle goes in any case.
    with contextlib.ExitStack() as undo, contextlib.ExitStack() as release:
        release.callback(_call, driver, "cuMemRelease", handle)
        pointer = _call(driver, "cuMemAddressReserve", size_bytes, 0, 0, 0)
        undo.callback(_call, driver, "cuMemAddressFree", pointer, size_bytes)
        _call(driver, "cuMemMap", pointer, size_bytes, 0, handle, 0)
        undo.callback(_call, driver, "cuMemUnmap", pointer, size_bytes)
        access = driver.CUmemAccessDesc()
        location = driver.CUmemLocation()
        location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        location.id = index
        access.location = location
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READ
        _call(driver, "cuMemSetAccess", pointer, size_bytes, [access], 1)
        owner = _Owner(int(pointer))
        unmapping = _unmapping_of(driver, index, pointer, size_bytes)
        finalizer = weakref.finalize(owner, unmapping)
        finalizer.atexit = False
        undo.pop_all()
    return owner, finalizer, unmapping


def _unmapping_of(driver: Any, index: int, pointer: Any, size_bytes: int) -> Unmapping:
    def step(name: str, *arguments: Any) -> Callable[[], None]:
        def call() -> None:
            with _device_context(driver, index), _relaxed_capture(driver):
                _call(driver, name, *arguments)

        return call

    return Unmapping(
        step("cuCtxSynchronize"),
        (step("cuMemUnmap", pointer, size_bytes), step("cuMemAddressFree", pointer, size_bytes)),
    )


def _unmap_host(mapping: mmap.mmap, registered_address: int) -> None:
    """The last reference to the mapping is the argument's: it is unmapped when this returns."""
    if registered_address:
        _call(_load_driver(), "cuMemHostUnregister", registered_address)
    del mapping


def _register(address: int, size_bytes: int) -> bool:
    """Page-locks read-only memory; False where the machine, its driver or its packages cannot. Through the
    driver, whose failures leave no error behind for torch's next call to trip over."""
    import torch

    if not torch.cuda.is_available():
        return False
    try:
        driver = _load_driver()
        index = torch.cuda.current_device()
        with _device_context(driver, index), _relaxed_capture(driver):
            _call(driver, "cuMemHostRegister", address, size_bytes, _REGISTER_PORTABLE_READ_ONLY)
    except (MappingFailed, MissingDependency):
        return False
    return True


def check_sealed(fd: int, size_bytes: int) -> None:
    """Raises MappingFailed unless ``fd`` is a memfd of this size that can neither shrink nor grow: reading a
    page that was cut off would kill this process."""
    found_bytes = os.fstat(fd).st_size
    if size_bytes < 1 or found_bytes != size_bytes:
        raise MappingFailed(
            f"the shared memory has {found_bytes} bytes, {size_bytes} were announced",
            details={"found": found_bytes, "expected": size_bytes},
        )
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise MappingFailed("the shared memory is no memfd and could shrink under its reader") from error
    if seals & _SIZE_SEALS != _SIZE_SEALS:
        raise MappingFailed(
            f"the shared memory has seals {seals:#x}, {_SIZE_SEALS:#x} are needed",
            details={"found": seals, "expected": _SIZE_SEALS},
        )


def _load_driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise MissingDependency("cuda-bindings", "mapping the encoder's device memory") from error
    return driver


def _call(driver: Any, name: str, *arguments: Any) -> Any:
    """Calls a driver function; its result. Raises MappingFailed with the driver's name of the error."""
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
def _primary_context(index: int) -> Any:
    """The context that torch uses on the device, retained for the life of the process: given back, it would
    end where torch has not started it yet, and every mapping in it."""
    driver = _load_driver()
    _call(driver, "cuInit", 0)
    return _call(driver, "cuDevicePrimaryCtxRetain", _call(driver, "cuDeviceGet", index))


@contextlib.contextmanager
def _device_context(driver: Any, index: int) -> Iterator[None]:
    """The device's primary context on this thread."""
    _call(driver, "cuCtxPushCurrent", _primary_context(index))
    try:
        yield
    finally:
        _call(driver, "cuCtxPopCurrent")


@contextlib.contextmanager
def _relaxed_capture(driver: Any) -> Iterator[None]:
    """What this thread calls neither fails nor spoils a capture that another thread has under way."""
    modes = driver.CUstreamCaptureMode
    previous = _call(driver, "cuThreadExchangeStreamCaptureMode", modes.CU_STREAM_CAPTURE_MODE_RELAXED)
    try:
        yield
    finally:
        _call(driver, "cuThreadExchangeStreamCaptureMode", previous)
