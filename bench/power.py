"""Power and clocks of a GPU while something runs on it, through the driver's management library (NVML).

Owns the sampling thread and what is said of a span of time. Where the library or the counter is missing the
figures are None, and ``reason`` says why: a claim about a power limit needs a file that shows it.

Source of names and numbers: nvml.h (NVML_CLOCK_SM, nvmlClocksEventReason*).
"""

from __future__ import annotations

import ctypes
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from measurement import synchronise

LIBRARY = "libnvidia-ml.so.1"
CLOCK_SM = 1
# What holds the clocks down, by bit.
THROTTLE_BITS = {
    "power_limit": 0x4,
    "hardware_slowdown": 0x8,
    "software_thermal": 0x20,
    "hardware_thermal": 0x40,
    "power_brake": 0x80,
}
PERIOD_S = 0.02
# Graph replays are queued far faster than they run: at most this many are under way.
IN_FLIGHT = 4


class NoPowerReading(Exception):
    """The management library, or the device in it, cannot be read here."""


class ManagedDevice:
    """One GPU as the management library sees it."""

    def __init__(self, uuid: str, library: Any = None) -> None:
        """uuid: as torch gives it, without the prefix. Raises NoPowerReading."""
        try:
            self._library = library or ctypes.CDLL(LIBRARY)
        except OSError as error:
            raise NoPowerReading(f"{LIBRARY} cannot be loaded: {error}") from error
        self._call("nvmlInit_v2")
        self._handle = ctypes.c_void_p()
        self._call("nvmlDeviceGetHandleByUUID", f"GPU-{uuid}".encode(), ctypes.byref(self._handle))

    def sm_clock_mhz(self) -> int:
        return self._read("nvmlDeviceGetClockInfo", ctypes.c_uint, CLOCK_SM)

    def power_w(self) -> float:
        """The driver's own average, over about a second on recent parts."""
        return self._read("nvmlDeviceGetPowerUsage", ctypes.c_uint) / 1e3

    def power_limit_w(self) -> float:
        return self._read("nvmlDeviceGetEnforcedPowerLimit", ctypes.c_uint) / 1e3

    def energy_j(self) -> float:
        """Since the driver was loaded."""
        return self._read("nvmlDeviceGetTotalEnergyConsumption", ctypes.c_ulonglong) / 1e3

    def throttle_reasons(self) -> int:
        return self._read("nvmlDeviceGetCurrentClocksThrottleReasons", ctypes.c_ulonglong)

    def _read(self, name: str, kind: Any, *arguments: int) -> int:
        value = kind()
        self._call(name, self._handle, *arguments, ctypes.byref(value))
        return int(value.value)

    def _call(self, name: str, *arguments: Any) -> None:
        function = getattr(self._library, name, None)
        code = -1 if function is None else function(*arguments)
        if code:
            raise NoPowerReading(f"{name} answers {code}" if function else f"{LIBRARY} has no {name}")


def managed_device(device: torch.device) -> ManagedDevice:
    """The management library's view of a torch device. Raises NoPowerReading."""
    if device.type != "cuda":
        raise NoPowerReading(f"{device} is no GPU")
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    if uuid is None:
        raise NoPowerReading(f"torch {torch.__version__} gives no device UUID")
    return ManagedDevice(str(uuid))


@dataclass
class PowerSampler:
    """Samples a device from a thread for as long as its block runs."""

    device: ManagedDevice
    clock: Callable[[], float] = time.perf_counter
    period_s: float = PERIOD_S
    clocks_mhz: list[int] = field(default_factory=list)
    powers_w: list[float] = field(default_factory=list)
    reasons: list[int] = field(default_factory=list)

    def __enter__(self) -> PowerSampler:
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="power", daemon=True)
        self._begun_s, self._begun_j = self.clock(), self._energy()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        self._spent_s = self.clock() - self._begun_s
        ended_j = self._energy()
        has_counter = ended_j is not None and self._begun_j is not None
        self._spent_j = ended_j - self._begun_j if has_counter else None  # type: ignore[operator]

    def summary(self) -> dict[str, Any]:
        """Of the block that ended. power_w: from the energy counter, else the mean of the samples."""
        power_w = self._spent_j / self._spent_s if self._spent_j else None
        if power_w is None and self.powers_w:
            power_w = statistics.fmean(self.powers_w)
        return {
            "power_w": power_w,
            "power_is_from": "energy counter" if self._spent_j else "samples",
            "max_sampled_power_w": max(self.powers_w, default=None),
            "sm_clock_mhz": statistics.fmean(self.clocks_mhz) if self.clocks_mhz else None,
            "min_sm_clock_mhz": min(self.clocks_mhz, default=None),
            "num_samples": len(self.clocks_mhz),
            "throttled_share": {
                name: sum(bool(reason & bit) for reason in self.reasons) / len(self.reasons)
                for name, bit in THROTTLE_BITS.items()
            }
            if self.reasons
            else None,
        }

    def _sample(self) -> None:
        while True:
            for values, read in (
                (self.clocks_mhz, self.device.sm_clock_mhz),
                (self.powers_w, self.device.power_w),
                (self.reasons, self.device.throttle_reasons),
            ):
                with suppress(NoPowerReading):  # a counter that this part does not have
                    values.append(read())  # type: ignore[attr-defined]
            if self._ended.wait(self.period_s):
                return

    def _energy(self) -> float | None:
        try:
            return self.device.energy_j()
        except NoPowerReading:
            return None


def sustained(
    run: Callable[[], object],
    device: torch.device,
    managed: ManagedDevice | None,
    *,
    settle_s: float,
    measure_s: float,
) -> dict[str, Any]:
    """One variant alone, back to back: milliseconds a run once the clocks have settled, and what the device
    drew meanwhile."""
    keep_running(run, device, settle_s)
    if managed is None:
        num_runs, spent_s = keep_running(run, device, measure_s)
        return {"sustained_ms": spent_s * 1e3 / num_runs, "num_runs": num_runs}
    with PowerSampler(managed) as sampler:
        num_runs, spent_s = keep_running(run, device, measure_s)
    return {"sustained_ms": spent_s * 1e3 / num_runs, "num_runs": num_runs} | sampler.summary()


def keep_running(run: Callable[[], object], device: torch.device, seconds: float) -> tuple[int, float]:
    """Runs for about so many seconds, at least once; how often, and how long it took."""
    synchronise(device)
    begun = time.perf_counter()
    num_runs = 0
    pending: deque[torch.cuda.Event] = deque()
    while not num_runs or time.perf_counter() - begun < seconds:
        run()
        num_runs += 1
        if device.type == "cuda":
            pending.append(torch.cuda.Event())
            pending[-1].record()
            if len(pending) > IN_FLIGHT:
                pending.popleft().synchronize()
    synchronise(device)
    return num_runs, time.perf_counter() - begun
