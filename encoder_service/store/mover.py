"""Copies between device and host memory, beside the event loop.

Owns the threads and streams that they run in, and that a copy has ended before anybody hears of its end. What
is copied where, and who holds both ends meanwhile, is ``tiers``'.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from encoder_service.store.arena_store import ArenaStore
from encoder_service.store.embedding_store import Held, Tier, Writing

# Copies under way at once; more would share the same link.
NUM_COPY_THREADS = 2


@dataclass(frozen=True)
class Move:
    """One item's copy into a tier. target: the part that it goes to; held, writing: its ends, kept till it is
    over."""

    tier: Tier
    target: ArenaStore
    held: Held
    writing: Writing


class Mover:
    """Copies between device and host memory on threads of its own, each way in a stream of its own."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(NUM_COPY_THREADS, thread_name_prefix="tier-copy")
        self._streams: dict[tuple[torch.device, bool], torch.cuda.Stream] = {}

    async def copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Returns when every first has the bytes of its second; all pairs lead the same way. When it is
        cancelled, no sooner: until then none of the memory may go to anybody else."""
        copying = asyncio.get_running_loop().run_in_executor(self._threads, self._copy_all, pairs)
        try:
            await asyncio.shield(copying)
        except asyncio.CancelledError:
            while not copying.done():  # however often it is cancelled
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([copying])
            raise

    def close(self) -> None:
        """Waits for the copies under way. Twice is once."""
        self._threads.shutdown(wait=True)

    def _copy_all(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        to_device = pairs[0][0].is_cuda
        on_device = pairs[0][0] if to_device else pairs[0][1]
        if not on_device.is_cuda:
            for target, source in pairs:
                self._copy(target, source)
            return
        with torch.cuda.device(on_device.device):
            with torch.cuda.stream(self._stream(on_device.device, to_device=to_device)):
                for target, source in pairs:
                    target.copy_(source, non_blocking=True)
                done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
                done.record()
            done.synchronize()

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """In host memory."""
        target.copy_(source)

    def _stream(self, device: torch.device, *, to_device: bool) -> torch.cuda.Stream:
        stream = self._streams.get((device, to_device))
        if stream is None:  # two threads may both make one: either is right
            stream = self._streams[device, to_device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return stream


def read_failure(task: asyncio.Task[Any]) -> None:
    """A task's failure is told to those who wait for it; one that nobody waits for any more is not lost."""
    if not task.cancelled():
        task.exception()
