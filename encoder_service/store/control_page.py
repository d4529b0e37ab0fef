"""The control page beside each arena: who it belongs to, whether it lives, and a generation per slot.

Owns the page's layout and the order of its stores. It is a sealed memfd that importers map read-only
(``lm_adapter.transport.control_page`` reads it); when a slot changes hands is the arena's to say.

Layout, 64-bit little-endian words:
  0      magic        1      version     2..3  arena_id     4  instance    5  num_slots
  6..11  probe: offset_bytes, num_bytes, SHA-256 of these bytes of the arena
  12     BLAKE2b of words 0..11          13    closed (0 or 1)             14 heartbeat
  15     zero         16...  one generation per slot

Generations. Even: nobody may read the slot. Odd: its rows are complete and readable. A generation only
grows, by one when rows are published or retired, by two when the leases on rows that stay are revoked, and
starts at a random value for each instance of the page, so none ever comes back. The protocol is a seqlock
whose writer never waits:
  writer: generation becomes even, fence, then anything may write the slot's memory; when the new rows are
          complete, fence, generation becomes odd.
  reader: copies the rows, waits until the copy is complete, fence, then compares the generation with its
          lease's. Equal: the copy is of these rows, whole. Different: the copy is thrown away.
If a copy saw one byte of the next tenant, that byte was written after the even store, so the reader's load,
which comes after its copy, sees that store or a later one.

Why this holds. Both sides access one aligned 64-bit word with a single load or store, which neither x86-64
nor aarch64 tears. Host copies: the fences (``full_fence``) forbid the reorderings that aarch64 would allow;
x86-64 keeps these orders by itself. Device copies: the writer's copy is enqueued after the store and its
fence, and the driver's doorbell is ordered behind earlier stores; the reader's copy has completed, its event
was waited for on the host, before the load. Either way the load happens after all that the copy has read.
"""

from __future__ import annotations

import hashlib
import os
import struct
import threading
from dataclasses import dataclass

from encoder_service.errors import InternalError
from encoder_service.store.host_memory import SealedFile

MAGIC = int.from_bytes(b"VEARENA\0", "little")
VERSION = 1
HEADER = struct.Struct("<QQ16sQQQQ32s")
CHECKSUM_WORD, CLOSED_WORD, HEARTBEAT_WORD, FIRST_GENERATION_WORD = 12, 13, 14, 16
WORD_BYTES = 8
# Generations start below this and are 64 bits wide, so none overflows in the life of a process.
_FIRST_GENERATIONS = 1 << 56

_FENCE = threading.Lock()


@dataclass(frozen=True)
class Probe:
    """Bytes of the arena that never change, with which an importer tests its mapping."""

    offset_bytes: int
    num_bytes: int
    sha256: bytes


def header_checksum(header: bytes) -> int:
    """BLAKE2b in 64 bits, little-endian."""
    return int.from_bytes(hashlib.blake2b(header, digest_size=8).digest(), "little")


def full_fence() -> None:
    """Orders this thread's accesses before it against those after it.

    Two rounds of a lock: the first round's release keeps earlier accesses before it, the second round's
    acquire keeps later ones behind, and a release followed by an acquire is not reordered on aarch64; on
    x86-64 each locked instruction is a full barrier."""
    with _FENCE:
        pass
    with _FENCE:
        pass


class ControlPage:
    """The page's only writer. Not thread-safe."""

    def __init__(self, *, arena_id: bytes, instance: int, num_slots: int, probe: Probe) -> None:
        """arena_id: 16 bytes. instance: 64 bits, new at every start."""
        self.num_slots = num_slots
        self._file = SealedFile("vision-encoder-control", (FIRST_GENERATION_WORD + num_slots) * WORD_BYTES)
        self._words = memoryview(self._file.mapping).cast("Q")
        header = HEADER.pack(
            MAGIC,
            VERSION,
            arena_id,
            instance,
            num_slots,
            probe.offset_bytes,
            probe.num_bytes,
            probe.sha256,
        )
        self._file.mapping[: len(header)] = header
        self._words[CHECKSUM_WORD] = header_checksum(header)
        for index in range(num_slots):
            start = int.from_bytes(os.urandom(7), "little") % _FIRST_GENERATIONS
            self._words[FIRST_GENERATION_WORD + index] = start & ~1
        full_fence()

    @property
    def size_bytes(self) -> int:
        return self._file.size_bytes

    def generation(self, index: int) -> int:
        """Odd while the slot's rows may be read."""
        return self._words[self._word(index)]

    def publish(self, index: int) -> int:
        """The slot's rows are complete; their generation. Raises InternalError when they are published
        already or the page is closed."""
        generation = self.generation(index)
        if self._words[CLOSED_WORD]:
            raise InternalError(f"slot {index} cannot be published, its arena is closed", slot=index)
        if generation % 2:
            raise InternalError(f"slot {index} is published already, generation {generation}", slot=index)
        return self._store(index, generation + 1)

    def retire(self, index: int) -> None:
        """No reader may trust a copy that ends after this; the memory may be written on return."""
        generation = self.generation(index)
        if generation % 2:
            self._store(index, generation + 1)

    def revoke(self, index: int) -> int:
        """The rows stay readable, under a new generation, which is returned: leases given until now are
        stale. Raises InternalError when nothing is published."""
        generation = self.generation(index)
        if not generation % 2:
            raise InternalError(f"slot {index} has no rows to revoke, generation {generation}", slot=index)
        return self._store(index, generation + 2)

    def beat(self) -> None:
        """One more heartbeat; a reader that sees none for a while takes the service for gone."""
        self._words[HEARTBEAT_WORD] += 1

    def export_fd(self) -> int:
        """A descriptor that maps with PROT_READ only; the caller closes it."""
        return self._file.export_fd()

    def close(self) -> None:
        """Retires every slot and says closed; importers that still map the page see both. Twice is once."""
        if self._words[CLOSED_WORD]:
            return
        for index in range(self.num_slots):
            self.retire(index)
        self._words[CLOSED_WORD] = 1
        full_fence()
        self._file.close()

    def _word(self, index: int) -> int:
        if not 0 <= index < self.num_slots:
            raise InternalError(f"slot {index} of {self.num_slots} does not exist", slot=index)
        return FIRST_GENERATION_WORD + index

    def _store(self, index: int, generation: int) -> int:
        full_fence()
        self._words[self._word(index)] = generation
        full_fence()
        return generation
