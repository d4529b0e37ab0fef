"""The memory that the engine writes one item's rows to.

Ensures that a reservation of the store ends exactly once, and never while the engine may still write to it: a
caller may leave at any time, but the device finishes the batch that it has begun. Used from the event loop
only.
"""

from __future__ import annotations

import asyncio
import contextlib
from concurrent.futures import Future
from types import TracebackType
from typing import Self

import torch

from encoder_service.engine.device import DeviceEngine
from encoder_service.engine.jobs import TowerResult
from encoder_service.errors import DeviceFault
from encoder_service.scheduler.planner import Ticket
from encoder_service.store.embedding_store import EmbeddingStore, PinnedRows
from encoder_service.types import EncodedItem, TowerItem


class OutputReservation:
    """A context manager around one reservation. On exit without ``commit``, the memory is freed once the
    engine's jobs have ended.

    rows: [R, W], the reserved memory, or None where the store has no room.
    """

    def __init__(
        self, store: EmbeddingStore, engine: DeviceEngine, namespace: str, expected: EncodedItem
    ) -> None:
        """expected: the item, with a meta tensor that has the shape and dtype of its rows."""
        self._store = store
        self._engine = engine
        self._reservation = store.reserve(namespace, expected)
        self._jobs: dict[Future[TowerResult], Ticket] = {}
        self.rows: torch.Tensor | None = None
        if self._reservation is not None:
            self.rows = self._reservation.destination

    def submit(
        self, pixels: TowerItem, ticket: Ticket, destination: torch.Tensor | None
    ) -> Future[TowerResult]:
        """Queues pixels for encoding. destination: ``rows`` or a part of them. Raises as
        ``DeviceEngine.submit``."""
        job = self._engine.submit(pixels, ticket, destination)
        self._jobs[job] = ticket
        return job

    def commit(self) -> PinnedRows:
        """Publishes the complete rows in the store and returns them, held for the caller. Requires that
        ``rows`` is not None. Raises Draining after the store was closed."""
        reservation, self._reservation = self._reservation, None
        assert reservation is not None
        return self._store.commit(reservation)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pending = {job: ticket for job, ticket in self._jobs.items() if not job.done()}
        for ticket in pending.values():
            ticket.cancelled = True
            self._engine.discard(ticket)
        self._end_after([job for job in pending if not job.done()])

    def _end_after(self, jobs: list[Future[TowerResult]]) -> None:
        if self._reservation is None:
            return
        if not jobs:
            self._end()
            return
        loop = asyncio.get_running_loop()

        def check_rest(_: Future[TowerResult]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and the store with it
                loop.call_soon_threadsafe(self._end_after, [job for job in jobs[1:] if not job.done()])

        jobs[0].add_done_callback(check_rest)

    def _end(self) -> None:
        reservation, self._reservation = self._reservation, None
        if reservation is None:
            return
        if any(isinstance(job.exception(), DeviceFault) for job in self._jobs):
            self._store.abandon(reservation)
        else:
            self._store.cancel(reservation)
