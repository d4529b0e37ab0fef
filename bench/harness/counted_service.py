"""``vision-encoder`` whose event loop counts its turns.

    python -m bench.harness.counted_service FILE serve

The count is in FILE, where another process reads it at any time. The service itself has no count and no cost.
"""

from __future__ import annotations

import mmap
import sys
from pathlib import Path
from typing import Any

COUNT_BYTES = 8


def turns_in(file: Path) -> int:
    """Since the start; 0 before it."""
    return int.from_bytes(file.read_bytes()[:COUNT_BYTES], sys.byteorder) if file.exists() else 0


def count_turns(loop: type[Any], file: Path) -> None:
    """In each ``_run_once``, which is asyncio's turn: it waits for events and runs what is ready."""
    file.write_bytes(bytes(COUNT_BYTES))
    with file.open("r+b") as opened:
        turns = memoryview(mmap.mmap(opened.fileno(), COUNT_BYTES)).cast("Q")
    run_once = loop._run_once

    def counted(self: Any) -> None:
        turns[0] += 1
        run_once(self)

    loop._run_once = counted


if __name__ == "__main__":
    from encoder_service.__main__ import main
    from encoder_service.rpc.event_loop import ServiceLoop

    count_turns(ServiceLoop, Path(sys.argv.pop(1)))
    main()
