"""Many copies at once: on a CPU what they do, and what is left where the driver has no such call."""

from __future__ import annotations

import ctypes
import ctypes.util
import random
from typing import NamedTuple

import pytest
import torch

from encoder_service.engine import copies
from encoder_service.engine.copies import CopyList, DriverCopies, HostCopies, batch_copies_of
from encoder_service.errors import InternalError
from tests.parity.tower_cases import fresh_seed

CPU = torch.device("cpu")


class Pieces(NamedTuple):
    """Pieces of a source, to a target in another order, and what the target is to be."""

    source: torch.Tensor
    target: torch.Tensor
    expected: torch.Tensor
    list: CopyList
    count: int


def random_pieces(generator: random.Random) -> Pieces:
    sizes = [generator.randint(1, 300) for _ in range(generator.randint(1, 40))]
    source = torch.randint(1, 256, (sum(sizes),), dtype=torch.uint8)
    target = torch.zeros(sum(sizes) + 50, dtype=torch.uint8)
    expected, pieces, end = target.clone(), CopyList(64), 0
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    order = list(range(len(sizes)))
    generator.shuffle(order)
    for place, index in enumerate(order):
        start, size = starts[index], sizes[index]
        expected[end : end + size] = source[start : start + size]
        pieces.destinations[place] = target.data_ptr() + end
        pieces.sources[place] = source.data_ptr() + start
        pieces.sizes[place] = size
        end += size
    pieces.sizes[len(sizes) :] = 1 << 40  # of no business
    return Pieces(source, target, expected, pieces, len(sizes))


def test_every_piece_arrives_and_nothing_else_is_touched() -> None:
    generator = random.Random(fresh_seed())
    for _ in range(20):
        pieces = random_pieces(generator)
        HostCopies().copy(pieces.list, pieces.count, 0)
        assert torch.equal(pieces.target, pieces.expected)


def test_the_driver_gets_addresses_of_the_lists_one_attribute_and_the_stream() -> None:
    """A stand-in with the signature of CUDA 12.8, called as the driver is."""
    seen: list[tuple[int, ...]] = []
    pointer, size_type = ctypes.c_void_p, ctypes.c_size_t

    @ctypes.CFUNCTYPE(ctypes.c_int, *[pointer] * 3, size_type, *[pointer] * 2, size_type, pointer, pointer)
    def driver(
        to: int,
        of: int,
        sizes: int,
        count: int,
        attributes: int,
        firsts: int,
        num: int,
        failed: int,
        stream: int,
    ) -> int:
        order, *locations, flags = (ctypes.c_int * 6).from_address(attributes)
        seen.append((num, size_type.from_address(firsts).value, order, *locations, flags, stream))
        for index in range(count):
            numbers = [(ctypes.c_int64 * count).from_address(one)[index] for one in (to, of, sizes)]
            ctypes.memmove(*numbers)
        size_type.from_address(failed).value = 5
        return 0 if stream else 1

    address = ctypes.cast(driver, ctypes.c_void_p).value
    assert address is not None
    batch = DriverCopies(address)
    pieces = random_pieces(random.Random(fresh_seed()))
    batch.copy(pieces.list, pieces.count, 0xABC)
    assert torch.equal(pieces.target, pieces.expected)
    assert seen == [(1, 0, 1, 0, 0, 0, 0, 1, 0xABC)]
    with pytest.raises(InternalError, match=f"of {pieces.count} copies failed with CUDA error 1 at copy 5"):
        batch.copy(pieces.list, pieces.count, 0)


def test_a_library_without_the_function_is_told_apart() -> None:
    assert isinstance(batch_copies_of(CPU), HostCopies)
    with pytest.raises(OSError, match="no-such-driver"):
        copies._find_function("no-such-driver.so.1")
    libc = ctypes.util.find_library("c")
    assert libc is not None
    with pytest.raises(AttributeError, match="cuGetProcAddress"):
        copies._find_function(libc)
