"""Copies between device and host memory, beside the event loop.

Owns the threads and streams of the copies, and that a copy has ended before its end is reported. Which rows
are copied, and that both ends stay held meanwhile, is decided by ``embedding_store``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

# Copies under way at once; more would share the same link.
NUM_COPY_THREADS = 2


class Copier:
    """Copies tensors on threads of its own, in one stream for each direction."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(NUM_COPY_THREADS, thread_name_prefix="tier-copy")
        self._streams: dict[tuple[torch.device, bool], torch.cuda.Stream] = {}

    async def copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copies each second tensor into its first and returns when the bytes are there. All pairs have the
        same direction. After a cancelled call, as after a failed one, the device may still read and write the
        memory."""
        await asyncio.get_running_loop().run_in_executor(self._threads, self._copy_all, pairs)

    def close(self) -> None:
        """Waits for the copies under way. Idempotent."""
        self._threads.shutdown(wait=True)

    def _copy_all(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        target, source = pairs[0]
        device = target.device if target.is_cuda else source.device
        if device.type != "cuda":
            for target, source in pairs:
                target.copy_(source)
            return
        with torch.cuda.device(device):
            with torch.cuda.stream(self._stream(device, to_device=target.is_cuda)):
                for target, source in pairs:
                    target.copy_(source, non_blocking=True)
                done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
                done.record()
            done.synchronize()

    def _stream(self, device: torch.device, *, to_device: bool) -> torch.cuda.Stream:
        stream = self._streams.get((device, to_device))
        if stream is None:  # two threads may both create one; either is right
            stream = self._streams[device, to_device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return stream
