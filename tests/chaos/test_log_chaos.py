"""Logs that cannot be written: a full disk, a pipe that is not read, a pipe that is closed. The service goes
on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest

from lm_adapter import EncodedRows, ImageItem, ItemFailed, VisionEncoderClient
from tests.integration.images import photo
from tests.integration.test_process import ENV
from tests.unit.transport.broker_rig import socket_folder

# Far above what any of these takes on a slow machine: a service that never ends fails its test alone.
pytestmark = [pytest.mark.timeout(150), pytest.mark.extended]
NUM_BAD = 200
PIPE_BYTES = 1 << 16


@contextmanager
def serving(checkpoint: Path, *, stdout: IO[bytes] | int, stderr: IO[bytes] | int) -> Iterator[str]:
    """The address of a service process, which has to end in time."""
    with socket_folder() as folder:
        target = f"unix:{folder}/grpc.sock"
        process = subprocess.Popen(
            [
                sys.executable, "-m", "encoder_service", "serve", "--model", str(checkpoint),
                "--device", "cpu", "--dtype", "float32", "--listen", target, "--admin-listen", "",
                "--log-format", "json", "--log-level", "debug",
            ],
            env=ENV,
            stdout=stdout,
            stderr=stderr,
        )  # fmt: skip
        try:
            with VisionEncoderClient(target) as client:
                client.wait_ready(120)
            yield target
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        finally:
            process.kill()
            process.wait(30)


def serve_well_and_badly(target: str) -> None:
    """Each bad item is a log line; good ones are served between them."""
    with VisionEncoderClient(target, timeout_s=60) as client:
        for _ in range(5):
            bad = [ImageItem(b"no image" + os.urandom(4)) for _ in range(NUM_BAD)]
            outcomes = client.encode([*bad, ImageItem(photo(40, 40))])
            assert all(isinstance(outcome, ItemFailed) for outcome in outcomes[:-1])
            assert isinstance(outcomes[-1], EncodedRows)


def test_a_full_disk(checkpoint: Path) -> None:
    with Path("/dev/full").open("wb") as full, serving(checkpoint, stdout=full, stderr=full) as target:
        serve_well_and_badly(target)


def test_a_pipe_that_is_not_read(checkpoint: Path) -> None:
    """It takes 64 KiB. A service that wrote on its event loop would stand still from then on."""
    read, write = os.pipe()
    try:
        with serving(checkpoint, stdout=subprocess.DEVNULL, stderr=write) as target:
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


def test_a_pipe_that_is_closed(checkpoint: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as broken, serving(checkpoint, stdout=broken, stderr=broken) as target:
        serve_well_and_badly(target)
