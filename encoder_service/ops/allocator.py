"""Returns freed memory to the operating system while the process is idle.

glibc keeps freed memory for later allocations, also after a burst. The container images make it keep even
more (``MALLOC_TRIM_THRESHOLD_``), because new pages make it slow to receive messages. With another C library,
this module does nothing.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable

CHECK_S = 1.0
# Memory is returned after this many checks in a row without a call in progress.
QUIET_CHECKS = 5
# The allocator keeps up to this much free memory.
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
    """``struct mallinfo2`` (malloc.h). fordblks: free bytes in all of the allocator's arenas."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in _FIELDS)


async def return_freed_memory(num_calls: Callable[[], int]) -> None:
    """Checks every ``CHECK_S`` until it is cancelled. num_calls: returns the number of calls in progress.
    Waits for a quiet time, because no thread can allocate while memory is returned: 0.3 s for 800 MiB."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2") or not hasattr(libc, "malloc_trim"):
        return
    libc.mallinfo2.restype = _MallInfo
    num_quiet, has_worked = 0, True
    while True:
        await asyncio.sleep(CHECK_S)
        if num_calls():
            num_quiet, has_worked = 0, True
            continue
        num_quiet += 1
        if has_worked and num_quiet >= QUIET_CHECKS:
            has_worked = False
            if libc.mallinfo2().fordblks > KEPT_BYTES:
                await asyncio.to_thread(libc.malloc_trim, 0)
