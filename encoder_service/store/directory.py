"""The directory beside each arena: which rows are resident, and where, for readers that ask nobody.

Owns the table's layout and the order of its stores. It is a sealed memfd that importers map read-only
(``lm_adapter.transport.directory`` reads it). Which rows are listed is the store's to say; whether a copy of
them counts is the control page's, as for rows under a lease: a reader that found rows here copies them and
then compares the slot's generation with the record's. So nothing in here has to be believed. What is wrong,
late or torn costs its reader a copy, or the leased way instead.

Layout, little-endian, words of 64 bits:
  0      magic        1      version     2..3  arena_id     4  instance    5  num_slots
  6      num_places, a power of two      7     record_bytes
  8      BLAKE2b of words 0..7           9..15 zero
  16...  places: the table, open addressing with linear probing
  then   records, one for each slot: ``RECORD``

A place is 0, or 32 bits of a name's hash above the slot's index plus 1: one aligned word, so that it is never
torn. A name is a key in a namespace: the hash is the key's first eight bytes, which are SHA-256's, with the
namespace's tag (``namespace_tag``) exclusive-ored in. Its low bits say where the search starts; no name is
further than MAX_PROBES from there, and what would be is not listed. A deletion moves words back; whoever
searches just then may miss an entry, and finds it the next time.

A record begins with a sequence word, odd while it is written and while it is nobody's, and ends with a CRC-32
of all before it. Stores into a record may be seen in any order on some processors: a reader takes a copy of
it for whole only when the sequence is even, was so after the copy, and the CRC is right.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from encoder_service.errors import InternalError
from encoder_service.store.control_page import WORD_BYTES, full_fence, header_checksum
from encoder_service.store.host_memory import SealedFile

MAGIC = int.from_bytes(b"VEDIRECT", "little")
VERSION = 1
HEADER = struct.Struct("<QQ16sQQQQ")
CHECKSUM_WORD, FIRST_PLACE_WORD = 8, 16
KEY_BYTES = DIGEST_BYTES = 32
# sequence, key, tag, generation, offset_bytes; rows_bytes, t, h, w, num_rows, width, dtype, levels;
# content digest; slot index, CRC-32.
RECORD = struct.Struct("<Q32sQQQ QIIIIIHH 32s II")
RECORD_WORDS = RECORD.size // WORD_BYTES
CRC_BYTES = 4
MAX_PROBES = 64
PLACES_PER_SLOT = 2
PLACES_AT_ONCE = 1024
"""That one step of a check looks through."""
# As on the wire; the numbers are part of the layout.
DTYPE_CODES = {"float32": 1, "bfloat16": 2, "float16": 3}
_U16, _U32 = 1 << 16, 1 << 32


class Listing(NamedTuple):
    """What a reader has to know of an item besides where its rows lie."""

    tag: int
    key: bytes
    content_digest: bytes
    rows_bytes: int
    grid: tuple[int, int, int]
    num_rows: int
    width: int
    dtype: str
    num_deepstack_levels: int


class _Listed(NamedTuple):
    """What the writer remembers of a record that it published."""

    hashed: int
    listing: Listing
    generation: int
    offset_bytes: int


def namespace_tag(arena_id: bytes, namespace: str) -> int:
    """What tells a namespace's entries from those of others that share the arena: 64 bits."""
    tag = hashlib.blake2b(namespace.encode(), digest_size=8, key=arena_id).digest()
    return int.from_bytes(tag, "little")


def name_hash(key: bytes, tag: int) -> int:
    """64 bits, of which the low ones start the search and the high ones are in the place."""
    return int.from_bytes(key[:8], "little") ^ tag


def num_places_for(num_slots: int) -> int:
    """A power of two of which at most half is ever taken."""
    return 1 << (PLACES_PER_SLOT * num_slots - 1).bit_length()


class Directory:
    """The table's only writer. Not thread-safe."""

    def __init__(self, *, arena_id: bytes, instance: int, num_slots: int) -> None:
        """arena_id, instance: the control page's."""
        self.num_slots = num_slots
        self.num_places = num_places_for(num_slots)
        self.num_unlisted = 0
        """Names for which there was no place near enough, or a figure that no record holds."""
        self._mask = self.num_places - 1
        self._first_record = (FIRST_PLACE_WORD + self.num_places) * WORD_BYTES
        size_bytes = self._first_record + num_slots * RECORD.size
        self._file = SealedFile("vision-encoder-directory", size_bytes)
        self._words = memoryview(self._file.mapping).cast("Q")
        header = HEADER.pack(MAGIC, VERSION, arena_id, instance, num_slots, self.num_places, RECORD.size)
        self._file.mapping[: len(header)] = header
        self._words[CHECKSUM_WORD] = header_checksum(header)
        self._listed: dict[int, _Listed] = {}
        self._slots: dict[tuple[int, bytes], int] = {}
        full_fence()

    def __len__(self) -> int:
        """Slots that are listed."""
        return len(self._listed)

    @property
    def size_bytes(self) -> int:
        return self._file.size_bytes

    def put(self, index: int, generation: int, offset_bytes: int, listing: Listing) -> bool:
        """Lists a slot's rows, which are readable, in place of others under the same name. Whether it did:
        not where the table is too crowded around the name."""
        self.remove(index)
        name = (listing.tag, listing.key)
        if (before := self._slots.get(name)) is not None:
            self.remove(before)
        hashed = name_hash(listing.key, listing.tag)
        place = self._free_place(hashed) if _fits(index, listing) else None
        if place is None or not 0 <= index < self.num_slots:
            self.num_unlisted += 1
            return False
        self._listed[index] = _Listed(hashed, listing, generation, offset_bytes)
        self._slots[name] = index
        self._write(index)
        self._words[FIRST_PLACE_WORD + place] = (hashed >> 32) << 32 | index + 1
        full_fence()
        return True

    def set_generation(self, index: int, generation: int) -> None:
        """The slot's rows stay under a new generation. Nothing for a slot that is not listed."""
        found = self._listed.get(index)
        if found is not None:
            self._listed[index] = found._replace(generation=generation)
            self._open(index)
            self._write(index)

    def remove(self, index: int) -> None:
        """The slot is listed no more. Nothing where it was not."""
        found = self._listed.pop(index, None)
        if found is None:
            return
        del self._slots[found.listing.tag, found.listing.key]
        self._open(index)
        self._vacate(self._place_of(index, found.hashed))
        full_fence()

    def export_fd(self) -> int:
        """A descriptor that maps with PROT_READ only; the caller closes it."""
        return self._file.export_fd()

    def close(self) -> None:
        """Lists nothing any more. Twice is once."""
        for index in list(self._listed):
            self.remove(index)
        self._file.close()

    def check_integrity(self, generation_of: Callable[[int], int]) -> None:
        """All of ``integrity_steps`` at once. Raises AssertionError."""
        for _ in self.integrity_steps(generation_of):
            pass

    def integrity_steps(self, generation_of: Callable[[int], int]) -> Iterator[None]:
        """Places, records and what is remembered agree, every name is found by a search from where it starts,
        and every record has its slot's generation."""
        places = np.frombuffer(self._words, np.uint64, self.num_places, FIRST_PLACE_WORD * WORD_BYTES)
        num_taken = 0
        for start in range(0, self.num_places, PLACES_AT_ONCE):
            for place in np.flatnonzero(places[start : start + PLACES_AT_ONCE]).tolist():
                self._check_place(start + place)
                num_taken += 1
                yield
            yield
        assert num_taken == len(self._listed) == len(self._slots)
        for index, listed in self._listed.items():
            assert self._slots[listed.listing.tag, listed.listing.key] == index
            start = self._start(index)
            data = self._file.mapping[start : start + RECORD.size]
            assert not data[0] & 1, f"the record of slot {index} is left open"
            assert zlib.crc32(data[:-CRC_BYTES]) == int.from_bytes(data[-CRC_BYTES:], "little")
            assert RECORD.unpack(data)[1:5] == (
                listed.listing.key,
                listed.listing.tag,
                generation_of(index),
                listed.offset_bytes,
            )
            yield

    def _check_place(self, place: int) -> None:
        """Raises AssertionError."""
        word = self._words[FIRST_PLACE_WORD + place]
        found = self._listed.get((word & _U32 - 1) - 1)
        assert found is not None, f"place {place} leads to a slot that is not listed"
        assert word >> 32 == found.hashed >> 32
        steps = (place - found.hashed) & self._mask
        assert steps < MAX_PROBES, f"a name is {steps} places from where its search starts"
        between = range(steps)
        assert all(self._words[FIRST_PLACE_WORD + ((found.hashed + step) & self._mask)] for step in between)

    # -- places ----------------------------------------------------------------------------------------

    def _free_place(self, hashed: int) -> int | None:
        for step in range(MAX_PROBES):
            place = (hashed + step) & self._mask
            if not self._words[FIRST_PLACE_WORD + place]:
                return place
        return None

    def _place_of(self, index: int, hashed: int) -> int:
        for step in range(MAX_PROBES):
            place = (hashed + step) & self._mask
            if self._words[FIRST_PLACE_WORD + place] & _U32 - 1 == index + 1:
                return place
        raise InternalError(f"slot {index} is listed and has no place", slot=index)

    def _vacate(self, place: int) -> None:
        """Moves those behind back, each as far as its own start allows, so that no search ends too early. At
        most half of the places are taken: a free one is ahead."""
        words, mask = self._words, self._mask
        following = place
        while True:
            following = (following + 1) & mask
            word = words[FIRST_PLACE_WORD + following]
            if not word:
                break
            start = self._listed[(word & _U32 - 1) - 1].hashed
            if (following - start) & mask >= (following - place) & mask:
                words[FIRST_PLACE_WORD + place] = word
                place = following
        words[FIRST_PLACE_WORD + place] = 0

    # -- records ---------------------------------------------------------------------------------------

    def _start(self, index: int) -> int:
        return self._first_record + index * RECORD.size

    def _open(self, index: int) -> None:
        """Nobody may take the record for whole until it is written."""
        word = self._start(index) // WORD_BYTES
        self._words[word] |= 1
        full_fence()

    def _write(self, index: int) -> None:
        """The record as it is remembered, under the next even sequence."""
        self._open(index)
        word, (_, listing, generation, offset_bytes) = self._start(index) // WORD_BYTES, self._listed[index]
        sequence = self._words[word] + 1
        data = RECORD.pack(
            sequence,
            listing.key,
            listing.tag,
            generation,
            offset_bytes,
            listing.rows_bytes,
            *listing.grid,
            listing.num_rows,
            listing.width,
            DTYPE_CODES[listing.dtype],
            listing.num_deepstack_levels,
            listing.content_digest,
            index,
            0,
        )[:-CRC_BYTES]
        crc = zlib.crc32(data).to_bytes(CRC_BYTES, "little")
        start = self._start(index)
        self._file.mapping[start + WORD_BYTES : start + RECORD.size] = data[WORD_BYTES:] + crc
        full_fence()
        self._words[word] = sequence


def _fits(index: int, listing: Listing) -> bool:
    """Whether a record holds these figures."""
    return (
        len(listing.key) == KEY_BYTES
        and len(listing.content_digest) == DIGEST_BYTES
        and listing.dtype in DTYPE_CODES
        and max(index, listing.num_rows, listing.width, *listing.grid) < _U32
        and listing.num_deepstack_levels < _U16
    )
