"""nvJPEG behind the decoder's seam, through the package nvidia-nvimgcodec.

Owns every call of that library: which of its engines decodes, in which stream, and the way of the pixels to
host memory. Which files come here, and how many threads at a time, is ``device_decode``'s.

Its objects are not safe for several threads at once (nvImageCodec, "Thread safety"; nvJPEG likewise of its
decoder states): each decoder has its own, and its own stream, which the engine's streams do not wait for. One
kind decodes all files, so that a file's pixels do not depend on what else is being decoded: ``cuda``, whose
kernels do everything from the coefficients on, with Huffman codes on the thread that calls, or of large
images on the device; ``hardware``, the device's own JPEG engine where it has one, which takes baseline files
only. No decoder of the CPU is let in: what the device refuses is the host's, in this service's own decoder.
"""

from __future__ import annotations

import importlib
import os
from types import ModuleType
from typing import Literal

import torch

from encoder_service.errors import ConfigurationError
from encoder_service.ingest.device_decode import DeviceDecoding, DeviceMemoryFull, JpegDecoder

PACKAGE = "nvidia-nvimgcodec-cu13"
Engine = Literal["cuda", "hardware"]
# The library's names, and chroma upsampled with the same triangle filter as libjpeg's.
_BACKENDS = {"cuda": "HYBRID_CPU_GPU", "hardware": "HW_GPU_ONLY"}
_OPTIONS = ":fancy_upsampling=1"
# Device memory of a decode over that of its pixels: three bytes of each, and up to nine of planes.
IMAGE_SHARE = 4
_NO_MEMORY = ("out of memory", "memoryallocation", "allocator", "bad_alloc")


class NvJpegDecoder:
    """One decoder of the library, its stream, and the device memory of its largest image. For one thread at a
    time."""

    def __init__(self, library: ModuleType, device: torch.device, engine: Engine) -> None:
        self._library = library
        self._device = device
        with torch.cuda.device(device):
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            # Waits asleep: a thread that spins would cost the core that decoding here is to save.
            self._done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        backend = library.Backend(getattr(library.BackendKind, _BACKENDS[engine]))
        self._decoder = library.Decoder(
            device_id=device.index, max_num_cpu_threads=1, backends=[backend], options=_OPTIONS
        )
        self._params = library.DecodeParams(
            apply_exif_orientation=False,
            color_spec=library.ColorSpec.SRGB,
            sample_format=library.SampleFormat.I_RGB,
        )
        self._image: object | None = None

    def decode(self, data: bytes, out: torch.Tensor) -> bool:
        try:
            return self._decode(data, out)
        except RuntimeError as error:  # of the library's bindings and of torch's
            if any(text in str(error).lower() for text in _NO_MEMORY):
                raise DeviceMemoryFull(str(error)) from error
            raise

    def _decode(self, data: bytes, out: torch.Tensor) -> bool:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            kept, self._image = self._image, None
            image = self._decoder.decode(
                self._library.CodeStream(data),
                image=kept,
                params=self._params,
                cuda_stream=self._stream.cuda_stream,
            )
            if image is None:
                # Refused, or no memory: the library says which on stderr alone.
                free_bytes, _ = torch.cuda.mem_get_info(self._device)
                if free_bytes < IMAGE_SHARE * out.numel():
                    raise DeviceMemoryFull(f"{free_bytes} bytes are free for an image of {out.numel()}")
                return False
            if tuple(image.shape) != tuple(out.shape):
                return False
            out.copy_(torch.as_tensor(image, device=self._device), non_blocking=True)
            self._done.record(self._stream)
            self._done.synchronize()
            self._image = image
        return True


def load_library() -> ModuleType:
    """The library. Raises ConfigurationError where it is not installed or cannot be loaded."""
    # It writes a line to stderr for every file that it refuses, which is the host's then and no news.
    os.environ.setdefault("PYNVIMGCODEC_VERBOSITY", "0")
    try:
        return importlib.import_module("nvidia.nvimgcodec")
    except ImportError as error:
        raise ConfigurationError(
            f"decode device needs the package {PACKAGE}, installed by the extra nvjpeg: {error}"
        ) from error


def open_nvjpeg(device: torch.device, engine: Engine = "cuda") -> DeviceDecoding:
    """nvJPEG on ``device``, a CUDA device. Raises ConfigurationError without the library."""
    library = load_library()
    if device.index is None:
        device = torch.device(device.type, torch.cuda.current_device())

    def make_decoder() -> JpegDecoder:
        return NvJpegDecoder(library, device, engine)

    return DeviceDecoding(f"nvjpeg engine={engine} upsampling=fancy", make_decoder, device)
