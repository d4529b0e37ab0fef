"""JPEG files decoded on the device, on the workers' behalf: which ones, by how many at a time, and what their
rows are called.

Owns the choice between device and host, the decoders that threads take turns with, the counts and the part of
the key. The library behind a decoder is ``nvjpeg``'s matter, and everything that is not decoded here is
``decode``'s: other formats, whatever is unusual about a file, and every error, whose words are therefore the
host's.

A decoder's pixels are not the host's to the bit (docs/resize.md says how near they are), so that the rows
have keys of their own. One image may come from the host all the same, where the device had no memory for it:
it is within the same distance.
"""

from __future__ import annotations

import base64
import io
import threading
from collections.abc import Callable
from typing import Literal, Protocol

import numpy as np
import structlog
import torch
from blake3 import blake3
from PIL import Image

from encoder_service.errors import ConfigurationError
from encoder_service.ingest.jpeg import read_jpeg_head, upright_pixels
from encoder_service.ingest.jpeg_scans import read_plain_jpeg

log = structlog.get_logger(__name__)

KEY_TAG = b"vision_encoder.decoder.v1"
# Bounds the device memory of one decoder; a photograph of 12 megapixels fits.
MAX_DEVICE_PIXELS = 1 << 24
# Of smaller images the few pixels at edges, which the two interpolate differently, are many.
MIN_DEVICE_SIDE = 64
# Decoders in use at a time; threads beyond wait for one. Each keeps the memory of its largest image.
MAX_DECODERS = 16
# Mean distance of the probe's pixels from the host's, in levels.
MAX_PROBE_DISTANCE = 3.0
# Slopes in 4:2:0, height and width, the same bytes everywhere: what a decoder makes of them enters keys.
PROBE_SIDES = (24, 40)
PROBE = base64.b64decode(
    "/9j/4AAQSkZJRgABAQAAAQABAAD/2wBDAAgGBgcGBQgHBwcJCQgKDBQNDAsLDBkSEw8UHRofHh0aHBwgJC4nICIsIxwcKDcpLDAx"
    "NDQ0Hyc5PTgyPC4zNDL/2wBDAQkJCQwLDBgNDRgyIRwhMjIyMjIyMjIyMjIyMjIyMjIyMjIyMjIyMjIyMjIyMjIyMjIyMjIyMjIy"
    "MjIyMjIyMjL/wAARCAAYACgDASIAAhEBAxEB/8QAFwABAQEBAAAAAAAAAAAAAAAAAAUCB//EABcQAAMBAAAAAAAAAAAAAAAAAAAE"
    "ITH/xAAZAQACAwEAAAAAAAAAAAAAAAADBgEEBQj/xAAeEQABAwUBAQAAAAAAAAAAAAAAAQIEAwUxUWESIv/aAAwDAQACEQMRAD8A"
    "4ympkLyauQwmrkL6auQhyF2XbOG01MhfTVyGE1MhfTVyAHILEu2cNpq5AXE1cgAqgu1bZ9YOPpq5C+mrkANFyHQMuOzRfTVyF5NX"
    "IAAcgsS47NF9NXIAAKi7Vjs9YP/Z"
)


class DeviceMemoryFull(Exception):
    """The device had no memory for an image."""


class JpegDecoder(Protocol):
    """Used by one thread at a time."""

    def decode(self, data: bytes, out: torch.Tensor) -> bool:
        """Fills ``out``, contiguous uint8 [H, W, 3] on the host, with the file's RGB pixels, not rotated.
        False for a file that it refuses; ``out`` may have anything then. Raises DeviceMemoryFull, and
        whatever else: it is not used again after that."""
        ...


class DeviceDecoding:
    """What decodes JPEG files on ``device``. Thread-safe.

    name: of the kind of decoder and its settings, for keys. make_decoder: a new one; may raise as
    ``JpegDecoder.decode``. counts: images by where they were decoded: ``device``, and on the host what is no
    plain JPEG file (``host_format``), what has a side under ``min_side`` (``host_small``) or more than
    ``max_pixels`` (``host_large``), what the device had no memory for (``host_memory``) and what it refused
    or failed at (``host_error``).
    """

    def __init__(
        self,
        name: str,
        make_decoder: Callable[[], JpegDecoder],
        device: torch.device,
        *,
        min_side: int = MIN_DEVICE_SIDE,
        max_pixels: int = MAX_DEVICE_PIXELS,
        max_decoders: int = MAX_DECODERS,
    ) -> None:
        self.name = name
        self.min_side = min_side
        self.max_pixels = max_pixels
        self._make_decoder = make_decoder
        self._device = device
        self._lock = threading.Lock()
        self._turns = threading.BoundedSemaphore(max_decoders)
        self._idle: list[JpegDecoder] = []  # the last one first: few decoders have large images' memory
        self._probed = b""
        places = ("device", "host_format", "host_small", "host_large", "host_memory", "host_error")
        self.counts = dict.fromkeys(places, 0)

    def decode(self, data: bytes, out: torch.Tensor | None = None) -> torch.Tensor | None:
        """The upright pixels, uint8 [H, W, 3] on the host, contiguous; None for a file that the host is to
        decode, or to refuse. data: within the service's limits. out: memory of the image's size, which is
        returned where it could be filled; else it may have anything. Raises nothing of the decoder's."""
        place, pixels = self._decode(data, out)
        with self._lock:
            self.counts[place] += 1
        return pixels

    def try_out(self) -> None:
        """Decodes an image whose pixels are known. Raises ConfigurationError where that fails."""
        height, width = PROBE_SIDES
        found = torch.empty((height, width, 3), dtype=torch.uint8)
        try:
            is_decoded = self._decode_in_turn(PROBE, found)
        except Exception as error:
            raise ConfigurationError(f"decode device: {self.name} fails at a probe image: {error}") from error
        if not is_decoded:
            raise ConfigurationError(f"decode device: {self.name} refuses a probe image")
        with Image.open(io.BytesIO(PROBE)) as picture:
            expected = np.asarray(picture.convert("RGB"), np.int16)
        distance = float(np.abs(found.numpy().astype(np.int16) - expected).mean())
        if distance > MAX_PROBE_DISTANCE:
            raise ConfigurationError(
                f"decode device: {self.name} gives pixels of a probe image that are {distance:.1f} levels "
                f"from the host's in the mean, {MAX_PROBE_DISTANCE} are allowed"
            )
        self._probed = found.numpy().tobytes()

    def fingerprint(self, preprocess_fingerprint: bytes) -> bytes:
        """The preprocessing's fingerprint under this decoder, 32 bytes: another for every kind of decoder,
        and for each that makes other pixels of the probe."""
        digest: bytes = blake3(
            KEY_TAG + preprocess_fingerprint + blake3(self.name.encode()).digest() + self._probed
        ).digest()
        return digest

    def _decode(self, data: bytes, out: torch.Tensor | None) -> tuple[str, torch.Tensor | None]:
        """The place that the image counts for, and what ``decode`` returns."""
        head = read_jpeg_head(data)
        if head is None or read_plain_jpeg(data) is None:
            return "host_format", None
        if min(head.height, head.width) < self.min_side:
            return "host_small", None
        if head.height * head.width > self.max_pixels:
            return "host_large", None
        is_upright, shape = head.orientation == 1, (head.height, head.width, 3)
        try:
            fits = out is not None and is_upright and tuple(out.shape) == shape
            pixels = out if out is not None and fits else self._host_memory(shape)
            if not self._decode_in_turn(data, pixels):
                return "host_error", None
        except DeviceMemoryFull as error:
            log.debug("no device memory to decode an image in", shape=shape, error=str(error))
            return "host_memory", None
        except Exception as error:  # of the library's bindings: anything
            log.debug("the device cannot decode an image", shape=shape, error=str(error))
            return "host_error", None
        if is_upright:
            return "device", pixels
        return "device", torch.from_numpy(upright_pixels(pixels.numpy(), head.orientation))

    def _decode_in_turn(self, data: bytes, pixels: torch.Tensor) -> bool:
        with self._turns:
            with self._lock:
                decoder = self._idle.pop() if self._idle else None
            if decoder is None:
                decoder = self._make_decoder()
            is_decoded = decoder.decode(data, pixels)
            with self._lock:  # not after an exception
                self._idle.append(decoder)
        return is_decoded

    def _host_memory(self, shape: tuple[int, ...]) -> torch.Tensor:
        if self._device.type != "cuda":
            return torch.empty(shape, dtype=torch.uint8)
        with torch.cuda.device(self._device):  # pinning makes a context on whatever is current
            return torch.empty(shape, dtype=torch.uint8, pin_memory=True)


def open_decoding(
    where: Literal["host", "device"],
    device: torch.device,
    open_decoders: Callable[[torch.device], DeviceDecoding] | None = None,
) -> DeviceDecoding | None:
    """What decodes on ``device``, tried out; None for the host. open_decoders: in place of nvJPEG's. Raises
    ConfigurationError where the library is missing or cannot decode."""
    if where == "host":
        return None
    if open_decoders is None:
        from encoder_service.ingest.nvjpeg import open_nvjpeg  # imports the library

        open_decoders = open_nvjpeg
    decoding = open_decoders(device)
    decoding.try_out()
    return decoding
