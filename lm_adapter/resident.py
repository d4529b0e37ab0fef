"""Rows that the service has in shared memory already: read without asking, or leased in one round trip, in
place of gRPC.

Owns which items of a call come so: those whose keys are given, or follow from digests that are known, which
for items without one ``hashing`` computes where it pays. First what the directory lists is copied
(``transport.unleased``), where a copy is all that the caller wants; then what is left is leased over the
broker's socket. Whatever does not come in these ways, for whatever reason, goes the ordinary way after them,
so that nothing here fails a call. A call's steps are ``resident_call``'s.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from lm_adapter.checks import check_keys
from lm_adapter.errors import InvalidRequest, ItemFailed
from lm_adapter.hashing import HashedItems, ItemHasher
from lm_adapter.keys import ItemKeys
from lm_adapter.resident_call import Expected, ResidentCall
from lm_adapter.transport.broker_errors import BrokerError
from lm_adapter.transport.broker_link import BrokerLink
from lm_adapter.transport.buffers import Bytes, RowsHandling, RowsOptions, buffer_bytes
from lm_adapter.transport.off_loop import CallerStreams
from lm_adapter.transport.shared_transport import SharedTransport
from lm_adapter.transport.unleased import CheckedShapes, Place, UnleasedRows
from lm_adapter.types import ClipItem, FramesItem, Item, ModelInfo, Outcome, ServerInfo

if TYPE_CHECKING:
    from lm_adapter.session import Session

__all__ = ["ResidentRows"]

PAUSE_S = 1.0
"""After a round trip that failed, before the next is tried."""
TOO_MANY_UNDER_WAY = "TOO_MANY_UNDER_WAY"
_PLAIN = {"out"}
"""Options of a call that wants copies and nothing else."""
_CLIPS = (ClipItem, FramesItem)


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
        self._hasher = ItemHasher(session.transports.settings.hash_items)

    def of_keys(self, info: ServerInfo, keys: Sequence[bytes], handling: RowsHandling) -> ResidentCall[bytes]:
        """For a Fetch. Raises InvalidRequest."""
        handling.check_items(len(check_keys(keys)))
        transport, known = self.session.transports.current(), self._known(info)
        expected = {} if transport is None else {index: Expected(key) for index, key in enumerate(keys)}
        return ResidentCall(self, transport, keys, expected, info.models, known.fetched_shapes, handling)

    def of_items(self, info: ServerInfo, items: Sequence[Item], handling: RowsHandling) -> ResidentCall[Item]:
        """For an Encode. Raises InvalidRequest."""
        handling.check_items(len(items))
        transport = self.session.transports.current()
        return self._of_items(info, transport, self._hashed(transport, items), handling)

    async def of_items_on_loop(
        self, info: ServerInfo, items: Sequence[Item], handling: RowsHandling, streams: CallerStreams
    ) -> ResidentCall[Item]:
        """The same; what takes a while to hash is hashed on a thread."""
        handling.check_items(len(items))
        transport = self.session.transports.current()
        known = self._to_hash_for(transport)
        if known is None:
            hashed = list(items) if isinstance(items, HashedItems) else items
        else:
            hashed = await self._hasher.hashed_on_loop(items, known.info.limits.max_message_bytes, streams)
        return self._of_items(info, transport, hashed, handling)

    def hashed(self, items: Sequence[Item]) -> Sequence[Item]:
        """The items, those hashed that may be resident and carry no digest; see ``ItemHasher``. Hashed once:
        what comes back may be given in again."""
        return self._hashed(self.session.transports.current(), items)

    def _hashed(self, transport: SharedTransport | None, items: Sequence[Item]) -> Sequence[Item]:
        known = self._to_hash_for(transport)
        if known is None:
            return list(items) if isinstance(items, HashedItems) else items
        return self._hasher.hashed(items, known.info.limits.max_message_bytes)

    def _to_hash_for(self, transport: SharedTransport | None) -> _Known | None:
        """None while there is nothing to look at with a digest."""
        info = self.session.info
        if not self._hasher.is_on or info is None or transport is None:
            return None
        known = self._known(info)
        # Without a directory every item that is not there would cost a round trip, about what a hit saves.
        can_look = transport.unleased is not None or (
            self._hasher.takes_all and self.link(transport) is not None
        )
        return known if can_look and known.keys is not None else None

    def _of_items(
        self,
        info: ServerInfo,
        transport: SharedTransport | None,
        items: Sequence[Item],
        handling: RowsHandling,
    ) -> ResidentCall[Item]:
        known = self._known(info)
        computed = items.computed if isinstance(items, HashedItems) else {}
        expected: dict[int, Expected] = {}
        if transport is not None and known.keys is not None:
            for index, item in enumerate(items):
                own = computed.get(index)
                if item.digest or own:  # another's is not known before the item is sent
                    # Clips with timestamps are not listed, and cost more than a round trip.
                    if_listed = own is not None and not isinstance(item, _CLIPS)
                    try:
                        key = known.keys.of(item, own)
                    except InvalidRequest:  # which says why when the item is sent
                        continue
                    expected[index] = Expected(key, item.digest or own, if_listed)
        to_send = items.to_send if isinstance(items, HashedItems) else None
        return ResidentCall(
            self, transport, items, expected, known.models, known.encoded_shapes, handling, to_send
        )

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
        """The same for an Encode of items whose digests are known, by them or by ``hashed``."""
        known, unleased = self._at_hand(timeout_s, options)
        if known is None or known.keys is None or unleased is None:
            return None
        names: list[tuple[bytes, bytes | None]] = []
        computed = items.computed if isinstance(items, HashedItems) else {}
        for index, item in enumerate(items):
            own = computed.get(index)
            if not item.digest and own is None:
                return None
            try:
                names.append((known.keys.of(item, own), item.digest or own))
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
            # That a model is not served is the server's to say, whatever rows another has.
            is_known = len(models) == 1 and session.model in ("", models[0].name)
            known = self._last_known = _Known(
                info,
                models,
                ItemKeys(models[0], session.namespace) if is_known else None,
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
