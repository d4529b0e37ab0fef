"""Device memory that other processes map: one ``cuMemCreate`` allocation, exported as a file descriptor.

Owns the allocation, its mapping in this process and the exported descriptor. Uses the driver API of the
optional package ``cuda-bindings``, whose functions used here are the same in 12.x and 13.x, in the device's
primary context, which torch uses too. Torch's caching allocator does not know this memory.

The driver has no read-only descriptors. This project's readers map with read access, but a hostile process
with the descriptor could map for writing. Therefore an isolated namespace has its own arenas.
"""

from __future__ import annotations

import os
import weakref
from contextlib import ExitStack
from typing import Any, Literal

import torch

from encoder_service.errors import ConfigurationError, InternalError
from encoder_service.store.host_memory import duplicate


class CudaMemory:
    """GPU memory of an arena; see ``arena.ArenaMemory``."""

    kind: Literal["host", "device"] = "device"

    def __init__(self, size_bytes: int, device: torch.device) -> None:
        """size_bytes is rounded up to the device's granularity, usually 2 MiB. The memory is zeroed, because
        readers see all of it. Raises ConfigurationError if the device cannot export memory or has too
        little."""
        driver = load_driver()
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        torch.cuda.synchronize(index)  # creates the primary context where there is none
        self.device_uuid = device_uuid(index)
        self._check_support(driver, index)
        properties = _properties(driver, index)
        granularity = _call(
            "cuMemGetAllocationGranularity",
            properties,
            driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED,
        )
        self.size_bytes = -(-size_bytes // granularity) * granularity
        self._fd = -1
        with torch.cuda.device(index):
            owner = _DeviceBytes(driver, index, self.size_bytes, properties)
            self._finalizer = weakref.finalize(owner, _release, index, *owner.mapping)
            self._finalizer.atexit = False
            self._fd = owner.export_fd(driver)
            # Made outside inference mode, so that it may be written both inside and outside of it.
            with torch.inference_mode(False):
                tensor = torch.as_tensor(owner)
            if tensor.data_ptr() != owner.address or tensor.device != self.device:
                raise InternalError(
                    f"torch sees the arena at {tensor.data_ptr():#x} on {tensor.device}, it is at "
                    f"{owner.address:#x} on {self.device}"
                )
            tensor.zero_()
        self._tensor: torch.Tensor | None = tensor
        self.synchronize()

    @property
    def tensor(self) -> torch.Tensor:
        """uint8 [size_bytes], a view of the memory. Raises InternalError after ``close``."""
        if self._tensor is None:
            raise InternalError("the arena's memory was closed")
        return self._tensor

    def export_fd(self) -> int:
        """A descriptor for other processes. The caller closes it. Raises InternalError after ``close``."""
        return duplicate(self._fd)

    def synchronize(self) -> None:
        """Waits for all work on the device."""
        torch.cuda.synchronize(self.device)

    def close(self) -> None:
        """Closes the descriptor. The memory is unmapped with the last tensor; other processes keep their
        mappings. Idempotent."""
        self._tensor = None
        descriptor, self._fd = self._fd, -1
        if descriptor >= 0:
            os.close(descriptor)

    @staticmethod
    def _check_support(driver: Any, index: int) -> None:
        attributes = driver.CUdevice_attribute
        for attribute, what in (
            (attributes.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, "virtual memory"),
            (attributes.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, "descriptors"),
        ):
            if not _call("cuDeviceGetAttribute", attribute, _call("cuDeviceGet", index)):
                raise ConfigurationError(
                    f"device {index} does not support {what} for exported memory", device=index
                )


class _DeviceBytes:
    """One mapped allocation. Every tensor over it refers to this object. A finalizer releases the memory."""

    def __init__(self, driver: Any, index: int, size_bytes: int, properties: Any) -> None:
        free_bytes, _ = torch.cuda.mem_get_info(index)
        self._handle = _call(
            "cuMemCreate", size_bytes, properties, 0, doing=f"{size_bytes} bytes, {free_bytes} are free"
        )
        with ExitStack() as undo:
            undo.callback(_call, "cuMemRelease", self._handle)
            pointer = _call("cuMemAddressReserve", size_bytes, 0, 0, 0)
            undo.callback(_call, "cuMemAddressFree", pointer, size_bytes)
            _call("cuMemMap", pointer, size_bytes, 0, self._handle, 0)
            undo.callback(_call, "cuMemUnmap", pointer, size_bytes)
            _call("cuMemSetAccess", pointer, size_bytes, [_access(driver, index)], 1)
            undo.pop_all()
        self.address = int(pointer)
        self.mapping = (pointer, size_bytes, self._handle)
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (self.address, False),
            "version": 3,
        }

    def export_fd(self, driver: Any) -> int:
        kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        descriptor = int(_call("cuMemExportToShareableHandle", self._handle, kind, 0))
        os.set_inheritable(descriptor, False)
        return descriptor


def load_driver() -> Any:
    """The module ``cuda.bindings.driver``. Raises ConfigurationError if it is not installed."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise ConfigurationError(
            "device memory that other processes map needs the package cuda-bindings"
        ) from error
    return driver


def device_uuid(index: int) -> str:
    """The device's UUID in the form of NVML and nvidia-smi."""
    text = str(torch.cuda.get_device_properties(index).uuid)
    return text if text.startswith(("GPU-", "MIG-")) else f"GPU-{text}"


def _properties(driver: Any, index: int) -> Any:
    properties = driver.CUmemAllocationProp()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.requestedHandleTypes = (
        driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    )
    properties.location = _location(driver, index)
    return properties


def _access(driver: Any, index: int) -> Any:
    access = driver.CUmemAccessDesc()
    access.location = _location(driver, index)
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return access


def _location(driver: Any, index: int) -> Any:
    location = driver.CUmemLocation()
    location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    location.id = index
    return location


def _call(name: str, *arguments: Any, doing: str = "") -> Any:
    """Calls a driver function, returns its result. Raises ConfigurationError with the CUDA error's name."""
    try:
        status, *results = getattr(load_driver(), name)(*arguments)
    except RuntimeError as error:  # the driver's library is missing
        raise ConfigurationError(f"{name} cannot be called: {error}", call=name) from error
    if int(status):
        text = f"{name} failed with {getattr(status, 'name', status)}{f': {doing}' if doing else ''}"
        raise ConfigurationError(text, call=name, status=int(status))
    return results[0] if results else None


def _release(index: int, pointer: Any, size_bytes: int, handle: Any) -> None:
    """Unmaps and frees the memory. Waits for work in progress first, because unmapping does not."""
    torch.cuda.synchronize(index)
    _call("cuMemUnmap", pointer, size_bytes)
    _call("cuMemAddressFree", pointer, size_bytes)
    _call("cuMemRelease", handle)
