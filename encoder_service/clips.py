"""Encodes a clip in pieces: a worker thread decodes the next piece while the device encodes the current one.
Pieces wait in the engine's queue like images, so that both share batches.

Owns the order of the pieces and the number of pieces that are decoded ahead. ``ingest.video`` decodes the
clip and cuts it, the engine encodes a piece. Used from the event loop only.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from encoder_service.engine.jobs import TowerResult
from encoder_service.inflight import InFlightEncode
from encoder_service.ingest.pinned import pinned
from encoder_service.ingest.video.clip import Clip
from encoder_service.ingest.workers import IngestWorkers
from encoder_service.ops.shares import Holder
from encoder_service.output import OutputReservation
from encoder_service.towers.tower import Tower
from encoder_service.types import FrameItem

# Limit on pieces of one clip that are decoded and not yet encoded: two on the device and the next one.
MAX_PIECES_AHEAD = 3


@dataclass(frozen=True)
class ClipEncoder:
    """Encodes clips on one tower.

    max_piece_patches: size of a piece; frames that are attended together stay in one piece even if it gets
    larger. clock: the engine's, in seconds."""

    tower: Tower
    workers: IngestWorkers
    max_piece_patches: int
    clock: Callable[[], float]

    async def encode(
        self,
        encode: InFlightEncode,
        clip: Clip,
        output: OutputReservation,
        rows: torch.Tensor,
        holder: Holder,
    ) -> None:
        """Encodes every piece into its part of rows [R, W], which is the output's memory or a tensor in host
        memory. holder: whose share of the workers is used. Fills in the encode's timings. Raises the errors
        of decoding and of the engine's futures."""
        timings = encode.timings
        pieces = clip.pieces(self.max_piece_patches)
        ahead: deque[Future[TowerResult]] = deque()
        first, queued_s = 0, 0.0

        async def take_oldest() -> None:
            result = await asyncio.wrap_future(ahead.popleft())
            timings.queue_ms = timings.queue_ms or (result.started_s - queued_s) * 1e3
            timings.tower_ms += result.tower_ms

        while (piece := await self.workers.run(holder, self._next_piece, pieces, is_clip=True)) is not None:
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
        """Runs on a worker: the next piece, in memory that the device can read; None after the last."""
        piece = next(pieces, None)
        return None if piece is None else pinned(piece, self.tower.device, self.tower.dtype)
