"""The settings of the vLLM connector and of the front: values, and files that must stop the start."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from lm_adapter import ClientTls, InvalidRequest
from lm_adapter.engines import vllm_front
from lm_adapter.engines.vllm_fetch import Fetcher
from lm_adapter.engines.vllm_items import Geometry
from lm_adapter.engines.vllm_settings import Access, FetchSettings
from tests.certificates import Authority

GEOMETRY = Geometry(width=12, dtype="float32", num_levels=0, merge_size=2, merges_time=False)
Files = dict[str, str]


@pytest.fixture
def files(tmp_path: Path) -> Files:
    """Settings that work."""
    authority = Authority(tmp_path)
    own = authority.issue("reader")
    (tmp_path / "token").write_text("4f2c9b\n")
    return {
        "token_file": str(tmp_path / "token"),
        "tls_ca": str(authority.ca),
        "tls_cert": str(own.cert),
        "tls_key": str(own.key),
        "tls_server_name": "encoder.test",
    }


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({}, "has no target"),
        ({"target": ["a:1", "b:1"]}, "target is .* needs str"),
        ({"target": "a:1", "fleets": 1}, r"has \['fleets'\], known are"),
        ({"target": "a:1", "timeout_s": "4"}, "timeout_s is '4', needs float"),
        ({"target": "a:1", "retry_s": -1}, "retry_s is -1"),
        ({"target": "a:1", "retry_s": True}, "retry_s is True"),
        ({"target": "a:1", "finite": 1}, "finite is 1, needs bool"),
        ({"target": "a:1", "transports": ["carrier pigeon"]}, "carrier pigeon"),
        *(({"target": "a:1", field.name: 5}, field.name) for field in fields(Access)),
    ],
)
def test_settings_of_another_name_or_type_are_refused(config: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidRequest, match=text):
        FetchSettings.read(config)


def test_settings_that_fit_are_read() -> None:
    read = FetchSettings.read({"target": "a:1", "transports": ["host", "inline"], "timeout_s": 4})
    assert read == FetchSettings(target="a:1", transports=("host", "inline"), timeout_s=4)
    assert read.client_tls() is None


def without(*names: str) -> Callable[[Files], None]:
    return lambda files: [files.pop(name) for name in names] and None


def written(name: str, content: bytes) -> Callable[[Files], None]:
    return lambda files: Path(files[name]).write_bytes(content) and None


def missing(name: str) -> Callable[[Files], None]:
    return lambda files: Path(files[name]).unlink()


def with_key_of_another(files: Files) -> None:
    shutil.copy(Authority(Path(files["tls_ca"]).parent / "other").issue("other").key, files["tls_key"])


BROKEN: dict[str, tuple[Callable[[Files], None], str]] = {
    "no authority": (missing("tls_ca"), "authority.pem .*No such file"),
    "no token": (missing("token_file"), "cannot read .*token: No such file"),
    "certificate alone": (without("tls_key"), "given together or not at all"),
    "name alone": (without("tls_ca", "tls_cert", "tls_key"), "tls_server_name needs TLS"),
    "empty authority": (written("tls_ca", b"\n"), "authority.pem has no certificate"),
    "key of another": (with_key_of_another, "are no certificate and its key"),
    "two tokens": (written("token_file", b"s3cret s3cret"), "token has 2 words"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_unusable_files_stop_connector_and_front(
    case: str, files: Files, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """When they start, not with the first image."""
    change, text = BROKEN[case]
    change(files)
    with pytest.raises(InvalidRequest, match=text) as caught:
        Fetcher(FetchSettings.read({"target": "127.0.0.1:1", **files}), GEOMETRY)
    monkeypatch.setattr("uvicorn.run", lambda *_, **__: pytest.fail("the front was started"))
    with pytest.raises(SystemExit):
        vllm_front.main(arguments(files))
    shown = capsys.readouterr().err
    assert str(caught.value) in shown
    assert "s3cret" not in shown


def arguments(files: Files) -> list[str]:
    words = [word for name, value in files.items() for word in (f"--{name.replace('_', '-')}", value)]
    return ["--vllm", "http://127.0.0.1:1", "--encoder", "127.0.0.1:1", *words]


def test_the_front_starts_with_the_given_access(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    started: dict[str, Any] = {}
    monkeypatch.setattr("uvicorn.run", lambda *_, **__: None)
    monkeypatch.setattr(vllm_front, "create_app", lambda **options: started.update(options))
    vllm_front.main(arguments(files))
    assert started["token_file"] == files["token_file"]
    assert started["tls"] == ClientTls(
        files["tls_ca"], files["tls_cert"], files["tls_key"], files["tls_server_name"]
    )
    vllm_front.main(arguments({}))
    assert (started["token_file"], started["tls"]) == ("", None)
