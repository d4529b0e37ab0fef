"""What ``auto`` means on a host: a GPU or the reason for none, the dtype, the broker's socket."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from encoder_service import defaults
from encoder_service.broker import ListeningSocket
from encoder_service.config import parse_settings
from encoder_service.defaults import check_driver, check_installed, with_broker_path, with_device
from encoder_service.errors import ConfigurationError
from encoder_service.startup import capture_graphs, failure_text, tower_dtype

pytestmark = pytest.mark.without_device


def refuse(message: str) -> Any:
    def call(*_: object) -> None:
        raise RuntimeError(message)

    return call


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The driver's file of a host without a GPU, with a torch for CUDA."""
    driver = tmp_path / "nvidiactl"
    monkeypatch.setattr(defaults, "DRIVER_FILE", driver)
    monkeypatch.setattr("shutil.which", lambda _: None)
    monkeypatch.setattr("ctypes.CDLL", lambda _: None)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return driver


def chosen(**given: object) -> tuple[str, list[str]]:
    """The device, and what the log says of it."""
    with capture_logs() as logs:
        device = with_device(parse_settings(model="/m", **given)).device
    return device, [f"{entry['log_level']}: {entry['event']}: {entry.get('reason')}" for entry in logs]


def test_a_gpu_is_used_where_there_is_one(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "H200")
    assert chosen() == ("cuda:0", ["info: the tower runs on a GPU: None"])
    assert chosen(device="cuda:1") == ("cuda:1", [])
    with pytest.raises(ConfigurationError, match=r"--device is cuda:2, and torch sees 2 GPU.*to cuda:1"):
        chosen(device="cuda:2")
    host.touch()
    device, (line,) = chosen(device="cpu")
    assert (device, line.partition(": ")[0]) == ("cpu", "warning")


def test_a_host_without_a_gpu_says_that_it_runs_on_the_cpu(host: Path) -> None:
    assert chosen() == ("cpu", ["info: the tower runs on the CPU: this host has no NVIDIA GPU"])
    assert chosen(device="cpu") == ("cpu", [])


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ("build", "is a build for the CPU"),
        ("library", "libcuda.so.1 is not found"),
        ("hidden", "CUDA_VISIBLE_DEVICES is ''"),
        ("driver", "for CUDA 12.8 says: The NVIDIA driver on your system is too old (found version 11040)."),
    ],
)
def test_a_cpu_beside_a_gpu_is_a_warning_with_the_reason(
    host: Path, monkeypatch: pytest.MonkeyPatch, broken: str, reason: str
) -> None:
    host.touch()
    if broken == "build":
        monkeypatch.setattr(torch.version, "cuda", None)
    elif broken == "library":
        monkeypatch.setattr("ctypes.CDLL", lambda _: (_ for _ in ()).throw(OSError("no file")))
    elif broken == "hidden":
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    text = "The NVIDIA driver on your system is too old (found version 11040).\nMore."
    monkeypatch.setattr(torch.cuda, "init", refuse(text))
    device, (line,) = chosen()
    assert device == "cpu"
    assert line.startswith("warning: the tower runs on the CPU beside a GPU")
    assert reason in line
    for given in ({"device": "cuda"}, {"broker_path": "/b", "device_arena_bytes": 1 << 20}):
        with pytest.raises(ConfigurationError) as refused:
            chosen(**given)
        assert reason in refused.value.message


def test_a_gpu_without_a_driver_is_refused_before_torch_is_asked(
    host: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any part of a driver leaves the answer to torch: WSL and containers have some of them alone."""
    check_driver("cuda:0")  # the library is there
    monkeypatch.setattr("ctypes.CDLL", lambda _: (_ for _ in ()).throw(OSError("no file")))
    for device in ("auto", "cpu"):
        check_driver(device)
    with pytest.raises(ConfigurationError, match="--device is cuda:1, and this host has no NVIDIA driver"):
        check_driver("cuda:1")
    host.touch()
    check_driver("cuda:1")


@pytest.mark.parametrize(
    ("config", "logged"),
    [
        ({"dtype": "bfloat16"}, []),
        ({"torch_dtype": "bfloat16"}, []),
        ({"text_config": {"dtype": "bfloat16"}}, []),  # as Qwen's are published
        ({"dtype": None, "vision_config": {"torch_dtype": "torch.bfloat16"}}, []),
        ({"dtype": "float32", "text_config": {"dtype": "bfloat16"}}, ["info"]),
        ({"text_config": {"dtype": "float16"}}, ["warning"]),
    ],
)
def test_rows_have_the_dtype_that_vllm_takes(tmp_path: Path, config: object, logged: list[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with capture_logs() as logs:
        assert tower_dtype(parse_settings(model=tmp_path), tmp_path) is torch.bfloat16
    assert [entry["log_level"] for entry in logs] == logged
    assert tower_dtype(parse_settings(model=tmp_path, dtype="float32"), tmp_path) is torch.float32


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), "cuda:0 has too little memory: 5 of its 9 bytes are"),
        (MemoryError(), "the host has too little memory: .*; lower --arena-bytes"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate"), "the host has too little"),
        (RuntimeError("no kernel image is available"), "has no kernels for T4: install a build of torch"),
        (KeyError("x"), "KeyError: 'x'; --log-level debug logs where"),
    ],
)
def test_a_librarys_error_at_the_start_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, error: Exception, text: str
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (5, 9))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "T4")
    assert re.search(text, failure_text(error, "cuda:0"))


def test_a_gpus_attention_is_refused_on_the_cpu(tmp_path: Path) -> None:
    model: Any = SimpleNamespace(tower=SimpleNamespace(device=torch.device("cpu")))
    assert capture_graphs(model, parse_settings(model=tmp_path, attention="sdpa")) is None
    with pytest.raises(ConfigurationError, match="--attention is fa3, which needs a GPU"):
        capture_graphs(model, parse_settings(model=tmp_path, attention="fa3"))


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ({"device": "cpu", "attention": "fa3"}, "--attention is fa3, which needs a GPU"),
        ({"traces": "otlp"}, "traces need the extra otel"),
        ({"serve_tokenspeed": "127.0.0.1:0"}, "--serve-tokenspeed needs Mooncake"),
    ],
)
def test_what_is_not_there_is_refused_before_torch_is_imported(
    setting: dict[str, str], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("mooncake", "opentelemetry.sdk.trace.export"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigurationError, match=text):
        check_installed(parse_settings(model=tmp_path, **setting))


LISTEN = ("unix:/run/e.sock", "0.0.0.0:50051")


def broker_path(listen: tuple[str, ...] = LISTEN, **given: object) -> tuple[str, list[str]]:
    with capture_logs() as logs:
        settings = with_broker_path(parse_settings(model="/m", **given), listen)
    return settings.broker_path, [str(entry.get("reason", entry["event"])) for entry in logs]


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The private folder in the temporary one, not made yet. A host without a runtime folder."""
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    return tmp_path / f"vision-encoder-{os.getuid()}"


def test_the_brokers_socket_is_named_after_the_port_in_a_private_folder(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):  # the second service finds the folder
        assert broker_path() == (f"{temporary}/50051.sock", [])
        assert temporary.stat().st_mode & 0o777 == 0o700
    runtime = temporary.parent / "runtime"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))  # which does not exist, as after su
    assert broker_path()[0] == f"{temporary}/50051.sock"
    runtime.mkdir()
    assert broker_path()[0] == f"{runtime}/vision-encoder/50051.sock"
    assert defaults.default_path(("10.0.0.5:50051",)) == f"{runtime}/vision-encoder/10.0.0.5-50051.sock"
    assert broker_path(("unix:/run/e.sock",))[0] == "/run/e.sock.broker"
    assert broker_path(broker_path="")[0] == ""
    assert broker_path(broker_path="/b")[0] == "/b"


@pytest.mark.parametrize("made", ["open", "link", "file", "foreign"])
def test_a_folder_that_somebody_else_made_or_may_enter_is_not_used(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, made: str
) -> None:
    """Another user could replace the socket in it, and hand out memory in the service's name."""
    if made == "open":
        temporary.mkdir()
        temporary.chmod(0o770)
    elif made == "link":
        (temporary.parent / "elsewhere").mkdir(mode=0o700)
        temporary.symlink_to(temporary.parent / "elsewhere")
    elif made == "file":
        temporary.touch(mode=0o600)
    else:
        temporary.mkdir(mode=0o700)
        uid = os.getuid()
        monkeypatch.setattr("os.getuid", lambda: uid + 1)
        temporary.rename(temporary.parent / f"vision-encoder-{uid + 1}")
    path, (reason,) = broker_path()
    assert path == ""
    assert "vision-encoder-" in reason
    with pytest.raises(ConfigurationError, match="set --broker-path"):
        broker_path(isolated_namespaces="a=1048576", tokens_file="/t")


def test_the_socket_of_a_dead_process_is_replaced_and_that_of_a_live_one_is_not(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("encoder_service.ops.addresses.DYING_S", 0.05)
    temporary.mkdir(mode=0o700)
    path = temporary / "50051.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    assert broker_path()[0] == str(path)
    live = ListeningSocket(str(path))
    try:
        assert broker_path() == ("", [f"cannot listen on unix:{path}: another process listens there"])
        assert live.is_in_place()
    finally:
        live.close()
