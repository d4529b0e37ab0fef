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
    ],
)
def test_wrong_settings_are_refused_by_name(given: dict[str, object], text: str) -> None:
    arguments = {"model": Path("/m"), **given} if given else {}
    with pytest.raises(ConfigurationError, match=text):
        parse_settings(**arguments)


def test_unknown_environment_variables_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VE_STOER_BYTES", "1")
    with pytest.raises(ConfigurationError, match="VE_STOER_BYTES"):
        parse_settings(model=Path("/m"))


def test_settings_are_frozen() -> None:
    settings = parse_settings(model=Path("/m"))
    with pytest.raises(ValueError, match="frozen"):
        settings.device = "cuda"
