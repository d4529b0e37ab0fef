"""Power and clocks: the management library's calls, and what a block of time is summed up to."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from power import ManagedDevice, NoPowerReading, PowerSampler, managed_device, sustained


class Library:
    """A management library that answers what it is told. missing: names that it lacks; failing: names that
    answer an error."""

    def __init__(self, *, missing: tuple[str, ...] = (), failing: tuple[str, ...] = ()) -> None:
        self.energies_mj = iter(range(1_000_000, 10**9, 350_000))
        self.missing = missing
        self.failing = failing
        self.uuid: bytes | None = None

    def __getattr__(self, name: str) -> Any:
        if name in self.missing or not name.startswith("nvml"):
            raise AttributeError(name)
        return lambda *arguments: 3 if name in self.failing else self.answer(name, *arguments)

    def answer(self, name: str, *arguments: Any) -> int:
        if name == "nvmlDeviceGetHandleByUUID":
            self.uuid = arguments[0]
            return 0
        if name == "nvmlInit_v2":
            return 0
        if name == "nvmlDeviceGetClockInfo":
            assert arguments[1] == 1
        arguments[-1]._obj.value = {
            "nvmlDeviceGetClockInfo": lambda: 1755,
            "nvmlDeviceGetPowerUsage": lambda: 690_500,
            "nvmlDeviceGetEnforcedPowerLimit": lambda: 700_000,
            "nvmlDeviceGetTotalEnergyConsumption": lambda: next(self.energies_mj),
            "nvmlDeviceGetCurrentClocksThrottleReasons": lambda: 0x4 | 0x20,
        }[name]()
        return 0


class Clock:
    """Half a second later each time."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.5
        return self.now


def test_readings_come_in_watts_and_megahertz_of_the_device_asked_for() -> None:
    library = Library()
    device = ManagedDevice("12-34", library)
    assert library.uuid == b"GPU-12-34"
    assert (device.sm_clock_mhz(), device.power_w(), device.power_limit_w()) == (1755, 690.5, 700.0)
    assert device.energy_j() == 1000.0


@pytest.mark.parametrize("library", [Library(failing=("nvmlInit_v2",)), Library(missing=("nvmlInit_v2",))])
def test_a_library_that_fails_says_which_call_did(library: Library) -> None:
    with pytest.raises(NoPowerReading, match="nvmlInit_v2"):
        ManagedDevice("x", library)


def sampled(library: Library) -> dict[str, Any]:
    with PowerSampler(ManagedDevice("x", library), clock=Clock(), period_s=60) as sampler:
        pass
    return sampler.summary()


def test_power_is_energy_over_time() -> None:
    found = sampled(Library())
    assert found["power_w"] == pytest.approx(350 / 0.5)
    assert found["power_is_from"] == "energy counter"
    assert found["sm_clock_mhz"] == 1755
    assert found["num_samples"] == 1
    assert found["throttled_share"] == {
        "power_limit": 1,
        "hardware_slowdown": 0,
        "software_thermal": 1,
        "hardware_thermal": 0,
        "power_brake": 0,
    }


def test_without_an_energy_counter_power_is_the_samples_mean() -> None:
    found = sampled(Library(missing=("nvmlDeviceGetTotalEnergyConsumption",)))
    assert (found["power_w"], found["power_is_from"]) == (690.5, "samples")


def test_counters_that_are_missing_leave_none() -> None:
    found = sampled(
        Library(
            failing=(
                "nvmlDeviceGetTotalEnergyConsumption",
                "nvmlDeviceGetPowerUsage",
                "nvmlDeviceGetClockInfo",
                "nvmlDeviceGetCurrentClocksThrottleReasons",
            )
        )
    )
    assert found["power_w"] is None
    assert found["sm_clock_mhz"] is None
    assert found["throttled_share"] is None


def test_the_sampling_thread_ends_with_the_block() -> None:
    before = threading.active_count()
    sampled(Library())
    assert threading.active_count() == before


def test_no_gpu_is_a_reason() -> None:
    with pytest.raises(NoPowerReading, match="cpu is no GPU"):
        managed_device(torch.device("cpu"))


def test_a_sustained_run_counts_its_runs_and_carries_what_was_drawn() -> None:
    calls: list[int] = []
    found = sustained(
        lambda: calls.append(1),
        torch.device("cpu"),
        ManagedDevice("x", Library()),
        settle_s=0.0,
        measure_s=0.01,
    )
    assert found["num_runs"] == len(calls) - 1  # one run settles
    assert found["sustained_ms"] > 0
    assert found["sm_clock_mhz"] == 1755
