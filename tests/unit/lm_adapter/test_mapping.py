"""Mapping device memory, against a driver that records its calls: order, access, and undoing what failed.
Copies from it, against streams whose work ends only when the host waits."""

from __future__ import annotations

import contextlib
import enum
import sys
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from lm_adapter.errors import MappingFailed, MissingDependency
from lm_adapter.shm import device as device_memory
from lm_adapter.shm.device import DeviceMemory, resolve_device

SIZE = 1 << 21
STEPS = ["cuMemImportFromShareableHandle", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"]


class Status(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_DEVICE = 101


class RecordingDriver:
    """Answers as the driver does. fails: the call that is refused."""

    CUmemAllocationHandleType = SimpleNamespace(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR="posix")
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE="device")
    CUmemAccess_flags = SimpleNamespace(
        CU_MEM_ACCESS_FLAGS_PROT_READ="read", CU_MEM_ACCESS_FLAGS_PROT_READWRITE="readwrite"
    )
    CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED="relaxed")
    CUmemAccessDesc = SimpleNamespace
    CUmemLocation = SimpleNamespace
    results: ClassVar = {"cuMemImportFromShareableHandle": "handle", "cuMemAddressReserve": 0x7000_0000}

    def __init__(self, fails: str = "") -> None:
        self.fails = fails
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.mode = "global"
        self.contexts: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append((name, arguments))
            if name == self.fails:
                return (Status.CUDA_ERROR_INVALID_DEVICE, None)
            return (Status.CUDA_SUCCESS, self.results.get(name))

        return call

    def cuThreadExchangeStreamCaptureMode(self, mode: str) -> tuple[Status, str]:
        previous, self.mode = self.mode, mode
        return (Status.CUDA_SUCCESS, previous)

    def cuCtxPushCurrent(self, context: str) -> tuple[Status]:
        self.contexts.append(context)
        return (Status.CUDA_SUCCESS,)

    def cuCtxPopCurrent(self) -> tuple[Status, str]:
        return (Status.CUDA_SUCCESS, self.contexts.pop())

    def names(self) -> list[str]:
        return [name for name, _ in self.calls]


class CopyStream:
    """A stream whose copies run until the host waits for them."""

    made: ClassVar[list[CopyStream]] = []

    def __init__(self, device: torch.device) -> None:
        self.made.append(self)
        self.device = device
        self.cuda_stream = self
        self.num_running = 0

    def synchronize(self) -> None:
        self.num_running = 0


class CopyEvent:
    """Covers the copies that its stream had when it was recorded. fails: the call that is interrupted."""

    def __init__(self, fails: str = "") -> None:
        self.fails = fails

    def record(self, stream: CopyStream) -> None:
        if self.fails == "record":
            raise KeyboardInterrupt
        self.stream, self.num_covered = stream, stream.num_running

    def synchronize(self) -> None:
        if self.fails == "synchronize":
            raise KeyboardInterrupt
        self.stream.num_running -= self.num_covered


class CopyingDriver(RecordingDriver):
    """Starts copies on a CopyStream, also where it then reports an error."""

    def cuMemcpyDtoDAsync(self, *arguments: Any) -> Any:
        *_, stream = arguments
        stream.num_running += 1
        return self.__getattr__("cuMemcpyDtoDAsync")(*arguments)


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts a driver where cuda-bindings would be, beside a torch with two GPUs."""
    for cached in (device_memory.primary_context, device_memory.load_driver):
        cached.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(device=device))

    def put(driver: object) -> None:
        package, bindings = ModuleType("cuda"), ModuleType("cuda.bindings")
        bindings.driver = driver  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "cuda", package)
        monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)

    yield put
    for cached in (device_memory.primary_context, device_memory.load_driver):
        cached.cache_clear()


def test_p39_a_device_without_an_index_is_the_current_one(install: Any) -> None:
    install(RecordingDriver())
    assert resolve_device("cuda") == torch.device("cuda:1")
    assert resolve_device(0) == torch.device("cuda:0")
    for wrong, why in (("cpu", "got cpu"), ("cuda:2", "2 CUDA devices")):
        with pytest.raises(MappingFailed, match=why):
            resolve_device(wrong)


def test_device_memory_is_mapped_for_reading_by_its_own_device(install: Any) -> None:
    driver = RecordingDriver()
    install(driver)
    memory = DeviceMemory(7, SIZE, torch.device("cuda"))
    assert (memory.device, memory.size_bytes) == (torch.device("cuda:1"), SIZE)
    calls = dict(driver.calls)
    assert calls["cuMemImportFromShareableHandle"] == (7, "posix")
    (access,) = calls["cuMemSetAccess"][2]
    assert (access.flags, access.location.id, access.location.type) == ("read", 1, "device")
    assert driver.names()[-5:] == [*STEPS, "cuMemRelease"], "the handle goes, the mapping keeps the memory"
    assert (driver.mode, driver.contexts) == ("global", [])
    driver.calls.clear()
    memory.unmap()
    memory.unmap()
    # The device is not waited for: that fails, and may invalidate the graph, while any stream captures.
    assert driver.names() == ["cuMemUnmap", "cuMemAddressFree"]


def test_an_unmap_that_the_driver_refuses_goes_on_where_it_failed(install: Any) -> None:
    driver = RecordingDriver()
    install(driver)
    memory = DeviceMemory(7, SIZE, torch.device("cuda:0"))
    driver.calls.clear()
    driver.fails = "cuMemAddressFree"
    with pytest.raises(MappingFailed, match="CUDA_ERROR_INVALID_DEVICE"):
        memory.unmap()
    driver.fails = ""
    memory.unmap()
    assert driver.names() == ["cuMemUnmap", "cuMemAddressFree", "cuMemAddressFree"]


@pytest.mark.parametrize("step", range(len(STEPS)))
def test_what_was_done_before_a_failure_is_undone(install: Any, step: int) -> None:
    driver = RecordingDriver(fails=STEPS[step])
    install(driver)
    with pytest.raises(MappingFailed, match=f"{STEPS[step]} failed with CUDA_ERROR_INVALID_DEVICE"):
        DeviceMemory(7, SIZE, torch.device("cuda:0"))
    undone = [[], ["cuMemRelease"], ["cuMemAddressFree", "cuMemRelease"]][min(step, 2)]
    if step == 3:
        undone = ["cuMemUnmap", *undone]
    names = driver.names()
    assert names[names.index(STEPS[step]) + 1 :] == undone
    assert (driver.mode, driver.contexts) == ("global", [])


def test_the_primary_context_is_retained_once(install: Any) -> None:
    driver = RecordingDriver()
    install(driver)
    for _ in range(3):
        DeviceMemory(7, SIZE, torch.device("cuda:0")).unmap()
    assert driver.names().count("cuDevicePrimaryCtxRetain") == 1
    assert "cuDevicePrimaryCtxRelease" not in driver.names()


def test_without_the_package_or_the_driver_the_reason_is_given(
    install: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NoLibrary(RecordingDriver):
        def cuInit(self, flags: int) -> None:
            raise RuntimeError("Failed to dlopen libcuda.so.1")

    install(NoLibrary())
    with pytest.raises(MappingFailed, match=r"cuInit cannot be called: Failed to dlopen libcuda.so.1"):
        DeviceMemory(7, SIZE, torch.device("cuda:0"))
    device_memory.load_driver.cache_clear()
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(MissingDependency, match="needs the package cuda-bindings"):
        DeviceMemory(7, SIZE, torch.device("cuda:0"))


@pytest.fixture
def copying(install: Any, monkeypatch: pytest.MonkeyPatch) -> CopyingDriver:
    """A driver that copies to address 0x1000, and torch without a GPU."""
    driver = CopyingDriver()
    install(driver)
    rows = SimpleNamespace(data_ptr=lambda: 0x1000, record_stream=lambda stream: None)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: rows)
    monkeypatch.setattr(torch.cuda, "Stream", CopyStream)
    monkeypatch.setattr(CopyStream, "made", [])
    monkeypatch.setattr(torch.cuda, "Event", CopyEvent)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "current_stream", CopyStream)
    return driver


def test_a_copy_is_complete_on_return(copying: CopyingDriver) -> None:
    memory = DeviceMemory(7, SIZE, torch.device("cuda:0"))
    memory.copy(512, 256)
    (*copied, stream) = dict(copying.calls)["cuMemcpyDtoDAsync"]
    assert (copied, stream) == ([0x1000, 0x7000_0000 + 512, 256], CopyStream.made[0])
    assert CopyStream.made[0].num_running == 0, "the slot may be reused, and the copy still reads it"
    assert (copying.mode, copying.contexts) == ("global", [])


@pytest.mark.parametrize("fails", ["record", "synchronize", "cuMemcpyDtoDAsync"])
def test_a_copy_that_fails_or_is_interrupted_has_ended_when_the_error_is_raised(
    copying: CopyingDriver, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """The driver's error may be of earlier work on the device."""
    memory = DeviceMemory(7, SIZE, torch.device("cuda:0"))
    monkeypatch.setattr(torch.cuda, "Event", lambda: CopyEvent(fails))
    copying.fails = fails
    with pytest.raises((KeyboardInterrupt, MappingFailed)):
        memory.copy(0, 256)
    assert "cuMemcpyDtoDAsync" in copying.names()
    assert CopyStream.made[0].num_running == 0, "the copy writes to memory that the allocator reuses"
