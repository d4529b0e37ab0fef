"""Exact resizing and normalisation, shared by all families.

Both equal the reference's default (torchvision) processors bit for bit, and Pillow's resize those that use
Pillow. Shape suffixes: H height, W width, C
channels, P patches.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from PIL import Image

from encoder_service.ingest.settings import Normalisation


def resize_bicubic(image_HWC: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Resizes uint8 [H, W, 3] to uint8 [height, width, 3]: bicubic with antialiasing, in integers.

    Uses torch's uint8 kernel, as the reference processors do; through float32 the result would differ by up
    to six levels. An image of the right size is returned unchanged, as in the reference.
    """
    if image_HWC.shape[:2] == (height, width):
        return image_HWC
    planes_1CHW = image_HWC.unsqueeze(0).permute(0, 3, 1, 2)  # a channels-last view: no copy
    resized_1CHW = torch.nn.functional.interpolate(
        planes_1CHW, size=(height, width), mode="bicubic", antialias=True
    )
    return resized_1CHW.permute(0, 2, 3, 1).squeeze(0).contiguous()


def resize_and_pad(image_HWC: torch.Tensor, target: tuple[int, int], padded: tuple[int, int]) -> torch.Tensor:
    """Resizes uint8 [H, W, 3] to the target, then pads it on the right and below with black, which becomes
    -mean / std after normalisation. target, padded: (height, width) in pixels."""
    return pad(resize_bicubic(image_HWC, *target), padded)


def pad(image_HWC: torch.Tensor, padded: tuple[int, int]) -> torch.Tensor:
    """Black on the right and below, up to (height, width) in pixels."""
    below, right = padded[0] - image_HWC.shape[0], padded[1] - image_HWC.shape[1]
    if not (right or below):
        return image_HWC
    return torch.nn.functional.pad(image_HWC, (0, 0, 0, right, 0, below))


def resize_pillow(image_HWC: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """``resize_bicubic`` by Pillow, whose weights are rounded to other integers: single values differ by one
    or two levels. uint8 [H, W, 3], or [H, W, 4] whose colours are weighted by alpha."""
    if image_HWC.shape[:2] == (height, width):
        return image_HWC
    image = Image.fromarray(image_HWC.numpy())
    return torch.from_numpy(np.array(image.resize((width, height), Image.Resampling.BICUBIC)))


def resize_bytes(height: int, width: int, target: tuple[int, int], padded: tuple[int, int]) -> int:
    """What ``resize_and_pad`` holds at most, the image itself included: the horizontal pass beside two copies
    of the result, or the result beside its padded copy."""
    resized, between = target[0] * target[1], height * target[1]
    return 3 * (height * width + resized + max(between + resized, padded[0] * padded[1]))


def pillow_bytes(
    height: int, width: int, target: tuple[int, int], padded: tuple[int, int], *, has_alpha: bool
) -> int:
    """What ``resize_pillow`` and ``pad`` hold at most, the image itself included. Pillow has four bytes a
    pixel: the image, the horizontal pass and the result; image and result a second time if colours are
    weighted by alpha."""
    copies = 2 if has_alpha else 1
    source, resized, between = height * width, target[0] * target[1], height * target[1]
    pillows = 4 * (copies * (source + resized) + between)
    return (3 + has_alpha) * (source + resized) + pillows + 3 * padded[0] * padded[1]


@functools.lru_cache(maxsize=64)
def _scaled_statistics(
    normalisation: Normalisation, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    scale = 1.0 if normalisation.in_steps else 1.0 / normalisation.rescale_factor
    mean_C, std_C = (
        (torch.tensor(values, dtype=torch.float32) * scale).to(device)
        for values in (normalisation.image_mean, normalisation.image_std)
    )
    return mean_C, std_C


def normalise_into(out: torch.Tensor, patches: torch.Tensor, normalisation: Normalisation) -> None:
    """Normalises uint8 [P, 3, ...] to float32: (x - mean / f) / (std / f), where f is the rescale factor, or
    ((x / (1 / f)) - mean) / std in steps.

    The reference fuses rescaling into mean and std in this way, in float32, and subtracts before it divides
    (``TorchvisionBackend.rescale_and_normalize``). Any other order differs in the last bit.
    """
    per_channel = (3, *(1,) * (patches.dim() - 2))
    mean, std = (values.view(per_channel) for values in _scaled_statistics(normalisation, patches.device))
    if normalisation.in_steps:
        # A tensor on the device, because CUDA multiplies by the reciprocal of a number.
        levels = torch.full((), 1.0 / normalisation.rescale_factor, device=patches.device)
        torch.div(patches, levels, out=out)
        out.sub_(mean).div_(std)
        return
    torch.sub(patches, mean, out=out)  # uint8 is promoted exactly, without a float copy of the patches
    out.div_(std)
