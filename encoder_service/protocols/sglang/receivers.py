"""Receivers that the scheduler's processes name themselves (SGLang's transfer backend zmq_to_scheduler).

Owns which processes want the rows of a request, from the first ``/scheduler_receive_url`` or ``/encode`` of
its ``req_id`` until the end of the ``/encode``. Used from the event loop only.
"""

from __future__ import annotations

import asyncio
import contextlib
import reprlib
from collections.abc import Iterator

from encoder_service.errors import DeadlineExceeded, InvalidRequest, TooManyCalls

# Limit on requests with known or expected receivers. Above it, receivers announced early are refused.
MAX_REQUESTS = 4096
# How long early receivers are kept without their ``/encode``, and how long an ``/encode`` with rows waits for
# its receivers.
WAIT_S = 60.0


class ReceiverGroup:
    """The processes that want the rows of one request. is_encoding: its ``/encode`` is in progress."""

    def __init__(self, wait_s: float) -> None:
        self.is_encoding = False
        self._wait_s = wait_s
        self._urls: list[str] = []
        self._num_expected = 0
        """0 until a process has stated how many there are."""
        self._is_complete = asyncio.Event()

    def add(self, url: str, num_expected: int) -> None:
        """Adds a process, once. url: host:port. Raises InvalidRequest if another process stated another
        number of processes."""
        if self._num_expected not in (0, num_expected):
            raise InvalidRequest(
                f"receive_count is {num_expected}, another process stated {self._num_expected}"
            )
        self._num_expected = num_expected
        if url not in self._urls and not self._is_complete.is_set():
            self._urls.append(url)
        if len(self._urls) >= num_expected:
            self._is_complete.set()

    async def complete(self) -> list[str]:
        """The URLs of all processes, once all are known. Raises DeadlineExceeded."""
        try:
            async with asyncio.timeout(self._wait_s):
                await self._is_complete.wait()
        except TimeoutError:
            raise DeadlineExceeded(
                f"{len(self._urls)} of {self._num_expected or 'an unknown number of'} receivers were "
                f"named within {self._wait_s} s"
            ) from None
        return self._urls


class AwaitedReceivers:
    """Receivers by request. Its length is the number of requests."""

    def __init__(self, max_requests: int = MAX_REQUESTS, wait_s: float = WAIT_S) -> None:
        self._max_requests, self._wait_s = max_requests, wait_s
        self._groups: dict[str, ReceiverGroup] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def add(self, req_id: str, url: str, num_expected: int) -> None:
        """Adds a receiver, before or after the request's ``/encode`` has begun. Raises TooManyCalls, and as
        ``ReceiverGroup.add``."""
        group = self._groups.get(req_id)
        if group is None:
            if len(self) >= self._max_requests:
                raise TooManyCalls(
                    f"receivers of {len(self)} requests are awaited, at most {self._max_requests} may be"
                )
            group = self._groups[req_id] = ReceiverGroup(self._wait_s)
            asyncio.get_running_loop().call_later(self._wait_s, self._forget_early, req_id, group)
        group.add(url, num_expected)

    @contextlib.contextmanager
    def encoding(self, req_id: str) -> Iterator[ReceiverGroup]:
        """The receivers of a request while its ``/encode`` is in progress. ``max_requests`` does not apply:
        early receivers of other requests keep no ``/encode`` out. Raises InvalidRequest if the request is
        being encoded already."""
        group = self._groups.setdefault(req_id, ReceiverGroup(self._wait_s))
        if group.is_encoding:
            raise InvalidRequest(f"req_id {reprlib.repr(req_id)} is being encoded")
        group.is_encoding = True
        try:
            yield group
        finally:
            del self._groups[req_id]

    def _forget_early(self, req_id: str, group: ReceiverGroup) -> None:
        if self._groups.get(req_id) is group and not group.is_encoding:
            del self._groups[req_id]
