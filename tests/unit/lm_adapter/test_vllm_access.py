"""What the connector and the front are told of TLS and tokens: what cannot work stops the start."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from lm_adapter.transport.followed import MAX_TOKEN_BYTES, token_source

from lm_adapter import AsyncFleetClient, AsyncVisionEncoderClient, ClientTls, InvalidRequest, TokenFile
from lm_adapter.engines import vllm_encoders, vllm_front
from lm_adapter.engines.vllm_access import Access, tls_of_service
from lm_adapter.engines.vllm_fetch import Fetcher, FetchSettings
from lm_adapter.engines.vllm_items import Geometry
from tests.certificates import Authority

GEOMETRY = Geometry(width=12, dtype="float32", num_levels=0, merge_size=2, merges_time=False)
NAMES = [field.name for field in fields(Access)]
TOKEN = "4f2c9b"


@pytest.fixture
def given(tmp_path: Path) -> dict[str, str]:
    """Settings that work."""
    authority = Authority(tmp_path)
    own = authority.issue("reader")
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    return {
        "token_file": str(tmp_path / "token"),
        "tls_ca": str(authority.ca),
        "tls_cert": str(own.cert),
        "tls_key": str(own.key),
        "tls_server_name": "encoder.test",
    }


def with_password(given: dict[str, str]) -> None:
    path = Path(given["tls_key"])
    key = serialization.load_pem_private_key(path.read_bytes(), None)
    password = serialization.BestAvailableEncryption(b"password")
    path.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, password)
    )


def written(name: str, text: str | bytes) -> Callable[[dict[str, str]], None]:
    def change(given: dict[str, str]) -> None:
        Path(given[name]).write_bytes(text if isinstance(text, bytes) else text.encode())

    return change


def removed(name: str) -> Callable[[dict[str, str]], None]:
    return lambda given: Path(given[name]).unlink()


def without(*names: str) -> Callable[[dict[str, str]], None]:
    def change(given: dict[str, str]) -> None:
        for name in names:
            del given[name]

    return change


def with_key_of_another(given: dict[str, str]) -> None:
    other = Authority(Path(given["tls_ca"]).parent / "other").issue("other")
    shutil.copy(other.key, given["tls_key"])


# What is changed, which setting the complaint begins with, and what it says.
BROKEN: dict[str, tuple[Callable[[dict[str, str]], None], str, str]] = {
    "no ca": (removed("tls_ca"), "tls_ca", "cannot read .*authority.pem: No such file"),
    "no cert": (removed("tls_cert"), "tls_cert", "cannot read .*reader.pem: No such file"),
    "no key": (removed("tls_key"), "tls_key", "cannot read .*reader.key: No such file"),
    "no token": (removed("token_file"), "token_file", "cannot read .*token: No such file"),
    "cert alone": (without("tls_key"), "tls_cert", "without .*key.* given together or not at all"),
    "key alone": (without("tls_cert"), "tls_key", "without .*cert.* given together or not at all"),
    "name alone": (without("tls_ca", "tls_cert", "tls_key"), "tls_server_name", "is for TLS: give .*ca too"),
    "empty ca": (written("tls_ca", ""), "tls_ca", "authority.pem has no certificate"),
    "ca of something else": (written("tls_ca", b"\xff junk"), "tls_ca", "authority.pem has no certificate"),
    "another's key": (with_key_of_another, "tls_cert", "are no certificate and its key"),
    "key of something else": (written("tls_key", "junk"), "tls_cert", "are no certificate and its key"),
    "encrypted": (with_password, "tls_key", "reader.key is encrypted"),
    "empty token": (written("token_file", "\n"), "token_file", "token has 0 words, a token is 1"),
    "two tokens": (written("token_file", "s3cret s3cret"), "token_file", "token has 2 words, a token is 1"),
    "binary token": (written("token_file", b"s3cret\xff"), "token_file", "characters that no token has"),
    "control characters": (written("token_file", "s3cret\x7f"), "token_file", "characters that no token has"),
    "endless token": (
        written("token_file", "s3cret" * MAX_TOKEN_BYTES),
        "token_file",
        "more than 4096 bytes",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_cannot_work_stops_the_connector(given: dict[str, str], case: str) -> None:
    """When its thread would be started, and not with the first image; workers need no files."""
    change, setting, complaint = BROKEN[case]
    change(given)
    settings = FetchSettings.read({"target": "127.0.0.1:1", **given})
    with pytest.raises(InvalidRequest, match=f"^{setting}.*{complaint}") as caught:
        Fetcher(settings, GEOMETRY)
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize("case", BROKEN)
def test_what_cannot_work_stops_the_front(
    given: dict[str, str], case: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    change, setting, _ = BROKEN[case]
    change(given)
    monkeypatch.setattr("uvicorn.run", lambda *_, **__: pytest.fail("it was started"))
    with pytest.raises(SystemExit) as caught:
        vllm_front.main(arguments(given))
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert f"error: {option(setting)}" in said
    assert not any(name in said for name in NAMES)
    assert "s3cret" not in said


def option(name: str) -> str:
    return "--" + name.replace("_", "-")


def arguments(given: dict[str, str]) -> list[str]:
    words = [word for name, value in given.items() for word in (option(name), value)]
    return ["--vllm", "http://127.0.0.1:1", "--encoder", "127.0.0.1:1", *words]


def test_the_front_is_started_with_what_it_was_told(
    given: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: dict[str, Any] = {}
    monkeypatch.setattr("uvicorn.run", lambda *_, **__: None)
    monkeypatch.setattr(vllm_front, "create_app", lambda **options: told.update(options))
    vllm_front.main(arguments(given))
    assert told["token"] == TokenFile(given["token_file"])
    assert told["tls"] == ClientTls(*(given[name] for name in NAMES[1:]))
    vllm_front.main(arguments({}))
    assert told["token"] == ""
    assert told["tls"] is None


def test_authorities_may_be_commented_in_any_language(given: dict[str, str]) -> None:
    ca = Path(given["tls_ca"])
    ca.write_bytes("# Prüfstelle\n".encode() + ca.read_bytes())
    assert Access(tls_ca=str(ca)).token_and_tls()[1] == ClientTls(ca=str(ca))


def test_each_setting_alone_that_means_tls_is_tls(given: dict[str, str]) -> None:
    token, tls = Access(tls_ca=given["tls_ca"]).token_and_tls()
    assert token == ""
    assert tls == ClientTls(ca=given["tls_ca"])
    pair = {name: given[name] for name in ("tls_cert", "tls_key")}
    assert Access(**pair).token_and_tls()[1] == ClientTls(cert=pair["tls_cert"], key=pair["tls_key"])
    token = TokenFile(given["token_file"])
    assert Access(token_file=given["token_file"]).token_and_tls() == (token, None)
    assert token_source(token)() == TOKEN


@pytest.mark.parametrize("name", NAMES)
def test_settings_of_another_kind_stop_the_start(name: str) -> None:
    with pytest.raises(InvalidRequest, match=name):
        FetchSettings.read({"target": "a:1", name: 5})


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("target", "kind", "server_name"),
    [
        ("127.0.0.1:1", "AsyncVisionEncoderClient", ""),
        ("dns:///encoders.models.svc:1", "AsyncFleetClient", "encoders.models.svc"),
        (
            "dns:///encoders.models.svc.cluster.local.:1",
            "AsyncFleetClient",
            "encoders.models.svc.cluster.local",
        ),
        (["127.0.0.1:1", "127.0.0.2:1"], "AsyncFleetClient", ""),
    ],
    ids=["one", "service", "absolute name", "list"],
)
async def test_replicas_behind_a_name_show_a_certificate_for_it(
    target: object, kind: str, server_name: str, given: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are connected to by address, which no certificate has; what was said is left as it is."""
    told: list[ClientTls] = []
    real = {"AsyncVisionEncoderClient": AsyncVisionEncoderClient, "AsyncFleetClient": AsyncFleetClient}[kind]

    def opened(*positional: Any, **named: Any) -> Any:
        told.append(named["tls"])
        return real(*positional, **named)

    monkeypatch.setattr(vllm_encoders, kind, opened)
    del given["tls_server_name"]
    for name, expected in (("", server_name), ("other.test", "other.test")):
        settings = FetchSettings.read({"target": target, **given, "tls_server_name": name})
        await settings.client().close()
        assert told.pop() == ClientTls(given["tls_ca"], given["tls_cert"], given["tls_key"], expected)


def test_the_default_name_leaves_the_files_alone() -> None:
    found = tls_of_service(ClientTls("ca.pem", "cert.pem", "key.pem"), "dns:///a.b:1")
    assert found == ClientTls("ca.pem", "cert.pem", "key.pem", "a.b")


def test_the_page_names_every_setting_and_its_example_is_taken(
    given: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """docs/vllm.md, with the files of this test."""
    page = (Path(__file__).parents[3] / "docs" / "vllm.md").read_text()
    rows = "\n".join(line for line in page.splitlines() if line.startswith("| `"))
    assert [name.name for name in fields(FetchSettings) if f"`{name.name}`" not in rows] == []
    assert [name for name in NAMES if f"`{option(name)}`" not in rows] == []
    for name in ("ca.crt", "token"):
        source = given["tls_ca" if name == "ca.crt" else "token_file"]
        page = page.replace(f"/run/secrets/vision-encoder/{name}", source)
    (example,) = re.findall(r"^```json\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    settings = FetchSettings.read(json.loads(example))
    (command,) = re.findall(r"^```sh\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    told: dict[str, Any] = {}
    monkeypatch.setattr("uvicorn.run", lambda *_, **__: None)
    monkeypatch.setattr(vllm_front, "create_app", lambda **options: told.update(options))
    vllm_front.main(shlex.split(command.replace("\\\n", " "))[3:])
    expected = (TokenFile(given["token_file"]), ClientTls(given["tls_ca"]))
    assert (told["token"], told["tls"]) == settings.token_and_tls() == expected
    same = ("namespace", "failures_path")
    assert [told[name] for name in same] == [getattr(settings, name) for name in same]
    assert told["encoder"] == settings.target
