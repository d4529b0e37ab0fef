"""The resize on a GPU against torch's on the CPU: every byte, at random sizes and at the odd ones."""

from __future__ import annotations

import secrets

import pytest
import torch

from encoder_service.ingest.frames import resize_bicubic
from encoder_service.towers.kernels.resize import axis_tables, resize_bicubic_uint8

CPU = torch.device("cpu")
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
    found = resize_bicubic_uint8(before.to(device), height, width).cpu()
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


def test_an_image_of_the_right_size_is_not_touched(device: torch.device, generator: torch.Generator) -> None:
    before = image(9, 12, generator).to(device)
    assert resize_bicubic_uint8(before, 9, 12) is before


def test_tables_are_those_of_every_size_that_torch_is_asked_for(generator: torch.Generator) -> None:
    """By one axis of random sizes up to 5,000, without the kernel: the sums as plain tensors."""
    for _ in range(60):
        num_before, num_after = RNG.randint(1, 5000), RNG.randint(1, 2000)
        row = image(1, num_before, generator, RNG.choice(("noise", "edges")))
        tables = axis_tables(num_before, num_after, CPU)
        assert int(tables.weights_MK.abs().max()) < 1 << 15
        taps = torch.arange(tables.weights_MK.shape[1])
        places = (tables.first_M[:, None] + taps).clamp(max=num_before - 1).long()
        total = (row[0].long()[places] * tables.weights_MK.long()[..., None]).sum(1)
        assert int(total.abs().max()) + (1 << (tables.precision - 1)) < 1 << 31, "the kernel's sums fit"
        level = ((total + (1 << (tables.precision - 1))) >> tables.precision).clamp(0, 255).to(torch.uint8)
        expected = resize_bicubic(row, 1, num_after)[0]
        assert torch.equal(level, expected), f"{num_before} to {num_after}"


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        (torch.zeros(2, 2, 3), "found torch.float32"),
        (torch.zeros(2, 2, 4, dtype=torch.uint8), "3 channels, found 4"),
        (torch.zeros(2, 2, dtype=torch.uint8), "3 dimensions, found 2"),
        (torch.zeros(3, 2, 2, dtype=torch.uint8).permute(1, 2, 0), "contiguous"),
    ],
)
def test_what_is_no_image_is_refused(wrong: torch.Tensor, complaint: str) -> None:
    with pytest.raises(AssertionError, match=complaint):
        resize_bicubic_uint8(wrong, 4, 4)
