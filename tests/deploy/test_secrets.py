"""The Secrets that make-secrets.sh prints are those that the overlays name, and the service takes them."""

from __future__ import annotations

import base64
import contextlib
import shutil
import ssl
import subprocess
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from cryptography import x509

from encoder_service.config import parse_settings
from encoder_service.ops.tokens import NamespaceTokens
from tests.deploy.rendering import K8S, Object, built, named
from tests.deploy.test_chart import render

SCRIPT = K8S / "make-secrets.sh"
KINDS = {"tls": (), "tokens": ("a",), "valkey": ()}
pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not on PATH")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(SCRIPT), *arguments], capture_output=True, text=True, timeout=60, check=False)


def secret(*arguments: str, name: str = "") -> tuple[Object, dict[str, str]]:
    """The object, which fits the schema, and its data as texts."""
    ended = run(*(["--name", name] if name else []), *arguments)
    assert ended.returncode == 0, ended.stderr
    found: Object = yaml.safe_load(ended.stdout)
    kubernetes_validate.validate(found, "1.30", strict=True)
    assert found["metadata"]["namespace"] == arguments[1]
    return found, {name: base64.b64decode(text).decode() for name, text in found["data"].items()}


def test_the_certificate_is_for_the_names_that_clients_use() -> None:
    found, data = secret("tls", "tenants")
    assert (found["metadata"]["name"], found["type"]) == ("vision-encoder-tls", "kubernetes.io/tls")
    assert data.keys() == {"ca.crt", "tls.crt", "tls.key"}
    authority, certificate = (
        x509.load_pem_x509_certificate(data[name].encode()) for name in ("ca.crt", "tls.crt")
    )
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    wanted = {"vision-encoder.tenants.svc", "vision-encoder-local.tenants.svc.cluster.local", "localhost"}
    assert wanted <= set(names.get_values_for_type(x509.DNSName))
    certificate.verify_directly_issued_by(authority)
    assert (certificate.not_valid_after_utc - certificate.not_valid_before_utc).days == 365


def shake_hands(data: dict[str, str], folder: Path, host: str) -> None:
    """A client that trusts the authority and a server with the pair, in memory. Raises ssl.SSLError."""
    for name, text in data.items():
        (folder / name).write_text(text)
    serving, asking = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    serving.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    asking.load_verify_locations(folder / "ca.crt")
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [asking.wrap_bio(down, up, server_hostname=host), serving.wrap_bio(up, down, server_side=True)]
    for _ in range(4):
        for side in sides:
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
    assert sides[0].version()


def test_clients_that_have_the_authority_trust_the_service_and_no_other_name(tmp_path: Path) -> None:
    _, data = secret("tls", "tenants")
    shake_hands(data, tmp_path, "vision-encoder.tenants.svc")
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        shake_hands(data, tmp_path, "vision-encoder.others.svc")


def test_the_tokens_are_a_file_that_the_service_reads(tmp_path: Path) -> None:
    found, data = secret("tokens", "tenants", "search", "chat")
    assert found["metadata"]["name"] == "vision-encoder-tokens"
    file = tmp_path / "tokens"
    file.write_text(data["tokens"])
    given = dict(line.split("=") for line in data["tokens"].splitlines())
    assert given.keys() == {"search", "chat"}
    tokens = NamespaceTokens(file=file, open_namespaces=False)
    assert tokens.opens("search", given["search"])
    assert not tokens.opens("search", given["chat"])
    assert len({*given.values(), data["admin-token"]}) == 3
    assert data["admin-token"].isalnum()
    assert len(data["admin-token"]) == 64


def test_valkeys_url_has_its_password_and_the_service_takes_both(monkeypatch: pytest.MonkeyPatch) -> None:
    _, data = secret("valkey", "tenants")
    service = named(built("with-valkey"), "Service", "vision-encoder-valkey")
    assert data["url"] == f"redis://:{data['password']}@{service['metadata']['name']}:6379/0"
    monkeypatch.setenv("VE_SHARED_URL", data["url"])
    monkeypatch.setenv("VE_SHARED_SECRET", data["secret"])
    assert parse_settings(model=Path("x")).shared_url is not None


def test_a_release_of_another_name_has_its_own() -> None:
    """The chart's: its Secrets, and the Services that the URL and the certificate name."""
    values = {"tls": {"enabled": True}, "tokens": {"enabled": True}, "valkey": {"enabled": True}}
    objects = render(values, release="other")
    services = {each["metadata"]["name"] for each in objects if each["kind"] == "Service"}
    named_there = yaml.safe_dump_all(each for each in objects if each["kind"] == "Deployment")
    made = {kind: secret(kind, "tenants", *names, name="other") for kind, names in KINDS.items()}
    for kind, (found, _) in made.items():
        assert found["metadata"]["name"] == f"other-{kind}"
        assert f"other-{kind}" in named_there
    host = made["valkey"][1]["url"].rpartition("@")[2].partition(":")[0]
    assert host in services
    certificate = x509.load_pem_x509_certificate(made["tls"][1]["tls.crt"].encode())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert "other.tenants.svc" in names.get_values_for_type(x509.DNSName)
    assert "other" in services


def test_no_two_runs_make_the_same() -> None:
    assert secret("tokens", "n", "a")[1] != secret("tokens", "n", "a")[1]


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("tls",),
        ("tokens", "n"),
        ("tokens", "n", "a=b"),
        ("tokens", "n", "#a"),
        ("tls", "N!"),
        ("certs", "n"),
        ("--name", "a"),
        ("--name", "A.b", "tls", "n"),
        ("--name", "", "tls", "n"),
    ],
)
def test_what_it_does_not_understand_it_refuses(arguments: tuple[str, ...]) -> None:
    ended = run(*arguments)
    assert ended.returncode == 2
    assert ended.stderr
    assert not ended.stdout
