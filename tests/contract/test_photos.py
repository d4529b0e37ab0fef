"""The photographs that tests and the demo use: all are licensed, small, and as described."""

from __future__ import annotations

from pathlib import Path

from PIL import Image

PHOTOS = Path(__file__).parents[1] / "data" / "photos"
FILES = sorted(path for path in PHOTOS.iterdir() if path.suffix in {".jpg", ".png"})


def test_every_photograph_has_its_licence() -> None:
    rows = [line.split("|") for line in (PHOTOS / "LICENSES.md").read_text().splitlines() if "| `" in line]
    named = {columns[1].strip(" `"): columns for columns in rows}
    assert named.keys() == {path.name for path in FILES}
    for _, _, title, author, licence, source, *_ in named.values():
        assert title.strip()
        assert author.strip()
        assert "public domain" in licence or "CC0" in licence
        assert "skimage/data/" in source


def test_photographs_are_small() -> None:
    assert len(FILES) == 4
    assert sum(path.stat().st_size for path in FILES) < 600_000


def test_one_is_turned_by_exif_and_one_has_alpha() -> None:
    with Image.open(PHOTOS / "chelsea_exif_rotated.jpg") as cat:
        assert cat.getexif()[0x0112] == 6
        assert cat.size == (300, 451)
    with Image.open(PHOTOS / "rocket_alpha.png") as rocket:
        assert rocket.mode == "RGBA"
        assert rocket.getchannel("A").getextrema() == (0, 255)
