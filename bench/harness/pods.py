"""Processes that share nothing with this one but folders and a unix socket, as two pods of one host.

Owns how such a process is started, isolated, asked and ended. Where the kernel permits it, each runs in PID,
IPC and mount namespaces of its own (``IS_ISOLATED``); else in this one's.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from bench.harness.processes import ROOT, python_path
from bench.harness.ready import ready_in

START_S, ANSWER_S = 120.0, 120.0
ISOLATE = ("unshare", "--pid", "--ipc", "--mount", "--fork", "--kill-child", "--mount-proc")


@functools.cache
def can_isolate() -> bool:
    """Whether new PID, IPC and mount namespaces are permitted here."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        return False
    return subprocess.run([*ISOLATE, "true"], capture_output=True, timeout=30, check=False).returncode == 0


def environment(gpu: str) -> dict[str, str]:
    """gpu: as CUDA_VISIBLE_DEVICES names it; empty for none."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("VE_")}
    return {
        **kept,
        "PYTHONPATH": python_path(),
        "CUDA_VISIBLE_DEVICES": gpu,
        "OMP_NUM_THREADS": "1",
    }


class Pod:
    """A Python process that reads commands from its input and answers each with a line of JSON."""

    def __init__(self, gpu: str, module: str, *arguments: object, **variables: str) -> None:
        self.process = subprocess.Popen(
            [*(ISOLATE if can_isolate() else ()), sys.executable, "-m", module, *map(str, arguments)],
            cwd=ROOT,
            env={**environment(gpu), **variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._received = b""

    def line(self, timeout_s: float) -> str:
        assert self.process.stdout is not None
        output, ends_s = self.process.stdout.fileno(), time.monotonic() + timeout_s
        while b"\n" not in self._received:
            ready, _, _ = select.select([output], [], [], max(0.0, ends_s - time.monotonic()))
            assert ready, f"no line came within {timeout_s:g} s"
            data = os.read(output, 1 << 16)
            assert data, f"the process ended with {self.process.wait(30)}"
            self._received += data
        line, end, self._received = self._received.partition(b"\n")
        return (line + end).decode()

    def send(self, do: str, **command: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **command}) + "\n")
        self.process.stdin.flush()

    def answer(self, timeout_s: float = ANSWER_S) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.line(timeout_s))
        assert "error" not in found, found
        return found

    def ask(self, do: str, *, timeout_s: float = ANSWER_S, **command: object) -> dict[str, Any]:
        self.send(do, **command)
        return self.answer(timeout_s)

    @property
    def pid(self) -> int:
        """Of the process inside its namespaces, as it is known outside. Raises ValueError once it is gone."""
        pid = self.process.pid
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text()) if can_isolate() else pid

    def signal(self, number: int) -> None:
        with contextlib.suppress(ValueError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL, and waits for its end. Harmless for a process that has ended."""
        try:
            if self.process.poll() is None:
                self.signal(signal.SIGKILL)
            self.process.wait(30)
        finally:
            self.process.kill()
            self.process.communicate(timeout=30)


class EncoderPod:
    """A whole service. ``launch`` starts it again after a kill, at the same addresses."""

    def __init__(self, folder: Path, checkpoint: Path, gpu: str, settings: dict[str, object]) -> None:
        """gpu: empty for the CPU. settings: of the service, by name without the prefix."""
        self.broker_path = folder / "broker.sock"
        self.target = f"unix:{folder}/grpc.sock"
        self._gpu = gpu
        self._variables = {
            "VE_MODEL": str(checkpoint),
            "VE_DEVICE": "cuda:0" if gpu else "cpu",
            "VE_LISTEN": self.target,
            "VE_ADMIN_LISTEN": "127.0.0.1:0",
            "VE_BROKER_PATH": str(self.broker_path),
            **{f"VE_{name.upper()}": str(value) for name, value in settings.items()},
        }
        self.launch()

    def launch(self) -> None:
        self.pod = Pod(self._gpu, "encoder_service", "serve", **self._variables)

    def wait_ready(self) -> None:
        ready = ready_in(self.pod.line(START_S) for _ in itertools.count())
        self._admin = f"http://{ready['admin']}"

    def figure(self, name: str, **labels: str) -> float:
        return figure(self._admin, name, **labels)


def figure(admin: str, name: str, **labels: str) -> float:
    """A metric at this address of an admin plane, summed over the series that have these labels."""
    with urllib.request.urlopen(f"{admin}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    found = re.findall(rf"^{name}(?:{{([^}}]*)}})? (\S+)$", text, re.MULTILINE)
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    return sum(float(value) for series, value in found if all(one in series for one in wanted))
