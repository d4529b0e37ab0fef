"""Offsets, shapes and strides against the file's real size; copies of any layout; files cut under a copy."""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Iterator
from typing import IO

import numpy as np
import pytest
import torch

from encoder_service.errors import PixelTensorMismatch
from encoder_service.transport import pixel_layout
from encoder_service.transport.pixel_layout import PixelLayout, read_tensor

MAX = 1 << 30


@pytest.fixture
def file() -> Iterator[IO[bytes]]:
    with tempfile.TemporaryFile() as found:
        yield found


def write(file: IO[bytes], data: bytes) -> int:
    file.write(data)
    file.flush()
    return file.fileno()


def checked(layout: PixelLayout, file_bytes: int) -> PixelLayout:
    layout.check(MAX)
    layout.check_fits(file_bytes)
    return layout


@pytest.mark.parametrize("scratch_bytes", [1, 16, 64, 1 << 20])
def test_p19_any_view_of_any_array_is_copied_out_right(
    scratch_bytes: int, file: IO[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transposed, sliced, stepped, of every item size, read in pieces of any size."""
    monkeypatch.setattr(pixel_layout, "SCRATCH_BYTES", scratch_bytes)
    monkeypatch.setattr(pixel_layout, "MAX_SPREAD", 10_000)
    dtypes = {1: [torch.uint8], 2: [torch.bfloat16, torch.float16], 4: [torch.float32]}
    for _ in range(300):
        rank, itemsize = random.randint(1, 5), random.choice([1, 2, 4])
        sizes = [random.randint(1, 6) for _ in range(rank)]
        base = np.random.default_rng().integers(0, 256, [*sizes, itemsize], dtype=np.uint8)
        view = base.view(f"u{itemsize}")[..., 0].transpose(random.sample(range(rank), rank))
        view = view[tuple(slice(random.randrange(num), None, random.randint(1, 3)) for num in view.shape)]
        inside = view.__array_interface__["data"][0] - base.__array_interface__["data"][0]
        before = random.randint(0, 9)
        file.seek(0)
        file.truncate()
        descriptor = write(file, b"x" * before + base.tobytes())
        layout = PixelLayout(random.choice(dtypes[itemsize]), view.shape, before + inside, view.strides)
        tensor = read_tensor(descriptor, checked(layout, before + base.nbytes))
        assert tensor.shape == view.shape
        assert tensor.is_contiguous()
        found = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        assert found == np.ascontiguousarray(view).tobytes(), (view.shape, view.strides)


def test_a_spread_tensor_is_read_in_few_pieces(file: IO[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """A column out of many rows costs reads of a megabyte, not one for each element."""
    array = np.random.default_rng().standard_normal((50_000, 12), dtype=np.float32)
    descriptor = write(file, array.tobytes())
    num_reads = 0
    preadv = os.preadv

    def counted(*arguments: object) -> int:
        nonlocal num_reads
        num_reads += 1
        return preadv(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(pixel_layout.os, "preadv", counted)
    column = array[:, 3]
    layout = checked(PixelLayout(torch.float32, column.shape, 12, column.strides), array.nbytes)
    assert torch.equal(read_tensor(descriptor, layout), torch.from_numpy(column.copy()))
    assert num_reads <= 4
    num_reads = 0
    read_tensor(descriptor, checked(PixelLayout(torch.float32, array.shape), array.nbytes))
    assert num_reads == 1


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        (PixelLayout(torch.float32, ()), "0 dimensions, 1 to 8"),
        (PixelLayout(torch.float32, (1,) * 9), "9 dimensions, 1 to 8"),
        (PixelLayout(torch.float32, (3, 0)), r"shape \(3, 0\) is empty"),
        (PixelLayout(torch.float32, (2**40, 2**40)), f"has {2**82} bytes, at most {MAX}"),
        (PixelLayout(torch.float32, (4, 4), 0, (16,)), "1 strides for 2 dimensions"),
        (PixelLayout(torch.float32, (4, 4), 0, (-16, 4)), "stride of -16 bytes"),
        (PixelLayout(torch.float32, (4, 4), 0, (16, 0)), "elements overlap: a stride of 0"),
        (PixelLayout(torch.float32, (4, 4), 0, (12, 4)), "stride of 12 bytes steps into the 16"),
        (PixelLayout(torch.float32, (4, 4), 0, (4, 4)), "elements overlap"),
        (PixelLayout(torch.float32, (4, 4), 0, (18, 4)), "stride of 18 bytes is no multiple"),
        (
            PixelLayout(torch.uint8, (2, 4), 0, (1 << 40, 1)),
            f"8 bytes of elements are spread over {2**40 + 4}",
        ),
    ],
)
def test_p19_layouts_that_cannot_be_meant_are_refused(layout: PixelLayout, text: str) -> None:
    with pytest.raises(PixelTensorMismatch, match=text):
        layout.check(MAX)


@pytest.mark.parametrize(
    ("layout", "file_bytes", "needed"),
    [
        (PixelLayout(torch.float32, (4, 4)), 63, 64),
        (PixelLayout(torch.float32, (4, 4), 1), 64, 65),
        (PixelLayout(torch.float32, (4, 4), 2**64 - 1), 64, 2**64 + 63),
        (PixelLayout(torch.bfloat16, (4, 4), 0, (16, 2)), 55, 56),
        (PixelLayout(torch.uint8, (1,)), 0, 1),
    ],
)
def test_p19_sizes_are_held_against_the_file_with_both_numbers(
    layout: PixelLayout, file_bytes: int, needed: int
) -> None:
    layout.check(MAX)
    layout.check_fits(needed)
    with pytest.raises(PixelTensorMismatch, match=f"has {file_bytes} bytes, .* needs {needed}") as raised:
        layout.check_fits(file_bytes)
    assert raised.value.details == {"found_bytes": str(file_bytes), "needed_bytes": str(needed)}


def test_a_dimension_of_one_may_have_any_stride() -> None:
    PixelLayout(torch.float32, (1, 4), 0, (-3, 4)).check(MAX)


@pytest.mark.parametrize("strides", [(), (16, 8)])
def test_p19_a_file_cut_under_the_copy_is_an_error_and_no_signal(
    strides: tuple[int, ...], file: IO[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    descriptor = write(file, b"x" * 160)
    layout = checked(PixelLayout(torch.float32, (10, 2), 0, strides), 160)
    monkeypatch.setattr(pixel_layout, "SCRATCH_BYTES", 32)
    preadv = os.preadv

    def cut_first(*arguments: object) -> int:
        file.truncate(30)
        return preadv(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(pixel_layout.os, "preadv", cut_first)
    with pytest.raises(PixelTensorMismatch, match=r"cut to 30 bytes while it was read, \d+ are needed"):
        read_tensor(descriptor, layout)
