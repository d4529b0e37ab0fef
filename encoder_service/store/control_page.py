"""Writes the control page beside an arena: one generation per slot, and whether the arena is open.

Owns the order of the stores. The layout, the protocol and why it holds are in
``vision_encoder.layout.control_page``; when a slot changes hands is decided by ``arena``.
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

# First generations are below this. The words have 64 bits, so that none overflows in a process's life.
_FIRST_GENERATIONS = 1 << 56


class ControlPage:
    """The page's only writer. Not thread-safe."""

    def __init__(self, header: PageHeader) -> None:
        """Raises ConfigurationError when the host lacks the memory."""
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
        """Odd while the slot's rows may be read. Raises InternalError for a slot that does not exist."""
        return self._words[self._word(index)]

    def publish(self, index: int) -> int:
        """Makes the generation odd and returns it; the slot's rows are complete. Raises InternalError when
        it is odd already or the page is closed."""
        generation = self.generation(index)
        if self._words[CLOSED_WORD]:
            raise InternalError(f"slot {index} cannot be published, its arena is closed", slot=index)
        if generation % 2:
            raise InternalError(f"slot {index} is published already, generation {generation}", slot=index)
        self._store(index, generation + 1)
        return generation + 1

    def retire(self, index: int) -> None:
        """Makes the generation even. After the return the slot's memory may be written."""
        generation = self.generation(index)
        if generation % 2:
            self._store(index, generation + 1)

    def export_fd(self) -> int:
        """A descriptor that maps with PROT_READ only; the caller closes it."""
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
