"""The service of the serving bench, as users start it, and what can be seen of it from outside.

Owns its process, its metrics read over HTTP, and the cores that it keeps busy. ``main`` runs it under a
profiler of its event loop, for ``--profile``.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "proto")]

STOP_S = 30.0
SCRAPE_S = 5.0
TICKS = os.sysconf("SC_CLK_TCK")
SERVE = "encoder_service"
PROFILE_PATH = "SERVE_PROFILE_PATH"


class NotStarted(Exception):
    """The service did not become ready; the text is its own reason."""


@dataclass(frozen=True)
class Sight:
    """What the service says of itself at one moment. counters: by metric name, with ``{label}`` where it has
    one; cpu_s: of all its threads; loop_cpu_s: of the thread of its event loop."""

    at_s: float
    counters: Mapping[str, float]
    cpu_s: float
    loop_cpu_s: float


class ServiceProcess:
    """``vision-encoder serve`` as a process; a context manager. Raises NotStarted."""

    def __init__(
        self,
        settings: Mapping[str, Any],
        log: Path,
        *,
        environment: Mapping[str, str],
        start_s: float,
        profile: Path | None = None,
    ) -> None:
        """settings: by name, as the environment has them. log: what it says goes there. start_s: how long it
        may take to be ready."""
        named = {f"VE_{name.upper()}": str(value) for name, value in settings.items()}
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("VE_")}
        command = [sys.executable, "-m", SERVE, "serve"]
        if profile is not None:
            command = [sys.executable, __file__]
            named[PROFILE_PATH] = str(profile)
        self._log = log
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                command,
                env={
                    **inherited,
                    **environment,
                    **named,
                    "PYTHONPATH": os.pathsep.join(
                        [str(ROOT), str(ROOT / "proto"), os.environ.get("PYTHONPATH", "")]
                    ),
                },
                stdout=(log.with_suffix(".out")).open("wb"),
                stderr=errors,
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

    def sight(self) -> Sight:
        """Now. The scrape itself is part of what the service does."""
        cpu_s = thread_seconds(self._process.pid)
        with urllib.request.urlopen(f"http://{self.admin}/metrics", timeout=SCRAPE_S) as answer:
            text = answer.read().decode()
        loop_cpu_s = cpu_s.get(self._process.pid, 0.0)
        return Sight(time.monotonic(), counters_of(text), sum(cpu_s.values()), loop_cpu_s)

    def close(self) -> int:
        """Stops it gently, at first; its exit status. Twice is once."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        return self._process.returncode

    def _wait_ready(self, ends_s: float) -> tuple[str, str]:
        out = self._log.with_suffix(".out")
        while time.monotonic() < ends_s:
            found = re.search(r" at (\S+).*\(admin http://(\S+)\)", out.read_text(errors="replace"))
            if found is not None:
                return found[1], found[2]
            if self._process.poll() is not None:
                lines = self._log.read_text(errors="replace").strip().splitlines()
                raise NotStarted(lines[-1] if lines else f"exit status {self._process.returncode}")
            time.sleep(0.1)
        raise NotStarted("the service was not ready in time")


def thread_seconds(pid: int) -> dict[int, float]:
    """CPU seconds of each thread of a process, by thread id; the main thread has the process's."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # it has just ended
            fields = (task / "stat").read_text().rpartition(")")[2].split()
            found[int(task.name)] = (int(fields[11]) + int(fields[12])) / TICKS
    return found


def counters_of(text: str) -> dict[str, float]:
    """Samples of the exposition by name, with the first label's value in braces; histograms by their sum and
    count alone."""
    from prometheus_client.parser import text_string_to_metric_families

    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.endswith(("_bucket", "_created")):
                continue
            label = next(iter(sample.labels.values()), None)
            found[sample.name if label is None else f"{sample.name}{{{label}}}"] = sample.value
    return found


def main() -> None:
    """The same service under a profiler of the main thread, which is its event loop's."""
    import asyncio
    import cProfile

    from encoder_service.app import serve
    from encoder_service.cli.serving import announce, loop_factory
    from encoder_service.config import parse_settings
    from encoder_service.ops.logs import configure_logs

    path = os.environ.pop(PROFILE_PATH)
    settings = parse_settings()
    configure_logs(settings.log_format, settings.log_level)
    # By the thread's own CPU time: waits, for the interpreter's lock too, are nobody's work.
    profile = cProfile.Profile(time.thread_time)
    with asyncio.Runner(loop_factory=loop_factory(settings.event_loop)) as runner:
        code = profile.runcall(runner.run, serve(settings, announce))
    profile.dump_stats(path)
    os._exit(code)


if __name__ == "__main__":
    main()
