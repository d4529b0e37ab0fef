"""The processes of the transport bench: one script each, a command and an answer a line.

Owns how they are started, in namespaces of their own where the machine permits it, with one GPU in sight or
none, and how they are told what to do. What they do is theirs.
"""

from __future__ import annotations

import functools
import json
import os
import queue
import shutil
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

ROOT = Path(__file__).resolve().parent.parent
ISOLATE = ("unshare", "--pid", "--ipc", "--mount", "--fork", "--kill-child", "--mount-proc")
# What the service's images set, so that a freed message's pages are used again (deploy/docker).
IMAGE_MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": "1073741824",
    "MALLOC_TRIM_THRESHOLD_": "4294967296",
    "MALLOC_TOP_PAD_": "268435456",
}
START_S = 60.0
ANSWER_S = 30.0
SETTLE_S = 0.03


class ProcessFailed(Exception):
    """One of the bench's processes could not do what it was told, or has ended."""


@functools.cache
def can_isolate() -> bool:
    """Whether this machine lets us make PID, IPC and mount namespaces, as two containers have them."""
    if os.geteuid() != 0 or shutil.which(ISOLATE[0]) is None:
        return False
    ended = subprocess.run([*ISOLATE, "true"], capture_output=True, timeout=30, check=False)
    return ended.returncode == 0


def visible_gpu(index: int) -> str:
    """What CUDA_VISIBLE_DEVICES has to be for this process's index-th GPU alone."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",")[index] if visible else str(index)


class Process:
    """A script of this folder as a process. ``ask`` may be called when ``ready`` has returned."""

    def __init__(
        self, script: str, log: Path, *, gpu: int | None = None, malloc: Mapping[str, str] | None = None
    ) -> None:
        """log: a file for what it says. gpu: the only one that it sees, by this process's count; None: none.
        malloc: settings of the allocator."""
        self.log = log
        self._script = script
        self._answers: queue.Queue[str] = queue.Queue()
        self._given_up = False
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [*(ISOLATE if can_isolate() else ()), sys.executable, str(ROOT / "bench" / script)],
                env={
                    **os.environ,
                    **(malloc or {}),
                    "CUDA_VISIBLE_DEVICES": "" if gpu is None else visible_gpu(gpu),
                    "OMP_NUM_THREADS": "1",
                    "PYTHONPATH": os.pathsep.join(
                        [str(ROOT), str(ROOT / "proto"), os.environ.get("PYTHONPATH", "")]
                    ),
                },
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put("")

    def send(self, do: str, **command: Any) -> None:
        """Raises ProcessFailed."""
        assert self._process.stdin is not None
        self._check_not_given_up()
        try:
            self._process.stdin.write(json.dumps({"do": do, **command}) + "\n")
            self._process.stdin.flush()
        except (OSError, ValueError) as error:  # a broken pipe, or one closed here
            raise ProcessFailed(f"{self._script} has ended: {self._last_words()}") from error

    def answer(self, timeout_s: float = ANSWER_S) -> dict[str, Any]:
        """Raises ProcessFailed; a process that does not answer in time is ended, since its late answer would
        be taken for that to another question."""
        self._check_not_given_up()
        try:
            line = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            self._given_up = True  # its answer may come before its end does
            self._process.kill()
            raise ProcessFailed(f"{self._script} did not answer within {timeout_s:g} s") from None
        if not line:
            self._answers.put("")  # for whoever asks again
            raise ProcessFailed(f"{self._script} has ended: {self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ProcessFailed(f"{self._script}: {answer['error']}")
        return answer

    def ask(self, do: str, *, timeout_s: float = ANSWER_S, **command: Any) -> dict[str, Any]:
        """Raises ProcessFailed."""
        self.send(do, **command)
        return self.answer(timeout_s)

    def close(self) -> None:
        """Ends it, gently at first. Twice is once."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.close()
            self._process.wait(10)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        self._reader.join(5)
        self._process.stdout.close()

    def _check_not_given_up(self) -> None:
        if self._given_up:
            raise ProcessFailed(f"{self._script} has ended: it did not answer in time")

    def _last_words(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"it said nothing, exit status {self._process.poll()}"


def settled(encoder: Process) -> dict[str, Any]:
    """The encoder's counts, once readers have told what they read without asking. Raises ProcessFailed."""
    counts = encoder.ask("counters")
    while True:
        time.sleep(SETTLE_S)
        before, counts = counts, encoder.ask("counters")
        if counts == before:
            return counts


def serve_commands(handlers: Mapping[str, Callable[..., dict[str, Any] | None]]) -> None:
    """A process's own side: answers each command on the standard output, which is nobody else's from here
    on, until the standard input ends. What a handler raises becomes the answer; its trace goes to the log."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = handlers[command.pop("do")](**command) or {}
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
