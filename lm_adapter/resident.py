"""Rows that the service has in shared memory already: read without asking, or leased in one round trip, in
place of gRPC.

Owns which items of a call come so: those whose keys are given, or follow from digests that are known; nothing
is hashed for it. First what the directory lists is copied (``transport.unleased``), where a copy is all that
the caller wants; then what is left is leased over the broker's socket. Whatever does not come in these ways,
for whatever reason, goes the ordinary way after them, so that nothing here fails a call. The round trip is
``transport.resident_fetch``'s, reading under a lease ``assembly``'s.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Sequence
from contextlib import aclosing, closing, suppress
from functools import partial
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeAlias, TypeVar

from lm_adapter import assembly
from lm_adapter.assembly import Assembler
from lm_adapter.checks import check_keys
from lm_adapter.errors import InvalidRequest, InvalidRows, ItemFailed
from lm_adapter.keys import ItemKeys
from lm_adapter.transport.broker_errors import BrokerError
from lm_adapter.transport.broker_link import BrokerLink
from lm_adapter.transport.buffers import Bytes, RowsHandling, RowsOptions, buffer_bytes
from lm_adapter.transport.off_loop import CallerStreams
from lm_adapter.transport.reading import Receiver
from lm_adapter.transport.resident_fetch import fetch, fetch_on_loop
from lm_adapter.transport.shared_transport import SharedTransport
from lm_adapter.transport.unleased import CheckedShapes, Place, UnleasedRows
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
_PLAIN = {"out"}
"""Options of a call that wants copies and nothing else."""
_KINDS = {"host": broker_pb2.ARENA_KIND_HOST, "device": broker_pb2.ARENA_KIND_DEVICE}

EntryT = TypeVar("EntryT")
Finished: TypeAlias = tuple[int, Outcome]
Step: TypeAlias = tuple[int, Callable[[], Finished | None]]
"""Bytes that it copies, and what reads one item."""


class Expected(NamedTuple):
    """An item that may be resident. content_digest: where the caller knows it."""

    key: bytes
    content_digest: bytes | None = None


class _Known(NamedTuple):
    """What follows from a server's word alone."""

    info: ServerInfo
    models: Sequence[ModelInfo]
    keys: ItemKeys | None
    fetched_shapes: CheckedShapes
    encoded_shapes: CheckedShapes


class ResidentRows:
    """One client's way to such rows. Thread-safe."""

    def __init__(self, session: Session, clock: Callable[[], float] = time.monotonic) -> None:
        self.session = session
        self._clock = clock
        self._not_before_s = float("-inf")
        self._last_known: _Known | None = None

    def of_keys(self, info: ServerInfo, keys: Sequence[bytes], handling: RowsHandling) -> ResidentCall[bytes]:
        """For a Fetch. Raises InvalidRequest."""
        handling.check_items(len(check_keys(keys)))
        transport, known = self.session.transports.current(), self._known(info)
        expected = {} if transport is None else {index: Expected(key) for index, key in enumerate(keys)}
        return ResidentCall(self, transport, keys, expected, info.models, known.fetched_shapes, handling)

    def of_items(self, info: ServerInfo, items: Sequence[Item], handling: RowsHandling) -> ResidentCall[Item]:
        """For an Encode. Raises InvalidRequest."""
        handling.check_items(len(items))
        transport, known = self.session.transports.current(), self._known(info)
        expected: dict[int, Expected] = {}
        if transport is not None and known.keys is not None:
            for index, item in enumerate(items):
                if item.digest:  # another's is not known before the item is sent
                    with suppress(InvalidRequest):  # which says why when the item is sent
                        expected[index] = Expected(known.keys.of(item), item.digest)
        return ResidentCall(self, transport, items, expected, known.models, known.encoded_shapes, handling)

    def keys_at_once(
        self, keys: Sequence[bytes], timeout_s: float | None, options: RowsOptions
    ) -> list[Outcome] | None:
        """What a Fetch gives where the directory lists every key, and copies are wanted: by the shortest way.
        None where anything is otherwise; nothing counts as read then, but buffers may have been written."""
        known, unleased = self._at_hand(timeout_s, options)
        if known is None or unleased is None:
            return None
        return _copied_at_once(unleased, [(key, None) for key in keys], known.fetched_shapes, options)

    def items_at_once(
        self, items: Sequence[Item], timeout_s: float | None, options: RowsOptions
    ) -> list[Outcome] | None:
        """The same for an Encode of items whose digests are known."""
        known, unleased = self._at_hand(timeout_s, options)
        if known is None or known.keys is None or unleased is None:
            return None
        names: list[tuple[bytes, bytes | None]] = []
        for item in items:
            if not item.digest:
                return None
            try:
                names.append((known.keys.of(item), item.digest))
            except InvalidRequest:  # of this item alone: the ordinary way says so
                return None
        return _copied_at_once(unleased, names, known.encoded_shapes, options)

    def _at_hand(
        self, timeout_s: float | None, options: RowsOptions
    ) -> tuple[_Known | None, UnleasedRows | None]:
        info, transport = self.session.info, self.session.transports.current()
        if info is None or transport is None or not options.keys() <= _PLAIN:
            return None, None
        if timeout_s is not None and not timeout_s > 0:
            return None, None
        return self._known(info), transport.unleased

    def _known(self, info: ServerInfo) -> _Known:
        known = self._last_known
        if known is None or known.info is not info:
            session = self.session
            models, max_bytes = session.models(info), session.max_rows_bytes
            known = self._last_known = _Known(
                info,
                models,
                ItemKeys(models[0], session.namespace) if len(models) == 1 else None,
                CheckedShapes(info.models, max_bytes),
                CheckedShapes(models, max_bytes),
            )
        return known

    def link(self, transport: SharedTransport) -> BrokerLink | None:
        """Where leases are asked for; None while that is of no use."""
        if transport.broker is None or self._clock() < self._not_before_s:
            return None
        return transport.broker.fetch_link(transport.owner_id)

    def failed(self, error: BrokerError) -> None:
        """Told of a round trip that was in vain."""
        if error.reason != TOO_MANY_UNDER_WAY:
            self._not_before_s = self._clock() + PAUSE_S


def _copied_at_once(
    unleased: UnleasedRows,
    names: Sequence[tuple[bytes, bytes | None]],
    shapes: CheckedShapes,
    options: RowsOptions,
) -> list[Outcome] | None:
    """Nothing is copied unless all are listed and every buffer does; where one is lost on the way, the
    ordinary way reads all of them again, and none counts as read here."""
    outs = options.get("out", ())
    if len(outs) not in (0, len(names)):
        return None
    steps: list[tuple[Place, Bytes | None]] = []
    for index, (key, content_digest) in enumerate(names):
        place = unleased.find(key, content_digest, shapes)
        if place is None:
            return None
        given = outs[index] if len(outs) else None
        try:
            steps.append((place, None if given is None else buffer_bytes(given, place.shape.rows_bytes)))
        except ItemFailed:
            return None
    found: list[Outcome] = []
    for place, out in steps:
        rows = unleased.read(place, out)
        if rows is None:
            return None
        found.append(rows)
    for place, _ in steps:
        unleased.note_read(place.key)
    return found


class ResidentCall(Generic[EntryT]):
    """One caller's call: ``run``, or ``run_on_loop``."""

    def __init__(
        self,
        resident: ResidentRows,
        transport: SharedTransport | None,
        entries: Sequence[EntryT],
        expected: dict[int, Expected],
        models: Sequence[ModelInfo],
        shapes: CheckedShapes,
        handling: RowsHandling,
    ) -> None:
        """transport: None for inline. entries: what the caller asked for, keys or items. expected: of those
        that may be resident, by index. models, shapes: what their rows may be."""
        self._resident = resident
        self._session = resident.session
        self._transport = transport
        self._entries = entries
        self._expected = expected
        self._models = models
        self._shapes = shapes
        self._handling = handling
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
        self,
        deadline: Deadline,
        streams: CallerStreams,
        ordinary: Callable[[Sequence[EntryT], RowsHandling], AsyncGenerator[Finished, None]],
    ) -> AsyncGenerator[Finished, None]:
        """The same on a loop; large copies on threads."""
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
        rest = self._rest()
        if rest:
            async with aclosing(ordinary(*self._only(rest))) as others:
                async for index, outcome in others:
                    yield rest[index], outcome

    def _unleased(self) -> Iterator[Step]:
        """Of what the directory lists, where a copy for this caller alone is wanted, and at once."""
        handling, transport = self._handling, self._transport
        if transport is None or transport.unleased is None or not handling.is_plain_copy:
            return
        for index, (key, content_digest) in self._expected.items():
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
        wanted = [index for index in self._expected if index not in self._done]
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
            [assembly.Expected(*call._expected[index]) for index in found],
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
