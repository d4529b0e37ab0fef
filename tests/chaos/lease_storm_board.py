"""What the processes of a lease storm share besides the product: counts that survive a kill, and rows whose
every line says whose they are.

Owns the layout of both. The board is anonymous shared memory of 64-bit words, one row per role; a row has one
writer at a time, so that a process that is killed between two stores leaves whole numbers behind and the one
that takes its place counts on.
"""

from __future__ import annotations

import contextlib
import enum
import gc
import mmap
import os
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

LINE_BYTES = 256
MAX_LINES = 64
WORDS_PER_LINE = LINE_BYTES // 8
ROW_WORDS = 48
NUM_KEYS = 160
LONG_LEASE_S = 3600.0

_PATTERN = (np.arange(MAX_LINES * WORDS_PER_LINE, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)).reshape(
    MAX_LINES, WORDS_PER_LINE
)


@dataclass(frozen=True)
class Plan:
    """device: where the arena lies. sabotage: a defect to be found, see ``sabotage``."""

    folder: str
    seed: int
    device: str = "cpu"
    sabotage: str = ""

    @property
    def broker_path(self) -> str:
        return f"{self.folder}/broker.sock"

    @property
    def desk_path(self) -> str:
        return f"{self.folder}/desk.sock"

    @property
    def target(self) -> str:
        return f"unix:{self.folder}/grpc.sock"

    @property
    def kind(self) -> str:
        return "host" if self.device == "cpu" else "device"


def lines_of(stamp: int, num_lines: int) -> npt.NDArray[np.uint64]:
    """uint64 [num_lines, WORDS_PER_LINE]: every word follows from the tenancy's stamp and its place."""
    return _PATTERN[:num_lines] ^ np.uint64(stamp)


def digest_of(stamp: int) -> bytes:
    """What stands for the content of a tenancy: whoever finds its rows by key alone knows the stamp by it."""
    return stamp.to_bytes(32, "little")


def has_stamp(payload: npt.NDArray[np.uint8], stamp: int) -> bool:
    """Whether every line of the rows is this tenancy's, in its place."""
    words = payload.view(np.uint64).reshape(-1, WORDS_PER_LINE)
    return bool(((words ^ _PATTERN[: len(words)]) == np.uint64(stamp)).all())


class Phase(enum.IntEnum):
    STORM = 0
    LEAVE = 1
    """Readers take some last leases and go."""
    QUIESCE = 2
    """The encoder ends what is its own, and looks for what is left."""


class Word(enum.IntEnum):
    """Places in a row. Which are whose is said by the prefix: of the orchestrator, the encoder, readers."""

    PHASE = 0
    ALLOWED = 1
    """Operations after which the encoder's own callers pause."""

    INSTANCE = 2
    """Encoder: its number, once it serves. Reader: that of the encoder whose rows it accepted last."""
    ARENA = 3
    """Encoder: the first half of its arena's id."""
    GRANTED = 4
    RENEWED = 5
    RELEASED = 6
    EXPIRED = 7
    REVOKED = 8
    GENERATIONS_REVOKED = 9
    PUTS = 10
    EVICTIONS = 11
    CHECKS = 12
    """Of integrity, passed."""
    BROKEN = 13
    """Checks that failed."""
    SHARED = 14
    LEAKED_LEASES = 15
    LEAKED_SLOTS = 16
    LEAKED_BYTES = 17

    ACCEPTED = 20
    """Reads through the mapping whose generation held."""
    STALE = 21
    """Reads whose generation did not."""
    WRONG = 22
    """Accepted reads with a line that is not the lease's: what must never be."""
    INLINE = 23
    REFUSED = 24
    SHARED_READERS = 25
    """Accepted reads of a lease that another process had asked for."""
    REMAPS = 26
    FAILED_CALLS = 27

    BY_DIRECTORY = 28
    """Accepted reads that nobody was asked for, among the others."""
    STALE_BY_DIRECTORY = 29

    DESCRIPTORS_BEFORE = 30
    DESCRIPTORS_AFTER = 31
    MAPPINGS_BEFORE = 32
    MAPPINGS_AFTER = 33
    ENDED = 34
    """Incarnations that ended in good order."""


OPERATIONS = (Word.GRANTED, Word.RENEWED, Word.RELEASED, Word.EXPIRED, Word.REVOKED)


class Board:
    """Inherited by fork. Row 0 is the orchestrator's, row 1 the encoder's, the others' are the readers'."""

    def __init__(self, num_readers: int) -> None:
        self.num_readers = num_readers
        self._memory = mmap.mmap(-1, (2 + num_readers) * ROW_WORDS * 8)
        self._words = memoryview(self._memory).cast("Q")

    def row(self, index: int) -> Row:
        return Row(self._words[index * ROW_WORDS : (index + 1) * ROW_WORDS])

    @property
    def storm(self) -> Row:
        return self.row(0)

    @property
    def encoder(self) -> Row:
        return self.row(1)

    def reader(self, number: int) -> Row:
        return self.row(2 + number)

    def operations(self) -> int:
        encoder = self.encoder
        return sum(encoder[word] for word in OPERATIONS)

    def over_readers(self, word: Word) -> int:
        return sum(self.reader(number)[word] for number in range(self.num_readers))


class Row:
    def __init__(self, words: memoryview[int]) -> None:
        self._words = words

    def __getitem__(self, word: Word) -> int:
        return self._words[word]

    def __setitem__(self, word: Word, value: int) -> None:
        self._words[word] = value

    def add(self, word: Word, value: int = 1) -> None:
        self._words[word] += value


def num_shared_mappings() -> int:
    """Of an encoder's memory, in this process."""
    gc.collect()
    with open("/proc/self/maps") as maps:
        return sum("memfd:vision-encoder" in line for line in maps)


def num_descriptors(*, shared_only: bool = False) -> int:
    """Open in this process; shared_only: those of an encoder's memory."""
    gc.collect()  # a mapping that only a failed call's traceback still holds has a descriptor
    links = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            links.append(os.readlink(f"/proc/self/fd/{name}"))
    return sum("memfd:vision-encoder" in link for link in links) if shared_only else len(links)
