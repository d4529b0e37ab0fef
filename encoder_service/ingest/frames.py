"""What both families share between a decoded image and the tower: resizing, normalising, loading, checks.

Owns the one exact resize, the one exact normalisation, the order of limit, decode and resize on the host,
and the checks of a caller's own pixel tensor. Leaves target sizes, padding and patch order to the families.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import json
import math
import time
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from blake3 import blake3

from encoder_service.errors import (
    GridMismatch,
    InvalidOption,
    NonFinitePixels,
    PixelTensorMismatch,
    UndecodableImage,
)
from encoder_service.ingest.decode import DecodeLimits, decode_rgb, glance_at_size, read_size
from encoder_service.ingest.identity import dtype_name
from encoder_service.ingest.preprocessor import Fit, Preprocessor
from encoder_service.ingest.settings import MoonViTSettings, Normalisation, QwenVLSettings
from encoder_service.types import FrameItem, Grid, Modality, PatchItem, PixelValues, PreprocessOptions

if TYPE_CHECKING:
    from encoder_service.ingest.clips import ClipPreprocessor

# Options that were found in order, which are not looked at again.
MAX_SOUND_OPTIONS = 256
PIXEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def resize_bicubic(image_HWC: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """uint8 [H, W, 3] to uint8 [height, width, 3]: bicubic with antialiasing, in integers.

    torch's own uint8 kernel, which the reference's default (torchvision) processors end in as well; through
    float32 the result is up to six levels off. An image of the right size passes untouched, as there.
    """
    if image_HWC.shape[:2] == (height, width):
        return image_HWC
    planes_1CHW = image_HWC.unsqueeze(0).permute(0, 3, 1, 2)  # a channels-last view: no copy
    resized_1CHW = torch.nn.functional.interpolate(
        planes_1CHW, size=(height, width), mode="bicubic", antialias=True
    )
    return resized_1CHW.permute(0, 2, 3, 1).squeeze(0).contiguous()


def check_size(image_HWC: torch.Tensor, height: int, width: int) -> None:
    """Raises UndecodableImage unless the image has the size that its header promised."""
    found_height, found_width, _ = image_HWC.shape
    if (found_height, found_width) != (height, width):
        raise UndecodableImage(
            f"the header promises {width}x{height} pixels, the image has {found_width}x{found_height}",
            header=f"{width}x{height}",
            found=f"{found_width}x{found_height}",
        )


@functools.lru_cache(maxsize=64)
def _scaled_statistics(
    normalisation: Normalisation, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    scale = 1.0 / normalisation.rescale_factor
    mean_C, std_C = (
        (torch.tensor(values, dtype=torch.float32) * scale).to(device)
        for values in (normalisation.image_mean, normalisation.image_std)
    )
    return mean_C, std_C


def normalise_into(out: torch.Tensor, patches: torch.Tensor, normalisation: Normalisation) -> None:
    """uint8 [P, 3, ...] into float32 of that shape: (x - mean / f) / (std / f), f the rescale factor.

    The reference fuses rescaling into mean and std in this way, in float32, subtracting before dividing
    (``TorchvisionBackend.rescale_and_normalize``); any other order differs in the last bit.
    """
    per_channel = (3, *(1,) * (patches.dim() - 2))
    mean, std = (values.view(per_channel) for values in _scaled_statistics(normalisation, patches.device))
    torch.sub(patches, mean, out=out)  # uint8 is promoted exactly, without a float copy of the patches
    out.div_(std)


def settings_fingerprint(
    rules: str,
    settings: QwenVLSettings | MoonViTSettings,
    clips: ClipPreprocessor | None = None,
) -> bytes:
    """BLAKE3 over the rules' version and the settings, those of clips among them, as canonical JSON. Floats
    in JSON are the shortest text that reads back to the same double, so equal settings give equal bytes
    everywhere."""
    content: dict[str, object] = {"rules": rules, "settings": dataclasses.asdict(settings)}
    if clips is not None:
        content["clips"] = clips.described
    digest: bytes = blake3(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).digest()
    return digest


class ImagePreprocessor(Preprocessor):
    """The host half and the tensor checks, the same for every family.

    Attributes a subclass sets: family; taken_options, the overrides of images that it takes; merge_size.
    """

    family: ClassVar[str]
    taken_options: ClassVar[tuple[str, ...]]
    limits: DecodeLimits
    merge_size: int

    @abc.abstractmethod
    def fit_of(self, height: int, width: int, options: PreprocessOptions) -> Fit:
        """What becomes of an image of this size. Raises as ``target_grid``."""

    def fit(self, image_HWC: torch.Tensor, options: PreprocessOptions) -> torch.Tensor:
        """uint8 [H, W, 3] resized and padded to the target grid's pixels."""
        height, width, _ = image_HWC.shape
        fit = self.fit_of(height, width, options)
        resized_HWC = resize_bicubic(image_HWC, fit.target_height, fit.target_width)
        # Black to the right and below, before normalising: padding is -mean / std in the patches.
        right, below = fit.padded_width - fit.target_width, fit.padded_height - fit.target_height
        if not (right or below):
            return resized_HWC
        return torch.nn.functional.pad(resized_HWC, (0, 0, 0, right, 0, below))

    def target_grid(self, height: int, width: int, options: PreprocessOptions) -> Grid:
        return self.fit_of(height, width, options).grid

    @abc.abstractmethod
    def check_values(self, options: PreprocessOptions) -> None:
        """Raises InvalidOption for a value that is out of bounds; only taken options are given."""

    @property
    @abc.abstractmethod
    def patch_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes that one patch of a caller's pixel tensor may have; the first is the flat one."""

    def check_options(self, modality: Modality, options: PreprocessOptions) -> None:
        # Asked three times of every item, and nearly always of the same options.
        if (modality, options) in self._sound_options:
            return
        self._check_options(modality, options)
        if len(self._sound_options) >= MAX_SOUND_OPTIONS:
            self._sound_options.clear()
        self._sound_options.add((modality, options))

    def _check_options(self, modality: Modality, options: PreprocessOptions) -> None:
        given = options.given()
        clips = self.clips if modality is Modality.VIDEO else None
        taken = self.taken_options if modality is Modality.IMAGE else ()
        if clips is not None:
            taken = clips.taken_options
        for name in given:
            if name not in taken:
                raise InvalidOption(
                    f"{name} = {given[name]} does not apply to {modality.value} items of {self.family}, "
                    f"which take {', '.join(taken) or 'no options'}",
                    option=name,
                    taken=", ".join(taken),
                )
        if clips is not None:
            clips.check_options(options)
        else:
            self.check_values(options)

    @functools.cached_property
    def _sound_options(self) -> set[tuple[Modality, PreprocessOptions]]:
        return set()

    def check_range(self, name: str, value: int | float, ceiling: int) -> None:
        """Raises InvalidOption unless 1 <= value <= ceiling."""
        if not 1 <= value <= ceiling:
            raise InvalidOption(
                f"{name} is {value}, allowed are 1 to {ceiling}", option=name, found=value, allowed=ceiling
            )

    def probe_image(self, data: bytes, options: PreprocessOptions) -> Grid:
        self.check_options(Modality.IMAGE, options)
        return self.target_grid(*read_size(data, self.limits), options)

    def glance_at_image(self, data: bytes, options: PreprocessOptions) -> Grid | None:
        size = glance_at_size(data, self.limits)
        if size is None:
            return None
        self.check_options(Modality.IMAGE, options)
        return self.target_grid(*size, options)

    def glance_at_fit(self, data: bytes, options: PreprocessOptions) -> Fit | None:
        size = glance_at_size(data, self.limits)
        if size is None:
            return None
        self.check_options(Modality.IMAGE, options)
        return self.fit_of(*size, options)

    def probe_fit(self, data: bytes, options: PreprocessOptions) -> Fit:
        self.check_options(Modality.IMAGE, options)
        return self.fit_of(*read_size(data, self.limits), options)

    def decode_image(self, data: bytes, fit: Fit, out: torch.Tensor) -> None:
        image_HWC = decode_rgb(data, self.limits, out)
        check_size(image_HWC, fit.height, fit.width)
        if image_HWC is not out:
            # By numpy: torch would start a team of threads for each worker that copies.
            np.copyto(out.numpy(), image_HWC.numpy())

    def load_image(self, data: bytes, options: PreprocessOptions) -> tuple[FrameItem, float, float]:
        started = time.perf_counter()
        self.check_options(Modality.IMAGE, options)
        size = read_size(data, self.limits)
        # Refuses an absurd shape before its pixels are decoded.
        grid = self.target_grid(*size, options)
        image_HWC = decode_rgb(data, self.limits)
        check_size(image_HWC, size.height, size.width)
        decoded = time.perf_counter()
        frames_THWC = self.fit(image_HWC, options).unsqueeze(0)
        fitted = time.perf_counter()
        return FrameItem(frames_THWC, grid), (decoded - started) * 1e3, (fitted - decoded) * 1e3

    def check_pixels(self, pixels: PixelValues) -> PatchItem:
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
        low, high = torch.aminmax(tensor)  # both are NaN as soon as one element is
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
