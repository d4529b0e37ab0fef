"""Copies between device and host memory, beside the event loop.

Owns the threads and streams that they run in, and that a copy has ended before anybody hears of its end. What
is copied where, and who holds both ends meanwhile, is ``tiers``'.
"""

from __future__ import annotations

import asyncio
import contextlib
from concurrent.futures import ThreadPoolExecutor

import torch

# Copies under way at once; more would share the same link.
NUM_COPY_THREADS = 2


class Mover:
    """Copies between device and host memory on threads of its own, each way in a stream of its own."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(NUM_COPY_THREADS, thread_name_prefix="tier-copy")
        self._streams: dict[tuple[torch.device, bool], torch.cuda.Stream] = {}

    async def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Returns when ``target`` has the bytes of ``source``. When it is cancelled, no sooner: until then
        neither memory may go to anybody else."""
        copying = asyncio.get_running_loop().run_in_executor(self._threads, self._copy, target, source)
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

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        on_device = target if target.is_cuda else source
        if not on_device.is_cuda:
            target.copy_(source)
            return
        with torch.cuda.device(on_device.device):
            with torch.cuda.stream(self._stream(on_device.device, to_device=target.is_cuda)):
                target.copy_(source, non_blocking=True)
                done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
                done.record()
            done.synchronize()

    def _stream(self, device: torch.device, *, to_device: bool) -> torch.cuda.Stream:
        stream = self._streams.get((device, to_device))
        if stream is None:  # two threads may both make one: either is right
            stream = self._streams[device, to_device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return stream
