"""The chart's commands, environments and Secrets, run as processes of this machine.

Addresses, folders and the device differ from a cluster's.
"""

from __future__ import annotations

import base64
import os
import re
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
from cryptography import x509

from tests.deploy.chart import HELM_FOLDER, ROOT, environment_of, pod_of, render, rendered, validate

SCRIPT = HELM_FOLDER / "make-secrets.sh"
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
    (init,) = pod_of(rendered("cpu-dev"))["initContainers"]
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
    """The addresses of gRPC and of the admin plane. SIGTERM ends the process, which must exit with 0."""
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


@pytest.mark.extended
def test_cpu_dev_runs_with_its_settings_and_checkpoint(
    bin_folder: Path, models: Path, tmp_path: Path
) -> None:
    environment = environment_of(rendered("cpu-dev"))
    environment["VE_MODEL"] = environment["VE_MODEL"].replace("/models", str(models))
    with serving(environment, bin_folder, tmp_path) as (grpc_address, admin):
        assert is_healthy(bin_folder, "--server", grpc_address)
        assert is_healthy(bin_folder, "--server", f"unix:{tmp_path}/encoder.sock")
        assert status(admin, "/readyz") == status(admin, "/healthz") == status(admin, "/metrics") == 200
    assert not is_healthy(bin_folder, "--server", grpc_address, "--timeout-s", "1")


@pytest.mark.extended
def test_the_secured_case_runs_with_the_secrets_of_the_script(
    bin_folder: Path, models: Path, tmp_path: Path
) -> None:
    data = secret_of("tls", "tenants") | secret_of("tokens", "tenants", "search", "chat")
    for name, text in data.items():
        (tmp_path / name).write_text(text)
    tokens = dict(line.split("=") for line in data["tokens"].splitlines())
    assert tokens.keys() == {"search", "chat"}
    assert len({*tokens.values(), data["admin-token"]}) == 3
    environment = {
        name: re.sub(r"^/etc/vision-encoder/(tls|tokens)", str(tmp_path), value)
        for name, value in environment_of(rendered("gpu-secured")).items()
    }
    environment |= {"VE_MODEL": str(models / "demo"), "VE_ADMIN_TOKEN": data["admin-token"]}
    with serving(environment, bin_folder, tmp_path) as (grpc_address, admin):
        trusted = ["--server", grpc_address, "--ca", str(tmp_path / "ca.crt")]
        assert is_healthy(bin_folder, *trusted, "--server-name", "vision-encoder.tenants.svc")
        assert not is_healthy(bin_folder, *trusted, "--server-name", "vision-encoder.elsewhere.svc")
        assert not is_healthy(bin_folder, "--server", grpc_address)
        # The probes' pages are open, metrics need the token.
        assert status(admin, "/readyz") == status(admin, "/healthz") == 200
        assert status(admin, "/metrics") == 401
        assert status(admin, "/metrics", data["admin-token"]) == 200


# Secrets


def make_secrets(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([SCRIPT, *arguments], capture_output=True, text=True, timeout=60, check=False)


def secret_of(*arguments: str) -> dict[str, str]:
    """The Secret's data as texts."""
    found = yaml.safe_load(make_secrets(*arguments).stdout)
    validate([found])
    return {name: base64.b64decode(text).decode() for name, text in found["data"].items()}


def test_secrets_have_the_names_that_a_release_mounts() -> None:
    deployment = yaml.safe_dump(
        render({"tls": {"enabled": True}, "tokens": {"enabled": True}}, release="other")
    )
    for kind, *tenants in (("tls",), ("tokens", "a")):
        found = yaml.safe_load(make_secrets("--name", "other", kind, "tenant", *tenants).stdout)
        assert (found["metadata"]["name"], found["metadata"]["namespace"]) == (f"other-{kind}", "tenant")
        assert f"other-{kind}" in deployment
        if kind == "tls":
            certificate = x509.load_pem_x509_certificate(base64.b64decode(found["data"]["tls.crt"]))
            names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
            assert {"other.tenant.svc", "other-local.tenant.svc"} <= set(
                names.get_values_for_type(x509.DNSName)
            )


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("tls",),
        ("tokens", "n"),
        ("tokens", "n", "a=b"),
        ("tls", "N!"),
        ("certs", "n"),
        ("--name", "A.b", "tls", "n"),
    ],
)
def test_the_script_refuses_malformed_arguments(arguments: tuple[str, ...]) -> None:
    ended = make_secrets(*arguments)
    assert ended.returncode == 2
    assert ended.stderr
    assert not ended.stdout
