"""Commands of the documents and examples as a user's shell runs them, with this interpreter's programs."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from bench.harness.processes import environment
from bench.harness.ready import ready_in

ENDS_S = 400.0
ENCODER = ("-m", "encoder_service")


def shell_with(
    folder: Path, programs: Mapping[str, Sequence[str]], variables: Mapping[str, str]
) -> dict[str, str]:
    """The environment of a shell that finds programs by name. programs: Python's arguments for each."""
    for name, arguments in programs.items():
        program = folder / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, *arguments])} "$@"\n')
        program.chmod(0o755)
    found = environment(**variables)
    return {**found, "PATH": f"{folder / 'bin'}:{found['PATH']}"}


def run(command: str, shell: Mapping[str, str], folder: Path) -> subprocess.CompletedProcess[str]:
    """It has to succeed."""
    process = subprocess.Popen(
        ["bash", "-c", command],
        env=shell,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=ENDS_S)
    finally:
        if process.returncode is None:  # with all that it has started
            os.killpg(process.pid, signal.SIGKILL)
            print(*process.communicate())
    assert process.returncode == 0, stdout + stderr
    return subprocess.CompletedProcess(command, 0, stdout, stderr)


@contextmanager
def serving(command: str, shell: Mapping[str, str], folder: Path) -> Iterator[dict[str, str]]:
    """The fields of the service's ready line. It has to end well on SIGTERM."""
    process = subprocess.Popen(
        ["bash", "-c", f"exec {command}"], env=shell, cwd=folder, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        ready = ready_in(process.stdout)
        assert ready, f"{command} ended with {process.wait()}"
        yield ready
    finally:
        process.terminate()
        process.communicate(timeout=60)
    assert process.returncode == 0
