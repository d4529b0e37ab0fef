"""What a run says before its end: failures when they happen, and what each test took.

Owns lines on standard error for a run that may be cut off, a file of times, and a table by test file. With
xdist all of it is the controller's.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest

# Files in the table.
MOST_FILES = 15
# Of a failure's message.
MAX_CHARS = 300


class AsItHappens:
    """One per run. seconds_file: gets ``seconds node-id`` as each test ends, with setup and teardown."""

    def __init__(self, config: pytest.Config, seconds_file: str | None) -> None:
        self._config = config
        self._taken_s: dict[str, float] = defaultdict(float)
        self._ended: Counter[str] = Counter()
        self._file_s: Counter[str] = Counter()
        self._out = None
        if seconds_file is not None:
            path = Path(seconds_file)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._out = path.open("w", buffering=1)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        nodeid = report.nodeid
        self._taken_s[nodeid] += report.duration
        if report.outcome in ("failed", "rerun"):
            self._tell(f"{report.outcome.upper()} {nodeid} in {report.when}: {message_of(report)}")
        if report.when == "teardown":
            taken_s, path = self._taken_s.pop(nodeid), nodeid.partition("::")[0]
            self._ended[path] += 1
            self._file_s[path] += taken_s
            if self._out is not None:
                self._out.write(f"{taken_s:.2f} {nodeid}\n")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._out is None:
            return
        terminalreporter.section("seconds of workers, by file")
        for path, file_s in self._file_s.most_common(MOST_FILES):
            terminalreporter.write_line(f"{file_s:8.1f} s in {self._ended[path]:4} tests of {path}")
        terminalreporter.write_line(f"{self._file_s.total():8.1f} s in {self._ended.total():4} tests in all")

    def pytest_unconfigure(self) -> None:
        if self._out is not None:
            self._out.close()

    def _tell(self, line: str) -> None:
        capture = self._config.pluginmanager.getplugin("capturemanager")
        with capture.global_and_fixture_disabled():
            print(f"\n{line}", file=sys.stderr, flush=True)


def message_of(report: pytest.TestReport) -> str:
    """The failure in one line."""
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = str(report.longrepr if crash is None else crash.message).strip().splitlines()
    # An exception begins with what it says; other reports, as a fixture's, end with it.
    line = "" if not lines else lines[-1] if crash is None else lines[0]
    return line if len(line) <= MAX_CHARS else f"{line[:MAX_CHARS]}..."
