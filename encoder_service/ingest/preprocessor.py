"""The base class of preprocessors: file bytes to uint8 frames on the host, frames to patches anywhere.

Owns what the families share: option checks, loading, the checks of a caller's own pixel tensor, and the
fingerprint of the settings. The families (``qwen_vl``, ``moonvit``) own target sizes, padding and patch
order.

The host half (decode, resize, pad) runs on worker threads and gives uint8. The device half (``patchify``:
normalise, cut into patches) runs where the tower runs, so that at most a quarter of the bytes of float32
patches is copied. Together they equal the reference processors bit for bit.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import json
import math
import time
from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple, TypeAlias

import torch
from blake3 import blake3

from encoder_service.errors import (
    GridMismatch,
    InvalidOption,
    NonFinitePixels,
    PixelTensorMismatch,
    UnsupportedContent,
)
from encoder_service.ingest.decode import DecodeLimits, OpenImage, Transparent, open_image
from encoder_service.ingest.identity import dtype_name
from encoder_service.ingest.resize import resize_and_pad, resize_bytes
from encoder_service.ingest.settings import ImageSettings, Normalisation, SettingsReader
from encoder_service.ingest.video.clip import Clip, ClipRules
from encoder_service.ingest.video.source import ClipLimits
from encoder_service.types import (
    EncodedFile,
    FrameArray,
    FrameItem,
    Grid,
    Item,
    LoadedPixels,
    Modality,
    PatchItem,
    PixelValues,
    PreprocessOptions,
)

PIXEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class ImagePlan(NamedTuple):
    """How an image is resized: to ``target``, then padded to ``padded``, both (height, width) in pixels."""

    target: tuple[int, int]
    padded: tuple[int, int]
    grid: Grid


class PatchLayout(NamedTuple):
    """How ``patchify`` cuts frames, for a kernel that does the same on the device. temporal_patch_size:
    frames. merges_time: whether patches are frame by frame in raster order, otherwise they are in merge
    order."""

    patch_size: int
    merge_size: int
    temporal_patch_size: int
    merges_time: bool
    normalisation: Normalisation


@dataclasses.dataclass(frozen=True)
class OpenItem:
    """An image, or patches that the caller made, whose pixels are not decoded. Holds no more memory than the
    content.

    grid: as the file's header or the caller states it. decoded_bytes: the most memory that ``load`` takes for
    pixels. load: makes the pixels; must run on a worker thread. Raises UndecodableImage, ImageTooLarge,
    PixelTensorMismatch, GridMismatch, NonFinitePixels.
    """

    grid: Grid
    decoded_bytes: int
    load: Callable[[], LoadedPixels]


class Preprocessor(abc.ABC):
    """One family's preprocessing with one checkpoint's settings. Stateless and thread-safe.

    modalities: what the family's own processor makes; pixel tensors of others are refused too.
    family, rules, options, merges_time: set by a subclass. rules: version of the preprocessing rules in the
    code. options: the overrides that images accept. merges_time: the tower averages over frames. fingerprint:
    32 bytes over the rules and every setting that changes pixels. patch_dim: elements of one flattened patch.
    patch_layout: None if the device's kernel has no such cut; then ``patchify`` runs item by item. clips: the
    rules for clips; None if the checkpoint has none. transparent: how alpha is handled.
    """

    family: ClassVar[str]
    rules: ClassVar[str]
    options: ClassVar[tuple[str, ...]]
    merges_time: ClassVar[bool] = False
    modalities: ClassVar[tuple[Modality, ...]] = (Modality.IMAGE, Modality.VIDEO)
    fingerprint: bytes
    patch_layout: PatchLayout | None = None
    clips: ClipRules | None = None

    def __init__(
        self,
        settings: ImageSettings,
        limits: DecodeLimits,
        clips: ClipRules | None,
        transparent: Transparent,
        *,
        frames_per_patch: int,
    ) -> None:
        self.limits = limits
        self.clips = clips
        self.transparent = transparent
        self.merge_size = settings.merge_size
        self.patch_dim = 3 * frames_per_patch * settings.patch_size**2
        self.patch_layout = PatchLayout(
            settings.patch_size,
            settings.merge_size,
            frames_per_patch,
            self.merges_time,
            settings.normalisation,
        )
        # JSON writes a float as the shortest text that reads back to the same double, so equal settings give
        # equal bytes on every machine.
        content: dict[str, object] = {"rules": self.rules, "settings": dataclasses.asdict(settings)}
        if clips is not None:
            content["clips"] = clips.described
        if transparent != "drop":
            content["transparent"] = transparent
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
        self.fingerprint = blake3(text.encode()).digest()

    @property
    def longest_item(self) -> int:
        """Patches of the largest image that the checkpoint's settings allow, or of the largest part of a clip
        that is attended together. 0 if that never exceeds a batch."""
        return 0

    @abc.abstractmethod
    def plan_image(self, height: int, width: int, options: PreprocessOptions) -> ImagePlan:
        """The target size of an image. height, width: upright, in pixels. Raises AspectRatioExceeded,
        InvalidOption."""

    @abc.abstractmethod
    def check_values(self, options: PreprocessOptions) -> None:
        """Raises InvalidOption for a value out of bounds. Expects only overrides named in ``options``."""

    @property
    @abc.abstractmethod
    def patch_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes that one patch of a caller's pixel tensor may have. The first is the flat one."""

    @abc.abstractmethod
    def patchify(self, frames_THWC: torch.Tensor) -> torch.Tensor:
        """Converts uint8 frames [T, H, W, 3] to normalised float32 [P, patch_dim], on the same device."""

    def check_options(self, modality: Modality, options: PreprocessOptions) -> None:
        """Raises InvalidOption for an override that the family lacks or whose value is out of bounds,
        UnsupportedContent for a modality that it lacks."""
        if modality not in self.modalities:
            taken = " and ".join(f"{one.value} items" for one in self.modalities)
            raise UnsupportedContent(f"{self.family} takes {taken}, this is a {modality.value} item")
        clips = self.clips if modality is Modality.VIDEO else None
        accepted = self.options if modality is Modality.IMAGE else ()
        if clips is not None:
            accepted = clips.options
        for name, value in options.given().items():
            if name not in accepted:
                raise InvalidOption(
                    f"{name} = {value} does not apply to {modality.value} items of {self.family}, "
                    f"which accept {', '.join(accepted) or 'no options'}",
                    option=name,
                    accepted=", ".join(accepted),
                )
        if clips is not None:
            clips.check_options(options)
        else:
            self.check_values(options)

    def open(self, item: Item) -> OpenItem:
        """Opens an image file or patches. Must run on a worker thread for a file, whose header it reads.
        Raises UndecodableImage, ImageTooLarge, AspectRatioExceeded, UnsupportedContent."""
        match item.content:
            case EncodedFile(data) if item.modality is Modality.IMAGE:
                return self.open_image(data, item.options)
            case PixelValues(tensor, grid) as pixels:
                if grid.t > 1 and Modality.VIDEO not in self.modalities:
                    raise UnsupportedContent(f"{self.family} takes no clips, grid {list(grid)} is one")
                return OpenItem(grid, 4 * tensor.numel(), functools.partial(self._load_pixels, pixels))
        raise UnsupportedContent(f"{type(item.content).__name__} of {item.modality.value} is no single image")

    def open_image(self, data: bytes, options: PreprocessOptions) -> OpenItem:
        """Opens an image file: reads its header. Raises as ``open``."""
        image = open_image(data, self.limits)
        plan = self.plan_image(*image.size, options)
        num_bytes = self.image_bytes(image, plan)
        return OpenItem(plan.grid, num_bytes, functools.partial(self._load_image, image, options))

    def image_bytes(self, image: OpenImage, plan: ImagePlan) -> int:
        """The most memory that decoding and ``resized`` take."""
        return max(image.decoded_bytes, resize_bytes(*image.size, plan.target, plan.padded))

    def resized(self, image_HWC: torch.Tensor, plan: ImagePlan) -> torch.Tensor:
        """A decoded image, resized and padded: uint8 [*plan.padded, 3]."""
        return resize_and_pad(image_HWC, plan.target, plan.padded)

    def _load_image(self, image: OpenImage, options: PreprocessOptions) -> LoadedPixels:
        """One decoded, resized and padded frame, with the milliseconds of decoding and of resizing. The grid
        is that of the decoded pixels; the header of a damaged file may state another one."""
        started_s = time.perf_counter()
        image_HWC = image.decode(self.transparent)
        decoded_s = time.perf_counter()
        plan = self.plan_image(image_HWC.shape[0], image_HWC.shape[1], options)
        frames_THWC = self.resized(image_HWC, plan).unsqueeze(0)
        resized_s = time.perf_counter()
        decode_ms, resize_ms = (decoded_s - started_s) * 1e3, (resized_s - decoded_s) * 1e3
        return LoadedPixels(FrameItem(frames_THWC, plan.grid), decode_ms, resize_ms)

    def _load_pixels(self, pixels: PixelValues) -> LoadedPixels:
        started_s = time.perf_counter()
        patches = self.check_pixels(pixels)
        return LoadedPixels(patches, (time.perf_counter() - started_s) * 1e3, 0.0)

    def open_clip(self, content: EncodedFile | FrameArray, options: PreprocessOptions) -> Clip:
        """Opens a clip, which is then read in pieces. Must run on a worker thread. Raises as
        ``ClipRules.open``, and UnsupportedContent if the checkpoint has no settings for clips."""
        if self.clips is None:
            raise UnsupportedContent("the checkpoint has no settings for clips; send a clip as pixel tensors")
        return self.clips.open(content, options)

    def check_pixels(self, pixels: PixelValues) -> PatchItem:
        """A caller's own pixel tensor as float32 [P, patch_dim]. Raises PixelTensorMismatch (dtype, rank,
        width), GridMismatch (rows), NonFinitePixels."""
        tensor, grid = pixels.pixel_values, pixels.grid
        if tensor.dtype not in PIXEL_DTYPES:
            raise PixelTensorMismatch(
                f"pixel_values is {dtype_name(tensor.dtype)}, "
                f"needs one of {', '.join(dtype_name(dtype) for dtype in PIXEL_DTYPES)}",
                found=dtype_name(tensor.dtype),
            )
        if tuple(tensor.shape[1:]) not in self.patch_shapes:
            allowed = " or ".join(str(["P", *shape]).replace("'", "") for shape in self.patch_shapes)
            raise PixelTensorMismatch(
                f"pixel_values has shape {list(tensor.shape)}, {self.family} needs {allowed}",
                found=list(tensor.shape),
                needed=allowed,
            )
        self._check_grid(grid, tensor.shape[0])
        low, high = torch.aminmax(tensor)  # both are NaN if any element is
        if not (math.isfinite(low.item()) and math.isfinite(high.item())):
            num_bad = int(tensor.numel() - torch.isfinite(tensor).sum().item())
            raise NonFinitePixels(
                f"pixel_values has {num_bad} NaN or infinite elements among {tensor.numel()}, allowed are 0",
                found=num_bad,
                num_elements=tensor.numel(),
            )
        flat = tensor.to(torch.float32).reshape(grid.num_patches, self.patch_dim)
        return PatchItem(flat.contiguous(), grid)

    def _check_grid(self, grid: Grid, num_rows: int) -> None:
        text = list(grid)
        if min(grid) < 1:
            raise GridMismatch(f"grid_thw is {text}, every side needs at least 1", grid_thw=text)
        if grid.h % self.merge_size or grid.w % self.merge_size:
            raise GridMismatch(
                f"grid_thw is {text}, height and width need multiples of the merge size {self.merge_size}",
                grid_thw=text,
                merge_size=self.merge_size,
            )
        if num_rows != grid.num_patches:
            raise GridMismatch(
                f"pixel_values has {num_rows} rows, grid_thw {text} needs {grid.num_patches}",
                found=num_rows,
                needed=grid.num_patches,
            )


def overridden(names: Sequence[str], settings: object, options: PreprocessOptions) -> dict[str, int]:
    """The checkpoint's values of these names, overridden by those of the request."""
    given = options.given()
    return {name: int(given.get(name, getattr(settings, name))) for name in names}


def check_range(name: str, value: int | float, ceiling: int) -> None:
    """Raises InvalidOption unless 1 <= value <= ceiling."""
    if not 1 <= value <= ceiling:
        raise InvalidOption(
            f"{name} is {value}, allowed are 1 to {ceiling}", option=name, found=value, allowed=ceiling
        )


Build: TypeAlias = Callable[
    [SettingsReader, SettingsReader | None, DecodeLimits, ClipLimits, Transparent], Preprocessor
]
"""Makes a family's preprocessor of a checkpoint's settings for images and for clips, if it has these. Raises
UnsupportedCheckpoint."""
