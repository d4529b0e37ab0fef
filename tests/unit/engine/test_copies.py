"""Many copies at once: on a CPU what they do, and what is left where the driver has no such call."""

from __future__ import annotations

import ctypes
import ctypes.util
import random
from typing import NamedTuple

import pytest
import torch

from encoder_service.engine import copies
from encoder_service.engine.copies import (
    Copies,
    CopyList,
    DriverCopies,
    HostCopies,
    Memory,
    TorchCopies,
    address_of,
    copies_of,
)
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
    expected, pieces, end = target.clone(), CopyList.of_capacity(64), 0
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
        HostCopies().many(pieces.list, pieces.count, 0)
        assert torch.equal(pieces.target, pieces.expected)


class StandIn:
    """Functions with the driver's signatures, called as the driver's are. Stream 0xBAD is refused."""

    def __init__(self) -> None:
        self.singles: list[int] = []
        self.batches: list[tuple[int, ...]] = []
        pointer, size_type = ctypes.c_void_p, ctypes.c_size_t

        @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, size_type, pointer)
        def single(to: int, of: int, size: int, stream: int | None) -> int:
            self.singles.append(stream or 0)
            ctypes.memmove(to, of, size)
            return 1 if stream == 0xBAD else 0

        @ctypes.CFUNCTYPE(
            ctypes.c_int, *[pointer] * 3, size_type, *[pointer] * 2, size_type, pointer, pointer
        )
        def batch(
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
            self.batches.append((num, size_type.from_address(firsts).value, order, *locations, flags, stream))
            for index in range(count):
                numbers = [(ctypes.c_int64 * count).from_address(one)[index] for one in (to, of, sizes)]
                ctypes.memmove(*numbers)
            size_type.from_address(failed).value = 5
            return 1 if stream == 0xBAD else 0

        self._kept = single, batch
        self.single, self.batch = address_of(single), address_of(batch)


def test_the_driver_gets_addresses_of_the_lists_one_attribute_and_the_stream() -> None:
    driver = StandIn()
    both = DriverCopies(driver.single, driver.batch)
    assert both.takes_many
    pieces = random_pieces(random.Random(fresh_seed()))
    both.many(pieces.list, pieces.count, 0xABC)
    assert torch.equal(pieces.target, pieces.expected)
    assert driver.batches == [(1, 0, 1, 0, 0, 0, 0, 1, 0xABC)]
    assert driver.singles == []
    with pytest.raises(InternalError, match=f"of {pieces.count} copies failed with CUDA error 1 at copy 5"):
        both.many(pieces.list, pieces.count, 0xBAD)


@pytest.mark.parametrize(("has_batch", "stream"), [(True, 0), (True, 1), (False, 0xABC)])
def test_many_copies_go_one_by_one_where_the_call_for_many_is_not_to_be_had(
    has_batch: bool, stream: int
) -> None:
    """The legacy default stream, by either handle, and an older driver."""
    driver = StandIn()
    either = DriverCopies(driver.single, driver.batch if has_batch else None)
    pieces = random_pieces(random.Random(fresh_seed()))
    either.many(pieces.list, pieces.count, stream)
    assert torch.equal(pieces.target, pieces.expected)
    assert driver.batches == []
    assert driver.singles == [stream] * pieces.count
    with pytest.raises(InternalError, match="bytes failed with CUDA error 1"):
        DriverCopies(driver.single, None).many(pieces.list, pieces.count, 0xBAD)


def test_every_way_of_copying_one_piece_brings_the_same_bits() -> None:
    driver = StandIn()
    ways: list[Copies] = [HostCopies(), TorchCopies(CPU), DriverCopies(driver.single, None)]
    generator = random.Random(fresh_seed())
    for _ in range(10):
        bits = torch.randint(-(1 << 15), 1 << 15, (generator.randint(1, 40), 6)).to(torch.int16)
        rows = bits.view(torch.bfloat16)  # NaN among them
        num_bytes = generator.randint(1, rows.nbytes)
        found = []
        for way in ways:
            target = torch.zeros_like(rows)
            way.one(Memory(target), Memory(rows), num_bytes, 0)
            found.append(target.view(torch.uint8).view(-1))
        expected = rows.view(torch.uint8).view(-1).clone()
        expected[num_bytes:] = 0
        assert all(torch.equal(one, expected) for one in found)
    assert driver.singles == [0] * 10
    with pytest.raises(InternalError, match=r"of 1 bytes failed with CUDA error 1"):
        ways[2].one(Memory(target), Memory(rows), 1, 0xBAD)
    assert [way.by_address for way in ways] == [True, False, True]
    with pytest.raises(NotImplementedError):
        ways[1].many(CopyList.of_capacity(1), 1, 0)


def test_a_memory_is_a_tensor_from_its_first_byte_to_its_last() -> None:
    rows = torch.randn(4, 3)
    memory = Memory(rows)
    assert (memory.address, memory.num_bytes) == (rows.data_ptr(), 48)
    memory.tensor[:] = 0
    assert not rows.any()
    with pytest.raises(RuntimeError):
        Memory(rows.T)


def test_a_library_without_the_functions_is_told_apart() -> None:
    assert isinstance(copies_of(CPU), HostCopies)
    with pytest.raises(OSError, match="no-such-driver"):
        copies.load_driver("no-such-driver.so.1")
    libc = ctypes.util.find_library("c")
    assert libc is not None
    with pytest.raises(AttributeError, match="cuGetProcAddress"):
        copies.find_batch_function(copies.load_driver(libc))
