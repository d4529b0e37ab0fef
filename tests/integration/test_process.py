"""The service as its own process: its log, signals, kills, and the command-line clients."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import torch
from typer.testing import CliRunner, Result

from bench.harness.ready import ready_in
from bench.harness.waiting import wait_until
from encoder_service.cli import app
from lm_adapter import ClipItem, ImageItem, ItemFailed, VisionEncoderClient
from tests.integration.health import health_of
from tests.integration.images import photo
from tests.unit.ingest import clip_files

ROOT = Path(__file__).resolve().parents[2]
ENV = {
    **{name: value for name, value in os.environ.items() if not name.startswith("VE_")},
    "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "proto"), os.environ.get("PYTHONPATH", "")]),
    "COLUMNS": "200",
    "OMP_NUM_THREADS": "2",
    "VE_ARENA_BYTES": str(64 << 20),
}


def command(*arguments: object, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "encoder_service", *map(str, arguments)],
        env=ENV,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def client_command(*arguments: object) -> Result:
    """A client's command, in this process."""
    runner = CliRunner(env={"COLUMNS": "200"})
    return runner.invoke(app, [str(each) for each in arguments], catch_exceptions=False)


class ServiceProcess:
    def __init__(self, *arguments: object, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "encoder_service", "serve", *map(str, arguments)],
            env=ENV | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        try:
            self.ready = ready_in(self.process.stdout)
            assert self.ready, self.process.communicate(timeout=30)
        except BaseException:  # the time limit of a test too
            self.process.kill()
            self.process.communicate()
            raise
        self.target = self.ready["listen"]

    def end(self, number: signal.Signals, timeout_s: float = 30) -> int:
        """Sends the signal and waits; harmless for a process that has ended."""
        self.process.send_signal(number)
        self.output, self.errors = self.process.communicate(timeout=timeout_s)
        return self.process.returncode


# Of a service in 16 bits: two graphs on a GPU, which is not what these tests are about, in place of dozens.
FEW_GRAPHS = ("--bucket-sizes", "256,1024")


@pytest.fixture
def process(checkpoints: dict[str, Path], device: torch.device) -> Iterator[ServiceProcess]:
    """A service of the test's own, to be killed."""
    started = ServiceProcess(
        "--model", checkpoints["qwen3_vl"], "--device", device, "--dtype", "float32",
        "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0",
    )  # fmt: skip
    yield started
    started.end(signal.SIGKILL)


def test_one_ready_line_then_info_and_health_then_sigterm_ends_with_zero(
    process: ServiceProcess, device: torch.device
) -> None:
    assert process.ready["model"] == process.ready["family"] == "qwen3_vl"
    assert httpx.get(f"http://{process.ready['admin']}/readyz").status_code == 200
    with VisionEncoderClient(process.target, timeout_s=30) as client:
        assert client.encode_one(ImageItem(photo()))
    shown = client_command("info", "--server", process.target)
    assert shown.exit_code == 0
    for text in ("qwen3_vl", "float32", "deepstack", "max_items_per_request", "inline"):
        assert text in shown.stdout
    if device.type == "cpu":
        assert "none, the tower runs on the CPU" in " ".join(shown.stdout.split())
    assert client_command("health", "--server", process.target).stdout == "SERVING\n"
    assert process.end(signal.SIGTERM) == 0
    assert not ready_in(process.output.splitlines(keepends=True))
    assert process.errors == ""
    gone = client_command("health", "--server", process.target, "--timeout-s", "1")
    assert (gone.exit_code, gone.stdout) == (1, "NOT SERVING\n")
    shown = client_command("info", "--server", process.target, "--timeout-s", "1")
    assert shown.exit_code == 1
    for errors in (gone.stderr, shown.stderr):
        assert errors.startswith(f"vision-encoder: no encoder answers at {process.target} (")
        assert "Connection refused; check the address" in errors


def test_p72_the_whole_output_of_a_service_is_its_log_in_json(
    checkpoints: dict[str, Path], device: torch.device
) -> None:
    """Lines of uvicorn and gRPC too. A key that is not here is an answer, and no warning."""
    process = ServiceProcess(
        "--model", checkpoints["qwen3_vl"], "--device", device, "--dtype", "float32",
        "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0",
        "--log-format", "json", "--log-level", "debug",
    )  # fmt: skip
    admin = process.ready["admin"]
    try:
        with VisionEncoderClient(process.target, timeout_s=30, namespace="tenant") as client:
            client.encode([ImageItem(photo()), ImageItem(b"<html>")])
            (unknown,) = client.fetch([bytes(32)])
            assert isinstance(unknown, ItemFailed)
        assert httpx.get(f"http://{admin}/metrics", headers={"host": "evil.example"}).status_code == 421
        for address in (admin, process.target):
            host, _, port = address.rpartition(":")
            with socket.create_connection((host, int(port)), timeout=20) as nonsense:
                nonsense.sendall(b"nonsense\r\n\r\n")
                nonsense.recv(1000)
    finally:
        assert process.end(signal.SIGTERM) == 0
    assert process.errors == ""
    lines = [json.loads(line) for line in process.output.splitlines()]
    assert all([*line][:3] == ["timestamp", "level", "event"] for line in lines)
    warnings = {line["event"]: line for line in lines if line["level"] not in ("debug", "info")}
    assert warnings.keys() == {"item failed", "call failed", "Invalid HTTP request received."}
    assert warnings["call failed"]["method"] == "admin"
    assert warnings["item failed"]["reason"] == "UNDECODABLE_IMAGE"
    calls = {line["method"]: line for line in lines if line["event"] == "call ended"}
    encoded, fetched = calls["Encode"], calls["Fetch"]
    assert warnings["item failed"]["request_id"] == encoded["request_id"] != fetched["request_id"]
    assert warnings["item failed"]["peer"] == encoded["peer"]
    assert encoded["peer"].startswith("127.0.0.1:")
    assert (encoded["namespace"], encoded["status"], encoded["items"]) == ("tenant", "OK", 2)
    assert (encoded["tiers"], encoded["failed"]) == ({"miss": 1}, {"UNDECODABLE_IMAGE": 1})
    assert (fetched["tiers"], fetched["failed"]) == ({}, {"UNKNOWN_KEY": 1})
    assert 0 < fetched["ms"] < 30_000


@pytest.mark.without_device
def test_a_killed_server_leaves_a_socket_that_the_next_one_takes(
    checkpoints: dict[str, Path], device: torch.device, tmp_path: Path
) -> None:
    arguments = ("--model", checkpoints["kimi_k25"], "--device", device,
                 "--listen", f"unix:{tmp_path}/encoder.sock", "--admin-listen", "", *FEW_GRAPHS)  # fmt: skip
    first = ServiceProcess(*arguments)
    assert first.end(signal.SIGKILL) == -signal.SIGKILL
    assert (tmp_path / "encoder.sock").exists()
    second = ServiceProcess(*arguments)
    with VisionEncoderClient(f"unix:{tmp_path}/encoder.sock", timeout_s=30) as client:
        assert client.encode_one(ImageItem(photo()))
    assert second.end(signal.SIGTERM) == 0


@pytest.mark.without_device
@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("--listen HOST:PORT", "--listen HOST:0"),
        ("--admin-listen HOST:PORT", "--admin-listen HOST:0"),
        ("--serve-tokenspeed HOST:0 --tokenspeed-bootstrap-port PORT", "--tokenspeed-bootstrap-port 0"),
        ("--admin-listen HOST:FREE --http-listen HOST:FREE", "--http-listen HOST:0"),
    ],
)
def test_a_second_service_on_a_host_says_which_option_gives_it_another_port(
    checkpoints: dict[str, Path], given: str, named: str
) -> None:
    """Before torch is imported, which follows the log's first line."""
    free = ("--listen", "127.0.0.1:0", "--admin-listen", "", "--broker-path", "")
    with socket.create_server(("127.0.0.1", 0)) as first, socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = (unused if "FREE" in given else first).getsockname()[1]
        unused.close()
        options = given.replace("HOST", "127.0.0.1").replace("PORT", str(port)).replace("FREE", str(port))
        ended = command("serve", "--model", checkpoints["qwen3_vl"], *free, *options.split())
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == (
        f"vision-encoder: cannot start: cannot listen on 127.0.0.1:{port}: Address already in use; "
        f"{named.replace('HOST', '127.0.0.1')} takes a free port\n"
    )


# A service whose load or whose forwards take a minute. A line on standard output says that they run.
SLOW_LOAD = """
import time
import encoder_service.serve
def load_model(settings):
    print("loading", flush=True)
    time.sleep(60)
encoder_service.serve.load_model = load_model
"""
SLOW_FORWARD = """
import time
from encoder_service.engine.device import DeviceEngine
def slow(engine, jobs):
    print("running", flush=True)
    time.sleep(60)
DeviceEngine._launch = slow
"""
# A decoder that does not come back from its C library.
HUNG_DECODER = """
import ctypes
import encoder_service.serve
from encoder_service.ingest.decode import OpenImage
from encoder_service.ingest.video.clip import Clip
def hang(*_):
    print("running", flush=True)
    ctypes.CDLL(None).sleep(600)
OpenImage.decode = Clip._decode_piece = hang
"""


@contextmanager
def slow_service(
    code: str, checkpoint: Path, device: torch.device, *arguments: str, ingest_threads: int = 0
) -> Iterator[subprocess.Popen[str]]:
    """It ends with the test, however that ends: to leave a process alone is to wait for it."""
    with subprocess.Popen(
        [sys.executable, "-c", f"{code}\nfrom encoder_service.cli import app\napp()", "serve",
         "--model", str(checkpoint), "--device", str(device),
         "--listen", "127.0.0.1:0", "--admin-listen", "", *FEW_GRAPHS, *arguments],
        env=ENV | {"VE_INGEST_THREADS": str(ingest_threads)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        try:
            yield process
        finally:
            process.kill()


def test_p37_sigterm_while_loading_ends_without_waiting_for_the_load(
    checkpoints: dict[str, Path], device: torch.device
) -> None:
    with slow_service(SLOW_LOAD, checkpoints["qwen3_vl"], device) as process:
        assert process.stdout is not None
        assert "loading\n" in process.stdout
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=30)
        assert process.returncode == 0
        assert "stopped before it was ready" in output
        assert errors == ""


def test_p37_a_second_signal_leaves_a_batch_that_does_not_end(
    checkpoints: dict[str, Path], device: torch.device
) -> None:
    with slow_service(SLOW_FORWARD, checkpoints["qwen3_vl"], device) as process:
        assert process.stdout is not None
        target = ready_in(process.stdout)["listen"]
        with VisionEncoderClient(target, timeout_s=30) as client:
            client.prefetch([ImageItem(photo(64 + number, 64)) for number in range(3)])
            assert "running\n" in process.stdout
        process.send_signal(signal.SIGINT)  # which drains at once
        draining = next(line for line in process.stdout if "draining" in line)
        assert "items_left=3 calls_left=0 grace_s=20.0" in draining
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=30)
        assert process.returncode == 1
        assert "ended at once by a second signal" in output
        assert errors == ""


def test_p37_work_is_taken_while_gateways_notice_the_end(
    checkpoints: dict[str, Path], device: torch.device
) -> None:
    """After SIGTERM the health check says NOT_SERVING at once; a gateway that has not asked yet loses
    nothing. More time than by default, which a busy machine may take for the calls."""
    leave_s = 5.0
    code = f"import encoder_service.serve\nencoder_service.serve.LEAVE_S = {leave_s}"
    with slow_service(code, checkpoints["qwen3_vl"], device) as process:
        assert process.stdout is not None
        target = ready_in(process.stdout)["listen"]
        with VisionEncoderClient(target, timeout_s=30) as client:
            client.wait_ready(30)
            process.send_signal(signal.SIGTERM)
            sent_s = time.monotonic()
            wait_until(lambda: health_of(target) == 2, "NOT_SERVING", leave_s / 2)
            assert client.encode_one(ImageItem(photo()))
            assert time.monotonic() - sent_s < leave_s
        process.communicate(timeout=30)
        assert process.returncode == 0


@pytest.mark.parametrize("fails_too", [False, True], ids=["stops", "fails at its stop"])
def test_p37_a_decoder_that_hangs_does_not_hold_up_the_end(
    checkpoints: dict[str, Path], device: torch.device, fails_too: bool
) -> None:
    items: list[ImageItem | ClipItem] = [
        ImageItem(photo()),
        ClipItem(clip_files.encode(clip_files.moving(8), fps=8)),
    ]
    code = HUNG_DECODER + ("encoder_service.serve.Service.stop = None\n" if fails_too else "")
    with slow_service(
        code, checkpoints["qwen3_vl"], device, "--drain-grace-s", "1", ingest_threads=2
    ) as process:
        assert process.stdout is not None
        target = ready_in(process.stdout)["listen"]
        with VisionEncoderClient(target, timeout_s=30) as client:
            client.prefetch(items)
            assert all("running\n" in process.stdout for _ in items)
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=30)
        assert process.returncode == 1
        assert ("stopped" in output) != fails_too
        assert ("TypeError" in errors) == fails_too
