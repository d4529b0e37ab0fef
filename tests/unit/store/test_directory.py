"""The directory: what its writer lists is what its reader finds, whatever happens meanwhile."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import struct
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from encoder_service.store import directory as written
from encoder_service.store.arena import Arena
from encoder_service.store.arena_store import ArenaStore
from encoder_service.store.directory import MAX_PROBES, RECORD, Directory, Listing, namespace_tag
from encoder_service.store.host_memory import HostMemory
from encoder_service.types import ClipFacts, EncodedItem, Grid
from lm_adapter.transport import directory as read
from lm_adapter.transport.directory import SHAPE, DirectoryReader, Found
from lm_adapter.transport.mapping import MappingFailed
from tests.chaos.lease_storm_processes import die_with
from vision_encoder.v1 import encoder_pb2

ARENA = bytes(range(16))
TAG = namespace_tag(ARENA, "")
TAG_BYTES = read.namespace_tag(ARENA, "")
CHANCE_SEED = int.from_bytes(os.urandom(4), "little")


@pytest.fixture
def chance() -> random.Random:
    print("seed", CHANCE_SEED)
    return random.Random(CHANCE_SEED)


def made(num_slots: int = 16) -> Directory:
    return Directory(arena_id=ARENA, instance=7, num_slots=num_slots)


def reader_of(directory: Directory) -> DirectoryReader:
    fd = directory.export_fd()
    try:
        return DirectoryReader(fd, directory.size_bytes, arena_id=ARENA)
    finally:
        os.close(fd)


def listing(key: bytes, stamp: int = 1, tag: int = TAG) -> Listing:
    """Every figure follows from the stamp, so that a mixture of two is seen."""
    rows = 1 + stamp % 1000
    return Listing(tag, key, struct.pack("<4Q", *[stamp] * 4), rows * 8, (1, rows, 4), rows, 2, "float32", 0)


def assert_whole(found: Found, key: bytes) -> int:
    """The stamp of what was found, of which every part has to be."""
    (stamp,) = {*struct.unpack("<4Q", found.content_digest)}
    rows = 1 + stamp % 1000
    assert SHAPE.unpack(found.shape) == (rows * 8, 1, rows, 4, rows, 2, 1, 0)
    assert (found.generation, found.offset_bytes) == (2 * stamp + 1, stamp % 1000 * 256)
    assert len(key) == 32
    return stamp


def put(directory: Directory, index: int, key: bytes, stamp: int) -> bool:
    return directory.put(index, 2 * stamp + 1, stamp % 1000 * 256, listing(key, stamp))


@pytest.fixture
def pair() -> Iterator[tuple[Directory, DirectoryReader]]:
    directory = made()
    reader = reader_of(directory)
    yield directory, reader
    reader.close()
    directory.close()


def test_what_is_listed_is_found_until_it_is_removed(pair: tuple[Directory, DirectoryReader]) -> None:
    directory, reader = pair
    key = os.urandom(32)
    assert reader.find(key, TAG_BYTES) is None
    assert put(directory, 3, key, 5)
    found = reader.find(key, TAG_BYTES)
    assert found is not None
    assert found.slot_index == 3
    assert assert_whole(found, key) == 5
    directory.set_generation(3, 99)
    again = reader.find(key, TAG_BYTES)
    assert again == found._replace(generation=99)
    directory.remove(3)
    directory.remove(3)
    assert reader.find(key, TAG_BYTES) is None
    assert not len(directory)


def test_p18_a_name_of_another_namespace_is_not_found(pair: tuple[Directory, DirectoryReader]) -> None:
    directory, reader = pair
    key = os.urandom(32)
    other = namespace_tag(ARENA, "other")
    assert directory.put(0, 1, 0, listing(key, 1))
    assert reader.find(key, read.namespace_tag(ARENA, "other")) is None
    assert directory.put(1, 3, 256, listing(key, 2, other))
    mine, others = reader.find(key, TAG_BYTES), reader.find(key, read.namespace_tag(ARENA, "other"))
    assert mine is not None
    assert others is not None
    assert (mine.slot_index, others.slot_index) == (0, 1)


def test_the_same_name_again_takes_the_place_of_the_first(pair: tuple[Directory, DirectoryReader]) -> None:
    directory, reader = pair
    key = os.urandom(32)
    for index, stamp in ((2, 1), (5, 2), (2, 3)):
        assert put(directory, index, key, stamp)
        found = reader.find(key, TAG_BYTES)
        assert found is not None
        assert (found.slot_index, assert_whole(found, key)) == (index, stamp)
        assert len(directory) == 1


def test_p12_keys_that_start_alike_are_told_apart(pair: tuple[Directory, DirectoryReader]) -> None:
    """The same hash for all: every search starts at one place and goes over all of them."""
    directory, reader = pair
    head = os.urandom(8)
    keys = [head + os.urandom(24) for _ in range(16)]
    for index, key in enumerate(keys):
        assert put(directory, index, key, index)
    for index, key in enumerate(keys):
        found = reader.find(key, TAG_BYTES)
        assert found is not None
        assert (found.slot_index, assert_whole(found, key)) == (index, index)
    assert reader.find(head + os.urandom(24), TAG_BYTES) is None


def test_p17_a_search_is_bounded_and_what_is_too_far_is_not_listed() -> None:
    directory = made(MAX_PROBES + 40)
    reader = reader_of(directory)
    head = os.urandom(8)
    keys = [head + os.urandom(24) for _ in range(MAX_PROBES + 40)]
    listed = [put(directory, index, key, index) for index, key in enumerate(keys)]
    assert listed == [True] * MAX_PROBES + [False] * 40
    assert directory.num_unlisted == 40
    assert [reader.find(key, TAG_BYTES) is not None for key in keys] == listed
    directory.remove(0)
    assert put(directory, 0, keys[-1], 1), "there is a place again"
    reader.close()
    directory.close()


def test_a_full_table_wraps_around_at_its_end(chance: random.Random) -> None:
    """Names whose search starts in the last places, some of which come to lie in the first."""
    directory = made(32)
    reader = reader_of(directory)
    keys: list[bytes] = []
    while len(keys) < 32:
        key = chance.randbytes(32)
        if written.name_hash(key, TAG) % directory.num_places >= directory.num_places - 4:
            keys.append(key)
    for index, key in enumerate(keys):
        assert put(directory, index, key, index)
    assert any(directory._words[written.FIRST_PLACE_WORD + place] for place in range(16))
    for index in chance.sample(range(32), 32):
        directory.check_integrity(lambda slot: 2 * slot + 1)
        directory.remove(index)
        found = {number for number, key in enumerate(keys) if reader.find(key, TAG_BYTES) is not None}
        assert found == directory._listed.keys()
    reader.close()
    directory.close()


@pytest.mark.parametrize("num_slots", [1, 5, 64])
def test_random_changes_against_a_dictionary(num_slots: int, chance: random.Random) -> None:
    directory = made(num_slots)
    reader = reader_of(directory)
    # Few different starts, so that names crowd.
    keys = [
        struct.pack("<Q", chance.randrange(6) << 32 | chance.randrange(6)) + chance.randbytes(24)
        for _ in range(150)
    ]
    generations: dict[int, int] = {}
    model: dict[bytes, tuple[int, int]] = {}
    for _ in range(3000):
        index = chance.randrange(num_slots)
        match chance.randrange(5):
            case 0:
                directory.remove(index)
                model = {key: place for key, place in model.items() if place[0] != index}
            case 1 if index in generations:
                generations[index] += 2
                directory.set_generation(index, generations[index])
            case _:
                key, stamp = chance.choice(keys), chance.randrange(1 << 30)
                listed = put(directory, index, key, stamp)
                model = {name: place for name, place in model.items() if place[0] != index and name != key}
                generations[index] = 2 * stamp + 1
                if listed:
                    model[key] = index, stamp
        for key in (*chance.sample(keys, 5), *list(model)[:5]):
            found = reader.find(key, TAG_BYTES)
            assert (found is not None) == (key in model)
            if found is not None:
                assert found.slot_index == model[key][0]
                assert found.generation == generations[found.slot_index]
    assert directory.num_unlisted == 0
    directory.check_integrity(generations.__getitem__)
    reader.close()
    directory.close()


@pytest.mark.parametrize("byte", range(RECORD.size))
def test_p21_a_torn_record_is_not_taken_for_whole(pair: tuple[Directory, DirectoryReader], byte: int) -> None:
    """Every byte may be of the tenant before, as a processor without order would show it."""
    directory, reader = pair
    key = os.urandom(32)
    assert put(directory, 4, key, 17)
    start = directory._start(4)
    directory._file.mapping[start + byte] ^= 1 << random.randrange(8)
    assert reader.find(key, TAG_BYTES) is None
    assert reader.num_torn == 1


def test_p21_a_record_that_is_being_written_is_not_taken_for_whole(
    pair: tuple[Directory, DirectoryReader],
) -> None:
    directory, reader = pair
    key = os.urandom(32)
    assert put(directory, 4, key, 17)
    directory._open(4)
    assert reader.find(key, TAG_BYTES) is None
    assert reader.num_torn == 1
    directory._write(4)
    assert reader.find(key, TAG_BYTES) is not None


def test_a_record_with_a_right_sum_of_another_slot_or_name_is_not_taken(
    pair: tuple[Directory, DirectoryReader],
) -> None:
    directory, reader = pair
    key = os.urandom(32)
    assert put(directory, 4, key, 17)
    start = directory._start(4)
    whole = bytearray(directory._file.mapping[start : start + RECORD.size])
    for place, byte in ((len(whole) - 8, 5), (8, whole[8] ^ 1)):
        changed = bytearray(whole)
        changed[place] = byte
        changed[-4:] = zlib.crc32(changed[:-4]).to_bytes(4, "little")
        directory._file.mapping[start : start + RECORD.size] = bytes(changed)
        assert reader.find(key, TAG_BYTES) is None
    directory._file.mapping[start : start + RECORD.size] = bytes(whole)
    place = written.FIRST_PLACE_WORD + directory._place_of(4, written.name_hash(key, TAG))
    word, directory._words[place] = directory._words[place], directory._words[place] | 0xFFFF_FFFF
    assert reader.find(key, TAG_BYTES) is None, "a slot that the directory does not have"
    directory._words[place] = word
    assert reader.find(key, TAG_BYTES) is not None


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"arena_id": bytes(16)}, "arena"),
        ({"magic": 1}, "magic number"),
        ({"version": 2}, "version"),
        ({"record_bytes": 144}, "size of a record"),
        ({"num_places": 33}, "power of two"),
        ({"num_slots": 17}, "size is"),
        ({"checksum": 5}, "checksum"),
    ],
)
def test_a_directory_that_is_not_one_is_refused(
    pair: tuple[Directory, DirectoryReader], change: dict[str, object], word: str
) -> None:
    directory, _ = pair
    names = ("magic", "version", "arena_id", "instance", "num_slots", "num_places", "record_bytes")
    values = dict(
        zip(names, written.HEADER.unpack(directory._file.mapping[: written.HEADER.size]), strict=True)
    )
    values.update({name: value for name, value in change.items() if name in values})
    header = written.HEADER.pack(*values.values())
    directory._file.mapping[: len(header)] = header
    directory._words[written.CHECKSUM_WORD] = 5 if "checksum" in change else written.header_checksum(header)
    with pytest.raises(MappingFailed, match=word):
        reader_of(directory)


def test_both_sides_have_one_layout() -> None:
    assert struct.calcsize(read._RECORD.format) == RECORD.size
    assert (read._MAGIC, read._VERSION, read._MAX_PROBES) == (written.MAGIC, written.VERSION, MAX_PROBES)
    assert (read._CHECKSUM_WORD, read._FIRST_PLACE_WORD) == (written.CHECKSUM_WORD, written.FIRST_PLACE_WORD)
    assert read._HEADER.format == written.HEADER.format
    assert int.from_bytes(TAG_BYTES, "little") == TAG
    for name, code in written.DTYPE_CODES.items():
        assert code == getattr(encoder_pb2, f"DTYPE_{name.upper()}")


def test_figures_that_no_record_holds_are_not_listed(pair: tuple[Directory, DirectoryReader]) -> None:
    directory, _ = pair
    good = listing(os.urandom(32))
    for bad in (
        good._replace(dtype="uint8"),
        good._replace(num_rows=1 << 32),
        good._replace(grid=(1, 1 << 32, 1)),
        good._replace(num_deepstack_levels=1 << 16),
        good._replace(key=b"short"),
        good._replace(content_digest=b""),
    ):
        assert not directory.put(0, 1, 0, bad)
    assert directory.num_unlisted == 6
    assert directory.put(0, 1, 0, good)


# -- beside an arena -----------------------------------------------------------------------------------------


def item(key: bytes, num_rows: int) -> EncodedItem:
    return EncodedItem(key, os.urandom(32), Grid(1, num_rows, 4), torch.rand(num_rows, 64), 1)


def test_p21_the_directory_says_what_store_and_control_page_say(chance: random.Random) -> None:
    """Puts, evictions, leases that keep a slot, revocations: after each, what is found is what is there, and
    what has gone is not."""
    arena = Arena(HostMemory(1 << 17), max_slots=24)
    store = ArenaStore(arena)
    reader, tag = _reader_of(arena), {name: read.namespace_tag(arena.arena_id, name) for name in ("a", "b")}
    keys = [chance.randbytes(32) for _ in range(40)]
    held = []
    for _ in range(1500):
        namespace, key = chance.choice("ab"), chance.choice(keys)
        match chance.randrange(6):
            case 0:
                if (one := store.hold(namespace, key)) is not None:
                    held.append(one)
            case 1 if held:
                held.pop(chance.randrange(len(held))).drop()
            case 2 if held:
                slot = chance.choice(held).slot
                assert slot is not None
                arena.revoke(slot)
            case _:
                store.put(namespace, item(key, chance.randrange(1, 40)))
        store.check_integrity()
        for name, probed in (("a", key), ("b", key)):
            found, kept = reader.find(probed, tag[name]), store.peek(name, probed)
            assert (found is None) == (kept is None)
            if found is not None and kept is not None:
                slot = store._entries[name, probed].slot
                assert (found.slot_index, found.generation) == (slot.index, arena.generation(slot))
                assert found.offset_bytes == slot.offset_bytes
                assert found.content_digest == kept.content_digest
                spec = kept.spec
                assert SHAPE.unpack(found.shape) == (
                    spec.num_bytes, *kept.grid, spec.num_rows, spec.width, 1, spec.num_deepstack_levels,
                )  # fmt: skip
    for one in held:
        one.drop()
    store.close()
    assert all(reader.find(key, each) is None for key in keys for each in tag.values())
    reader.close()


def _reader_of(arena: Arena) -> DirectoryReader:
    fds = arena.export_all()
    try:
        return DirectoryReader(fds[2], arena.geometry.directory_bytes, arena_id=arena.arena_id)
    finally:
        for fd in fds:
            os.close(fd)


def test_clips_with_facts_that_no_record_holds_are_leased() -> None:
    arena = Arena(HostMemory(1 << 16), max_slots=4)
    store, reader = ArenaStore(arena), _reader_of(arena)
    image = item(os.urandom(32), 2)
    clip = dataclasses.replace(item(os.urandom(32), 2), clip=ClipFacts((0.0, 0.5)))
    tag = read.namespace_tag(arena.arena_id, "")
    for one in (image, clip):
        assert store.put("", one)
        store.check_integrity()
    assert reader.find(image.key, tag) is not None
    assert reader.find(clip.key, tag) is None
    assert arena.directory.num_unlisted == 0, "it counts names for which there was no place"
    assert store.put("", dataclasses.replace(clip, key=image.key)), "in place of the image"
    assert reader.find(image.key, tag) is None
    store.check_integrity()
    reader.close()
    store.close()


def test_rows_that_are_not_readable_are_not_listed() -> None:
    arena = Arena(HostMemory(1 << 16), max_slots=4)
    slot = arena.allocate(64)
    assert slot is not None
    with pytest.raises(Exception, match="no readable rows to list"):
        arena.enter(slot, "", dataclasses.replace(item(os.urandom(32), 1)))
    arena.close()


# -- at the same time ----------------------------------------------------------------------------------------


def write_for_ever(directory: Directory, keys: list[bytes], seed: int) -> None:
    chance, stamp = random.Random(seed), 0
    while True:
        stamp += 1
        index = chance.randrange(directory.num_slots)
        if chance.random() < 0.3:
            directory.remove(index)
        else:
            put(directory, index, chance.choice(keys), stamp)


def forked_writer(directory: Directory, keys: list[bytes], seed: int) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        die_with(parent)
        write_for_ever(directory, keys, seed)
    finally:
        os._exit(1)


def read_for(reader: DirectoryReader, keys: list[bytes], seconds: float, chance: random.Random) -> int:
    """Reads that found something, each of which was one tenant's."""
    num_found, ends_s = 0, time.monotonic() + seconds
    while time.monotonic() < ends_s:
        for key in chance.sample(keys, 8):
            found = reader.find(key, TAG_BYTES)
            if found is not None:
                assert_whole(found, key)
                num_found += 1
    return num_found


def test_p21_p25_readers_beside_a_writer_in_another_process(chance: random.Random) -> None:
    """Whatever they find is whole; and the writer's end by the strongest signal, in the middle of a store or
    not, leaves nothing behind that is taken for a record."""
    keys = [struct.pack("<Q", number % 3) + chance.randbytes(24) for number in range(24)]
    directory = made(12)
    reader = reader_of(directory)
    for _ in range(8):
        pid = forked_writer(directory, keys, chance.getrandbits(32))
        try:
            with ThreadPoolExecutor(2) as pool:
                chances = [random.Random(chance.getrandbits(32)) for _ in range(2)]
                assert all(pool.map(lambda each: read_for(reader, keys, 0.15, each), chances))
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        for key in keys:
            found = reader.find(key, TAG_BYTES)
            if found is not None:
                assert_whole(found, key)
        # Another writer begins with an empty table, as a restarted encoder with a new one.
        places = written.FIRST_PLACE_WORD
        for place in range(directory.num_places):
            directory._words[places + place] = 0
    reader.close()
    directory.close()
