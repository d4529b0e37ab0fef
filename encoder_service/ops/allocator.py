"""Returns freed memory to the system while the process is idle.

glibc keeps freed memory for the next requests, also what a burst left behind. The images raise that further
(``MALLOC_TRIM_THRESHOLD_``), because fresh pages make messages slow. Other C libraries have no such call, and
nothing happens there.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable

CHECK_S = 1.0
# Checks in a row without a call in progress.
QUIET_CHECKS = 5
# Less free memory than this stays with the allocator.
KEPT_BYTES = 32 << 20


_FIELDS = (
    "arena",
    "ordblks",
    "smblks",
    "hblks",
    "hblkhd",
    "usmblks",
    "fsmblks",
    "uordblks",
    "fordblks",
    "keepcost",
)


class _MallInfo(ctypes.Structure):
    """``struct mallinfo2`` of malloc.h. fordblks: free bytes in all arenas."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in _FIELDS)


async def return_freed_memory(num_calls: Callable[[], int]) -> None:
    """Checks every ``CHECK_S`` until it is cancelled. num_calls: calls that are in progress. Returns memory
    only after some checks without any, since allocations wait meanwhile: 0.3 s for 800 MiB."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2") or not hasattr(libc, "malloc_trim"):
        return
    libc.mallinfo2.restype = _MallInfo
    num_quiet = 0
    while True:
        await asyncio.sleep(CHECK_S)
        num_quiet = num_quiet + 1 if num_calls() == 0 else 0
        if num_quiet >= QUIET_CHECKS and libc.mallinfo2().fordblks > KEPT_BYTES:
            num_quiet = 0
            await asyncio.to_thread(libc.malloc_trim, 0)
