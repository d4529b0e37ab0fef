"""What the broker is told and nobody waits for: leases that go back, segments that nobody needs, rows that
were read without asking.

Owns these until they go out, and puts as many as fit into one message. When they go out is ``broker_link``'s;
what is left when the connection ends is not told, since all but the figures of reads ended with it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator

from lm_adapter.transport.broker_frames import encode_frame
from lm_adapter.transport.broker_handshake import HELLO_ID
from lm_adapter.transport.uses import Uses
from vision_encoder.v1 import broker_pb2 as pb

__all__ = ["Unasked"]

MAX_LEASES_AT_ONCE = 128
MAX_AT_ONCE = 1024
"""Of what was added: about 20 KiB of leases, which a socket that takes anything takes without waiting."""
_NO_REPLY_ID = HELLO_ID
"""Nobody waits for an answer, which would be a failure, or word of a segment: any id will do."""


class Unasked:
    """``add`` and ``uses_of`` on any thread; ``take`` and ``take_requests`` on one at a time."""

    def __init__(self, wake: Callable[[], None], max_uses: int) -> None:
        """wake: called when there is something after ``take``; must be cheap. max_uses: of one message."""
        self._wake = wake
        self._max_uses = max_uses
        self._requests: deque[pb.BrokerRequest] = deque()
        self._asleep = True
        self._uses: dict[str, Uses] = {}
        self._uses_lock = threading.Lock()

    def add(self, request: pb.BrokerRequest, *, wakes: bool = True) -> None:
        """To go out soon. Takes no lock. wakes: False for who goes on to ``take_requests``: what that
        leaves, for being too much, was added before and woke."""
        self._requests.append(request)
        if self._asleep and wakes:
            self._asleep = False
            self._wake()

    def uses_of(self, kind: str) -> Uses:
        """Where reads of this kind of memory are noted."""
        with self._uses_lock:
            return self._uses.setdefault(kind, Uses(kind, self._wake))

    def take_requests(self) -> bytes:
        """Frames of what was added, without reads; empty for none. More may be left."""
        # Before the first is taken: whoever adds from here on wakes.
        self._asleep = True
        return b"".join(map(_frame, _joined(self._first_requests())))

    def take(self) -> tuple[bytes, bool]:
        """The same with reads, and whether to look again without being woken."""
        with self._uses_lock:
            noted = list(self._uses.values())
        used = [each for uses in noted for each in uses.take(self._max_uses)]
        frames = self.take_requests()
        frames += b"".join(_frame(pb.BrokerRequest(used=each)) for each in used)
        return frames, bool(used or self._requests)

    def _first_requests(self) -> Iterator[pb.BrokerRequest]:
        for _ in range(min(len(self._requests), MAX_AT_ONCE)):
            yield self._requests.popleft()


def _joined(requests: Iterator[pb.BrokerRequest]) -> Iterator[pb.BrokerRequest]:
    """In order; releases in a row, of one owner by one reader, in one."""
    last: pb.BrokerRequest | None = None
    for request in requests:
        if last is not None and _joins(last, request):
            last.release.lease_ids.extend(request.release.lease_ids)
            continue
        if last is not None:
            yield last
        last = request
    if last is not None:
        yield last


def _joins(last: pb.BrokerRequest, request: pb.BrokerRequest) -> bool:
    if not (last.HasField("release") and request.HasField("release")):
        return False
    one, other = last.release, request.release
    return (
        len(one.lease_ids) + len(other.lease_ids) <= MAX_LEASES_AT_ONCE
        and one.owner_id == other.owner_id
        and one.HasField("reader") == other.HasField("reader")
        and one.reader == other.reader
    )


def _frame(request: pb.BrokerRequest) -> bytes:
    request.request_id = _NO_REPLY_ID
    return encode_frame(request.SerializeToString())
