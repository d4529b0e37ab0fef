"""The shipped configurations: Envoy takes them without a warning, they differ in TLS alone, and TLS works."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from bench.harness.fleet.encoders import Encoder, EncoderProcesses
from bench.harness.fleet.fleet import SETTINGS
from bench.harness.fleet.gateway import CONFIG, NAME, Gateway
from bench.harness.fleet.images import image_file
from bench.harness.fleet.names import NameServer
from lm_adapter import ClientTls, EncoderUnavailable, ImageItem, VisionEncoderClient
from tests.certificates import Authority
from tests.programs import program

pytestmark = pytest.mark.fleet

FOLDER = CONFIG.parent
READY_S = 60.0


def localised(folder: Path, authority: Authority) -> Path:
    """tls.yaml and the files beside it, with the paths of this test's certificates."""
    files = authority.issue("gateway", NAME)
    files.cert.rename(folder / "tls.crt")
    files.key.rename(folder / "tls.key")
    (folder / "ca.crt").write_bytes(authority.ca.read_bytes())
    for name in ("tls.yaml", "certificate.yaml", "authority.yaml"):
        text = (FOLDER / name).read_text(encoding="utf-8")
        text = text.replace("/etc/gateway-tls", str(folder)).replace("/etc/gateway/", f"{folder}/")
        (folder / name).write_text(text, encoding="utf-8")
    return folder / "tls.yaml"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.mark.parametrize("name", ["gateway.yaml", "tls.yaml"])
def test_envoy_takes_it_without_a_warning(name: str, tmp_path: Path, authority: Authority) -> None:
    path = FOLDER / name if name == CONFIG.name else localised(tmp_path, authority)
    ended = subprocess.run(
        [program("envoy"), "--config-path", str(path), "--mode", "validate", "--log-level", "warning"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert "warning" not in ended.stderr, ended.stderr


def test_tls_is_the_only_difference() -> None:
    plain, tls = (yaml.safe_load((FOLDER / name).read_text()) for name in ("gateway.yaml", "tls.yaml"))
    sockets = remove_key(tls, "transport_socket")
    assert [socket["name"] for socket in sockets] == ["envoy.transport_sockets.tls"] * 2
    assert tls == plain


def remove_key(tree: Any, key: str) -> list[Any]:
    """What stood under that key, anywhere."""
    children = list(tree.values()) if isinstance(tree, dict) else tree if isinstance(tree, list) else []
    found = [tree.pop(key)] if isinstance(tree, dict) and key in tree else []
    return found + [one for child in children for one in remove_key(child, key)]


def test_what_depends_on_a_deployment_is_marked() -> None:
    """Hosts and ports of sockets, and files."""
    for name in ("gateway.yaml", "tls.yaml", "certificate.yaml", "authority.yaml"):
        for line in (FOLDER / name).read_text().splitlines():
            depends = "port_value" in line or "/etc/" in line or NAME in line
            assert depends == ("# address" in line) or line.startswith("#"), line


@pytest.fixture(scope="module")
def encoder(
    tmp_path_factory: pytest.TempPathFactory, checkpoint: Path, authority: Authority
) -> Iterator[Encoder]:
    """One encoder that asks for certificates."""
    files = authority.issue("encoder", NAME)
    folder = tmp_path_factory.mktemp("encoder")
    settings = {"tls_cert": str(files.cert), "tls_key": str(files.key), "tls_client_ca": str(authority.ca)}
    with EncoderProcesses(folder, {**SETTINGS, "model": str(checkpoint)}) as processes:
        started = processes.start("127.19.0.1", **settings)
        started.wait_ready()
        yield started


def test_mutual_tls_on_both_sides(encoder: Encoder, authority: Authority, tmp_path: Path) -> None:
    with (
        NameServer(NAME) as names,
        Gateway(tmp_path, names.port, config=localised(tmp_path, authority)) as gateway,
    ):
        names.addresses = (encoder.address,)
        gateway.wait_members(1)
        caller = authority.issue("caller")
        known = ClientTls(authority.ca, caller.cert, caller.key)
        with VisionEncoderClient(gateway.target, tls=known, fleet=True) as client:
            client.wait_ready(READY_S)
            assert client.encode_one(ImageItem(image_file(1))).num_rows
        with (
            VisionEncoderClient(gateway.target, tls=ClientTls(authority.ca), fleet=True) as client,
            pytest.raises(EncoderUnavailable),
        ):
            client.info()
