"""JPEG files on their way to a decoder on the device, played by a stand-in: what it is given, what comes back
to the host, and what keys and counts say of it."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from encoder_service.errors import ConfigurationError, ImageTooLarge, VisionEncoderError
from encoder_service.ingest.decode import DecodeLimits, decode_rgb
from encoder_service.ingest.device_decode import (
    MIN_DEVICE_SIDE,
    PROBE,
    PROBE_SIDES,
    DeviceDecoding,
    DeviceMemoryFull,
    JpegDecoder,
    open_decoding,
)
from encoder_service.ingest.frames import ImagePreprocessor
from encoder_service.ingest.moonvit import MoonViTPreprocessor
from encoder_service.ingest.qwen_vl import QwenVLPreprocessor
from encoder_service.ingest.settings import MoonViTSettings, Normalisation, QwenVLSettings
from encoder_service.types import PreprocessOptions
from tests.unit.ingest import image_files

CPU = torch.device("cpu")
LIMITS = DecodeLimits(max_encoded_bytes=1 << 20, max_image_pixels=1 << 20)
PLAIN = PreprocessOptions()
HALF = Normalisation((0.5, 0.5, 0.5), (0.5, 0.5, 0.5), 1 / 255)
FILES = image_files.every_file()
ON_DEVICE = {"jpeg-rgb", "jpeg-444", "jpeg-progressive", "jpeg-grey"}


def off_by_one(pixels: np.ndarray) -> np.ndarray:
    """As the stand-in decodes: one level from the host's everywhere."""
    return (pixels ^ 1).astype(np.uint8)


class StandIn:
    """Decodes with Pillow, every level off by one. before: called with the file."""

    def __init__(self, before: Callable[[bytes], object] | None = None) -> None:
        self._before = before
        self._busy = threading.Lock()
        self.num_files = 0

    def decode(self, data: bytes, out: torch.Tensor) -> bool:
        assert self._busy.acquire(blocking=False), "two threads in one decoder"
        try:
            self.num_files += 1
            if self._before is not None and self._before(data) is False:
                out.zero_()
                return False
            with Image.open(io.BytesIO(data)) as picture:
                pixels = np.asarray(picture.convert("RGB"))
            assert tuple(out.shape) == pixels.shape
            assert out.is_contiguous()
            out.copy_(torch.from_numpy(off_by_one(pixels)))
            return True
        finally:
            self._busy.release()


class Stand:
    """A decoding over stand-ins, which it keeps."""

    def __init__(self, before: Callable[[bytes], object] | None = None, **options: Any) -> None:
        self.made: list[StandIn] = []

        def make() -> JpegDecoder:
            self.made.append(StandIn(before))
            return self.made[-1]

        # the tests' images are small
        self.decoding = DeviceDecoding("stand-in", make, CPU, **{"min_side": 1} | options)

    @property
    def counts(self) -> dict[str, int]:
        return {place: number for place, number in self.decoding.counts.items() if number}


def preprocessors(decoding: DeviceDecoding | None) -> list[ImagePreprocessor]:
    return [
        QwenVLPreprocessor(QwenVLSettings(16, 2, 2, 1024, 1 << 22, HALF), LIMITS, decoding=decoding),
        MoonViTPreprocessor(MoonViTSettings(14, 2, 16_384, 512, HALF), LIMITS, decoding=decoding),
    ]


def outcome(data: bytes, decoding: DeviceDecoding | None, limits: DecodeLimits = LIMITS) -> Any:
    """Pixels, or all that an error tells."""
    try:
        return decode_rgb(data, limits, decoding=decoding).numpy().tobytes()
    except VisionEncoderError as error:
        return type(error), error.reason, error.message, error.details


# Which files


@pytest.mark.parametrize("name", sorted(FILES))
def test_plain_jpeg_is_the_devices_and_everything_else_the_hosts(name: str) -> None:
    stand = Stand()
    found = decode_rgb(FILES[name], LIMITS, decoding=stand.decoding).numpy()
    expected = decode_rgb(FILES[name], LIMITS).numpy()
    if name in ON_DEVICE:
        assert np.array_equal(found, off_by_one(expected))
        assert stand.counts == {"device": 1}
    else:
        assert np.array_equal(found, expected)
        assert stand.counts == {"host_format": 1}
        assert not stand.made


@pytest.mark.parametrize("orientation", range(10))
def test_orientation_is_applied_to_the_devices_pixels(orientation: int) -> None:
    picture = Image.fromarray(image_files.pixels(31, 52))
    data = image_files.encode(picture, "JPEG", exif=image_files.exif(orientation))
    stand = Stand()
    found = decode_rgb(data, LIMITS, decoding=stand.decoding)
    assert found.is_contiguous()
    expected = decode_rgb(data, LIMITS).numpy()
    if 1 <= orientation <= 8:
        assert stand.counts == {"device": 1}
        assert np.array_equal(found.numpy(), off_by_one(expected))
    else:  # no orientation that there is: Pillow has the say
        assert stand.counts == {"host_format": 1}
        assert np.array_equal(found.numpy(), expected)


def test_memory_of_the_callers_is_filled_where_nothing_is_turned() -> None:
    stand, limits = Stand(), LIMITS
    upright = FILES["jpeg-rgb"]
    turned = image_files.encode(image_files.image("RGB"), "JPEG", exif=image_files.exif(6))
    out = torch.empty((image_files.HEIGHT, image_files.WIDTH, 3), dtype=torch.uint8)
    assert decode_rgb(upright, limits, out, stand.decoding) is out
    assert np.array_equal(out.numpy(), off_by_one(decode_rgb(upright, limits).numpy()))
    tall = torch.empty((image_files.WIDTH, image_files.HEIGHT, 3), dtype=torch.uint8)
    found = decode_rgb(turned, limits, tall, stand.decoding)
    assert np.array_equal(found.numpy(), off_by_one(decode_rgb(turned, limits).numpy()))
    wrong = torch.empty((3, 4, 3), dtype=torch.uint8)
    assert decode_rgb(upright, limits, wrong, stand.decoding) is not wrong
    assert stand.counts == {"device": 3}


def test_what_is_over_the_limits_is_refused_by_the_host_and_never_sent() -> None:
    data = FILES["jpeg-rgb"]
    num_pixels = image_files.WIDTH * image_files.HEIGHT
    for limits in (DecodeLimits(len(data) - 1, 1 << 20), DecodeLimits(1 << 20, num_pixels - 1)):
        stand = Stand()
        assert outcome(data, stand.decoding, limits) == outcome(data, None, limits)
        assert outcome(data, None, limits)[0] is ImageTooLarge
        assert not stand.made
        assert stand.counts == {}
    assert outcome(data, Stand().decoding, DecodeLimits(len(data), num_pixels)) != outcome(data, None)


def test_images_over_the_devices_own_limit_are_decoded_on_the_host() -> None:
    data = FILES["jpeg-rgb"]
    num_pixels = image_files.WIDTH * image_files.HEIGHT
    stand = Stand(max_pixels=num_pixels - 1)
    assert outcome(data, stand.decoding) == outcome(data, None)
    assert (stand.counts, stand.made) == ({"host_large": 1}, [])
    at_the_limit = Stand(max_pixels=num_pixels)
    assert outcome(data, at_the_limit.decoding) != outcome(data, None)
    assert at_the_limit.counts == {"device": 1}


@pytest.mark.parametrize("turned", [False, True])
def test_small_images_are_decoded_on_the_host(turned: bool) -> None:
    assert DeviceDecoding("stand-in", StandIn, CPU).min_side == MIN_DEVICE_SIDE
    side = min(image_files.WIDTH, image_files.HEIGHT)
    picture = image_files.image("RGB")
    data = image_files.encode(picture.transpose(Image.Transpose.ROTATE_90) if turned else picture, "JPEG")
    stand = Stand(min_side=side + 1)
    assert outcome(data, stand.decoding) == outcome(data, None)
    assert (stand.counts, stand.made) == ({"host_small": 1}, [])
    at_the_limit = Stand(min_side=side)
    assert outcome(data, at_the_limit.decoding) != outcome(data, None)
    assert at_the_limit.counts == {"device": 1}


def test_errors_are_the_hosts_word_for_word() -> None:
    """Cut off, put together wrongly, or with headers that say something else."""
    num_errors = 0
    for name in sorted(ON_DEVICE | {"jpeg-cmyk", "mpo"}):
        data = FILES[name]
        broken = [data[: len(data) * part // 40] for part in range(40)]
        broken += [
            data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :] for at in range(0, min(700, len(data)), 3)
        ]
        for number, one in enumerate(broken):
            expected, stand = outcome(one, None), Stand()
            found = outcome(one, stand.decoding)
            if isinstance(expected, bytes):
                assert isinstance(found, bytes), f"{name} {number}: {found}"
                assert len(found) == len(expected)
                continue
            num_errors += 1
            assert found == expected, f"{name} {number}"
            assert not stand.made, f"{name} {number}: a file that the host refuses was sent to the device"
    assert num_errors > 200


# What the device cannot do


def test_a_file_that_the_device_refuses_is_decoded_on_the_host() -> None:
    stand = Stand(lambda data: False)
    for _ in range(2):
        assert outcome(FILES["jpeg-rgb"], stand.decoding) == outcome(FILES["jpeg-rgb"], None)
    assert stand.counts == {"host_error": 2}
    assert len(stand.made) == 1, "a refusal leaves the decoder as it was"


@pytest.mark.parametrize(
    ("error", "place"),
    [
        (DeviceMemoryFull("20 MiB"), "host_memory"),
        (RuntimeError("internal error"), "host_error"),
        (ValueError("bad"), "host_error"),
    ],
    ids=["memory", "runtime", "value"],
)
def test_after_an_exception_the_host_decodes_and_another_decoder_is_made(
    error: Exception, place: str
) -> None:
    failing = [True]

    def before(data: bytes) -> None:
        if failing[0]:
            raise error

    stand = Stand(before)
    data = FILES["jpeg-444"]
    out = torch.empty((image_files.HEIGHT, image_files.WIDTH, 3), dtype=torch.uint8)
    expected = decode_rgb(data, LIMITS).numpy()
    for _ in range(40):  # more than there are turns
        assert np.array_equal(decode_rgb(data, LIMITS, out, stand.decoding).numpy(), expected)
    failing[0] = False
    for _ in range(2):
        assert outcome(data, stand.decoding) != outcome(data, None)
    assert stand.counts == {place: 40, "device": 2}
    assert len(stand.made) == 41


def test_a_decoder_that_cannot_be_made_is_as_one_that_fails() -> None:
    def fails() -> JpegDecoder:
        raise DeviceMemoryFull("no context")

    decoding = DeviceDecoding("none", fails, CPU, min_side=1)
    assert outcome(FILES["jpeg-rgb"], decoding) == outcome(FILES["jpeg-rgb"], None)
    assert decoding.counts["host_memory"] == 1


# Threads


def test_each_thread_has_a_decoder_to_itself_and_there_are_no_more_than_allowed() -> None:
    meet = threading.Barrier(3)

    def wait(data: bytes) -> None:
        meet.wait(30)  # three at a time, or never

    stand = Stand(wait, max_decoders=3)
    names = sorted(ON_DEVICE) * 6
    expected = {name: off_by_one(decode_rgb(FILES[name], LIMITS).numpy()) for name in ON_DEVICE}
    with ThreadPoolExecutor(12) as pool:
        found = list(pool.map(lambda name: decode_rgb(FILES[name], LIMITS, decoding=stand.decoding), names))
    for name, pixels in zip(names, found, strict=True):
        assert np.array_equal(pixels.numpy(), expected[name]), name
    assert len(stand.made) == 3
    assert stand.counts == {"device": 24}


def test_decoders_are_used_again_the_last_one_first() -> None:
    stand = Stand()
    for _ in range(5):
        outcome(FILES["jpeg-rgb"], stand.decoding)
    assert [one.num_files for one in stand.made] == [5]


# Images and keys


def test_both_families_resize_what_the_device_decoded() -> None:
    data = FILES["jpeg-rgb"]
    stand = Stand()
    lossless = image_files.ppm(off_by_one(decode_rgb(data, LIMITS).numpy()))
    for on_device, on_host in zip(preprocessors(stand.decoding), preprocessors(None), strict=True):
        found, _, _ = on_device.load_image(data, PLAIN)
        expected, _, _ = on_host.load_image(lossless, PLAIN)
        assert torch.equal(found.frames_THWC, expected.frames_THWC)
        assert found.grid == on_host.probe_image(data, PLAIN)
        fit = on_device.probe_fit(data, PLAIN)
        out = torch.empty((fit.height, fit.width, 3), dtype=torch.uint8)
        on_device.decode_image(data, fit, out)
        assert np.array_equal(out.numpy(), off_by_one(decode_rgb(data, LIMITS).numpy()))
    assert stand.counts == {"device": 4}


def test_another_decoder_is_another_fingerprint_and_the_hosts_is_todays() -> None:
    def tried(name: str, level: int = 0) -> DeviceDecoding:
        def make() -> JpegDecoder:
            def decode(data: bytes, out: torch.Tensor) -> bool:
                with Image.open(io.BytesIO(data)) as picture:
                    out.copy_(torch.from_numpy(np.array(picture.convert("RGB"))))
                out[0, 0, 0] += level
                return True

            return SimpleNamespace(decode=decode)  # type: ignore[return-value]

        decoding = DeviceDecoding(name, make, CPU)
        decoding.try_out()
        return decoding

    decoders = [None, tried("a"), tried("b"), tried("a", level=1)]
    fingerprints = [[one.fingerprint for one in preprocessors(decoder)] for decoder in decoders]
    assert len({digest for both in fingerprints for digest in both}) == 8
    assert all(len(digest) == 32 for both in fingerprints for digest in both)
    assert [one.fingerprint for one in preprocessors(tried("a"))] == fingerprints[1]
    # By hand: what replicas have stored under.
    assert [digest.hex()[:16] for digest in fingerprints[0]] == HOST_FINGERPRINTS


# Of these settings, before there was any decoder but the host's.
HOST_FINGERPRINTS = ["9a6b7db42092683f", "3e79b5fa2628fbd7"]


# At start


def opened(stand: Stand) -> Callable[[torch.device], DeviceDecoding]:
    return lambda device: stand.decoding


def test_the_host_needs_nothing() -> None:
    assert open_decoding("host", CPU) is None


def test_a_decoder_is_tried_out_before_it_serves() -> None:
    stand = Stand()
    assert open_decoding("device", CPU, opened(stand)) is stand.decoding
    assert stand.counts == {}, "the probe is no image of a caller's"
    assert [one.num_files for one in stand.made] == [1]
    with Image.open(io.BytesIO(PROBE)) as picture:
        assert picture.size == PROBE_SIDES[::-1]


@pytest.mark.parametrize(
    ("before", "text"),
    [
        (lambda data: False, "stand-in refuses a probe image"),
        (lambda data: 1 / 0, "stand-in fails at a probe image: division by zero"),
    ],
    ids=["refuses", "raises"],
)
def test_one_that_cannot_decode_is_refused(before: Callable[[bytes], object], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        open_decoding("device", CPU, opened(Stand(before)))


def test_one_that_gives_other_pixels_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    stand = Stand()
    monkeypatch.setattr(
        StandIn, "decode", lambda self, data, out: out.copy_(torch.arange(out.numel()).view_as(out)) is out
    )
    with pytest.raises(ConfigurationError, match=r"levels from the host's in the mean, 3\.0 are allowed"):
        open_decoding("device", CPU, opened(stand))
