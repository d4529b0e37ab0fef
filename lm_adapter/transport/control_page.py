"""The reader of an arena's control page: is the arena the right one, does it live, is a copy whole.

Owns the layout as its readers see it and the checks of its header; ``encoder_service.store.control_page``
writes it and explains the protocol. After the copy of a slot's rows is complete (waited for on the host,
where the device made it), ``unchanged`` tells whether the copy is of the lease's rows: the generation was
theirs until after the last byte. A copy that is not is thrown away.
"""

from __future__ import annotations

import hashlib
import mmap
import struct
import threading
from dataclasses import dataclass

from lm_adapter.transport.mapping import MappingFailed, check_sealed

__all__ = ["ControlPageReader", "Probe"]

_MAGIC = int.from_bytes(b"VEARENA\0", "little")
_VERSION = 1
_HEADER = struct.Struct("<QQ16sQQQQ32s")
_CHECKSUM_WORD, _CLOSED_WORD, _HEARTBEAT_WORD, _FIRST_GENERATION_WORD = 12, 13, 14, 16
_WORD_BYTES = 8

_fence = threading.Lock()


@dataclass(frozen=True)
class Probe:
    """Bytes of the arena that never change, with which a mapping is tested."""

    offset_bytes: int
    num_bytes: int
    sha256: bytes

    def matches(self, data: bytes) -> bool:
        """Whether ``data``, read through a mapping at offset_bytes, is what the encoder wrote there."""
        return len(data) == self.num_bytes and hashlib.sha256(data).digest() == self.sha256


class ControlPageReader:
    """A read-only view of one arena's control page."""

    def __init__(self, fd: int, size_bytes: int, *, arena_id: bytes) -> None:
        """The descriptor stays the caller's. Raises MappingFailed for a page that is damaged, of another
        version, or another arena's."""
        check_sealed(fd, size_bytes)
        if size_bytes < _FIRST_GENERATION_WORD * _WORD_BYTES or size_bytes % _WORD_BYTES:
            raise MappingFailed(f"a control page of {size_bytes} bytes is no page")
        self._mapping = mmap.mmap(fd, size_bytes, prot=mmap.PROT_READ)
        self._words = memoryview(self._mapping).cast("Q")
        header = bytes(self._mapping[: _HEADER.size])
        magic, version, found_id, self.instance, self.num_slots, *probe = _HEADER.unpack(header)
        self.probe = Probe(*probe)
        expected = int.from_bytes(hashlib.blake2b(header, digest_size=8).digest(), "little")
        words = (size_bytes // _WORD_BYTES) - _FIRST_GENERATION_WORD
        for what, found, wanted in (
            ("magic number", magic, _MAGIC),
            ("version", version, _VERSION),
            ("checksum", self._words[_CHECKSUM_WORD], expected),
            ("arena", found_id.hex(), arena_id.hex()),
            ("number of slots", self.num_slots, words),
        ):
            if found != wanted:
                self.close()
                raise MappingFailed(
                    f"the control page's {what} is {found}, expected {wanted}",
                    details={"found": found, "expected": wanted},
                )

    @property
    def closed(self) -> bool:
        """Whether the encoder closed the arena in good order, or this reader was closed."""
        return not self._words.nbytes or self._words[_CLOSED_WORD] != 0

    @property
    def heartbeat(self) -> int:
        """Counts up while the encoder lives."""
        return self._words[_HEARTBEAT_WORD]

    def unchanged(self, slot_index: int, generation: int) -> bool:
        """Whether all that was read of the slot before this call were the rows of ``generation``. The copy
        must be complete. False for a slot that the page does not have."""
        if not generation % 2 or not 0 <= slot_index < self.num_slots or not self._words.nbytes:
            return False
        # Orders the copy's loads before the load of the generation; see the writer's full_fence.
        with _fence:
            pass
        with _fence:
            pass
        return self._words[_FIRST_GENERATION_WORD + slot_index] == generation

    def close(self) -> None:
        """Unmaps the page. Twice is once."""
        if self._words.nbytes:
            self._words.release()
            self._words = memoryview(b"").cast("Q")
            self._mapping.close()
