"""What every family's preprocessor is: file bytes to uint8 frames on the host, frames to patches anywhere.

Owns the seam between ingest and the pipeline. The host half (decode, resize, pad) runs on worker threads
and yields uint8; the device half (normalise, cut into patches) runs where the tower runs, so that an
eighth of the bytes travels. Both halves together equal the reference processors bit for bit.
"""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, NamedTuple

import torch

from encoder_service.types import FrameItem, Grid, Modality, PatchItem, PixelValues, PreprocessOptions

if TYPE_CHECKING:
    from encoder_service.ingest.clips import ClipPreprocessor


class Fit(NamedTuple):
    """What becomes of an image of so many pixels: resized to the target, then padded to its grid's pixels."""

    height: int
    width: int
    target_height: int
    target_width: int
    padded_height: int
    padded_width: int
    grid: Grid

    @property
    def is_kept(self) -> bool:
        """Whether the image is as it has to be."""
        sizes = self.target_height, self.target_width
        return (self.height, self.width) == sizes == (self.padded_height, self.padded_width)


class Preprocessor(abc.ABC):
    """One family's preprocessing with one checkpoint's settings. Stateless and thread-safe.

    fingerprint: 32 bytes over every setting that changes pixels, and over the version of the code's rules.
    patch_dim: elements of one flattened patch. clips: the rules for clips; None where the checkpoint says
    nothing of them.
    """

    fingerprint: bytes
    patch_dim: int
    clips: ClipPreprocessor | None = None

    @property
    def longest_item(self) -> int:
        """Patches of the largest item, a still or what of a clip is attended together, that the checkpoint's
        settings make; 0 for a family that is never asked for more than a batch takes."""
        return 0

    @abc.abstractmethod
    def check_options(self, modality: Modality, options: PreprocessOptions) -> None:
        """Raises InvalidOption for an override the family lacks or whose value is out of bounds."""

    @abc.abstractmethod
    def target_grid(self, height: int, width: int, options: PreprocessOptions) -> Grid:
        """The grid that an image of this size will have. height, width in pixels, after EXIF rotation
        where the family applies it. Raises AspectRatioExceeded, InvalidOption."""

    @abc.abstractmethod
    def probe_image(self, data: bytes, options: PreprocessOptions) -> Grid:
        """The grid of an encoded image, from its header alone: no pixel is decoded.
        Raises UndecodableImage, ImageTooLarge, AspectRatioExceeded."""

    def glance_at_image(self, data: bytes, options: PreprocessOptions) -> Grid | None:
        """As ``probe_image``, where the file says it so plainly that an event loop may ask; else None.
        Raises as ``probe_image``."""
        del data, options
        return None

    @abc.abstractmethod
    def load_image(self, data: bytes, options: PreprocessOptions) -> tuple[FrameItem, float, float]:
        """Decoded, converted to RGB, resized and padded frames, with the milliseconds spent in decoding
        and in resizing. Raises UndecodableImage, ImageTooLarge, AspectRatioExceeded."""

    def glance_at_fit(self, data: bytes, options: PreprocessOptions) -> Fit | None:
        """As ``glance_at_image``, of all that becomes of the image; None also for a family that has nothing
        to tell of it."""
        del data, options
        return None

    def probe_fit(self, data: bytes, options: PreprocessOptions) -> Fit | None:
        """As ``probe_image``, of all that becomes of the image. None for a family that has nothing to tell
        of it: its images are loaded."""
        del data, options
        return None

    def decode_image(self, data: bytes, fit: Fit, out: torch.Tensor) -> None:
        """The image's own pixels, decoded and converted to RGB, into contiguous uint8 [height, width, 3].
        fit: what the header told. Raises UndecodableImage, ImageTooLarge."""
        raise NotImplementedError

    @abc.abstractmethod
    def check_pixels(self, pixels: PixelValues) -> PatchItem:
        """A caller's own pixel tensor as float32 [P, patch_dim].
        Raises PixelTensorMismatch (dtype, rank, width), GridMismatch (rows), NonFinitePixels."""

    @abc.abstractmethod
    def patchify(self, frames_THWC: torch.Tensor) -> torch.Tensor:
        """uint8 [T, H, W, 3] frames to normalised float32 [P, patch_dim], on the frames' device."""
