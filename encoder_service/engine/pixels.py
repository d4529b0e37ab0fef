"""Patches in front of a forward pass: how a caller gives them to the graph runner, and where they go.

Owns the two forms in which they come and the check that they fit. The buffers are the runner's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import torch

from encoder_service.errors import PixelTensorMismatch

# Either the patches of each item, [P of the item, patch_dim] on any device, or a function that writes all of
# them into the [P, patch_dim] tensor it is given, in the current stream.
Pixels: TypeAlias = Sequence[torch.Tensor] | Callable[[torch.Tensor], None]


class StaticBuffers(NamedTuple):
    """What the device has of the batch that is being launched in one bucket. table_I5: FusedInputs.items;
    sources_I2: StagedPixels.sources, of a staged batch; pixels: [P of the bucket, patch_dim]."""

    table_I5: torch.Tensor
    sources_I2: torch.Tensor
    pixels: torch.Tensor


def write_pixels(target: torch.Tensor, pixels: Pixels) -> None:
    """Patches into ``target`` [P, patch_dim]. Raises PixelTensorMismatch for another shape."""
    if callable(pixels):
        pixels(target)
        return
    num_patches, patch_dim = target.shape
    given = sum(patches.shape[0] for patches in pixels)
    if given != num_patches or any(patches.shape[1:] != (patch_dim,) for patches in pixels):
        raise PixelTensorMismatch(
            f"pixels have shapes {[tuple(patches.shape) for patches in pixels]}, {given} rows together, the "
            f"batch needs {num_patches} rows of {patch_dim}",
            found=given,
            needed=num_patches,
        )
    first = 0
    for patches in pixels:
        target[first : first + patches.shape[0]].copy_(patches, non_blocking=True)
        first += patches.shape[0]
