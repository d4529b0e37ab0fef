"""One caller's call for rows that may be resident: what is read without asking, what is leased in one round
trip, and what goes the ordinary way.

Owns the order of these three and what each is asked for. Which items may be resident is ``resident``'s, the
round trip ``transport.resident_fetch``'s, reading under a lease ``assembly``'s.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterator, Sequence
from contextlib import aclosing, closing
from functools import partial
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeAlias, TypeVar

from lm_adapter import assembly
from lm_adapter.assembly import Assembler
from lm_adapter.collect import in_order
from lm_adapter.errors import CallFailed, InvalidRows, ItemFailed
from lm_adapter.transport.broker_errors import BrokerError
from lm_adapter.transport.broker_link import BrokerLink
from lm_adapter.transport.buffers import RowsHandling
from lm_adapter.transport.off_loop import CallerStreams
from lm_adapter.transport.reading import Receiver
from lm_adapter.transport.resident_fetch import fetch, fetch_on_loop
from lm_adapter.transport.shared_transport import SharedTransport
from lm_adapter.transport.unleased import CheckedShapes, Place, UnleasedRows
from lm_adapter.types import ModelInfo, Outcome
from vision_encoder.v1 import broker_pb2
from vision_encoder.v1 import encoder_pb2 as pb

if TYPE_CHECKING:
    from lm_adapter.resident import ResidentRows
    from lm_adapter.session import Deadline

__all__ = ["Expected", "Ordinary", "ResidentCall"]

TIMEOUT_S = 1.0
"""Of one round trip; gRPC is asked then."""
_KINDS = {"host": broker_pb2.ARENA_KIND_HOST, "device": broker_pb2.ARENA_KIND_DEVICE}

EntryT = TypeVar("EntryT")
Finished: TypeAlias = tuple[int, Outcome]
Step: TypeAlias = tuple[int, Callable[[], Finished | None]]
"""Bytes that it copies, and what reads one item."""


class Others(Protocol):
    """What goes the ordinary way on a loop: ``loop_rows.LoopRows``."""

    async def next(self) -> Finished | None: ...

    def close(self) -> None: ...


Ordinary: TypeAlias = Callable[[Sequence[EntryT], RowsHandling], Awaitable[Others]]
"""Begins it, for some of a call's entries."""


class Expected(NamedTuple):
    """An item that may be resident. content_digest: where it is known. if_listed: not worth a round trip
    where the directory does not have it."""

    key: bytes
    content_digest: bytes | None = None
    if_listed: bool = False


class ResidentCall(Generic[EntryT]):
    """One caller's call: ``run``, ``run_on_loop`` or ``collect_on_loop``, once."""

    def __init__(
        self,
        resident: ResidentRows,
        transport: SharedTransport | None,
        entries: Sequence[EntryT],
        expected: dict[int, Expected],
        models: Sequence[ModelInfo],
        shapes: CheckedShapes,
        handling: RowsHandling,
        to_send: Callable[[Sequence[int]], Sequence[EntryT]] | None = None,
    ) -> None:
        """transport: None for inline. entries: what the caller asked for, keys or items. expected: of those
        that may be resident, by index. models, shapes: what their rows may be. to_send: what goes the
        ordinary way in the place of some entries; by default they themselves."""
        self._resident = resident
        self._session = resident.session
        self._transport = transport
        self._entries = entries
        self._expected = expected
        self._models = models
        self._shapes = shapes
        self._handling = handling
        self._to_send = to_send or self._entries_of
        self._done: set[int] = set()

    def run(
        self,
        deadline: Deadline,
        ordinary: Callable[[Sequence[EntryT], RowsHandling], Generator[Finished, None, None]],
    ) -> Generator[Finished, None, None]:
        """Index and outcome of every entry: of the resident ones, then of the others by ``ordinary``."""
        for _, step in self._unleased():
            yield from self._outcome(step())
        for link, indices, request in self._requests():
            try:
                fetched = fetch(link, request, min(TIMEOUT_S, deadline.left_s))
            except BrokerError as error:
                self._resident.failed(error)
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
        self, deadline: Deadline, streams: CallerStreams, ordinary: Ordinary[EntryT]
    ) -> AsyncGenerator[Finished, None]:
        """The same on a loop; large copies on threads."""
        async with aclosing(self._resident_on_loop(deadline, streams)) as resident:
            async for finished in resident:
                yield finished
        rest = self._rest()
        if rest:
            others = await ordinary(*self._only(rest))
            try:
                while (found := await others.next()) is not None:
                    yield rest[found[0]], found[1]
            finally:
                others.close()

    async def collect_on_loop(
        self, deadline: Deadline, streams: CallerStreams, ordinary: Ordinary[EntryT]
    ) -> list[Outcome]:
        """``run_on_loop`` for a caller who waits for all: as ``collect``."""
        outcomes: dict[int, Outcome] = {}
        try:
            if self._looks():
                async with aclosing(self._resident_on_loop(deadline, streams)) as resident:
                    async for finished in resident:
                        outcomes.update([finished])
            rest = self._rest()
            if rest:
                others = await ordinary(*self._only(rest))
                try:
                    while (found := await others.next()) is not None:
                        outcomes[rest[found[0]]] = found[1]
                finally:
                    others.close()
        except CallFailed as error:
            error.completed = outcomes
            raise
        return in_order(outcomes)

    async def _resident_on_loop(
        self, deadline: Deadline, streams: CallerStreams
    ) -> AsyncGenerator[Finished, None]:
        for num_bytes, step in self._unleased():
            for finished in self._outcome(await streams.run(num_bytes, step)):
                yield finished
        for link, indices, request in self._requests():
            try:
                fetched = await fetch_on_loop(link, request, min(TIMEOUT_S, deadline.left_s))
            except BrokerError as error:
                self._resident.failed(error)
                break
            with closing(_Answer(self, indices, fetched)) as answer:
                for num_bytes, step in answer.steps():
                    for finished in self._outcome(await streams.run(num_bytes, step)):
                        yield finished

    def _looks(self) -> bool:
        """Whether anything may come without the ordinary way; False where the directory says that it does
        not."""
        if self._transport is None:
            return False
        for index in self._expected:  # noqa: SIM110 - a generator takes longer than what it runs
            if self._is_asked_for(index):
                return True
        return False

    def _unleased(self) -> Iterator[Step]:
        """Of what the directory lists, where a copy for this caller alone is wanted, and at once."""
        handling, transport = self._handling, self._transport
        if transport is None or transport.unleased is None or not handling.is_plain_copy:
            return
        for index, (key, content_digest, _) in self._expected.items():
            place = transport.unleased.find(key, content_digest, self._shapes)
            if place is not None:
                yield place.shape.rows_bytes, partial(self._copied, transport.unleased, index, place)

    def _copied(self, unleased: UnleasedRows, index: int, place: Place) -> Finished | None:
        """None also for a buffer that does not do: the leased way says what is wrong with it."""
        try:
            out = self._handling.out_of(index, place.shape.rows_bytes)
        except ItemFailed:
            return None
        rows = unleased.read(place, out)
        if rows is None:
            return None
        unleased.note_read(place.key)
        return index, rows

    def _requests(self) -> Iterator[tuple[BrokerLink, list[int], broker_pb2.BrokerFetch]]:
        """Of what was not read yet."""
        transport = self._transport
        wanted = [index for index in self._expected if index not in self._done and self._is_asked_for(index)]
        link = self._resident.link(transport) if transport is not None and wanted else None
        if transport is None or link is None:
            return
        size = link.welcome.max_fetch_keys
        for start in range(0, len(wanted), size):
            indices = wanted[start : start + size]
            yield (
                link,
                indices,
                broker_pb2.BrokerFetch(
                    keys=[self._expected[index].key for index in indices],
                    kind=_KINDS[transport.name],
                    num_readers=self._handling.num_readers,
                    lease_ms=transport.lease_ms,
                ),
            )

    def _is_asked_for(self, index: int) -> bool:
        """Whether a lease is asked for: not where the directory says that there would be none."""
        key, content_digest, if_listed = self._expected[index]
        unleased = None if self._transport is None else self._transport.unleased
        if not if_listed or unleased is None:
            return True
        return unleased.find(key, content_digest, self._shapes) is not None

    def _outcome(self, finished: Finished | None) -> Iterator[Finished]:
        if finished is None:
            return
        index, outcome = finished
        self._done.add(index)
        if isinstance(outcome, InvalidRows):
            self._session.forget_info()
        yield finished

    def _rest(self) -> list[int]:
        indices, done = range(len(self._entries)), self._done
        return [index for index in indices if index not in done] if done else list(indices)

    def _only(self, indices: list[int]) -> tuple[Sequence[EntryT], RowsHandling]:
        handling = self._handling if len(indices) == len(self._entries) else self._handling.only(indices)
        return self._to_send(indices), handling

    def _entries_of(self, indices: Sequence[int]) -> Sequence[EntryT]:
        if len(indices) == len(self._entries):
            return self._entries
        return [self._entries[index] for index in indices]


class _Answer:
    """What one round trip brought. ``close`` gives back the leases that were not read under."""

    def __init__(
        self, call: ResidentCall[EntryT], indices: list[int], fetched: broker_pb2.BrokerFetched
    ) -> None:
        assert call._transport is not None
        self._transport = call._transport
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
            [
                assembly.Expected(call._expected[index].key, call._expected[index].content_digest)
                for index in found
            ],
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
