"""Copies between device and host memory, outside the event loop's thread.

Owns the threads and streams of the copies. A copy is reported as done only after it has ended on the device.
``embedding_store`` decides which rows are copied, and holds both ends of a copy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

# Number of concurrent copies. More would share the same link.
NUM_COPY_THREADS = 2


class Copier:
    """Copies tensors on its own threads, with one stream per direction."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(NUM_COPY_THREADS, thread_name_prefix="tier-copy")
        self._streams: dict[tuple[torch.device, bool], torch.cuda.Stream] = {}

    async def copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copies the second tensor of each pair into the first. Returns when the bytes have arrived. All
        pairs must have the same direction. After a cancelled or failed call, the device may still read and
        write the memory."""
        await asyncio.get_running_loop().run_in_executor(self._threads, self._copy_all, pairs)

    def close(self) -> None:
        """Waits for copies in progress. Idempotent."""
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
        if stream is None:  # if two threads create one at the same time, either stream works
            stream = self._streams[device, to_device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return stream
