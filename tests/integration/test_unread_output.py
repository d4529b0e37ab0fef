"""A service whose output nobody reads, and one with few descriptors: as processes of their own."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from bench.harness.ports import free_port
from bench.harness.waiting import wait_until
from lm_adapter import ClientTls, EncoderError, ImageItem, VisionEncoderClient
from tests.certificates import Authority
from tests.integration.images import photo
from tests.integration.test_process import ENV

pytestmark = pytest.mark.without_device


@contextlib.contextmanager
def full_pipe() -> Iterator[int]:
    """The writing end of a pipe that takes nothing more and that nobody reads."""
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writes, b"x" * 4096)
    os.set_blocking(writes, True)
    try:
        yield writes
    finally:
        os.close(reads)
        os.close(writes)


@contextlib.contextmanager
def serving(
    checkpoint: Path, output: int, *arguments: object, limit: int | None = None
) -> Iterator[tuple[subprocess.Popen[bytes], str, str]]:
    """The process, its gRPC and its admin address, once it is ready. limit: of descriptors."""
    target, admin = (f"127.0.0.1:{free_port()}" for _ in range(2))
    command = [
        *([] if limit is None else ["bash", "-c", f'ulimit -n {limit}; exec "$@"', "bash"]),
        sys.executable, "-m", "encoder_service", "serve", "--model", checkpoint, "--device", "cpu",
        "--listen", target, "--admin-listen", admin, *arguments,
    ]  # fmt: skip
    process = subprocess.Popen(list(map(str, command)), env=ENV, stdout=output, stderr=output)
    try:
        wait_until(lambda: process.poll() is not None or is_ready(admin), "readiness")
        yield process, target, admin
    finally:
        process.kill()
        process.wait()


def is_ready(admin: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"http://{admin}/readyz", timeout=5).status_code == 200
    return False


def send(address: str, data: bytes, number: int) -> None:
    host, _, port = address.rpartition(":")
    for _ in range(number):
        with socket.create_connection((host, int(port)), timeout=20) as client, contextlib.suppress(OSError):
            client.sendall(data)
            client.recv(100)


def test_p72_nothing_waits_for_output_that_nobody_reads(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """The ready line, uvicorn's lines about malformed requests, gRPC's own about failed handshakes."""
    authority = Authority(tmp_path)
    files, tls = authority.issue("encoder"), ClientTls(ca=authority.ca)
    with full_pipe() as descriptor, pytest.MonkeyPatch.context() as patched:
        patched.setitem(ENV, "VE_TLS_CERT", str(files.cert))
        patched.setitem(ENV, "VE_TLS_KEY", str(files.key))
        with serving(checkpoints["qwen3_vl"], descriptor) as (process, target, admin):
            assert process.poll() is None
            for number in range(3):
                send(admin, b"nonsense\r\n\r\n", 20)
                send(target, b"GET / HTTP/1.1\r\nHost: here\r\n\r\n", 20)
                assert httpx.get(f"http://{admin}/healthz", timeout=20).status_code == 200
                with VisionEncoderClient(target, tls=tls, timeout_s=20) as client:
                    assert client.encode_one(ImageItem(photo(64 + number, 64))).num_rows > 0
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0


def test_p71_few_descriptors_cost_a_few_lines_and_others_are_served_afterwards(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    lines = tmp_path / "lines"
    with (
        lines.open("wb") as output,
        serving(checkpoints["qwen3_vl"], output.fileno(), limit=128) as (process, target, admin),
    ):
        with contextlib.ExitStack() as stack:
            for address in (target, admin):
                host, _, port = address.rpartition(":")
                for _ in range(150):
                    with contextlib.suppress(OSError):
                        stack.enter_context(socket.create_connection((host, int(port)), timeout=5))
            time.sleep(2.5)
            assert process.poll() is None
        wait_until(lambda: is_ready(admin))
        with VisionEncoderClient(target, timeout_s=30) as client:
            wait_until(lambda: is_encoded(client), "an encode")
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    said = lines.read_text().splitlines()
    assert sum("fewer connections are accepted than set" in line for line in said) == 1
    assert len(said) < 20, said[:40]


def is_encoded(client: VisionEncoderClient) -> bool:
    with contextlib.suppress(EncoderError):
        return client.encode_one(ImageItem(photo())).num_rows > 0
    return False
