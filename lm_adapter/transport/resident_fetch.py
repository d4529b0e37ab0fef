"""Leases on rows that are resident, asked for over the broker's socket, from threads and from loops.

Owns the wait for the answer, and what becomes of leases that come when nobody waits any more. Which rows to
ask for, and what to do with them, is ``resident``'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable

from lm_adapter.transport.broker_errors import BrokerError, BrokerUnavailable, BrokerViolation
from lm_adapter.transport.broker_link import BrokerLink
from lm_adapter.transport.broker_waiting import Waiting
from vision_encoder.v1 import broker_pb2 as pb
from vision_encoder.v1 import encoder_pb2

__all__ = ["fetch", "fetch_on_loop"]

SEND_TIMEOUT_S = 1.0


def fetch(link: BrokerLink, request: pb.BrokerFetch, timeout_s: float) -> pb.BrokerFetched:
    """Raises BrokerError."""
    done = threading.Event()
    under_way = _UnderWay(link, request, done.set, reads=True)
    try:
        if not link.read_until(done, timeout_s):
            raise _too_late(timeout_s)
        return under_way.fetched()
    except BaseException:
        under_way.abandon()
        raise


async def fetch_on_loop(link: BrokerLink, request: pb.BrokerFetch, timeout_s: float) -> pb.BrokerFetched:
    """Raises BrokerError."""
    loop = asyncio.get_running_loop()
    done = asyncio.Event()

    def wake() -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and everybody who waited
            loop.call_soon_threadsafe(done.set)

    under_way = _UnderWay(link, request, wake)
    try:
        async with asyncio.timeout(timeout_s):
            await done.wait()
        return under_way.fetched()
    except TimeoutError as error:
        under_way.abandon()
        raise _too_late(timeout_s) from error
    except BaseException:
        under_way.abandon()
        raise


class _UnderWay:
    """A request until its answer is taken or it is abandoned, which may be at the same time."""

    def __init__(
        self, link: BrokerLink, request: pb.BrokerFetch, wake: Callable[[], None], *, reads: bool = False
    ) -> None:
        """Sends. wake: called on any thread when ``fetched`` may be."""
        self._link, self._request, self._wake = link, request, wake
        self._lock = threading.Lock()
        self._answer: Waiting | None = None
        self._abandoned = False
        link.ask(pb.BrokerRequest(fetch=request), SEND_TIMEOUT_S, self._arrived, reads=reads)

    def fetched(self) -> pb.BrokerFetched:
        """What came. Raises BrokerError."""
        assert self._answer is not None
        found = self._answer.result().message
        num_items, num_keys = len(found.fetched.items), len(self._request.keys)
        if not found.HasField("fetched") or num_items != num_keys:
            raise BrokerViolation(
                f"the reply is {found.WhichOneof('reply')} of {num_items} items for {num_keys} keys"
            )
        return found.fetched

    def abandon(self) -> None:
        """Nobody takes the answer: its leases go back, when it comes or now."""
        with self._lock:
            self._abandoned, answer = True, self._answer
        self._give_back(answer)

    def _arrived(self, answer: Waiting) -> None:
        with self._lock:
            self._answer, abandoned = answer, self._abandoned
        if abandoned:
            self._give_back(answer)
        else:
            self._wake()

    def _give_back(self, answer: Waiting | None) -> None:
        if answer is None or answer.reply is None:
            return
        found = [item.result for item in answer.reply.message.fetched.items if item.HasField("result")]
        if not found:
            return
        release = encoder_pb2.ReleaseRequest(
            lease_ids=[result.host.lease_id or result.lease.lease_id for result in found]
        )
        with contextlib.suppress(BrokerError):  # they ended with the connection
            for _ in range(max(1, self._request.num_readers)):  # none of them has heard of it
                self._link.post(pb.BrokerRequest(release=release), SEND_TIMEOUT_S)


def _too_late(timeout_s: float) -> BrokerError:
    return BrokerUnavailable(f"no leases of the broker within {timeout_s:g} s", reason="TIMEOUT")
