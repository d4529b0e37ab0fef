"""The resize on a GPU against torch's on the CPU: every byte, at random sizes and at the odd ones."""

from __future__ import annotations

import secrets

import pytest
import torch

from encoder_service.ingest.frames import ImagePreprocessor, resize_bicubic
from encoder_service.ingest.moonvit import MoonViTPreprocessor
from encoder_service.ingest.qwen_vl import QwenVLPreprocessor
from encoder_service.ingest.settings import MoonViTSettings, QwenVLSettings
from encoder_service.towers.kernels.resize import (
    HEADER_BYTES,
    Packing,
    axis_tables,
    num_taps,
    pack,
    pixels_of,
    resize_alone,
    write_tables,
)
from encoder_service.types import PreprocessOptions
from tests.unit.kernels.test_patches import HALVES, LIMITS

RNG = secrets.SystemRandom()
ODD_SIZES = [
    ((1, 1), (1, 1)),
    ((1, 1), (7, 5)),
    ((7, 5), (1, 1)),
    ((1, 40), (28, 28)),
    ((40, 1), (3, 64)),
    ((2, 2), (48, 48)),
    ((20, 24), (2, 2)),
    ((90, 7), (3, 40)),
    ((33, 47), (33, 16)),  # one axis only
    ((33, 47), (64, 47)),
    ((33, 47), (34, 46)),
    ((61, 97), (28, 56)),
]


def image(height: int, width: int, generator: torch.Generator, kind: str = "noise") -> torch.Tensor:
    """noise: every value; edges: 0 and 255 alone, whose overshoots have to be cut off."""
    values = torch.randint(0, 256, (height, width, 3), dtype=torch.uint8, generator=generator)
    return values if kind == "noise" else (values >= 128).to(torch.uint8) * 255


def check(before: torch.Tensor, height: int, width: int, device: torch.device) -> None:
    expected = resize_bicubic(before, height, width)
    rows, columns, _ = before.shape
    packing = Packing(rows, columns, height, width, height, width)
    found = resize_alone(pack(before, packing), packing, device).cpu()
    different = (found.int() - expected.int()).abs()
    assert torch.equal(found, expected), (
        f"{tuple(before.shape)} to {height}x{width}: {int(different.count_nonzero())} of {found.numel()} "
        f"bytes differ, by {int(different.max())} at most"
    )


@pytest.mark.parametrize("kind", ["noise", "edges"])
@pytest.mark.parametrize(("before", "after"), ODD_SIZES)
def test_odd_sizes(
    before: tuple[int, int],
    after: tuple[int, int],
    kind: str,
    device: torch.device,
    generator: torch.Generator,
) -> None:
    check(image(*before, generator, kind), *after, device)


@pytest.mark.parametrize(("largest", "number"), [(24, 12), (64, 4)])
def test_random_sizes(largest: int, number: int, device: torch.device, generator: torch.Generator) -> None:
    for _ in range(number):
        height, width, new_height, new_width = (RNG.randint(1, largest) for _ in range(4))
        kind = RNG.choice(("noise", "edges"))
        check(image(height, width, generator, kind), new_height, new_width, device)


@pytest.mark.gpu
def test_photographs_sizes_on_a_gpu(device: torch.device, generator: torch.Generator) -> None:
    for _ in range(30):
        height, width = RNG.randint(200, 4500), RNG.randint(200, 4500)
        new_height, new_width = 28 * RNG.randint(1, 80), 28 * RNG.randint(1, 80)
        check(image(height, width, generator), new_height, new_width, device)


def test_tables_are_those_of_every_size_that_torch_is_asked_for(generator: torch.Generator) -> None:
    """By one axis of random sizes up to 5,000, without the kernel: the sums as plain tensors."""
    for _ in range(60):
        num_before, num_after = RNG.randint(1, 5000), RNG.randint(1, 2000)
        row = image(1, num_before, generator, RNG.choice(("noise", "edges")))
        tables = axis_tables(num_before, num_after)
        assert tables.weights_MK.shape == (num_after, num_taps(num_before, num_after))
        weights_MK = torch.from_numpy(tables.weights_MK).long()
        taps = torch.arange(weights_MK.shape[1])
        places = (torch.from_numpy(tables.first_M)[:, None] + taps).clamp(max=num_before - 1).long()
        total = (row[0].long()[places] * weights_MK[..., None]).sum(1)
        assert int(total.abs().max()) + (1 << (tables.precision - 1)) < 1 << 31, "the kernel's sums fit"
        level = ((total + (1 << (tables.precision - 1))) >> tables.precision).clamp(0, 255).to(torch.uint8)
        expected = resize_bicubic(row, 1, num_after)[0]
        assert torch.equal(level, expected), f"{num_before} to {num_after}"


QWEN = QwenVLPreprocessor(QwenVLSettings(4, 2, 2, 24 * 24, 48 * 48, HALVES), LIMITS)
KIMI = MoonViTPreprocessor(MoonViTSettings(6, 2, 40, 20, HALVES), LIMITS)
FAMILIES = pytest.mark.parametrize("preprocessor", [QWEN, KIMI], ids=["qwen", "kimi"])


def check_fit(
    preprocessor: ImagePreprocessor, before: torch.Tensor, device: torch.device, options: PreprocessOptions
) -> None:
    """What the device makes of an image against what the workers do, padding included."""
    height, width, _ = before.shape
    fit = preprocessor.fit_of(height, width, options)
    packing = Packing(*fit[:6])
    found = resize_alone(pack(before, packing), packing, device).cpu()
    assert torch.equal(found, preprocessor.fit(before, options)), f"{height}x{width} as {fit}"


@FAMILIES
def test_p09_p11_images_a_pixel_off_the_grid_are_the_workers(
    preprocessor: ImagePreprocessor, device: torch.device, generator: torch.Generator
) -> None:
    """Up, down, and along one axis only, by one pixel; and images of the very size."""
    side = 24  # whole merge blocks of both
    for height in (side - 1, side, side + 1):
        for width in (2 * side - 1, 2 * side, 2 * side + 1):
            before = image(height, width, generator, RNG.choice(("noise", "edges")))
            check_fit(preprocessor, before, device, PreprocessOptions())


@FAMILIES
@pytest.mark.parametrize(("height", "width"), [(1, 120), (120, 1), (2, 200), (130, 3), (1, 1), (5, 90)])
def test_p09_p11_strips_and_dots_are_the_workers(
    height: int,
    width: int,
    preprocessor: ImagePreprocessor,
    device: torch.device,
    generator: torch.Generator,
) -> None:
    check_fit(preprocessor, image(height, width, generator, "edges"), device, PreprocessOptions())


@FAMILIES
def test_p09_p11_random_images_are_the_workers(
    preprocessor: ImagePreprocessor, device: torch.device, generator: torch.Generator
) -> None:
    for _ in range(8):
        options = PreprocessOptions(max_patches=RNG.randint(1, 40))
        if preprocessor is QWEN:
            least = RNG.randint(1, 24 * 24)
            options = PreprocessOptions(min_pixels=least, max_pixels=least + RNG.randint(0, 40 * 40))
        before = image(RNG.randint(1, 90), RNG.randint(1, 90), generator, RNG.choice(("noise", "edges")))
        check_fit(preprocessor, before, device, options)


@pytest.mark.gpu
@FAMILIES
def test_photographs_are_the_workers_on_a_gpu(
    preprocessor: ImagePreprocessor, device: torch.device, generator: torch.Generator
) -> None:
    full: ImagePreprocessor = QwenVLPreprocessor(QwenVLSettings(16, 2, 2, 65_536, 1 << 24, HALVES), LIMITS)
    if preprocessor is KIMI:
        full = MoonViTPreprocessor(MoonViTSettings(14, 2, 16_384, 512, HALVES), LIMITS)
    for _ in range(20):
        before = image(RNG.randint(20, 4500), RNG.randint(50, 4000), generator)
        check_fit(full, before, device, PreprocessOptions())


def test_a_packed_image_is_its_tables_and_its_pixels(generator: torch.Generator) -> None:
    before = image(9, 12, generator)
    packing = Packing(9, 12, 9, 20, 10, 22)
    packed = pack(before, packing)
    assert packed.numel() == packing.num_bytes > HEADER_BYTES + before.numel()
    assert torch.equal(pixels_of(packed, packing), before)
    assert pixels_of(packed, packing).data_ptr() - packed.data_ptr() == packing.num_bytes - before.numel()
    with pytest.raises(AssertionError, match=f"{packing.num_bytes} bytes, packed, got 7"):
        write_tables(packed[:7], packing)


@pytest.mark.parametrize(
    ("before", "after", "complaint"), [(0, 4, "has 0 elements, needs 1"), (4, 0, "gets 0 elements, needs 1")]
)
def test_an_axis_without_elements_is_refused(before: int, after: int, complaint: str) -> None:
    with pytest.raises(AssertionError, match=complaint):
        axis_tables(before, after)
