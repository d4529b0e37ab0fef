"""Patches from uint8 frames, bit for bit those of the preprocessors."""

from __future__ import annotations

import pytest
import torch

from encoder_service.ingest.decode import DecodeLimits
from encoder_service.ingest.moonvit import MoonViTPreprocessor
from encoder_service.ingest.qwen_vl import QwenVLPreprocessor
from encoder_service.ingest.settings import MoonViTSettings, Normalisation, QwenVLSettings
from encoder_service.towers.kernels import patchify_moonvit, patchify_packed, patchify_qwen

# Means and deviations that float32 does not hold exactly, different in every channel.
NORMALISATION = Normalisation(
    (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711), 1 / 255
)
HALVES = Normalisation((0.5, 0.5, 0.5), (0.5, 0.5, 0.5), 0.00392156862745098)
LIMITS = DecodeLimits(max_encoded_bytes=1 << 20, max_image_pixels=1 << 20)


def random_frames(generator: torch.Generator, num_frames: int, height: int, width: int) -> torch.Tensor:
    return torch.randint(256, (num_frames, height, width, 3), generator=generator, dtype=torch.uint8)


def qwen(normalisation: Normalisation, patch_size: int = 16) -> QwenVLPreprocessor:
    settings = QwenVLSettings(patch_size, 2, 2, 1, 1 << 20, normalisation)
    return QwenVLPreprocessor(settings, LIMITS)


def moonvit(normalisation: Normalisation) -> MoonViTPreprocessor:
    return MoonViTPreprocessor(MoonViTSettings(14, 2, 4096, 512, normalisation), LIMITS)


def rows_of_a_buffer(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Rows 3 and on of a larger buffer full of NaN. shape: [rows, patch_dim]."""
    num_rows, patch_dim = shape
    buffer = torch.full((num_rows + 5, patch_dim), torch.nan, dtype=dtype, device=device)
    return buffer[3 : 3 + num_rows]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("normalisation", [NORMALISATION, HALVES])
@pytest.mark.parametrize(("num_frames", "patch_size"), [(1, 16), (2, 8), (3, 6)])
def test_qwen_patches_are_the_preprocessors(
    num_frames: int,
    patch_size: int,
    normalisation: Normalisation,
    dtype: torch.dtype,
    device: torch.device,
    generator: torch.Generator,
) -> None:
    frames = random_frames(generator, num_frames, 4 * patch_size, 6 * patch_size)
    expected = qwen(normalisation, patch_size).patchify(frames).to(dtype)
    out = rows_of_a_buffer(expected.shape, dtype, device)
    patchify_qwen(
        frames.to(device),
        out,
        normalisation.image_mean,
        normalisation.image_std,
        normalisation.rescale_factor,
        patch_size=patch_size,
        merge_size=2,
        temporal_patch_size=2,
    )
    assert torch.equal(out.cpu(), expected)
    assert out._base is not None
    assert out._base.isnan().sum() == 5 * out.shape[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("normalisation", [NORMALISATION, HALVES])
@pytest.mark.parametrize("num_frames", [1, 3])
def test_moonvit_patches_are_the_preprocessors(
    num_frames: int,
    normalisation: Normalisation,
    dtype: torch.dtype,
    device: torch.device,
    generator: torch.Generator,
) -> None:
    # A cut out of larger frames: lines and frames lie apart.
    frames = random_frames(generator, num_frames, 70, 100)[:, :28, 14 : 14 + 56]
    expected = moonvit(normalisation).patchify(frames).to(dtype)
    on_device = torch.empty(num_frames, 30, 60, 3, dtype=torch.uint8, device=device)[:, :28, :56]
    on_device.copy_(frames)
    out = rows_of_a_buffer(expected.shape, dtype, device)
    patchify_moonvit(
        on_device,
        out,
        normalisation.image_mean,
        normalisation.image_std,
        normalisation.rescale_factor,
        patch_size=14,
    )
    assert torch.equal(out.cpu(), expected)


def test_every_pixel_value_in_every_channel(device: torch.device) -> None:
    """All 256 values, so that no rounding of a division hides."""
    frames = torch.arange(256, dtype=torch.uint8).view(1, 16, 16, 1).repeat(1, 2, 2, 3)
    expected = qwen(NORMALISATION).patchify(frames)
    out = torch.empty(expected.shape, device=device)
    patchify_qwen(
        frames.to(device),
        out,
        NORMALISATION.image_mean,
        NORMALISATION.image_std,
        NORMALISATION.rescale_factor,
        patch_size=16,
        merge_size=2,
        temporal_patch_size=2,
    )
    assert torch.equal(out.cpu(), expected)


def test_a_batch_in_one_launch(device: torch.device, generator: torch.Generator) -> None:
    """A still and a clip of three frames, then padding: the preprocessor's patches, and zeros."""
    patch, preprocessor = 8, qwen(NORMALISATION, 8)
    still, clip = random_frames(generator, 1, 32, 16), random_frames(generator, 3, 16, 48)
    expected = torch.cat([preprocessor.patchify(still), preprocessor.patchify(clip), torch.zeros(3, 384)])

    def block_order(high: int, wide: int) -> torch.Tensor:
        places = torch.cartesian_prod(*(torch.arange(n) for n in (high // 2, wide // 2, 2, 2)))
        block_row, block_column, row, column = places.unbind(1)
        sizes = torch.tensor([high, wide]).expand(high * wide, 2)
        return torch.cat([torch.stack([block_row * 2 + row, block_column * 2 + column], 1), sizes], 1)

    frame_bytes = 16 * 48 * 3
    starts = [[0, 0]] * 8 + [[still.numel(), still.numel() + frame_bytes]] * 12
    starts += [[still.numel() + 2 * frame_bytes] * 2] * 12 + [[-1, -1]] * 3
    coords = torch.cat(
        [block_order(4, 2), block_order(2, 6), block_order(2, 6), torch.tensor([[0, 0, 1, 1]] * 3)]
    )
    out = rows_of_a_buffer(expected.shape, torch.bfloat16, device)
    patchify_packed(
        torch.cat([still.flatten(), clip.flatten()]).to(device),
        torch.tensor(starts, device=device),
        coords.int().to(device),
        out,
        NORMALISATION.image_mean,
        NORMALISATION.image_std,
        NORMALISATION.rescale_factor,
        patch_size=patch,
    )
    assert torch.equal(out.cpu(), expected.bfloat16())
