"""Child processes of the transport and serving benches.

Owns modules that run as pods with one visible GPU or none and take commands, and the service as users start
it, with its metrics and CPU times.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from bench.harness.counted_service import turns_in
from bench.harness.pods import ANSWER_S, Pod, environment
from bench.harness.ready import ready_in

# As in the service's images (deploy/docker): freed message buffers stay mapped and are reused.
IMAGE_MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": "1073741824",
    "MALLOC_TRIM_THRESHOLD_": "4294967296",
    "MALLOC_TOP_PAD_": "268435456",
}
START_S = 60.0
STOP_S = 30.0
SCRAPE_S = 5.0
CLOCK_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class ProcessFailed(Exception):
    """A process of the bench failed to execute a command, or has ended."""


def visible_gpu(index: int | None) -> str:
    """The CUDA_VISIBLE_DEVICES value that exposes only this process's index-th GPU; None: no GPU."""
    if index is None:
        return ""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",")[index] if visible else str(index)


class Child(Pod):
    """A module that runs as a process; a context manager. Its standard error is this one's."""

    def __init__(self, module: str, role: str, *, gpu: int | None = None) -> None:
        """role: the module's argument. gpu: index of the only GPU that it sees, as numbered in this process;
        None: no GPU."""
        self._name = f"{module} {role}"
        super().__init__(visible_gpu(gpu), module, role, **IMAGE_MALLOC)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def send(self, do: str, **command: object) -> None:
        """Sends a command without waiting for its reply. Raises ProcessFailed."""
        try:
            super().send(do, **command)
        except OSError as error:
            raise ProcessFailed(f"{self._name} has ended") from error

    def answer(self, timeout_s: float = ANSWER_S) -> dict[str, Any]:
        """The reply to the last command. Raises ProcessFailed. A process that does not reply in time is
        killed, because its late reply would be mistaken for the reply to another command."""
        try:
            reply: dict[str, Any] = json.loads(self.line(timeout_s))
        except AssertionError as error:
            self.kill()
            raise ProcessFailed(f"{self._name}: {error}") from error
        if "error" in reply:
            raise ProcessFailed(f"{self._name}: {reply['error']}")
        return reply


def serve_commands(handlers: Mapping[str, Callable[..., dict[str, Any] | None]]) -> None:
    """Executes commands in the child process until its standard input ends. An exception of a handler becomes
    the reply; its traceback goes to the log. Only replies go to the standard output."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        command = json.loads(line)
        try:
            reply = handlers[command.pop("do")](**command) or {}
        except Exception as error:
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


# -- the service as users start it -----------------------------------------------------------------------


@dataclass(frozen=True)
class Snapshot:
    """The service's state at one moment. counters: by metric name, with ``{label value}`` if it has a label;
    cpu_s: CPU time of all threads; loop_cpu_s: of the main thread, which runs the event loop; turns: of the
    event loop, if they are counted."""

    at_s: float
    counters: Mapping[str, float]
    cpu_s: float
    loop_cpu_s: float
    turns: int


class ServiceProcess:
    """``vision-encoder serve`` as a process; a context manager."""

    def __init__(
        self,
        settings: Mapping[str, Any],
        log: Path,
        *,
        gpu: int | None,
        start_s: float = START_S,
        counts_turns: bool = False,
    ) -> None:
        """settings: by name. log: a file for its output. start_s: the time limit until it is ready.
        counts_turns: of the event loop, by bench.harness.counted_service. Raises ProcessFailed."""
        variables = {f"VE_{name.upper()}": str(value) for name, value in settings.items()}
        inherited = environment(visible_gpu(gpu))
        if gpu is not None:
            del inherited["OMP_NUM_THREADS"]
        self._log, self._turns = log, log.with_suffix(".turns")
        program = ["bench.harness.counted_service", str(self._turns)] if counts_turns else ["encoder_service"]
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *program, "serve"],
                env={**inherited, **IMAGE_MALLOC, **variables},
                stdout=output,
                stderr=output,
            )
        begun_s = time.monotonic()
        try:
            self.target, self.admin = self._wait_ready(begun_s + start_s)
        except BaseException:
            self.close()
            raise
        self.start_s = time.monotonic() - begun_s

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def snapshot(self) -> Snapshot:
        cpu_s = thread_seconds(self._process.pid)
        with urllib.request.urlopen(f"http://{self.admin}/metrics", timeout=SCRAPE_S) as response:
            text = response.read().decode()
        loop_cpu_s = cpu_s.get(self._process.pid, 0.0)
        return Snapshot(
            time.monotonic(), counters_of(text), sum(cpu_s.values()), loop_cpu_s, turns_in(self._turns)
        )

    def close(self) -> int:
        """Sends SIGTERM, and SIGKILL if the process does not end. Returns its exit status. Can be
        repeated."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        return self._process.returncode

    def _wait_ready(self, ends_s: float) -> tuple[str, str]:
        while time.monotonic() < ends_s:
            has_ended = self._process.poll() is not None
            lines = self._log.read_text(errors="replace").splitlines(keepends=True)
            if ready := ready_in(lines):
                return ready["listen"], ready["admin"]
            if has_ended:
                raise ProcessFailed(lines[-1].strip() if lines else f"exit status {self._process.returncode}")
            time.sleep(0.1)
        raise ProcessFailed("the service was not ready in time")


def thread_seconds(pid: int) -> dict[int, float]:
    """CPU seconds of each thread of a process, by thread id. The main thread's id equals the process id."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has just ended
            fields = (task / "stat").read_text().rpartition(")")[2].split()
            found[int(task.name)] = (int(fields[11]) + int(fields[12])) / CLOCK_TICKS_PER_S
    return found


def counters_of(text: str) -> dict[str, float]:
    """Samples of a Prometheus exposition by name, with the first label's value in braces; sums over further
    labels. Histograms only give their sum and count."""
    from prometheus_client.parser import text_string_to_metric_families

    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if not sample.name.endswith(("_bucket", "_created")):
                label = next(iter(sample.labels.values()), None)
                name = sample.name if label is None else f"{sample.name}{{{label}}}"
                found[name] = found.get(name, 0.0) + sample.value
    return found
