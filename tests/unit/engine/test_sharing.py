"""A GPU that two processes share without MPS is named in the log, also from inside a pod, once."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from encoder_service.engine import sharing
from encoder_service.engine.sharing import PIPE_DIRECTORY, SharedGpu

GIB = 1 << 30
DEVICE = torch.device("cuda:1")
# The signatures of cuda.h.
DEVICE_GET = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int), ctypes.c_int)
GET_ATTRIBUTE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int), ctypes.c_int, ctypes.c_int)


class Gpu:
    """GiB in use: this process's, of which torch has 3 and the arenas 2, and another one's."""

    def __init__(self) -> None:
        self.own, self.others = 6.5, 0.0

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        assert device == DEVICE
        return int((80 - self.own - self.others) * GIB), 80 * GIB

    def checked(self, run: Callable[[SharedGpu], object]) -> list[str]:
        with capture_logs() as logs:
            run(SharedGpu(DEVICE, 2 * GIB))
        return [f"{entry['log_level']}: {entry['event']}" for entry in logs]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """By default without MPS."""
    found = Gpu()
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", found.mem_get_info)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 3 * GIB)
    monkeypatch.delenv(PIPE_DIRECTORY, raising=False)
    use_driver(monkeypatch)
    return found


def use_driver(monkeypatch: pytest.MonkeyPatch, *, has_mps: bool = False, status: int = 0) -> None:
    """A stand-in for the driver's library. Device 1 has the handle 7; attribute 133 is MPS_ENABLED."""

    def get(device: Any, ordinal: int) -> int:
        device[0] = ordinal + 6
        return 0

    def get_attribute(value: Any, attribute: int, device: int) -> int:
        assert (attribute, device) == (133, 7)
        value[0] = has_mps
        return status

    driver = SimpleNamespace(cuDeviceGet=DEVICE_GET(get), cuDeviceGetAttribute=GET_ATTRIBUTE(get_attribute))
    monkeypatch.setattr("ctypes.CDLL", lambda name: {"libcuda.so.1": driver}[name])


TURNS = "warning: another process uses this GPU, and the two take turns"


def test_alone_nothing_is_said(gpu: Gpu) -> None:
    assert gpu.checked(SharedGpu.start) == []


def test_another_process_is_named_by_its_memory_and_the_remedy(gpu: Gpu) -> None:
    gpu.others = 60.0
    shared = SharedGpu(DEVICE, 2 * GIB)
    with capture_logs() as logs:
        shared.start()
        shared.check()
    (entry,) = logs
    assert (entry["others_gib"], entry["device"]) == (61.5, "cuda:1")
    document, heading = entry["remedy"].split(": ")[-1].split(", ")
    assert f"\n### {heading}\n" in Path(document).read_text()


def test_one_that_starts_later_is_named_then(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "CHECK_S", 0.0)
    num_checks = 0

    def mem_get_info(device: torch.device) -> tuple[int, int]:
        nonlocal num_checks
        num_checks += 1
        gpu.others = 60.0 if num_checks == 3 else 0.0
        return gpu.mem_get_info(device)

    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
    assert gpu.checked(lambda shared: asyncio.run(asyncio.wait_for(shared.watch(), 30))) == [TURNS]
    assert num_checks == 3


def test_a_device_fault_ends_the_watch_silently(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Any) -> None:
        raise torch.AcceleratorError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(torch.cuda, "mem_get_info", fail)
    assert gpu.checked(lambda shared: asyncio.run(shared.watch())) == []


def test_under_mps_others_are_welcome(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    use_driver(monkeypatch, has_mps=True)
    monkeypatch.setenv(PIPE_DIRECTORY, "/mps")
    gpu.others = 60.0
    assert gpu.checked(SharedGpu.start) == ["info: the GPU is used through MPS"]


def test_a_daemon_that_is_named_and_not_used_is_said(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA itself falls back to taking turns without a word."""
    monkeypatch.setenv(PIPE_DIRECTORY, "/mps")
    expected = ["warning: MPS is not used although the environment names its daemon"]
    assert gpu.checked(SharedGpu.start) == expected
    gpu.others = 60.0
    assert gpu.checked(SharedGpu.start) == [*expected, TURNS]


def test_with_an_older_driver_the_daemon_s_pipe_counts(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    use_driver(monkeypatch, has_mps=True, status=1)
    monkeypatch.setenv(PIPE_DIRECTORY, str(tmp_path))
    gpu.others = 60.0
    assert TURNS in gpu.checked(SharedGpu.start)
    (tmp_path / "control").touch()
    assert TURNS not in gpu.checked(SharedGpu.start)
