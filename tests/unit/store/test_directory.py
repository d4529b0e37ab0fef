"""The directory: a reader finds what the writer lists, and rejects torn records."""

from __future__ import annotations

import os
import random
import struct
import zlib
from collections.abc import Iterator

import pytest

from encoder_service.store.directory import Directory
from tests.reference_reader import ReferenceReader
from tests.unit.store.integrity import check_directory, table_of
from vision_encoder.layout import directory as layout
from vision_encoder.layout.control_page import LayoutError, PageHeader, Probe
from vision_encoder.layout.control_page import pack_header as pack_page_header
from vision_encoder.layout.directory import MAX_PROBES, RECORD, Record, namespace_tag, record_offset
from vision_encoder.v1 import encoder_pb2

ARENA = bytes(range(16))
TAG = namespace_tag(ARENA, "")
CHANCE_SEED = int.from_bytes(os.urandom(4), "little")


@pytest.fixture
def chance() -> random.Random:
    print("seed", CHANCE_SEED)
    return random.Random(CHANCE_SEED)


class Table:
    """A directory with a reader of it."""

    def __init__(self, num_slots: int = 16) -> None:
        self.directory = Directory(arena_id=ARENA, instance=7, num_slots=num_slots)
        self.reader = reader_of_table(self.directory.export_fd(), num_slots)

    def __enter__(self) -> Table:
        return self

    def __exit__(self, *_: object) -> None:
        self.reader.__exit__(None, None, None)
        self.directory.close()

    def put(self, slot_index: int, key: bytes, stamp: int) -> bool:
        return self.directory.put(record_of(slot_index, key, stamp))

    def find(self, key: bytes) -> Record | None:
        """The record of the key, which is never a mixture of two."""
        record = self.reader.find("", key)
        if record is not None:
            (stamp,) = {*struct.unpack("<4Q", record.content_digest)}
            assert record == record_of(record.slot_index, key, stamp)
        return record


def reader_of_table(fd: int, num_slots: int) -> ReferenceReader:
    """A reader of the directory behind the descriptor, which it closes, and of an arena without rows."""
    page = pack_page_header(PageHeader(ARENA, 7, num_slots, Probe(0, 0, bytes(32))))
    page_fd, data_fd = os.memfd_create("page"), os.memfd_create("data")
    os.write(page_fd, page.ljust((16 + num_slots) * 8, b"\0"))
    os.ftruncate(data_fd, 4096)
    return ReferenceReader((data_fd, page_fd, fd), ARENA)


def is_found(table: bytes | bytearray, key: bytes, num_slots: int = 16) -> bool:
    """Whether a reader finds the key in a directory of these bytes."""
    fd = os.memfd_create("table")
    os.write(fd, table)
    with reader_of_table(fd, num_slots) as reader:
        return reader.find("", key) is not None


def record_of(slot_index: int, key: bytes, stamp: int, tag: int = TAG) -> Record:
    """All values follow from the stamp, so that a mixture of two records is noticed."""
    rows, digest = 1 + stamp % 1000, struct.pack("<4Q", *[stamp] * 4)
    return Record(
        key, tag, 2 * stamp + 1, stamp % 1000 * 256, rows * 8, (1, rows, 4), rows, 2, "float32", 0, digest,
        slot_index,
    )  # fmt: skip


@pytest.fixture
def table() -> Iterator[Table]:
    with Table() as table:
        yield table


def test_p18_a_name_of_another_namespace_is_not_found(table: Table) -> None:
    key = os.urandom(32)
    assert table.put(0, key, 1)
    assert table.reader.find("other", key) is None
    assert table.directory.put(record_of(1, key, 2, namespace_tag(ARENA, "other")))
    mine, others = table.reader.find("", key), table.reader.find("other", key)
    assert mine is not None
    assert others is not None
    assert (mine.slot_index, others.slot_index) == (0, 1)


def test_p17_a_search_is_bounded_and_names_beyond_it_are_not_listed() -> None:
    with Table(MAX_PROBES + 40) as table:
        head = os.urandom(8)
        keys = [head + os.urandom(24) for _ in range(MAX_PROBES + 40)]
        listed = [table.put(number, key, number) for number, key in enumerate(keys)]
        assert listed == [True] * MAX_PROBES + [False] * 40
        assert [table.find(key) is not None for key in keys] == listed
        table.directory.remove(0)
        assert table.put(0, keys[-1], 1), "there is a cell again"


@pytest.mark.parametrize("num_slots", [1, 5, 64])
def test_random_changes_against_a_dictionary(num_slots: int, chance: random.Random) -> None:
    # Few different starts, so that names crowd.
    keys = [
        struct.pack("<Q", chance.randrange(6) << 32 | chance.randrange(6)) + chance.randbytes(24)
        for _ in range(150)
    ]
    model: dict[bytes, tuple[int, int]] = {}
    with Table(num_slots) as table:
        for _ in range(1000):
            slot_index = chance.randrange(num_slots)
            if chance.random() < 0.25:
                table.directory.remove(slot_index)
                model = {key: entry for key, entry in model.items() if entry[0] != slot_index}
            else:
                key, stamp = chance.choice(keys), chance.randrange(1 << 30)
                listed = table.put(slot_index, key, stamp)
                model = {
                    name: entry for name, entry in model.items() if entry[0] != slot_index and name != key
                }
                if listed:
                    model[key] = slot_index, stamp
            for key in (*chance.sample(keys, 5), *list(model)[:5]):
                listed_as = record_of(model[key][0], key, model[key][1]) if key in model else None
                assert table.find(key) == listed_as
        stamps = dict(model.values())
        check_directory(table.directory, lambda number: 2 * stamps[number] + 1)


@pytest.mark.parametrize("byte", range(RECORD.size))
def test_p21_a_torn_record_is_rejected(table: Table, byte: int) -> None:
    """A reader on a processor that reorders stores may see any byte of the earlier record. The first bytes
    are the sequence, which is odd while the record is written."""
    key = os.urandom(32)
    assert table.put(4, key, 17)
    torn = bytearray(table_of(table.directory))
    assert is_found(torn, key)
    torn[record_offset(16, 4) + byte] ^= 1 << random.randrange(8)
    assert not is_found(torn, key)


def test_a_record_of_another_slot_or_name_is_rejected_in_spite_of_its_checksum(table: Table) -> None:
    key = os.urandom(32)
    assert table.put(4, key, 17)
    whole = table_of(table.directory)
    start = record_offset(16, 4)
    record = whole[start : start + RECORD.size]
    for position, byte in ((len(record) - 8, 5), (8, record[8] ^ 1)):
        changed = bytearray(record)
        changed[position] = byte
        changed[-4:] = zlib.crc32(changed[:-4]).to_bytes(4, "little")
        assert not is_found(whole[:start] + changed + whole[start + RECORD.size :], key)


def test_a_cell_that_names_a_slot_beyond_the_last_is_skipped(table: Table) -> None:
    key = os.urandom(32)
    assert table.put(4, key, 17)
    whole = table_of(table.directory)
    cell = (layout.FIRST_CELL_WORD + layout.name_hash(key, TAG) % table.directory.num_cells) * 8
    word = struct.pack("<Q", layout.pack_cell(layout.name_hash(key, TAG), 0xFFFF_FFFE))
    assert whole[cell : cell + 8] != bytes(8)
    assert not is_found(whole[:cell] + word + whole[cell + 8 :], key)


def test_p35_a_directory_of_another_layout_is_refused() -> None:
    """Every byte of the header is checked, and the size."""
    size_bytes = layout.directory_bytes(16)
    good = layout.pack_header(ARENA, 7, 16)
    whole = good.ljust(size_bytes, b"\0")
    assert layout.read_header(whole, size_bytes).num_slots == 16
    for position in range(len(good)):
        damaged = bytearray(whole)
        damaged[position] ^= 1
        with pytest.raises(LayoutError):
            layout.read_header(bytes(damaged), size_bytes)
    for wrong_bytes in (0, 8, size_bytes - 8, size_bytes + 8):
        with pytest.raises(LayoutError):
            layout.read_header(whole, wrong_bytes)


def test_codes_of_dtypes_are_those_of_the_wire() -> None:
    for name, code in layout.DTYPE_CODES.items():
        assert code == getattr(encoder_pb2, f"DTYPE_{name.upper()}")


def test_values_that_do_not_fit_a_record_are_not_listed(table: Table) -> None:
    good = record_of(0, os.urandom(32), 1)
    for bad in (
        good._replace(dtype="uint8"),
        good._replace(num_rows=1 << 32),
        good._replace(grid=(1, 1 << 32, 1)),
        good._replace(num_deepstack_levels=1 << 16),
        good._replace(key=b"short"),
        good._replace(content_digest=b""),
        good._replace(slot_index=16),
    ):
        assert not table.directory.put(bad)
    assert table.directory.put(good)
