"""What the manifests say, done: the overlays' commands and environments run as processes of this machine.

Only addresses, folders and the device are others than in a cluster.
"""

from __future__ import annotations

import base64
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from tests.deploy.rendering import K8S, built, config_of, encoder_pod, environment_of

pytestmark = pytest.mark.extended

ROOT = Path(__file__).parents[2]
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith(("VE_", "OTEL_"))}


@pytest.fixture(scope="module")
def bin_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`vision-encoder` as the image's PATH has it, of this checkout."""
    folder = tmp_path_factory.mktemp("bin")
    program = folder / "vision-encoder"
    path = os.pathsep.join([str(ROOT), str(ROOT / "proto")])
    program.write_text(
        f'#!/bin/sh\nPYTHONPATH={path} OMP_NUM_THREADS=1 exec {sys.executable} -m encoder_service "$@"\n'
    )
    program.chmod(0o755)
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, bin_folder: Path) -> Path:
    """The folder that the init container of cpu-dev fills, by its own command; twice, as it may happen."""
    folder = tmp_path_factory.mktemp("models")
    (init,) = encoder_pod("cpu-dev")["initContainers"]
    command = [word.replace("/models", str(folder)) for word in init["command"]]
    (folder / "partial").mkdir()
    (folder / "partial" / "left-by-a-run-that-was-killed").touch()
    for _ in range(2):
        subprocess.run(
            command, env=CLEAN | {"PATH": f"{bin_folder}:{CLEAN['PATH']}"}, check=True, timeout=120
        )
    assert [path.name for path in folder.iterdir()] == ["demo"]
    return folder


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


@contextmanager
def serving(environment: dict[str, str], bin_folder: Path, folder: Path) -> Iterator[tuple[str, str]]:
    """The addresses of gRPC and of the admin plane; ends it as the kubelet does, and wants it to end well."""
    admin = f"127.0.0.1:{free_port()}"
    environment = environment | {
        "VE_LISTEN": f"127.0.0.1:0,unix:{folder}/encoder.sock",
        "VE_ADMIN_LISTEN": admin,
        "VE_DEVICE": "cpu",
        "VE_DTYPE": "float32",
    }
    process = subprocess.Popen(
        [bin_folder / "vision-encoder", "serve"],
        env=CLEAN | environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        found = re.search(r" at (127\.0\.0\.1:\d+)", process.stdout.readline())
        assert found
        yield found[1], admin
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=float(environment["VE_DRAIN_GRACE_S"]) + 15)
    assert process.returncode == 0


def status(admin: str, path: str, token: str = "") -> int:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        with urllib.request.urlopen(
            urllib.request.Request(f"http://{admin}{path}", headers=headers), timeout=10
        ) as got:
            return int(got.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def is_healthy(bin_folder: Path, *options: str) -> bool:
    ended = subprocess.run(
        [bin_folder / "vision-encoder", "health", "--timeout-s", "10", *options],
        env=CLEAN, capture_output=True, timeout=60, check=False,
    )  # fmt: skip
    return ended.returncode == 0


def test_cpu_dev_runs_with_the_settings_and_the_checkpoint_of_its_manifests(
    bin_folder: Path, models: Path, tmp_path: Path
) -> None:
    environment = dict(config_of(built("cpu-dev")))
    environment["VE_MODEL"] = environment["VE_MODEL"].replace("/models", str(models))
    with serving(environment, bin_folder, tmp_path) as (grpc_address, admin):
        assert is_healthy(bin_folder, "--server", grpc_address)
        assert is_healthy(bin_folder, "--server", f"unix:{tmp_path}/encoder.sock")
        assert status(admin, "/readyz") == status(admin, "/healthz") == status(admin, "/metrics") == 200
    assert not is_healthy(bin_folder, "--server", grpc_address, "--timeout-s", "1")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not on PATH")
def test_the_secured_overlay_runs_with_the_secrets_of_the_script(
    bin_folder: Path, models: Path, tmp_path: Path
) -> None:
    data: dict[str, str] = {}
    for kind, *names in (("tls",), ("tokens", "tenant")):
        printed = subprocess.run(
            [K8S / "make-secrets.sh", kind, "vision-encoder", *names],
            check=True,
            capture_output=True,
            timeout=60,
        ).stdout
        for name, text in yaml.safe_load(printed)["data"].items():
            data[name] = base64.b64decode(text).decode()
            (tmp_path / name).write_text(data[name])
    environment = {
        name: re.sub(r"^/etc/vision-encoder/(tls|tokens)", str(tmp_path), value)
        for name, value in environment_of(built("gpu-secured")).items()
    }
    environment |= {"VE_MODEL": str(models / "demo"), "VE_ADMIN_TOKEN": data["admin-token"]}
    with serving(environment, bin_folder, tmp_path) as (grpc_address, admin):
        trusted = ["--server", grpc_address, "--ca", str(tmp_path / "ca.crt")]
        assert is_healthy(bin_folder, *trusted, "--server-name", "vision-encoder.vision-encoder.svc")
        assert not is_healthy(bin_folder, *trusted, "--server-name", "vision-encoder.elsewhere.svc")
        assert not is_healthy(bin_folder, "--server", grpc_address)
        # What the probes ask, and what Prometheus asks with the token and without.
        assert status(admin, "/readyz") == status(admin, "/healthz") == 200
        assert status(admin, "/metrics") == 401
        assert status(admin, "/metrics", data["admin-token"]) == 200
