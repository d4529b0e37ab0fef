"""Mapping device memory, against a driver that records its calls: order, access, and undoing what failed."""

from __future__ import annotations

import enum
import gc
import sys
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from lm_adapter.transport import borrowed, mapping, unmapping
from lm_adapter.transport.mapping import MappingFailed, map_device
from lm_adapter.transport.unmapping import Unmapping

from encoder_service.errors import ConfigurationError
from encoder_service.store import cuda_memory
from lm_adapter.errors import MissingDependency
from tests.unit.transport.broker_rig import wait_until

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


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts a driver where cuda-bindings would be; tensors over its addresses are stand-ins."""
    mapping._primary_context.cache_clear()

    def put(driver: object) -> None:
        package, bindings = ModuleType("cuda"), ModuleType("cuda.bindings")
        bindings.driver = driver  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "cuda", package)
        monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
        monkeypatch.setattr(
            mapping, "borrow", lambda address, num_bytes, device, owner: SimpleNamespace(owner=owner)
        )

    yield put
    mapping._primary_context.cache_clear()


def test_device_memory_is_mapped_for_reading_by_its_own_device(install: Any) -> None:
    driver = RecordingDriver()
    install(driver)
    mapped = map_device(7, SIZE, torch.device("cuda:1"))
    assert (mapped.device, mapped.size_bytes, mapped.mapped) == (torch.device("cuda:1"), SIZE, True)
    calls = dict(driver.calls)
    assert calls["cuMemImportFromShareableHandle"] == (7, "posix")
    (access,) = calls["cuMemSetAccess"][2]
    assert (access.flags, access.location.id, access.location.type) == ("read", 1, "device")
    assert driver.names()[-5:] == [*STEPS, "cuMemRelease"], "the handle goes, the mapping keeps the memory"
    assert (driver.mode, driver.contexts) == ("global", [])
    driver.calls.clear()
    mapped.close()
    gc.collect()
    assert not mapped.mapped
    # The device is not waited for: that fails, and may spoil the graph, while any of its streams captures.
    assert driver.names() == ["cuMemUnmap", "cuMemAddressFree"]


def test_a_view_keeps_device_memory_mapped(install: Any) -> None:
    driver = RecordingDriver()
    install(driver)
    mapped = map_device(7, SIZE, torch.device("cuda:0"))
    view = mapped.tensor
    mapped.close()
    gc.collect()
    assert mapped.mapped
    driver.calls.clear()
    del view
    gc.collect()
    assert not mapped.mapped
    assert driver.names() == ["cuCtxSynchronize", "cuMemUnmap", "cuMemAddressFree"]


class Copy:
    """The event of a copy. fails: how often waiting for it does."""

    def __init__(self, log: list[str], fails: int = 0) -> None:
        self.log, self.fails = log, fails

    def synchronize(self) -> None:
        self.fails -= 1
        self.log.append("refused" if self.fails >= 0 else "waited")
        if self.fails >= 0:
            raise RuntimeError("operation not permitted when stream is capturing")


def test_copies_that_were_given_up_are_waited_for_before_the_memory_goes(install: Any) -> None:
    driver, log = RecordingDriver(), []
    install(driver)
    mapped = map_device(7, SIZE, torch.device("cuda:0"))
    mapped.wait_for(Copy(log))
    mapped.wait_for(Copy(log))
    driver.calls.clear()
    mapped.close()
    gc.collect()
    assert log == ["waited", "waited"]
    assert driver.names() == ["cuMemUnmap", "cuMemAddressFree"]
    assert not mapped.mapped


def test_an_end_that_the_driver_refuses_is_tried_again(install: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    try_again = unmapping._try_again

    def at_once() -> None:
        def pause(pause_s: float) -> None:
            pauses.append(pause_s)
            if len(pauses) == 3:
                driver.fails = ""

        try_again(pause)

    monkeypatch.setattr(unmapping, "_try_again", at_once)
    driver, log = RecordingDriver(), []
    install(driver)
    mapped = map_device(7, SIZE, torch.device("cuda:0"))
    mapped.wait_for(Copy(log, fails=2))
    mapped.wait_for(None)
    driver.fails = "cuCtxSynchronize"
    driver.calls.clear()
    mapped.close()
    gc.collect()
    wait_until(lambda: not mapped.mapped)
    assert log == ["refused", "refused", "waited"]
    assert driver.names() == ["cuCtxSynchronize", "cuCtxSynchronize", "cuMemUnmap", "cuMemAddressFree"]
    assert pauses == [1.0, 2.0, 4.0]
    wait_until(lambda: not unmapping._trying.locked())
    assert unmapping.num_waiting() == 0


def test_an_end_that_is_refused_for_good_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    def refuse() -> None:
        raise MappingFailed("cuCtxSynchronize failed with CUDA_ERROR_ILLEGAL_ADDRESS")

    ending = Unmapping(lambda: None, (refuse,))
    unmapping._waiting.append(ending)
    unmapping._trying.acquire()
    try:
        unmapping._try_again(pauses.append)
    finally:
        unmapping._waiting.clear()
    assert len(pauses) == unmapping.MAX_ATTEMPTS
    assert max(pauses) == unmapping.MAX_PAUSE_S
    assert not ending.done
    assert not unmapping._trying.locked()


@pytest.mark.parametrize("step", range(len(STEPS)))
def test_what_was_done_before_a_failure_is_undone(install: Any, step: int) -> None:
    driver = RecordingDriver(fails=STEPS[step])
    install(driver)
    with pytest.raises(MappingFailed, match=f"{STEPS[step]} failed with CUDA_ERROR_INVALID_DEVICE"):
        map_device(7, SIZE, torch.device("cuda:0"))
    undone = [[], ["cuMemRelease"], ["cuMemAddressFree", "cuMemRelease"]][min(step, 2)]
    if step == 3:
        undone = ["cuMemUnmap", *undone]
    names = driver.names()
    after = names[names.index(STEPS[step]) + 1 :]
    assert sorted(after) == sorted(undone)
    if step == 3:
        assert after.index("cuMemUnmap") < after.index("cuMemAddressFree")
    assert (driver.mode, driver.contexts) == ("global", [])


def test_the_primary_context_is_retained_once(install: Any) -> None:
    driver = RecordingDriver()
    install(driver)
    for _ in range(3):
        map_device(7, SIZE, torch.device("cuda:0")).close()
    gc.collect()
    assert driver.names().count("cuDevicePrimaryCtxRetain") == 1
    assert "cuDevicePrimaryCtxRelease" not in driver.names()


def test_without_the_package_or_the_driver_the_reason_is_told(
    install: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NoLibrary(RecordingDriver):
        def cuInit(self, flags: int) -> None:
            raise RuntimeError("Failed to dlopen libcuda.so.1")

    install(NoLibrary())
    with pytest.raises(MappingFailed, match=r"cuInit cannot be called: Failed to dlopen libcuda.so.1"):
        map_device(7, SIZE, torch.device("cuda:0"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(MissingDependency, match="needs the package cuda-bindings"):
        map_device(7, SIZE, torch.device("cuda:0"))
    with pytest.raises(ConfigurationError, match="need the package cuda-bindings"):
        cuda_memory.load_driver()


@pytest.mark.parametrize("step", range(4))
def test_the_exporter_undoes_what_was_done_before_a_failure(
    install: Any, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    steps = ["cuMemCreate", *STEPS[1:]]
    driver = RecordingDriver(fails=steps[step])
    install(driver)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (123, 456))
    with pytest.raises(ConfigurationError, match=f"{steps[step]} failed with CUDA_ERROR_INVALID_DEVICE"):
        cuda_memory._DeviceBytes(driver, 0, SIZE, SimpleNamespace())
    undone = ["cuMemUnmap", "cuMemAddressFree", "cuMemRelease"][3 - step :]
    assert driver.names() == [*steps[: step + 1], *undone]


def test_a_borrowed_tensor_keeps_its_owner_and_nothing_else() -> None:
    class Owner:
        pass

    memory = torch.arange(64, dtype=torch.uint8)
    owner = Owner()
    with torch.inference_mode():
        tensor = borrowed.borrow(memory.data_ptr(), 64, memory.device, owner)
    assert not tensor.is_inference()
    assert torch.equal(tensor, memory)
    assert tensor.data_ptr() == memory.data_ptr()
    rows = tensor[16:32].view(torch.float32).view(2, 2)
    before = len(gc.get_referrers(owner))
    assert before > 0
    assert len(borrowed._lent) == 1
    del tensor
    gc.collect()
    assert len(borrowed._lent) == 1, "a view of it is alive"
    del rows
    gc.collect()
    assert len(borrowed._lent) == 0
