"""The service as its own process: the ready line, signals, kills, and the command-line clients."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2
from typer.testing import CliRunner, Result

from bench.harness.waiting import wait_until
from encoder_service.cli import app
from lm_adapter import ClipItem, ImageItem, VisionEncoderClient
from tests.integration.health import health_stub
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
            self.ready_line = self.process.stdout.readline()
            found = re.search(r" at (\S+)", self.ready_line)
            assert found, self.process.communicate(timeout=30)
        except BaseException:  # the time limit of a test too
            self.process.kill()
            self.process.communicate()
            raise
        self.target = found[1]

    def end(self, number: signal.Signals, timeout_s: float = 30) -> int:
        """Sends the signal and waits; harmless for a process that has ended."""
        self.process.send_signal(number)
        self.process.communicate(timeout=timeout_s)
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
    assert re.fullmatch(
        r"ready: qwen3_vl \(qwen3_vl\) on \S+ at 127\.0\.0\.1:\d+ \(admin http://127\.0\.0\.1:\d+\)\n",
        process.ready_line,
    )
    with VisionEncoderClient(process.target, timeout_s=30) as client:
        assert client.encode_one(ImageItem(photo()))
    shown = client_command("info", "--server", process.target)
    assert shown.exit_code == 0
    for text in ("qwen3_vl", "float32", "deepstack", "max_items_per_request", "inline"):
        assert text in shown.stdout
    for library in ("fa4", "fa3", "varlen", "quack") if device.type == "cpu" else ():  # needs of a GPU
        assert f"{library}: ConfigurationError: needs a CUDA device" in " ".join(shown.stdout.split())
    assert client_command("health", "--server", process.target).stdout == "SERVING\n"
    assert process.end(signal.SIGTERM) == 0
    gone = client_command("health", "--server", process.target, "--timeout-s", "1")
    assert (gone.exit_code, gone.stdout) == (1, "NOT SERVING\n")
    assert client_command("info", "--server", process.target, "--timeout-s", "1").exit_code == 1


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
    ("arguments", "text"),
    [
        (("--model", "/no/such/checkpoint"), "/no/such/checkpoint"),
        (("--model", ".", "--listen", "nonsense"), "nonsense"),
    ],
)
def test_p38_what_cannot_start_says_so_in_one_line(arguments: tuple[str, ...], text: str) -> None:
    ended = command("serve", "--admin-listen", "", "--listen", "127.0.0.1:0", *arguments)
    assert ended.returncode != 0
    assert ended.stdout == ""
    assert "Traceback" not in ended.stderr
    assert ended.stderr.splitlines()[-1].startswith("vision-encoder: cannot start: ")
    assert text in ended.stderr.splitlines()[-1]


@pytest.mark.without_device
@pytest.mark.parametrize("option", ["--listen", "--admin-listen", "--serve-sglang"])
def test_a_second_service_on_a_host_says_which_option_gives_it_another_port(
    checkpoints: dict[str, Path], option: str
) -> None:
    free = ("--listen", "127.0.0.1:0", "--admin-listen", "", "--broker-path", "")
    with socket.create_server(("127.0.0.1", 0)) as first:
        address = f"127.0.0.1:{first.getsockname()[1]}"
        ended = command("serve", "--model", checkpoints["qwen3_vl"], *free, option, address)
    assert ended.returncode == 2
    assert f"cannot listen on {address}: Address already in use; set {option}, where" in ended.stderr
    assert "add_port" not in ended.stderr  # a line of gRPC's own


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
        assert process.stdout.readline() == "loading\n"
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=30)
        assert process.returncode == 0
        assert "Traceback" not in errors


def test_p37_a_second_signal_leaves_a_batch_that_does_not_end(
    checkpoints: dict[str, Path], device: torch.device
) -> None:
    with slow_service(SLOW_FORWARD, checkpoints["qwen3_vl"], device) as process:
        assert process.stdout is not None
        target = process.stdout.readline().split(" at ")[1].strip()
        with VisionEncoderClient(target, timeout_s=30) as client:
            client.prefetch([ImageItem(photo())])
            assert process.stdout.readline() == "running\n"
        process.send_signal(signal.SIGINT)  # which drains at once
        time.sleep(0.3)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=30)
        assert process.returncode == 1
        assert "Traceback" not in errors


def test_p37_work_is_taken_while_gateways_notice_the_end(
    checkpoints: dict[str, Path], device: torch.device
) -> None:
    """After SIGTERM the health check says NOT_SERVING at once; a gateway that has not asked yet loses
    nothing. More time than by default, which a busy machine may take for the calls."""
    leave_s = 5.0
    code = f"import encoder_service.serve\nencoder_service.serve.LEAVE_S = {leave_s}"
    with slow_service(code, checkpoints["qwen3_vl"], device) as process:
        assert process.stdout is not None
        target = process.stdout.readline().split(" at ")[1].strip()
        with VisionEncoderClient(target, timeout_s=30) as client:
            client.wait_ready(30)
            process.send_signal(signal.SIGTERM)
            sent_s = time.monotonic()
            wait_until(lambda: not is_serving(target), "NOT_SERVING", leave_s / 2)
            assert client.encode_one(ImageItem(photo()))
            assert time.monotonic() - sent_s < leave_s
        process.communicate(timeout=30)
        assert process.returncode == 0


def is_serving(target: str) -> bool:
    with grpc.insecure_channel(target) as channel:
        answer = health_stub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


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
        target = process.stdout.readline().split(" at ")[1].strip()
        with VisionEncoderClient(target, timeout_s=30) as client:
            client.prefetch(items)
            assert [process.stdout.readline() for _ in items] == ["running\n"] * 2
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=30)
        assert process.returncode == 1
        assert ("stopped" in errors) != fails_too
        assert ("TypeError" in errors) == fails_too
