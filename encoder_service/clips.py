"""One clip from its content to its rows, in pieces: each is decoded on a worker while the device runs the one
before, and waits in the engine's queue like any other item, so that images and clips share batches.

Owns the order of the pieces and how many are decoded ahead. Decoding and the cut are ``ingest.video``'s, what
becomes of a piece on the device is the engine's. Used from the event loop only.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass

import torch

from encoder_service.engine.jobs import TowerResult
from encoder_service.inflight import InFlightEncode
from encoder_service.ingest.pinned import pinned
from encoder_service.ingest.video.clip import Clip, ClipPlan
from encoder_service.output import OutputReservation
from encoder_service.towers.tower import Tower
from encoder_service.types import ClipFacts, FrameItem

# Pieces of one clip that are decoded and not yet encoded: two are on the device, one is next.
MAX_PIECES_AHEAD = 3


def num_clip_rows(plan: ClipPlan, tower: Tower) -> int:
    return sum(tower.num_rows(grid) for grid in plan.chunk_grids or (plan.grid,))


def clip_facts(plan: ClipPlan) -> ClipFacts:
    return ClipFacts(plan.timestamps_s, plan.chunk_grids)


@dataclass(frozen=True)
class ClipEncoder:
    """max_piece_patches: of a piece, unless what is attended together has more. clock: seconds, the
    engine's."""

    tower: Tower
    workers: Executor
    max_piece_patches: int
    clock: Callable[[], float]

    async def encode(
        self, encode: InFlightEncode, clip: Clip, output: OutputReservation, rows: torch.Tensor
    ) -> None:
        """Every piece into its part of rows [R, W], which the output owns or the host has. Fills in the
        encode's timings. Raises what decoding raises, and what the engine's futures end with."""
        loop, timings = asyncio.get_running_loop(), encode.timings
        pieces = clip.pieces(self.max_piece_patches)
        ahead: deque[Future[TowerResult]] = deque()
        first, queued_s = 0, 0.0

        async def take_oldest() -> None:
            result = await asyncio.wrap_future(ahead.popleft())
            timings.queue_ms = timings.queue_ms or (result.started_s - queued_s) * 1e3
            timings.tower_ms += result.tower_ms

        while (piece := await loop.run_in_executor(self.workers, self._next_piece, pieces)) is not None:
            timings.decode_ms, timings.resize_ms = clip.decode_ms, clip.resize_ms
            if len(ahead) == MAX_PIECES_AHEAD:
                await take_oldest()
            ticket = encode.ticket(piece.grid, merges_time=self.tower.merges_time)
            last = first + self.tower.num_rows(piece.grid)
            queued_s = queued_s or self.clock()
            ahead.append(output.submit(piece, ticket, rows[first:last]))
            first = last
        while ahead:
            await take_oldest()

    def _next_piece(self, pieces: Iterator[FrameItem]) -> FrameItem | None:
        """On a worker: the next piece in memory that the device can read; None after the last."""
        piece = next(pieces, None)
        return None if piece is None else pinned(piece, self.tower.device, self.tower.dtype)
