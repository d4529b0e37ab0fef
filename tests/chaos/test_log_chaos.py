"""Logs that cannot be written: a full disk, a reader that stopped, one that is gone. The service goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import pytest

from encoder_service.towers.synthetic import make_checkpoint
from lm_adapter import DeadlineExceeded, EncodedRows, ImageItem, ItemFailed, VisionEncoderClient
from tests.integration.images import photo
from tests.integration.test_process import ENV
from tests.unit.transport.broker_rig import socket_folder

# Far above what any of these takes on a slow machine: a service that never ends fails its test alone.
pytestmark = pytest.mark.timeout(150)
NUM_BAD = 200
PIPE_BYTES = 1 << 16


@contextmanager
def serving(model: Path, *, stdout: IO[bytes] | int, stderr: IO[bytes] | int) -> Iterator[str]:
    """A service process; its address. It ends in time, or the test fails."""
    with socket_folder() as folder:
        target = f"unix:{folder}/grpc.sock"
        stacks = folder / "stacks"
        process = subprocess.Popen(
            [
                sys.executable, "-c",
                "import faulthandler, signal\n"
                f"faulthandler.register(signal.SIGUSR1, open({str(stacks)!r}, 'w'))\n"
                "from encoder_service.cli import main\n"
                "main()",
                "serve", "--model", str(model), "--device", "cpu", "--dtype", "float32", "--listen", target,
                "--admin-listen", "", "--log-format", "json", "--log-level", "debug",
            ],
            env=ENV,
            stdout=stdout,
            stderr=stderr,
        )  # fmt: skip
        try:
            with VisionEncoderClient(target) as client:
                until_ready(client, process)
            yield target
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        except BaseException:  # the time limit too
            tell_what_it_does(process, stacks)
            raise
        finally:
            process.kill()
            process.wait(30)


def tell_what_it_does(process: subprocess.Popen[bytes], stacks: Path) -> None:
    """The stacks of a service at whose side something went wrong, and the time that its threads took."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGUSR1)
    time.sleep(1)
    print(stacks.read_text())
    for thread in Path(f"/proc/{process.pid}/task").iterdir():
        with suppress(OSError):
            taken = (thread / "stat").read_text().rpartition(")")[2].split()[11:13]
            print((thread / "comm").read_text().strip(), thread.name, "ticks in user and kernel:", *taken)


def until_ready(client: VisionEncoderClient, process: subprocess.Popen[bytes]) -> None:
    ends_s = time.monotonic() + 120
    while True:
        assert process.poll() is None, "the service ended while it started"
        try:
            client.wait_ready(1)
        except DeadlineExceeded:
            assert time.monotonic() < ends_s
        else:
            return


def serve_well_and_badly(target: str) -> None:
    """Each bad item is a line; good ones are served before, between and after."""
    with VisionEncoderClient(target, timeout_s=60) as client:
        for _ in range(5):
            bad = [ImageItem(b"no image" + os.urandom(4)) for _ in range(NUM_BAD)]
            outcomes = client.encode([*bad, ImageItem(photo(40, 40))])
            assert all(isinstance(outcome, ItemFailed) for outcome in outcomes[:-1])
            assert isinstance(outcomes[-1], EncodedRows)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    make_checkpoint(folder, "qwen3_vl", "tiny", 5)
    return folder


def test_a_full_disk(model: Path) -> None:
    with Path("/dev/full").open("wb") as full, serving(model, stdout=full, stderr=full) as target:
        serve_well_and_badly(target)


def test_a_reader_that_has_stopped(model: Path) -> None:
    """A pipe takes 64 KiB. Without a thread for lines the event loop stands still from then on."""
    read, write = os.pipe()
    try:
        with serving(model, stdout=subprocess.DEVNULL, stderr=write) as target:
            serve_well_and_badly(target)
        os.close(write)
        write = -1
        with os.fdopen(read, "rb", closefd=False) as reader:
            shown = reader.read()
        assert len(shown) >= PIPE_BYTES - 4096, "the pipe was full"
        assert b'"event": "ready"' in shown
    finally:
        os.close(read)
        if write >= 0:
            os.close(write)


def test_a_reader_that_is_gone(model: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as broken, serving(model, stdout=broken, stderr=broken) as target:
        serve_well_and_badly(target)
