"""Servers as processes with their output in a file, and the commands of the documents that start them.

Leaves what each server needs to its own module.
"""

from __future__ import annotations

import base64
import http.client
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).resolve().parents[2]
# A start takes half a minute; on a machine with five times the work that its cores do, more than four.
START_S = 420.0
STOP_S = 30.0


def python_path() -> str:
    """This project comes first, then what this interpreter finds by PYTHONPATH."""
    paths = (str(ROOT), str(ROOT / "proto"), os.environ.get("PYTHONPATH", ""))
    return os.pathsep.join(filter(None, paths))


def environment(**extra: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": python_path(), **extra}


def documented_in(document: Path, beginning: str, replaced: Mapping[str, str]) -> list[str]:
    """The first command of a document that begins so, as a shell would take it, with other values."""
    blocks = re.findall(r"^```console\n(.*?)^```$", document.read_text(), re.MULTILINE | re.DOTALL)
    command: str = next(block for block in blocks if block.startswith(beginning))
    for old, new in replaced.items():
        assert old in command, f"{beginning} has no {old} in {document}"
        command = command.replace(old, new)
    return shlex.split(command.replace("\\\n", " "))


class Process:
    """A process in a session of its own, with its output in a file."""

    def __init__(self, arguments: Sequence[str], log: Path, extra: Mapping[str, str] | None = None) -> None:
        self.log = log
        self._file = log.open("ab")
        self._process = subprocess.Popen(
            [sys.executable, *arguments],
            stdout=self._file,
            stderr=subprocess.STDOUT,
            env=environment(**(extra or {})),
            cwd=ROOT,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """Of the process and of its session."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def wait_for(self, is_ready: Any, what: str, timeout_s: float = START_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not is_ready():
            assert self.is_running, f"{what} ended:\n{self.tail()}"
            assert time.monotonic() < deadline, f"{what} is not ready after {timeout_s} s:\n{self.tail()}"
            time.sleep(0.1)

    def tail(self, num_bytes: int = 6000) -> str:
        return self.log.read_bytes()[-num_bytes:].decode(errors="replace")

    def kill(self) -> None:
        """At once, its children too: they are of its session alone."""
        if self.is_running:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(STOP_S)
        self._file.close()

    def send_signal(self, number: int) -> None:
        """Nothing to a process that has ended."""
        self._process.send_signal(number)

    def stop(self) -> None:
        if self.is_running:
            self._process.terminate()
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait(STOP_S)
        self._file.close()


class Restartable:
    """A process that stops and starts again with the same addresses and log."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._process: Process | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        raise NotImplementedError

    def run(
        self, arguments: Sequence[str], extra: Mapping[str, str], is_ready: Callable[[], bool], what: str
    ) -> None:
        """Starts the process and waits until it is ready."""
        self._process = Process(arguments, self._log, extra)
        try:
            self._process.wait_for(is_ready, what)
        except BaseException:
            self.kill()
            raise

    def stop(self) -> None:
        if self._process is not None:
            self._process.stop()
            self._process = None

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """It stands still, with its connections open."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    @property
    def log(self) -> str:
        return self._log.read_text()


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (OSError, http.client.HTTPException):
        return False


def program(name: str) -> str:
    """Its path: beside this interpreter, where wheels put theirs, or on PATH. Raises FileNotFoundError."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None:
        raise FileNotFoundError(f"{name} is not installed")
    return found


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64," + base64.b64encode(data).decode()
