"""Settings of pixels in shared memory: off until they are asked for, and hard to get wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from encoder_service.config import parse_settings
from encoder_service.errors import ConfigurationError
from encoder_service.transport.pixel_input import open_pixel_input


def test_nothing_is_taken_by_default() -> None:
    pixels = open_pixel_input(parse_settings(model=Path("/m")))
    assert (pixels.folder, pixels.book) == (None, None)
    assert not pixels.announcement("host").HasField("pixel_input")


def test_what_is_taken_is_announced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VE_SHM_PREFIXES", "ve-pixels-, gateway_")
    monkeypatch.setenv("VE_SHM_ALLOWED_UIDS", "1000,2000")
    settings = parse_settings(
        model=Path("/m"), shm_dir=tmp_path, broker_path="/run/b.sock", max_message_bytes=1 << 21
    )
    assert settings.shm_allowed_uids == (1000, 2000)
    pixels = open_pixel_input(settings)
    told = pixels.announcement("host").pixel_input
    assert (told.host_id, list(told.name_prefixes)) == ("host", ["ve-pixels-", "gateway_"])
    assert (told.published, told.max_tensor_bytes) == (True, 1 << 21)
    assert pixels.folder is not None
    pixels.folder.close()
    off = open_pixel_input(parse_settings(model=Path("/m"), broker_path="/b", max_published_bytes=0))
    assert off.book is None


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"shm_prefixes": "ve"}, "'ve'; a prefix has 3 to 64"),
        ({"shm_prefixes": "ok-prefix,../etc"}, "'../etc'"),
        ({"shm_prefixes": ".hidden"}, "'.hidden'"),
        ({"shm_dir": "shm"}, "'shm' is no absolute path"),
        ({"max_published_bytes": -1}, "max_published_bytes"),
    ],
)
def test_wrong_settings_are_refused_by_name(given: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        parse_settings(model=Path("/m"), **given)


def test_a_folder_that_is_not_there_stops_the_start(tmp_path: Path) -> None:
    settings = parse_settings(model=Path("/m"), shm_prefixes=("ve-",), shm_dir=tmp_path / "none")
    with pytest.raises(ConfigurationError, match="shared memory folder"):
        open_pixel_input(settings)
