"""What leaves the service for prefill ranks: rows by Mooncake, statuses by ZMQ.

Owns the tasks that send. ``rooms`` decides what is sent and when.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import TypeAlias

import structlog

from encoder_service.errors import DeadlineExceeded, TooManyCalls, VisionEncoderError
from encoder_service.protocols.tokenspeed.mooncake import Mooncake, StagedRows
from encoder_service.protocols.tokenspeed.room import Rank
from encoder_service.protocols.tokenspeed.wire import FAILED, check_requests, status_message
from encoder_service.protocols.zmq_push import Sender
from encoder_service.rpc.status import as_service_error
from encoder_service.types import EncodedItem

log = structlog.get_logger(__name__)
# Is called once rows are written, or with the error.
Ended: TypeAlias = Callable[[VisionEncoderError | None], None]

# For the rows of one room to be written.
SEND_S = 30.0
# Concurrent tasks from which on a rank of a failed room gets no status.
MAX_TASKS = 2048


class RankSender:
    """Sends to prefill ranks, without waiting. Used from the event loop only."""

    def __init__(
        self, statuses: Sender, mooncake: Mooncake, refused: Counter[str], limit_s: float = SEND_S
    ) -> None:
        """refused: counts statuses that could not be sent, by reason. limit_s: for the rows of one room."""
        self._statuses, self._mooncake, self._refused = statuses, mooncake, refused
        self._limit_s = limit_s
        self._tasks: set[asyncio.Task[None]] = set()

    def send_rows(self, item: EncodedItem, ranks: Sequence[Rank], ended: Ended) -> None:
        """Writes each rank's rows to its memory. Calls ``ended`` within the limit, with the error if there
        is one."""
        self._run(self._send_rows(item, ranks, ended))

    def send_status(self, rank: Rank, status: bytes) -> None:
        self._run(self._send_status(rank, status))

    def send_failed(self, rank: Rank) -> None:
        """The status FAILED for a rank that is in no room. Raises TooManyCalls while many tasks send."""
        if len(self._tasks) >= MAX_TASKS:
            raise TooManyCalls(
                f"{len(self._tasks)} statuses and rows are on their way, at most {MAX_TASKS} may be"
            )
        self.send_status(rank, FAILED)

    async def finish(self, timeout_s: float) -> None:
        """Returns once all has been sent, or after that time."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)

    async def _send_rows(self, item: EncodedItem, ranks: Sequence[Rank], ended: Ended) -> None:
        error: VisionEncoderError | None = None
        try:
            async with asyncio.timeout(self._limit_s):
                await self._write(item, ranks)
        except TimeoutError:
            error = DeadlineExceeded(f"the rows were not written within {self._limit_s} s")
        except Exception as failure:
            error = as_service_error(failure)
        ended(error)

    async def _write(self, item: EncodedItem, ranks: Sequence[Rank]) -> None:
        check_requests([rank.request for rank in ranks], item.spec)
        first = ranks[0]
        host = first.session.rpartition(":")[0]
        async with self._mooncake.staged(item.rows, first.request.width, first.request.dtype, host) as staged:
            writes = (self._write_rank(staged, rank) for rank in ranks if rank.request.num_rows)
            for error in await asyncio.gather(*writes, return_exceptions=True):
                if error is not None:
                    raise error

    async def _write_rank(self, staged: StagedRows, rank: Rank) -> None:
        request = rank.request
        rows = slice(request.row_start, request.row_start + request.num_rows)
        sources, addresses = [staged.main[rows]], [request.main]
        if request.has_deepstack:
            sources.append(staged.deepstack[rows])
            addresses.append(request.deepstack)
        await self._mooncake.write(staged, rank.session, sources, addresses)

    async def _send_status(self, rank: Rank, status: bytes) -> None:
        room = rank.request.room
        try:
            await self._statuses.push(rank.endpoint, status_message(room, status))
        except VisionEncoderError as error:
            self._refused[error.reason] += 1
            log.warning("status not delivered", room=room, error=error.message)

    def _run(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
