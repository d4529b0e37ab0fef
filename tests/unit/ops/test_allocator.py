"""Freed memory goes back to the system while nothing is in progress."""

from __future__ import annotations

import asyncio
import ctypes
import sys
from pathlib import Path

import pytest

from encoder_service.ops import allocator

pytestmark = pytest.mark.anyio

BLOCK_BYTES, NUM_BLOCKS = 60_000, 2000


def resident_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
async def test_memory_that_a_burst_left_behind_goes_back_once_no_call_is_in_progress(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "malloc_trim"):
        pytest.skip("this C library has no malloc_trim")
    monkeypatch.setattr(allocator, "CHECK_S", 0.01)
    num_calls = 1
    libc.malloc.restype = ctypes.c_void_p
    blocks = [ctypes.c_void_p(libc.malloc(BLOCK_BYTES)) for _ in range(NUM_BLOCKS + 1)]
    for block in blocks:
        ctypes.memset(block, 1, BLOCK_BYTES)
    for block in blocks[:-1]:  # the last one keeps the heap's end where it is
        libc.free(block)
    left_behind = resident_bytes()
    returning = asyncio.ensure_future(allocator.return_freed_memory(lambda: num_calls))
    await asyncio.sleep(0.1)
    assert resident_bytes() > left_behind - (10 << 20), "a call is in progress"
    num_calls = 0
    async with asyncio.timeout(10):
        while resident_bytes() > left_behind - BLOCK_BYTES * NUM_BLOCKS / 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    returning.cancel()
    libc.free(blocks[-1])
