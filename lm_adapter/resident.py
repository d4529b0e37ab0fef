"""Rows that the service has in shared memory already: asked for in one round trip, in place of gRPC.

Owns which items of a call are asked for so: those whose keys are given, or follow from digests that are
known; nothing is hashed for it. Whatever does not come in this way, for whatever reason, goes the ordinary
way after it, so that nothing here fails a call. The round trip is ``transport.resident_fetch``'s, reading
``assembly``'s.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Sequence
from contextlib import aclosing, closing
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeAlias, TypeVar

from lm_adapter.assembly import Assembler, Expected
from lm_adapter.checks import check_keys
from lm_adapter.errors import InvalidRequest, InvalidRows
from lm_adapter.keys import item_key
from lm_adapter.transport.broker_errors import BrokerError
from lm_adapter.transport.broker_link import BrokerLink
from lm_adapter.transport.buffers import RowsHandling
from lm_adapter.transport.off_loop import CallerStreams
from lm_adapter.transport.reading import Receiver
from lm_adapter.transport.resident_fetch import fetch, fetch_on_loop
from lm_adapter.transport.shared_transport import SharedTransport
from lm_adapter.types import Item, ModelInfo, Outcome, ServerInfo
from vision_encoder.v1 import broker_pb2
from vision_encoder.v1 import encoder_pb2 as pb

if TYPE_CHECKING:
    from lm_adapter.session import Deadline, Session

__all__ = ["ResidentCall", "ResidentRows"]

TIMEOUT_S = 1.0
"""Of one round trip; gRPC is asked then."""
PAUSE_S = 1.0
"""After a round trip that failed, before the next is tried."""
TOO_MANY_UNDER_WAY = "TOO_MANY_UNDER_WAY"
_KINDS = {"host": broker_pb2.ARENA_KIND_HOST, "device": broker_pb2.ARENA_KIND_DEVICE}

EntryT = TypeVar("EntryT")
Finished: TypeAlias = tuple[int, Outcome]
Step: TypeAlias = tuple[int, Callable[[], Finished | None]]
"""Bytes that it copies, and what reads one item."""


class ResidentRows:
    """One client's way to such rows. Thread-safe."""

    def __init__(self, session: Session, clock: Callable[[], float] = time.monotonic) -> None:
        self._session = session
        self._clock = clock
        self._not_before_s = float("-inf")

    def of_keys(self, info: ServerInfo, keys: Sequence[bytes], handling: RowsHandling) -> ResidentCall[bytes]:
        """For a Fetch. Raises InvalidRequest."""
        handling.check_items(len(check_keys(keys)))
        way = self._way()
        expected = {} if way is None else {index: Expected(key=key) for index, key in enumerate(keys)}
        return ResidentCall(self._session, way, keys, expected, info.models, handling, self._failed)

    def of_items(self, info: ServerInfo, items: Sequence[Item], handling: RowsHandling) -> ResidentCall[Item]:
        """For an Encode. Raises InvalidRequest."""
        handling.check_items(len(items))
        way, models = self._way(), self._session.models(info)
        expected: dict[int, Expected] = {}
        if way is not None and len(models) == 1:
            for index, item in enumerate(items):
                key = self._known_key(item, models[0])
                if key is not None:
                    expected[index] = Expected(key, item.digest)
        return ResidentCall(self._session, way, items, expected, models, handling, self._failed)

    def _known_key(self, item: Item, model: ModelInfo) -> bytes | None:
        """None for an item whose digest is not known yet, or that will be refused."""
        if not item.digest:
            return None
        try:
            return item_key(item, model, namespace=self._session.namespace)
        except InvalidRequest:
            return None

    def _way(self) -> tuple[SharedTransport, BrokerLink] | None:
        if self._clock() < self._not_before_s:
            return None
        transport = self._session.transports.current()
        if transport is None or transport.broker is None:
            return None
        link = transport.broker.fetch_link(transport.owner_id)
        return None if link is None else (transport, link)

    def _failed(self, error: BrokerError) -> None:
        if error.reason != TOO_MANY_UNDER_WAY:
            self._not_before_s = self._clock() + PAUSE_S


class ResidentCall(Generic[EntryT]):
    """One caller's call: ``run``, or ``run_on_loop``."""

    def __init__(
        self,
        session: Session,
        way: tuple[SharedTransport, BrokerLink] | None,
        entries: Sequence[EntryT],
        expected: dict[int, Expected],
        models: Sequence[ModelInfo],
        handling: RowsHandling,
        failed: Callable[[BrokerError], None],
    ) -> None:
        """entries: what the caller asked for, keys or items. expected: of those that may be resident, by
        index. failed: told of a round trip that was in vain."""
        self._session = session
        self._way = way
        self._entries = entries
        self._expected = expected
        self._models = models
        self._handling = handling
        self._failed = failed
        self._done: set[int] = set()

    def run(
        self,
        deadline: Deadline,
        ordinary: Callable[[Sequence[EntryT], RowsHandling], Generator[Finished, None, None]],
    ) -> Generator[Finished, None, None]:
        """Index and outcome of every entry: of the resident ones, then of the others by ``ordinary``."""
        for indices, request in self._requests():
            assert self._way is not None
            try:
                fetched = fetch(self._way[1], request, min(TIMEOUT_S, deadline.left_s))
            except BrokerError as error:
                self._failed(error)
                break
            with closing(_Answer(self, indices, fetched)) as answer:
                for _, step in answer.steps():
                    yield from self._outcome(step())
        rest = self._rest()
        if rest:
            with closing(ordinary(*self._only(rest))) as others:
                for index, outcome in others:
                    yield rest[index], outcome

    async def run_on_loop(
        self,
        deadline: Deadline,
        streams: CallerStreams,
        ordinary: Callable[[Sequence[EntryT], RowsHandling], AsyncGenerator[Finished, None]],
    ) -> AsyncGenerator[Finished, None]:
        """The same on a loop; large copies on threads."""
        for indices, request in self._requests():
            assert self._way is not None
            try:
                fetched = await fetch_on_loop(self._way[1], request, min(TIMEOUT_S, deadline.left_s))
            except BrokerError as error:
                self._failed(error)
                break
            with closing(_Answer(self, indices, fetched)) as answer:
                for num_bytes, step in answer.steps():
                    for finished in self._outcome(await streams.run(num_bytes, step)):
                        yield finished
        rest = self._rest()
        if rest:
            async with aclosing(ordinary(*self._only(rest))) as others:
                async for index, outcome in others:
                    yield rest[index], outcome

    def _requests(self) -> Iterator[tuple[list[int], broker_pb2.BrokerFetch]]:
        if self._way is None:
            return
        transport, link = self._way
        wanted, size = list(self._expected), link.welcome.max_fetch_keys
        for start in range(0, len(wanted), size):
            indices = wanted[start : start + size]
            yield (
                indices,
                broker_pb2.BrokerFetch(
                    keys=[self._expected[index].key or b"" for index in indices],
                    kind=_KINDS[transport.name],
                    num_readers=self._handling.num_readers,
                    lease_ms=transport.lease_ms,
                ),
            )

    def _outcome(self, finished: Finished | None) -> Iterator[Finished]:
        if finished is None:
            return
        index, outcome = finished
        self._done.add(index)
        if isinstance(outcome, InvalidRows):
            self._session.forget_info()
        yield finished

    def _rest(self) -> list[int]:
        return [index for index in range(len(self._entries)) if index not in self._done]

    def _only(self, indices: list[int]) -> tuple[Sequence[EntryT], RowsHandling]:
        if len(indices) == len(self._entries):
            return self._entries, self._handling
        return [self._entries[index] for index in indices], self._handling.only(indices)


class _Answer:
    """What one round trip brought. ``close`` gives back the leases that were not read under."""

    def __init__(
        self, call: ResidentCall[EntryT], indices: list[int], fetched: broker_pb2.BrokerFetched
    ) -> None:
        assert call._way is not None
        self._transport = call._way[0]
        self._found = [
            (index, item.result)
            for index, item in zip(indices, fetched.items, strict=True)
            if item.HasField("result")
        ]
        self._num_read = 0
        found = [index for index, _ in self._found]
        self._receiver = Receiver(
            call._handling, found, self._transport, call._session.transports.settings.inline_allowed, 0
        )
        self._assembler = Assembler(
            [call._expected[index] for index in found],
            models=call._models,
            max_rows_bytes=call._session.max_rows_bytes,
            receiver=self._receiver,
        )

    def steps(self) -> Iterator[Step]:
        for position, (_, result) in enumerate(self._found):
            self._num_read = position + 1
            num_bytes = 0 if self._receiver.handling.borrow else result.rows_bytes
            yield num_bytes, partial(self._read, position, result)

    def close(self) -> None:
        for _, result in self._found[self._num_read :]:
            self._receiver.give_back_unheard(result.host.lease_id or result.lease.lease_id, own=True)
        if self._found:
            self._transport.note(self._assembler.num_shared, self._assembler.refusal)

    def _read(self, position: int, result: pb.ItemResult) -> Finished | None:
        """The caller's index and outcome; None for what is to be asked for in the ordinary way."""
        finished = self._assembler.feed_event(pb.ItemEvent(item_index=position, result=result))
        return None if finished is None else (self._found[position][0], finished[1])
