"""Clips with alpha are put on white; containers off the list are named and refused."""

from __future__ import annotations

import io
import struct

import numpy as np
import pytest
import torch
from PIL import Image

from encoder_service.errors import PixelTensorMismatch, UndecodableClip
from encoder_service.ingest.video.clip import open_source
from encoder_service.ingest.video.source import ClipLimits, FramesClip
from encoder_service.types import FrameArray
from tests.unit.ingest import clip_files
from tests.unit.ingest.image_files import encode, image

LIMITS = ClipLimits()


def sticker(row: int) -> np.ndarray:
    """uint8 [T, H, W, 4]: a black bar on clear ground that is black below, as of stickers."""
    frames = np.zeros((6, 48, 64, 4), np.uint8)
    frames[:, row : row + 8, 8:56, 3] = 255
    return frames


def read(data: bytes, transparent: str = "white") -> np.ndarray:
    clip = open_source(data, LIMITS, transparent)  # type: ignore[arg-type]
    return np.stack([frame.numpy() for frame in clip.frames(range(clip.header.num_frames))])


@pytest.mark.parametrize("codec", ["libvpx", "libvpx-vp9"])
def test_p53_black_on_clear_ground_stays_readable(codec: str) -> None:
    first, second = (read(clip_files.transparent(sticker(row), codec)) for row in (8, 30))
    assert first.shape == (6, 48, 64, 3)
    assert first[:, 12, 12:52].max() < 10
    assert first[:, 30:].min() > 245
    assert second[:, 34, 12:52].max() < 10
    assert read(clip_files.transparent(sticker(8), codec), "drop").max() < 10


def test_p53_opaque_frames_with_alpha_equal_those_without() -> None:
    frames = np.concatenate([clip_files.moving(5), np.full((5, 48, 64, 1), 255, np.uint8)], axis=3)
    data = clip_files.transparent(frames)
    assert np.array_equal(read(data), clip_files.decoded(data))
    assert np.array_equal(read(data), read(data, "drop"))


def test_p53_alpha_of_a_clip_is_blended_as_that_of_an_image() -> None:
    frames = np.full((3, 48, 64, 4), (200, 40, 90, 128), np.uint8)
    found = read(clip_files.transparent(frames)).astype(int)
    expected = frames[..., :3] * (128 / 255) + 255 * (1 - 128 / 255)
    assert np.abs(found - expected).max() < 8  # colours are lossy


def test_p53_a_gif_is_shown_on_white() -> None:
    images = [Image.fromarray(frame) for frame in sticker(8)]
    file = io.BytesIO()
    images[0].save(file, "GIF", save_all=True, append_images=images[1:], duration=100, disposal=2)
    found = read(file.getvalue())
    assert found[:, 30:].min() == 255
    assert found[0, 12, 12:52].max() == 0


def test_p53_arrays_with_alpha_are_refused() -> None:
    frames = torch.zeros(2, 8, 8, 4, dtype=torch.uint8)
    with pytest.raises(PixelTensorMismatch, match=r"uint8 \[2, 8, 8, 4\], needed are .*alpha is not taken"):
        FramesClip(FrameArray(frames, 2.0), LIMITS)


@pytest.mark.parametrize("codec", ["png", "qtrle", "prores_ks"])
def test_p53_other_codecs_with_alpha_are_refused_by_name(codec: str) -> None:
    import av

    file, formats = io.BytesIO(), {"png": "rgba", "qtrle": "argb", "prores_ks": "yuva444p10le"}
    with av.open(file, "w", format="mov") as out:
        stream = out.add_stream(codec, rate=10)
        assert isinstance(stream, av.VideoStream)
        stream.height, stream.width, stream.pix_fmt = 48, 64, formats[codec]
        frame = av.VideoFrame.from_ndarray(sticker(8)[0], format="rgba").reformat(format=formats[codec])
        out.mux(stream.encode(frame))
        out.mux(stream.encode(None))
    with pytest.raises(UndecodableClip, match=f"video is {codec.removesuffix('_ks')}, accepted are h264"):
        open_source(file.getvalue(), LIMITS)


def animated(kind: str) -> bytes:
    return encode(image("RGB"), kind, save_all=True, append_images=[image("RGB", seed=1)])


def iso(*brands: bytes) -> bytes:
    """A sound MP4 with other brands."""
    data = clip_files.encode(clip_files.moving(4), "mpeg4.mp4")
    size = int.from_bytes(data[:4], "big")
    # As long as before, because offsets count from the file's beginning.
    body = brands[0] + bytes(4) + b"".join(brands[1:])
    ftyp = struct.pack(">I", 8 + len(body)) + b"ftyp" + body
    return ftyp + struct.pack(">I4s", size - len(ftyp), b"free") + bytes(size - len(ftyp) - 8) + data[size:]


@pytest.mark.parametrize(
    ("data", "name"),
    [
        *((iso(brand), "AVIF") for brand in (b"avif", b"avis")),
        *(
            (iso(brand), "HEIF or HEIC")
            for brand in (b"mif1", b"msf1", b"heic", b"heix", b"hevc", b"hevx", b"heim", b"heis", b"avci")
        ),
        (iso(b"msf1", b"avis"), "AVIF"),
        (iso(b"crx "), "Canon raw image"),
        (iso(b"abcd"), "ISO file of brand 'abcd'"),
        (iso(b"isom").replace(b"vide", b"pict", 1), "sequence of images"),
        (animated("WEBP"), "WebP image"),
        (animated("PNG"), "PNG image"),
        (animated("AVIF"), "AVIF"),
        (encode(image("RGB"), "JPEG"), "JPEG image"),
        (b"RIFF\x24\0\0\0AVI LIST" + bytes(40), "AVI file"),
        (b"FLV\x01\x05" + bytes(40), "Flash video"),
        (b"OggS" + bytes(40), "Ogg file"),
        (b"G" + (bytes(187) + b"G") * 3, "MPEG transport stream"),
        (b"\0\0\1\xba" + bytes(40), "MPEG program stream"),
        (b"\x1a\x45\xdf\xa3\x87\x42\x82\x84" + b"mine" + bytes(40), "EBML file of type b'mine'"),
        (b"#EXTM3U\nhttp://x/", "playlist"),
        (b"<html><body>not found</body></html>", "HTML or XML text"),
    ],
)
def test_p54_a_container_off_the_list_is_refused_by_name(data: bytes, name: str) -> None:
    with pytest.raises(UndecodableClip, match=name):
        open_source(data, LIMITS)


@pytest.mark.parametrize("brands", [(b"isom",), (b"qt  ",), (b"3gp5",), (b"NDXX", b"mp42"), (b"M4V ",)])
def test_p54_films_of_any_brand_that_is_known_are_read(brands: tuple[bytes, ...]) -> None:
    data = iso(*brands)
    assert np.array_equal(read(data), clip_files.decoded(data))
