"""`make fleet`: the program starts, says where the gateway is, and leaves nothing behind."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench.harness.fleet.images import image_file
from bench.harness.pods import environment
from bench.harness.processes import ROOT
from bench.harness.waiting import wait_until
from lm_adapter import ImageItem, VisionEncoderClient
from tests.programs import program

pytestmark = pytest.mark.fleet

READY_S = STOP_S = 60.0
LAST_LINE = "Ctrl-C ends it."


@contextmanager
def running(checkpoint: Path, log: Path) -> Iterator[subprocess.Popen[str]]:
    """In a process group of its own, as a shell's job."""
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "bench.harness.fleet", str(checkpoint)],
            cwd=ROOT,
            env=environment(""),
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=STOP_S)


def is_listening(address: str) -> bool:
    host, port = address.split(":")
    with socket.socket() as caller:
        return caller.connect_ex((host, int(port))) == 0


def group_is_empty(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


def test_ctrl_c_ends_the_fleet_with_all_its_processes(checkpoint: Path, tmp_path: Path) -> None:
    program("envoy")
    log = tmp_path / "errors.log"
    with running(checkpoint, log) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line.rstrip() == LAST_LINE:
                break
        (gateway,) = re.findall(r"^gateway at (127\.0\.0\.1:\d+): ", lines[0])
        encoders = re.findall(r"127\.[\d.]+:\d+", lines[1])
        assert len(encoders) == 4
        with VisionEncoderClient(gateway, fleet=True, timeout_s=READY_S) as client:
            assert client.encode_one(ImageItem(image_file(1))).num_rows
        assert all(is_listening(address) for address in (gateway, *encoders))
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        assert process.wait(STOP_S) == 0, log.read_text()
        assert not log.read_text()
        wait_until(lambda: group_is_empty(process.pid), "the end of the group's processes")
        wait_until(
            lambda: not any(is_listening(address) for address in (gateway, *encoders)), "the encoders' end"
        )
