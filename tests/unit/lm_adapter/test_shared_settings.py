"""The settings of the vLLM plugin: values, files that must stop the start, and the client they describe."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lm_adapter import ClientTls, InvalidRequest
from lm_adapter.engines.shared import settings as settings_module
from lm_adapter.engines.vllm.settings import CONNECTOR, MODULE, Settings, has_connector, is_marked, mark
from lm_adapter.local_first import LocalFirstClient
from lm_adapter.shm.attachment import TRANSPORTS
from tests.certificates import Authority

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


# A value of another type than each setting has.
WRONG: dict[str, Any] = {"str": 5, "bool": 1, "float": "4", "int": True, "tuple[str, ...]": "host"}


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({}, "has no target"),
        ({"target": ""}, "has no target"),
        ({"fleet": True}, "has no target"),
        ({"target": ["a:1", "b:1"]}, "target is .* needs str"),
        ({"target": "a:1", "fleets": 1}, r"has \['fleets'\], known are .*'fleet'"),
        ({"target": "a:1", "retry_s": -1}, "retry_s is -1, needs a number of at least 0"),
        ({"target": "a:1", "timeout_s": 0}, "timeout_s is 0, needs a number above 0"),
        ({"target": "a:1", "max_resident_bytes": 0}, "max_resident_bytes is 0, needs a number above 0"),
        ({"target": "a:1", "timeout_s": float("nan")}, "timeout_s is nan"),
        ({"target": "a:1", "transports": ["carrier pigeon"]}, "carrier pigeon"),
        ({"target": "a:1", "transports": []}, "transports is a sequence"),
        ({"target": "a:1", "broker_path": "sockets/broker"}, "broker_path is an absolute path"),
        ({"target": "a:1", "fleet": True, "fallback_target": "b:1"}, "fleet is for a gateway at target"),
        *(({"target": "a:1"} | {one.name: WRONG[str(one.type)]}, one.name) for one in fields(Settings)),
    ],
)
def test_settings_of_another_name_or_type_are_refused(config: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidRequest, match=text):
        Settings.read(config)


def test_settings_that_fit_are_read() -> None:
    read = Settings.read({"target": "a:1", "transports": ["host", "inline"], "timeout_s": 4})
    assert read == Settings(target="a:1", transports=("host", "inline"), timeout_s=4)
    assert read.client_tls() is None
    assert not read.is_routed
    assert Settings.read({"target": "a:1", "fleet": True}).is_routed
    assert Settings.read({"target": "a:1", "fallback_target": "b:1"}).is_routed


def test_a_number_of_bytes_is_whole() -> None:
    with pytest.raises(InvalidRequest, match="max_resident_bytes"):
        Settings.read({"target": "a:1", "max_resident_bytes": 1.5e9 + 0.5})


def test_unusable_files_stop_the_start(files: Files, tmp_path: Path) -> None:
    """Not the first image. What else makes a file unusable is in ``test_channel_security``."""
    other = Authority(tmp_path / "other").issue("other")
    for changes, text in (
        ({"token_file": str(tmp_path / "none")}, "cannot read .*none: No such file"),
        ({"tls_key": str(other.key)}, "are not a certificate and its key"),
        (dict.fromkeys(("tls_ca", "tls_cert", "tls_key"), ""), "tls_server_name needs TLS"),
    ):
        with pytest.raises(InvalidRequest, match=text):
            Settings.read({"target": "127.0.0.1:1", **files, **changes})


@pytest.mark.parametrize("reads_rows", [True, False])
@pytest.mark.parametrize("gateway", [{}, {"fleet": True}, {"fallback_target": "b:1"}])
def test_only_a_client_that_reads_rows_attaches_to_memory(
    gateway: dict[str, Any], reads_rows: bool, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And none of a fleet, whose rows come inline."""
    made: list[tuple[str, dict[str, Any]]] = []

    def note(target: str, **options: Any) -> None:
        made.append((target, options))

    monkeypatch.setattr(settings_module, "AsyncVisionEncoderClient", note)
    monkeypatch.setattr("lm_adapter.local_first.LocalFirstClient", note)
    config = {"target": "a:1", "namespace": "tenant", "model": "m", "broker_path": "/broker", "timeout_s": 4}
    Settings.read(config | files | gateway).client(reads_rows=reads_rows)
    ((target, options),) = made
    assert target == "a:1"
    assert options.pop("tls") == ClientTls(*(files[name] for name in list(files)[1:]))
    common: dict[str, Any] = {
        "namespace": "tenant",
        "model": "m",
        "timeout_s": 4,
        "token_file": files["token_file"],
    }
    common |= {"waits": False, "max_in_flight": sys.maxsize, "check_server": None}
    memory: dict[str, Any] = {"transports": TRANSPORTS, "broker_path": "/broker"}
    if "fleet" in gateway:
        memory = {}
    elif not reads_rows:
        memory = {"transports": ("inline",)}
    assert options == common | memory | gateway


def test_the_clients_options_are_real() -> None:
    async def make(reads_rows: bool, **gateway: Any) -> type:
        client = Settings(target="127.0.0.1:1", **gateway).client(reads_rows=reads_rows)
        await client.close()
        return type(client)

    for reads_rows in (True, False):
        assert asyncio.run(make(reads_rows, fallback_target="127.0.0.1:2")) is LocalFirstClient
        assert asyncio.run(make(reads_rows)) is asyncio.run(make(reads_rows, fleet=True))


@pytest.mark.parametrize(
    ("transfer", "expected"),
    [
        (None, False),
        (SimpleNamespace(ec_connector=CONNECTOR, ec_connector_module_path=MODULE), True),
        (SimpleNamespace(ec_connector=CONNECTOR, ec_connector_module_path=None), False),
        (SimpleNamespace(ec_connector="ExampleConnector", ec_connector_module_path=MODULE), False),
    ],
)
def test_an_engine_with_another_connector_is_left_alone(transfer: Any, expected: bool) -> None:
    assert has_connector(SimpleNamespace(ec_transfer_config=transfer)) is expected
    config = SimpleNamespace()
    assert not is_marked(config)
    mark(config)
    assert is_marked(config)
