"""The chart's commands, environments and Secrets, run as processes of this machine.

Addresses, folders and the device differ from a cluster's.
"""

from __future__ import annotations

import base64
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

import pytest
import yaml
from cryptography import x509

from bench.harness.ports import free_port
from bench.harness.ready import ready_in
from bench.harness.waiting import PATIENCE_S, wait_until
from tests.deploy.chart import (
    CHART,
    GATEWAY,
    HELM_FOLDER,
    ROOT,
    Object,
    container_of,
    environment_of,
    gateway_command,
    named,
    pod_of,
    render,
    rendered,
    validate,
)

SCRIPT = HELM_FOLDER / "make-secrets.sh"
DASHBOARD = CHART / "files" / "dashboard.json"
DOCUMENT = ROOT / "docs" / "deploy.md"
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith(("VE_", "OTEL_"))}


@pytest.fixture(scope="module")
def bin_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`vision-encoder` as the image's PATH has it, of this checkout."""
    folder = tmp_path_factory.mktemp("bin")
    script = folder / "vision-encoder"
    path = os.pathsep.join([str(ROOT), str(ROOT / "proto")])
    script.write_text(
        f'#!/bin/sh\nPYTHONPATH={path} OMP_NUM_THREADS=1 exec {sys.executable} -m encoder_service "$@"\n'
    )
    script.chmod(0o755)
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


@contextmanager
def serving(environment: dict[str, str], bin_folder: Path, folder: Path) -> Iterator[tuple[str, str]]:
    """The addresses of gRPC and of the admin plane. SIGTERM ends the process, which must exit with 0."""
    admin = f"127.0.0.1:{free_port()}"
    environment = environment | {
        "VE_LISTEN": f"127.0.0.1:0,unix:{folder}/encoder.sock",
        "VE_ADMIN_LISTEN": admin,
        "VE_DEVICE": "cpu",
        "VE_DTYPE": "float32",
        "VE_BROKER_PATH": "",
    }
    process = subprocess.Popen(
        [bin_folder / "vision-encoder", "serve"],
        env=CLEAN | environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        yield ready_in(process.stdout)["listen"].split(",")[0], admin
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=float(environment["VE_DRAIN_GRACE_S"]) + 15)
    assert process.returncode == 0


def fetch(address: str, path: str, token: str = "", method: str = "GET") -> tuple[int, str]:
    """Status, 0 where nobody listens, and body."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(f"http://{address}{path}", headers=headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=10) as got:
            return int(got.status), got.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
    except urllib.error.URLError:
        return 0, ""


def status(address: str, path: str, token: str = "", method: str = "GET") -> int:
    return fetch(address, path, token, method)[0]


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


# The gateway


@contextmanager
def gateway_running(
    objects: list[Object], folder: Path, changes: Mapping[str, str] = MappingProxyType({})
) -> Iterator[dict[str, str]]:
    """Addresses of Envoy with the arguments and the configuration of the pod, by their ports there."""
    found = {port: f"127.0.0.1:{free_port()}" for port in ("50051", "9901", "9902")}
    own = {
        f"port_value: {port}}}": f"port_value: {address.split(':')[1]}}}" for port, address in found.items()
    }
    command = gateway_command(objects, folder, {**changes, **own})
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        until = time.monotonic() + PATIENCE_S
        while status(found["9902"], "/ready") != 200:
            assert process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < until
            time.sleep(0.05)
        yield found
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


def test_the_gateways_pod_answers_its_probe_and_is_drained_by_prestop(tmp_path: Path) -> None:
    objects = rendered("gpu-gateway")
    container = container_of(objects, GATEWAY)
    probe = container["readinessProbe"]["httpGet"]
    assert container["startupProbe"]["httpGet"] == probe
    (endpoint,) = named(objects, "PodMonitor", GATEWAY)["spec"]["podMetricsEndpoints"]
    assert endpoint["port"] == probe["port"] == "operations"
    with gateway_running(objects, tmp_path) as addresses:
        operations = addresses["9902"]
        assert status(operations, probe["path"]) == 200
        found, metrics = fetch(operations, endpoint["path"])
        assert found == 200
        exported = set(re.findall(r"(?m)^# TYPE (\S+) ", metrics))
        for reader in (DASHBOARD, DOCUMENT):
            shown = {name.removesuffix("_bucket") for name in re.findall(r"\benvoy_\w+", reader.read_text())}
            assert shown
            assert not shown - exported, reader
        # Nothing else of the admin port can be reached from outside.
        for path in ("/", "/quitquitquit", "/config_dump", "/healthcheck/fail", "/ready/../quitquitquit"):
            assert status(operations, path) == status(operations, path, method="POST") == 404
        *command, script = container["lifecycle"]["preStop"]["exec"]["command"]
        script = re.sub(r"sleep \d+", "sleep 0", script.replace("9901", addresses["9901"].split(":")[1]))
        subprocess.run([*command, script], check=True, capture_output=True, timeout=30)
        assert status(operations, probe["path"]) == 503


@pytest.mark.extended
def test_calls_pass_the_gateway_by_mtls_with_the_secrets_of_the_script(
    bin_folder: Path, models: Path, tmp_path: Path
) -> None:
    """Each side checks the other's certificate, and servers' names. Renewed certificates are followed."""
    objects = render({"tls": {"enabled": True, "clientCertificates": True}}, case="gpu-secured-gateway")
    secret, clients = tmp_path / "services", tmp_path / "clients"

    def renew(folder: Path, data: dict[str, str]) -> None:
        """As the kubelet does: files are links into ..data, which is a link that is replaced."""
        version = Path(tempfile.mkdtemp(dir=folder))
        for name, text in data.items():
            (version / name).write_text(text)
            if not (folder / name).is_symlink():
                (folder / name).symlink_to(f"..data/{name}")
        (folder / "..new").symlink_to(version.name)
        (folder / "..new").rename(folder / "..data")

    for folder, data in zip((secret, clients), secrets_of("mtls", "tenant"), strict=True):
        folder.mkdir()
        renew(folder, data)
    (secret / "tokens").write_text("a=1\n")
    environment = {
        name: re.sub(r"^/etc/vision-encoder/(tls|tokens)", str(secret), value)
        for name, value in environment_of(objects).items()
    }
    environment |= {"VE_MODEL": str(models / "demo")}
    ca = ["--ca", str(clients / "ca.crt")]
    certificate = ["--cert", str(clients / "tls.crt"), "--key", str(clients / "tls.key")]
    through = ["--server-name", "vision-encoder-gateway.tenant.svc", *ca]
    with serving(environment, bin_folder, tmp_path) as (encoder, _):
        direct = ["--server", encoder, "--server-name", "vision-encoder.tenant.svc", *ca]
        assert is_healthy(bin_folder, *direct, *certificate)
        assert not is_healthy(bin_folder, *direct)
        changes = {
            "address: vision-encoder.tenant.svc, port_value: 50051": "address: {}, port_value: {}".format(
                *encoder.split(":")
            )
        }
        with gateway_running(objects, secret, changes) as addresses:
            gateway = ["--server", addresses["50051"], *through]
            assert is_healthy(bin_folder, *gateway, *certificate)
            assert not is_healthy(bin_folder, *gateway)
            for folder, data in zip((secret, clients), secrets_of("mtls", "tenant"), strict=True):
                renew(folder, data)
            wait_until(lambda: is_healthy(bin_folder, *gateway, *certificate), "the renewed certificate")
        # An encoder's certificate with another name.
        changes["vision-encoder.tenant.svc"] = "vision-encoder.elsewhere.svc"
        with gateway_running(objects, secret, changes) as addresses:
            assert not is_healthy(bin_folder, "--server", addresses["50051"], *through, *certificate)


# Secrets


def make_secrets(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([SCRIPT, *arguments], capture_output=True, text=True, timeout=60, check=False)


def secrets_of(*arguments: str) -> list[dict[str, str]]:
    """Data of the Secrets as texts."""
    found = list(yaml.safe_load_all(make_secrets(*arguments).stdout))
    validate(found)
    return [{name: base64.b64decode(text).decode() for name, text in each["data"].items()} for each in found]


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
            services = {f"{service}.tenant.svc" for service in ("other", "other-local", "other-gateway")}
            assert services <= set(names.get_values_for_type(x509.DNSName))
