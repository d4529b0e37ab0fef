"""What decoding, resizing and an open clip hold at most is stated beforehand, and measured here in a process
of its own."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from encoder_service.ingest.decode import DecodeLimits, open_image
from encoder_service.ingest.resize import resize_bytes
from encoder_service.ingest.video.clip import open_source
from encoder_service.ingest.video.source import ClipLimits
from tests.unit.ingest import clip_files, image_files

SIDE = 1400
LIMITS = DecodeLimits(1 << 28, 1 << 26)
# The peaks of a process' memory above what it held, while it reads each file.
MEASURE = """
import ctypes, json, sys
from pathlib import Path

import torch
from encoder_service.ingest.decode import DecodeLimits, open_image
from encoder_service.ingest.resize import resize_and_pad
from encoder_service.ingest.video.clip import open_source
from encoder_service.ingest.video.source import ClipLimits

def resident(name):
    return int(Path("/proc/self/status").read_text().split(name + ":")[1].split()[0]) * 1024

def read(path):
    data = path.read_bytes()
    if path.name.startswith("clip"):
        source = open_source(data, ClipLimits(decode_threads=2))
        for frame in source.frames(range(source.header.num_frames)):
            pass
        source.close()
        return None
    return open_image(data, DecodeLimits(1 << 28, 1 << 26)).decode()

def measured(run):
    run()  # imports, and what libraries keep
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    kept = run()
    return resident("VmHWM") - before

torch.set_num_threads(1)
peaks = {path.name: measured(lambda: read(path)) for path in sorted(Path(sys.argv[1]).iterdir())}
image = torch.zeros(2000, 1500, 3, dtype=torch.uint8)
for target in ((500, 400), (1900, 1600), (400, 3000), (3000, 300)):
    padded = target[0] + 20, target[1] + 20
    peaks["resize-%d-%d" % target] = measured(lambda: resize_and_pad(image, target, padded))
print(json.dumps(peaks))
"""


def picture(side: int) -> Image.Image:
    small = np.random.default_rng(3).integers(0, 256, (40, 40, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((side, side), Image.Resampling.BICUBIC)


def converted(mode: str) -> Image.Image:
    colours = picture(SIDE)
    match mode:
        case "I;16":
            return Image.fromarray(np.asarray(colours.convert("L")).astype(np.uint16) * 257)
        case "RGBA":
            colours.putalpha(picture(SIDE).convert("L"))
            return colours
        case "P":
            indices = colours.convert("L")
            indices.putpalette(np.random.default_rng(1).integers(0, 256, 768, dtype=np.uint8).tobytes())
            return indices
    return colours.convert(mode)


KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "png-1": ("1", "PNG", {}),
    "png-1-transparent": ("1", "PNG", {"transparency": 0}),
    "png-P-transparent": ("P", "PNG", {"transparency": 3, "compress_level": 1}),
    "png-RGBA": ("RGBA", "PNG", {"compress_level": 1}),
    "png-I;16": ("I;16", "PNG", {"compress_level": 1}),
    "jpeg": ("RGB", "JPEG", {}),
    "jpeg-progressive": ("RGB", "JPEG", {"progressive": True}),
    "jpeg-CMYK": ("CMYK", "JPEG", {}),
    "webp": ("RGB", "WEBP", {"method": 0}),
    "webp-alpha": ("RGBA", "WEBP", {"method": 0}),
    "avif": ("RGB", "AVIF", {"speed": 10}),
    "tiff-lzw": ("RGB", "TIFF", {"compression": "tiff_lzw"}),
    "gif": ("P", "GIF", {}),
    "jpeg2000": ("RGB", "JPEG2000", {}),
}
CLIP_KINDS = ("h264.mp4", "vp9.webm", "gif.gif")
SLACK = 2 << 20  # pages that the system counts late, and small allocations


@pytest.fixture(scope="module")
def peaks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, int]]:
    """A folder of files, and the peak of reading each."""
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("this system does not tell a peak of memory")
    folder = tmp_path_factory.mktemp("files")
    for name, (mode, kind, options) in KINDS.items():
        if kind in Image.SAVE:
            (folder / name).write_bytes(image_files.encode(converted(mode), kind, **options))
    for kind in CLIP_KINDS:
        (folder / f"clip-{kind}").write_bytes(clip_files.encode(clip_files.moving(16, 640, 640), kind))
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, folder],
        capture_output=True,
        check=True,
        text=True,
        env={**os.environ, "MALLOC_ARENA_MAX": "1"},
    )
    return folder, json.loads(done.stdout)


@pytest.mark.parametrize("name", KINDS)
def test_p50_decoding_holds_what_the_header_states(name: str, peaks: tuple[Path, dict[str, int]]) -> None:
    folder, found = peaks
    if name not in found:
        pytest.skip(f"this Pillow does not write {name}")
    stated = open_image((folder / name).read_bytes(), LIMITS).decoded_bytes
    assert found[name] <= stated + SLACK, (found[name], stated)
    assert stated <= 2 * found[name] + SLACK, (found[name], stated)


@pytest.mark.parametrize("target", [(500, 400), (1900, 1600), (400, 3000), (3000, 300)])
def test_p50_resizing_holds_what_is_stated(
    target: tuple[int, int], peaks: tuple[Path, dict[str, int]]
) -> None:
    image, (height, width) = 3 * 2000 * 1500, target
    found = image + peaks[1][f"resize-{height}-{width}"]
    stated = resize_bytes(2000, 1500, target, (height + 20, width + 20))
    assert found - SLACK <= stated <= 2 * found + SLACK


@pytest.mark.parametrize("kind", CLIP_KINDS)
def test_p50_an_open_clip_holds_what_it_states(kind: str, peaks: tuple[Path, dict[str, int]]) -> None:
    folder, found = peaks
    clip = open_source((folder / f"clip-{kind}").read_bytes(), ClipLimits(decode_threads=2))
    assert found[f"clip-{kind}"] <= clip.held_bytes + SLACK
    clip.close()


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "RGBA", "LA", "I;16", "CMYK", "F", "I"])
def test_p50_strips_give_the_pixels_of_the_whole(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A palette with alphas and a transparent colour too, which are kept beside the pixels."""
    options: list[dict[str, object]] = [{}]
    more: dict[str, list[dict[str, object]]] = {
        "1": [{"transparency": 0}],
        "L": [{"transparency": 77}],
        "P": [{"transparency": 3}, {"transparency": bytes(range(0, 250, 5))}],
        "RGB": [{"transparency": (3, 5, 7)}],
    }
    for each in options + more.get(mode, []):
        picture = image_files.image(mode)
        if "transparency" in each and isinstance(each["transparency"], bytes):
            picture.info["transparency"] = each["transparency"]
        kind = "TIFF" if mode in ("CMYK", "F", "I") else "PNG"
        data = image_files.encode(picture, kind, **each)
        whole = [open_image(data, LIMITS).decode(transparent) for transparent in ("white", "drop")]
        for pixels in (1, 100, 29 * 21):
            monkeypatch.setattr("encoder_service.ingest.decode.STRIP_PIXELS", pixels)
            for transparent, expected in zip(("white", "drop"), whole, strict=True):
                found = open_image(data, LIMITS).decode(transparent)  # type: ignore[arg-type]
                np.testing.assert_array_equal(found.numpy(), expected.numpy())
        monkeypatch.undo()


# What metadata costs and what its damage does


def with_early_chunk(data: bytes, chunk: bytes) -> bytes:
    return data[:33] + chunk + data[33:]


@pytest.mark.parametrize("kind", [b"tEXt", b"zTXt", b"iTXt", b"iCCP", b"pHYs", b"gAMA", b"tIME"])
def test_damaged_metadata_of_a_png_leaves_its_pixels(kind: bytes) -> None:
    plain = image_files.encode(image_files.image("RGB"), "PNG")
    chunk = image_files.png_chunk(kind, b"Comment\0\0\0some text")
    data = with_early_chunk(plain, chunk[:-1] + bytes([chunk[-1] ^ 1]))
    assert open_image(data, LIMITS).size == open_image(plain, LIMITS).size
    assert open_image(data, LIMITS).decode().equal(open_image(plain, LIMITS).decode())


@pytest.mark.parametrize("keyword", [b"Comment", b"XML:com.adobe.xmp", b"Raw profile type exif"])
@pytest.mark.parametrize("kind", [b"zTXt", b"iTXt", b"iCCP"])
def test_metadata_of_a_png_that_inflates_to_megabytes_is_left_out(kind: bytes, keyword: bytes) -> None:
    packed = zlib.compress(bytes(3 << 20))
    body = keyword + (b"\0\1\0\0\0" if kind == b"iTXt" else b"\0\0") + packed
    plain = image_files.encode(image_files.image("RGB"), "PNG")
    data = with_early_chunk(plain, image_files.png_chunk(kind, body) * 100)
    assert open_image(data, LIMITS).size == open_image(plain, LIMITS).size
    assert open_image(data, LIMITS).decode().equal(open_image(plain, LIMITS).decode())
    late = image_files.png_with_late_chunk(plain, image_files.png_chunk(kind, body))
    assert open_image(late, LIMITS).decode().equal(open_image(plain, LIMITS).decode())


def test_a_large_colour_profile_of_a_jpeg_is_read_over() -> None:
    file = io.BytesIO()
    image_files.image("RGB").save(file, "JPEG", icc_profile=os.urandom(2_000_000))
    assert open_image(file.getvalue(), LIMITS).decode().shape == (22, 29, 3)
