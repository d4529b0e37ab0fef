"""The callers of a fleet, from the side of the one who starts them, and what they measured.

Owns their processes, the count of their calls while they run, and the figures of a run: failures, hits,
percentiles over time, how long they took to recover.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from bench.harness.fleet.caller_main import FAILED, MISS, WRONG
from bench.harness.pods import environment
from bench.harness.processes import ROOT
from bench.harness.waiting import wait_until

STOP_S = 90.0
PATIENCE_S = 600.0
WINDOW_S, STEP_S = 0.5, 0.1
RECOVERED_FACTOR = 2.0
QUIET_S = 3.0


@dataclass(frozen=True)
class Mark:
    """When something was done to the fleet, by the monotonic clock."""

    name: str
    at_s: float


@dataclass(frozen=True)
class Measured:
    """All calls of a run, in the order of their start. failures: texts."""

    started_s: npt.NDArray[np.float64]
    took_s: npt.NDArray[np.float64]
    state: npt.NDArray[np.uint8]
    image: npt.NDArray[np.int32]
    failures: Sequence[str]
    marks: Sequence[Mark]

    @property
    def num_calls(self) -> int:
        return len(self.state)

    def count(self, state: int) -> int:
        return int((self.state == state).sum())

    @property
    def num_failed(self) -> int:
        """Without rows, or with wrong ones."""
        return self.count(FAILED) + self.count(WRONG)

    @property
    def hit_share(self) -> float:
        return 1.0 - self.count(MISS) / max(1, self.num_calls)

    def between(self, start_s: float, end_s: float) -> npt.NDArray[np.float64]:
        """Durations of the calls that started then."""
        is_within = (self.started_s >= start_s) & (self.started_s < end_s)
        found: npt.NDArray[np.float64] = self.took_s[is_within]
        return found

    def ended_s(self) -> npt.NDArray[np.float64]:
        found: npt.NDArray[np.float64] = self.started_s + self.took_s
        return found

    def p99_s(self, start_s: float, end_s: float) -> float:
        """Of the calls that were under way then. 0 without any."""
        is_under_way = (self.started_s < end_s) & (self.ended_s() > start_s)
        durations = self.took_s[is_under_way]
        return float(np.percentile(durations, 99)) if len(durations) else 0.0

    def longest_s(self) -> float:
        """The longest call that was under way at the first mark or began after it."""
        return float(self.took_s[self.ended_s() >= self.marks[0].at_s].max())

    def steady_percentile_s(self, percentile: float) -> float:
        """Before the first mark."""
        durations = self.between(-np.inf, self.marks[0].at_s if self.marks else np.inf)
        return float(np.percentile(durations, percentile))

    def failed_started_s(self) -> npt.NDArray[np.float64]:
        """When the calls started that failed."""
        found: npt.NDArray[np.float64] = self.started_s[(self.state == FAILED) | (self.state == WRONG)]
        return found

    def recovery_s(self, mark: Mark, margin_s: float) -> float:
        """From the mark to the end of the last tenth of a second at which a half second begins whose p99 is
        above twice the steady one and more than ``margin_s`` above it. Looks no further than the next mark,
        and QUIET_S without such a half second: what comes later has another cause."""
        steady_s = self.steady_percentile_s(99)
        bound_s = max(RECOVERED_FACTOR * steady_s, steady_s + margin_s)
        later = [one.at_s for one in self.marks if one.at_s > mark.at_s]
        ends_s = min(later, default=float(self.ended_s().max()))
        recovered_s = 0.0
        for start_s in np.arange(mark.at_s, ends_s, STEP_S):
            if self.p99_s(start_s, start_s + WINDOW_S) > bound_s:
                recovered_s = start_s + STEP_S - mark.at_s
            elif start_s - mark.at_s >= recovered_s + QUIET_S:
                break
        return float(recovered_s)


@dataclass
class Caller:
    """One process of callers."""

    process: subprocess.Popen[str]
    num_calls: int = 0
    stopped: threading.Event = field(default_factory=threading.Event)


class Callers:
    """Processes that stay for several runs; a context manager."""

    def __init__(self, folder: Path, *, num_processes: int) -> None:
        self._folder = folder
        self._num_runs = 0
        self._callers = []
        for number in range(num_processes):
            with (folder / f"caller-{number}.log").open("ab") as errors:
                process = subprocess.Popen(
                    [sys.executable, "-m", "bench.harness.fleet.caller_main"],
                    cwd=ROOT,
                    env=environment(""),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                )
            self._callers.append(Caller(process))
        self._readers = [threading.Thread(target=read, args=(one,), daemon=True) for one in self._callers]
        for reader in self._readers:
            reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for caller, reader in zip(self._callers, self._readers, strict=True):
            assert caller.process.stdin is not None
            assert caller.process.stdout is not None
            caller.process.stdin.close()
            try:
                caller.process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                caller.process.kill()
                caller.process.wait()
            reader.join()
            caller.process.stdout.close()

    def run(self, **command: Any) -> Run:
        """Starts to send. The arguments are those of ``caller_main.run``."""
        self._num_runs += 1
        for number, caller in enumerate(self._callers):
            caller.num_calls = 0
            caller.stopped.clear()
            write_line(caller, command | {"seed": self._num_runs * 1000 + number})
        return Run(self._callers, self._folder / f"run-{self._num_runs}")


class Run:
    """Calls that are being sent; a context manager that stops them."""

    def __init__(self, callers: Sequence[Caller], out: Path) -> None:
        self._callers = callers
        self._out = out
        self._marks: list[Mark] = []
        self._measured: Measured | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._measured is None:
            self.stop()

    @property
    def num_calls(self) -> int:
        return sum(caller.num_calls for caller in self._callers)

    def wait_calls(self, number: int) -> None:
        """Until there are so many of this run."""
        self._wait(lambda: self.num_calls >= number, f"{number} calls")

    def wait_more(self, number: int, at_least_s: float = 0.0) -> None:
        """Until so many calls, and so much time, have passed from now."""
        target, ends_s = self.num_calls + number, time.monotonic() + at_least_s
        self._wait(lambda: self.num_calls >= target and time.monotonic() >= ends_s, f"{number} more calls")

    def _wait(self, condition: Any, what: str) -> None:
        wait_until(
            lambda: condition() or any(one.process.poll() is not None for one in self._callers),
            what,
            PATIENCE_S,
        )
        assert all(one.process.poll() is None for one in self._callers), "a caller has ended"

    def mark(self, name: str) -> Mark:
        self._marks.append(Mark(name, time.monotonic()))
        return self._marks[-1]

    def stop(self) -> Measured:
        """Waits for the calls that are under way."""
        if self._measured is None:
            paths = [self._out.with_suffix(f".{number}.npz") for number in range(len(self._callers))]
            for caller, path in zip(self._callers, paths, strict=True):
                write_line(caller, {"out": str(path)})
            for caller in self._callers:
                assert caller.stopped.wait(STOP_S), "a caller did not stop"
                assert caller.process.poll() is None, "a caller has ended"
            self._measured = joined(paths, self._marks)
        return self._measured


def read(caller: Caller) -> None:
    """On a thread of its own: what a caller says."""
    assert caller.process.stdout is not None
    for line in caller.process.stdout:
        message = json.loads(line)
        caller.num_calls = message["calls"]
        if message.get("stopped"):
            caller.stopped.set()
    caller.stopped.set()


def write_line(caller: Caller, message: dict[str, Any]) -> None:
    assert caller.process.stdin is not None
    caller.process.stdin.write(json.dumps(message) + "\n")
    caller.process.stdin.flush()


def joined(paths: Sequence[Path], marks: Sequence[Mark]) -> Measured:
    parts = []
    for path in paths:
        with np.load(path) as file:
            parts.append({name: file[name] for name in file.files})
    columns = {name: np.concatenate([one[name] for one in parts]) for name in parts[0]}
    order = np.argsort(columns["started_s"], kind="stable")
    failures = [str(text) for text in columns.pop("failures")]
    return Measured(
        **{name: column[order] for name, column in columns.items()}, failures=failures, marks=list(marks)
    )
