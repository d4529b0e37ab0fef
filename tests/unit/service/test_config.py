"""Settings: sources, bounds, refusals."""

from __future__ import annotations

from pathlib import Path

import pytest

from encoder_service.config import Settings, parse_settings
from encoder_service.errors import ConfigurationError


def test_arguments_win_over_the_environment_over_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VE_DEVICE", "cuda:1")
    monkeypatch.setenv("VE_LISTEN", "0.0.0.0:1, unix:/run/x.sock")
    settings = parse_settings(model=Path("/m"), device="cpu", dtype=None)
    assert settings.device == "cpu"
    assert settings.listen == ("0.0.0.0:1", "unix:/run/x.sock")
    assert settings.dtype is None


def test_every_setting_says_what_it_is() -> None:
    assert all(field.description for field in Settings.model_fields.values())


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, "model"),
        ({"device": "tpu"}, "device"),
        ({"listen": ("nowhere",)}, "neither host:port nor unix:/path"),
        ({"listen": ("host:99999",)}, "neither host:port nor unix:/path"),
        ({"listen": ()}, "listen"),
        ({"listen": ("unix:" + "x" * 200,)}, "at most 107 bytes"),
        ({"admin_listen": "unix:/x"}, "host:port only"),
        ({"store_bytes": -1}, "store_bytes"),
        ({"chunk_bytes": 1}, "chunk_bytes"),
        ({"no_such": 1}, "no_such"),
        ({"max_queued_patches": 65_535}, "max_patches_per_item 65536 is above max_queued_patches 65535"),
        ({"max_queued_bytes": 1 << 20}, "max_message_bytes 268435456 is above max_queued_bytes 1048576"),
        ({"max_message_bytes": 1 << 20}, "chunk_bytes 1048576 and its 64 bytes of frame do not fit"),
        ({"broker_path": "run/broker.sock"}, "'run/broker.sock' is no absolute path"),
        ({"isolated_namespaces": "a=1048576"}, "set broker_path"),
        ({"broker_path": "/b", "isolated_namespaces": "a=1048576"}, "'a' needs a token"),
        (
            {"broker_path": "/b", "isolated_namespaces": "a=1048575", "broker_tokens": "a=x"},
            "'a' has 1048575 bytes, the least is 1048576",
        ),
        ({"broker_tokens": "a"}, "'a' is not one name=value"),
        ({"broker_tokens": "a=x,a=y"}, "'a' is not one name=value"),
        ({"broker_mode": "9"}, "broker_mode"),
        ({"lease_default_ms": 300_001}, "lease_default_ms 300001 is above lease_limit_ms 300000"),
        ({"lease_limit_ms": 600_001}, "lease_limit_ms 600001 is above lease_max_age_ms 600000"),
        ({"namespace_shares": "a=0"}, "namespace_shares.a"),
        ({"namespace_shares": "a=1001"}, "namespace_shares.a"),
        ({"namespace_shares": "a=nan"}, "namespace_shares.a"),
        ({"namespace_shares": "a=1,a=2"}, "'a' is not one name=value"),
        (
            {
                "broker_path": "/b",
                "isolated_namespaces": "a=1048576",
                "broker_tokens": "a=x",
                "namespace_shares": "a=2",
            },
            "'a' has all of its arena",
        ),
        (
            {"broker_path": "/b", "device_arena_bytes": 2_097_152},
            "2097152 bytes of device arenas are a GPU's memory, device is cpu",
        ),
        ({"decode": "device"}, "decode device needs device cuda, found device cpu"),
        ({"decode": "gpu"}, "decode"),
    ],
)
def test_wrong_settings_are_refused_by_name(given: dict[str, object], text: str) -> None:
    arguments = {"model": Path("/m"), **given} if given else {}
    with pytest.raises(ConfigurationError, match=text):
        parse_settings(**arguments)


def test_names_and_values_come_as_a_comma_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VE_BROKER_PATH", "/run/broker.sock")
    monkeypatch.setenv("VE_ISOLATED_NAMESPACES", "a=1048576, b=2097152")
    monkeypatch.setenv("VE_BROKER_TOKENS", "a=one,b=t=o,=three")
    monkeypatch.setenv("VE_BROKER_ALLOWED_UIDS", "0, 1000")
    monkeypatch.setenv("VE_NAMESPACE_SHARES", "=2, c=0.25")
    settings = parse_settings(model=Path("/m"))
    assert settings.isolated_namespaces == {"a": 1 << 20, "b": 2 << 20}
    tokens = {name: token.get_secret_value() for name, token in settings.broker_tokens.items()}
    assert tokens == {"a": "one", "b": "t=o", "": "three"}
    assert settings.broker_allowed_uids == (0, 1000)
    assert settings.namespace_shares == {"": 2.0, "c": 0.25}


def test_a_token_is_in_no_text(capsys: pytest.CaptureFixture[str]) -> None:
    settings = parse_settings(model=Path("/m"), broker_tokens="a=hush")
    assert "hush" not in repr(settings)
    with pytest.raises(ConfigurationError) as caught:
        parse_settings(model=Path("/m"), broker_tokens="a=hush,a=hush")
    assert "hush" not in str(caught.value)


def test_unknown_environment_variables_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VE_STOER_BYTES", "1")
    with pytest.raises(ConfigurationError, match="VE_STOER_BYTES"):
        parse_settings(model=Path("/m"))


def test_settings_are_frozen() -> None:
    settings = parse_settings(model=Path("/m"))
    with pytest.raises(ValueError, match="frozen"):
        settings.device = "cuda"
