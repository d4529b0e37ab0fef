"""Writes the control page of an arena: one generation per slot, and whether the arena is open.

Owns the order of the stores. ``vision_encoder.layout.control_page`` describes the layout, the protocol and
why it is correct. ``arena`` decides when a slot changes hands.
"""

from __future__ import annotations

import numpy as np

from encoder_service.errors import InternalError
from encoder_service.store.host_memory import SealedFile
from vision_encoder.layout.control_page import (
    CLOSED_WORD,
    FIRST_GENERATION_WORD,
    PageHeader,
    fence,
    pack_header,
    page_bytes,
)

# Upper bound of the initial generations. A generation has 64 bits, so it cannot overflow in a process's life.
_FIRST_GENERATIONS = 1 << 56


class ControlPage:
    """The only writer of the page. Not thread-safe."""

    def __init__(self, header: PageHeader) -> None:
        """Raises ConfigurationError if the host has too little memory."""
        self.num_slots = header.num_slots
        self._file = SealedFile("vision-encoder-control", page_bytes(header.num_slots))
        packed = pack_header(header)
        self._file.mapping[: len(packed)] = packed
        self._words = memoryview(self._file.mapping).cast("Q")
        first = np.random.default_rng().integers(_FIRST_GENERATIONS, size=header.num_slots, dtype=np.uint64)
        np.frombuffer(self._words, np.uint64)[FIRST_GENERATION_WORD:] = first & ~np.uint64(1)
        fence()

    @property
    def size_bytes(self) -> int:
        return self._file.size_bytes

    def generation(self, index: int) -> int:
        """The generation, which is odd while the slot's rows may be read. Raises InternalError for a slot
        that does not exist."""
        return self._words[self._word(index)]

    def publish(self, index: int) -> int:
        """Makes the generation odd and returns it. The slot's rows must be complete. Raises InternalError if
        it is odd already or the page is closed."""
        generation = self.generation(index)
        if self._words[CLOSED_WORD]:
            raise InternalError(f"slot {index} cannot be published, its arena is closed", slot=index)
        if generation % 2:
            raise InternalError(f"slot {index} is published already, generation {generation}", slot=index)
        self._store(index, generation + 1)
        return generation + 1

    def retire(self, index: int) -> None:
        """Makes the generation even. Afterwards the slot's memory may be written."""
        generation = self.generation(index)
        if generation % 2:
            self._store(index, generation + 1)

    def export_fd(self) -> int:
        """A new descriptor that can be mapped with PROT_READ only. The caller closes it."""
        return self._file.export_fd()

    def close(self) -> None:
        """Retires every slot and sets the closed flag. Idempotent."""
        if self._words[CLOSED_WORD]:
            return
        for index in range(self.num_slots):
            self.retire(index)
        self._words[CLOSED_WORD] = 1
        fence()
        self._file.close()

    def _word(self, index: int) -> int:
        if not 0 <= index < self.num_slots:
            raise InternalError(f"slot {index} of {self.num_slots} does not exist", slot=index)
        return FIRST_GENERATION_WORD + index

    def _store(self, index: int, generation: int) -> None:
        fence()
        self._words[self._word(index)] = generation
        fence()
