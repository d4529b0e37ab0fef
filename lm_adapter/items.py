"""Items that a caller sends: files, frames, pixel tensors, digests and URLs, with their processor options.

Owns these records and the checks that need no server. ``convert`` turns them into messages; ``types`` has the
results. Shape legend: P patches.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from lm_adapter.errors import InvalidRequest
from vision_encoder.layout.items import Grid as Grid
from vision_encoder.layout.items import Modality as Modality
from vision_encoder.layout.items import PreprocessOptions as PreprocessOptions
from vision_encoder.layout.keys import DIGEST_BYTES, frames_source

if TYPE_CHECKING:
    import torch


_NO_OPTIONS = PreprocessOptions()


class ShortRepr:
    """``repr`` of a dataclass without its defaults, and with the first digits of digests and keys."""

    def __repr__(self) -> str:
        shown = [(each, getattr(self, each.name)) for each in fields(cast("Any", self)) if each.repr]
        texts = [f"{each.name}={_short(value)}" for each, value in shown if value != each.default]
        return f"{type(self).__name__}({', '.join(texts)})"


def _short(value: object) -> str:
    if not isinstance(value, bytes):
        return repr(value)
    return f"{value[:6].hex()}..." if len(value) == DIGEST_BYTES else f"<{len(value)} bytes>"


@dataclass(frozen=True, repr=False)
class FileItem(ShortRepr):
    """A file's bytes. digest: 32 bytes that identify the content within the client's namespace; None: the
    bytes are hashed with BLAKE3."""

    data: bytes
    digest: bytes | None = None
    options: PreprocessOptions = _NO_OPTIONS

    def __post_init__(self) -> None:
        """Raises InvalidRequest for data that is not bytes, such as a path."""
        if not isinstance(self.data, bytes):
            name, found = type(self).__name__, type(self.data).__name__
            raise InvalidRequest(f"data is a {found}, needs bytes; {name}.from_path reads a file")

    @classmethod
    def from_path(
        cls,
        path: str | os.PathLike[str],
        *,
        digest: bytes | None = None,
        options: PreprocessOptions = _NO_OPTIONS,
    ) -> Self:
        """The file at the path. Raises OSError."""
        return cls(Path(path).read_bytes(), digest, options)


@dataclass(frozen=True, repr=False)
class ImageItem(FileItem):
    """An image file (JPEG, PNG, WebP, ...). Other arguments: as in FileItem."""

    modality: Modality = Modality.IMAGE

    @classmethod
    def from_pil(
        cls, image: Any, *, digest: bytes | None = None, options: PreprocessOptions = _NO_OPTIONS
    ) -> Self:
        """A Pillow image, sent as a PNG file without loss; see ``pixels.png_file``. Raises InvalidRequest."""
        from lm_adapter.pixels import png_file

        return cls(png_file(image), digest, options)

    @classmethod
    def from_array(
        cls, array: Any, *, digest: bytes | None = None, options: PreprocessOptions = _NO_OPTIONS
    ) -> Self:
        """As ``from_pil``, of a numpy array or a torch tensor on the host: uint8 [H, W, channels] or
        [channels, H, W], with 1 (grey), 3 (RGB) or 4 (RGBA) channels."""
        return cls.from_pil(array, digest=digest, options=options)


@dataclass(frozen=True, eq=False, repr=False)
class PixelItem(ShortRepr):
    """Pixels that the caller has preprocessed. pixel_values: [P, patch_dim] or [P, C, ph, pw], a numpy array
    or a torch tensor on any device, float32, float16 or (torch only) bfloat16. grid: with t * h * w == P."""

    pixel_values: npt.NDArray[Any] | torch.Tensor = field(repr=False)
    grid: Grid
    digest: bytes | None = None
    modality: Modality = Modality.IMAGE

    def packed(self) -> tuple[str, tuple[int, ...], memoryview]:
        """The dtype name, the shape, and the row-major little-endian bytes that are sent and hashed.
        Contiguous little-endian host memory is not copied.

        Raises TypeError if pixel_values is neither a numpy array nor a torch tensor.
        """
        if isinstance(self.pixel_values, np.ndarray):
            little = self.pixel_values.dtype.newbyteorder("<")
            array = np.ascontiguousarray(self.pixel_values, dtype=little)
            return little.name, self.pixel_values.shape, array.reshape(-1).view(np.uint8).data
        # A caller that holds a tensor has already imported torch.
        torch = sys.modules.get("torch")
        if torch is None or not isinstance(self.pixel_values, torch.Tensor):
            raise TypeError(
                f"pixel_values is a numpy array or a torch tensor, found {type(self.pixel_values).__name__}"
            )
        tensor = self.pixel_values.detach().cpu().contiguous()
        name = str(tensor.dtype).removeprefix("torch.")
        return name, tuple(tensor.shape), tensor.reshape(-1).view(torch.uint8).numpy().data


@dataclass(frozen=True, repr=False)
class ClipItem(FileItem):
    """A video file (MP4, WebM, Matroska, GIF). options: fps, min_frames, max_frames and the size limits of
    the model's family."""

    modality: Modality = Modality.VIDEO


@dataclass(frozen=True, eq=False, repr=False)
class FramesItem(ShortRepr):
    """A decoded clip. frames: uint8 [T, H, W, 3], RGB, upright, a numpy array or a torch tensor. fps: the
    rate of these frames, from which the service samples as from a file; None: 24. timestamps_s: one per
    frame, in place of fps; the service then uses all frames."""

    frames: npt.NDArray[np.uint8] | torch.Tensor = field(repr=False)
    fps: float | None = None
    timestamps_s: tuple[float, ...] | None = field(default=None, repr=False)
    digest: bytes | None = None
    options: PreprocessOptions = _NO_OPTIONS
    modality: Modality = Modality.VIDEO

    def array(self) -> npt.NDArray[np.uint8]:
        """The frames on the host, contiguous. Raises InvalidRequest for a wrong dtype or shape, for fps that
        is not above 0, for a wrong number of timestamps, and if both fps and timestamps are given. Raises
        TypeError if frames is neither a numpy array nor a torch tensor."""
        frames: Any = self.frames
        if not isinstance(frames, np.ndarray):
            torch = sys.modules.get("torch")
            if torch is None or not isinstance(frames, torch.Tensor):
                raise TypeError(f"frames is a numpy array or a torch tensor, found {type(frames).__name__}")
            frames = frames.detach().cpu().numpy()
        if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[3] != 3 or not frames.size:
            raise InvalidRequest(
                f"frames are {frames.dtype} {list(frames.shape)}, needed are uint8 [T, H, W, 3], none of "
                "them 0"
            )
        self._check_times()
        return np.ascontiguousarray(frames)

    def _check_times(self) -> None:
        num_frames, timestamps_s = len(self.frames), self.timestamps_s
        if timestamps_s is not None and (self.fps is not None or len(timestamps_s) != num_frames):
            raise InvalidRequest(
                f"{num_frames} frames have {len(timestamps_s)} timestamps and fps {self.fps}, needed is "
                "one timestamp for each, or fps"
            )
        if self.fps is not None and not self.fps > 0:
            raise InvalidRequest(f"{num_frames} frames have fps {self.fps}, needed is a number above 0")

    @property
    def source(self) -> str:
        """The rate or timestamps as they enter the embedding key. Raises InvalidRequest if invalid."""
        self._check_times()
        return frames_source(self.fps, self.timestamps_s)


@dataclass(frozen=True, repr=False)
class DigestItem(ShortRepr):
    """Content that is not sent. The service answers from its store, or the item fails with UNKNOWN_KEY."""

    digest: bytes
    options: PreprocessOptions = _NO_OPTIONS
    modality: Modality = Modality.IMAGE


@dataclass(frozen=True, repr=False)
class UrlItem(ShortRepr):
    """A URL that the service fetches if its configuration allows the address. digest: if given, the service
    fetches nothing while it has the rows."""

    url: str
    digest: bytes | None = None
    options: PreprocessOptions = _NO_OPTIONS
    modality: Modality = Modality.IMAGE


Item: TypeAlias = ImageItem | ClipItem | FramesItem | PixelItem | DigestItem | UrlItem
