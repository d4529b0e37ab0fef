"""Which requests wait for which rows: the scheduler's side of the vLLM connector, without vLLM.

Owns the states of requests and items, the bound on bytes that wait, and when a request is held to what
``vllm_names`` knows: when it comes, when it joins an item, when rows arrive and when vLLM takes them. A fetch
is started when a request is first asked about, and vLLM's scheduler asks on every pass, so that an answer
costs one look-up and a comparison. Leaves fetching to ``vllm_fetch``.

Requests that say different things of one name have items of their own (``vllm_shelf``). The first that has
rows settles what the name stands for, and the others are rejected.

An item is held from its fetch until vLLM has computed past it, or its request is over: then the connector
lets go of the rows, which live on in vLLM's own encoder cache alone. A request that is preempted and starts
anew fetches again. A request that waits for room holds nothing, so that those that hold something have all
that they need, and end.
"""

from __future__ import annotations

import json
import logging
import socket
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from lm_adapter.engines.vllm_fetch import Fetched, FetchSettings
from lm_adapter.engines.vllm_items import Geometry, WantedRows, wanted_rows
from lm_adapter.engines.vllm_names import Names, check_same
from lm_adapter.engines.vllm_shelf import Item, Shelf
from lm_adapter.errors import EncoderError, InvalidRequest, InvalidRows, ItemFailed
from lm_adapter.items import Grid
from lm_adapter.types import EncodedRows

__all__ = ["Book", "Fetches"]

logger = logging.getLogger("vllm.vision_encoder")


class Fetches(Protocol):
    """What the book needs of ``vllm_fetch.Fetcher``."""

    ended: deque[Fetched]

    def start(self, handle: object, wanted: WantedRows) -> None: ...

    def cancel(self, handle: object) -> None: ...

    def wait(self, timeout_s: float) -> None: ...


@dataclass(eq=False)
class _Request:
    """ready_from: from this many computed tokens on nothing is missing; None while rows are under way.
    needed: features whose rows it queues for."""

    request_id: str
    wanted: list[WantedRows]
    reply: str = ""
    ready_from: int | None = 0
    held: dict[int, Item] = field(default_factory=dict)
    needed: list[int] = field(default_factory=list)
    num_missing: int = 0
    queued: bool = False
    failed: bool = False


class Book:
    """One per engine; used by the scheduler's thread alone."""

    def __init__(
        self, fetches: Fetches, geometry: Geometry, settings: FetchSettings, *, has_tower: bool
    ) -> None:
        """has_tower: whether vLLM can encode pixels by itself."""
        self._fetches = fetches
        self._geometry = geometry
        self._settings = settings
        self._has_tower = has_tower
        self._requests: dict[str, _Request] = {}
        self._shelf = Shelf(settings.max_resident_bytes)
        self._names = Names(settings.max_bound_items)
        self._queue: deque[_Request] = deque()
        self._unavailable: set[str] = set()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)

    @property
    def resident_bytes(self) -> int:
        """Of rows that are held, and of room promised to those under way."""
        return self._shelf.used_bytes

    def close(self) -> None:
        self._socket.close()

    def ensure(self, request: Any, num_computed_tokens: int) -> bool:
        """Whether the request can be scheduled from ``num_computed_tokens`` on. Starts what is missing."""
        self._take_ended()
        state = self._requests.get(request.request_id)
        if state is None:
            state = self._admit(request)
        if state.failed or state.ready_from is None:
            return False
        if num_computed_tokens >= state.ready_from:
            # A prefix that another request computed is never said to be passed.
            for index in [index for index in state.held if state.wanted[index].end <= num_computed_tokens]:
                self.passed(request, index)
            return True
        self._need(state, num_computed_tokens)
        return state.ready_from is not None and num_computed_tokens >= state.ready_from

    def holds(self, identifier: str) -> bool:
        """Whether rows under this identifier are here."""
        return self._shelf.resident(identifier) is not None

    def rows(self, request: Any, index: int) -> EncodedRows | None:
        """Rows of a feature that vLLM has made room for. None for features that vLLM encodes by itself."""
        state = self._requests.get(request.request_id) or _Request(request.request_id, [])
        feature = request.mm_features[index]
        wanted = state.wanted[index] if index < len(state.wanted) else None
        # vLLM goes by the name alone, and takes what is here for pixels of that name too.
        item = state.held.get(index) or self._shelf.resident(feature.identifier)
        if item is None and (wanted is None or wanted.key is None):
            return None
        grid = wanted.grid if wanted is not None else Grid(0, 0, 0)
        num_places = feature.mm_position.get_num_embeds()
        rows = item.rows if item is not None else None
        if rows is not None and rows.num_rows == num_places and (not grid.t or rows.grid_thw == grid):
            return rows
        found = f"{rows.num_rows} rows with grid_thw {list(rows.grid_thw)}" if rows is not None else "no rows"
        if not state.failed:
            message = f"identifier {feature.identifier} has {found}, the prompt has {num_places} placeholders"
            self._fail(
                state,
                InvalidRows("num_rows", f"{message} for {list(grid)}", found=found, expected=num_places),
            )
        return self._withheld(feature.identifier, num_places)

    def passed(self, request: Any, index: int) -> None:
        """vLLM has computed past this feature."""
        state = self._requests.get(request.request_id)
        if state is None or index not in state.held:
            return
        state.num_missing -= state.held[index].rows is None
        self._let_go(state, index)
        if state.ready_from is None:
            self._settle(state)
        else:
            state.ready_from = max(state.ready_from, state.wanted[index].end)
        self._start_queued()

    def idle(self, timeout_s: float) -> None:
        """vLLM has nothing to compute: waits for rows under way, where there are any."""
        if self._shelf.is_waiting():
            self._fetches.wait(timeout_s)

    def finished(self, request: Any) -> None:
        """The request is over, however it ended. Rows that came for it settle their names all the same."""
        self._take_ended()
        state = self._requests.pop(request.request_id, None)
        self._unavailable.discard(request.request_id)
        if state is not None:
            self._release(state)
            self._start_queued()

    def take_unavailable(self) -> set[str]:
        """Requests to reject, each once."""
        self._take_ended()
        taken, self._unavailable = self._unavailable, set()
        return taken

    def _admit(self, request: Any) -> _Request:
        state = _Request(request.request_id, [])
        self._requests[request.request_id] = state
        try:
            state.wanted, state.reply = wanted_rows(request, self._geometry, has_tower=self._has_tower)
            self._check_names(state.wanted)
            num_bytes = self._shelf.num_bytes(state.wanted)
            if num_bytes > self._settings.max_resident_bytes:
                raise InvalidRequest(
                    f"the request's rows have {num_bytes} bytes, max_resident_bytes is "
                    f"{self._settings.max_resident_bytes}",
                    reason="ROWS_TOO_LARGE",
                )
        except EncoderError as error:
            self._fail(state, error)
            return state
        except Exception as error:
            self._fail(state, ItemFailed(f"the request cannot be read: {type(error).__name__}: {error}"))
            return state
        for wanted in state.wanted:
            if wanted.key is None and wanted.grid.t:
                # vLLM computes these whatever happens here.
                self._names.bind(wanted)
        state.ready_from = max((wanted.end for wanted in state.wanted if wanted.key is not None), default=0)
        return state

    def _check_names(self, several: Iterable[WantedRows]) -> None:
        """Two images under one identifier would share rows and KV. Raises InvalidRequest."""
        alike: dict[str, WantedRows] = {}
        for wanted in several:
            self._names.check(wanted)
            resident = self._shelf.resident(wanted.identifier)
            # Here longer than its name is remembered, or elsewhere in the same request.
            for other in (
                resident.wanted if resident else wanted,
                alike.setdefault(wanted.identifier, wanted),
            ):
                check_same(wanted, other.key, other.grid)

    def _need(self, state: _Request, num_computed_tokens: int) -> None:
        """Fetches what the tokens from here on need, as soon as there is room for all of it."""
        state.ready_from = None
        state.queued = True
        needed = [
            index
            for index, wanted in enumerate(state.wanted)
            if wanted.key is not None and wanted.end > num_computed_tokens
        ]
        state.needed = [index for index in needed if index not in state.held]
        if self._queue or not self._has_room(state):
            # Two that wait for room, each with a part of it, would wait for each other.
            for index in list(state.held):
                self._let_go(state, index)
            state.needed = needed
        self._queue.append(state)
        self._start_queued()

    def _has_room(self, state: _Request) -> bool:
        return self._shelf.has_room(state.wanted[index] for index in state.needed)

    def _start_queued(self) -> None:
        """In order of arrival: a large request is not overtaken for ever by small ones."""
        while self._queue:
            state = self._queue[0]
            if state.queued and not self._has_room(state):
                return
            self._queue.popleft()
            if state.queued:
                state.queued = False
                self._start(state)

    def _start(self, state: _Request) -> None:
        try:
            self._check_names(state.wanted[index] for index in state.needed)
        except InvalidRequest as error:
            self._fail(state, error)
            return
        for index in state.needed:
            wanted = state.wanted[index]
            item = self._shelf.find(wanted)
            if item is None:
                item = self._shelf.put(wanted)
                self._fetches.start(item, wanted)
            item.holders.add((state.request_id, index))
            state.held[index] = item
            state.num_missing += item.rows is None
        state.needed = []
        self._settle(state)

    def _settle(self, state: _Request) -> None:
        if state.num_missing == 0 and not state.queued:
            state.ready_from = max(
                (
                    wanted.end
                    for index, wanted in enumerate(state.wanted)
                    if wanted.key is not None and index not in state.held
                ),
                default=0,
            )

    def _take_ended(self) -> None:
        while self._fetches.ended:
            ended = self._fetches.ended.popleft()
            item = ended.handle
            assert isinstance(item, Item)
            if item.is_over:
                continue
            if isinstance(ended.outcome, EncodedRows):
                self._arrived(item, ended.outcome)
            else:
                self._lost(item, ended.outcome)
            self._start_queued()

    def _arrived(self, item: Item, rows: EncodedRows) -> None:
        """The name stands for these rows from now on: others under way under it are not its image's."""
        wanted = item.wanted
        try:
            self._geometry.check_size(rows, wanted.grid)
            self._check_names([wanted])
        except EncoderError as error:
            self._lost(item, error)
            return
        item.rows = rows
        self._names.bind(wanted)
        for state in self._waiting(item):
            state.num_missing -= 1
            self._settle(state)
        for rival in self._shelf.rivals(item):
            try:
                check_same(rival.wanted, wanted.key, wanted.grid)
            except InvalidRequest as error:
                self._fetches.cancel(rival)
                self._lost(rival, error)

    def _lost(self, item: Item, error: EncoderError) -> None:
        """Out of the way first: what starts in the room that a failure makes must not join it."""
        self._shelf.drop(item)
        for state in self._waiting(item):
            if not state.failed:
                self._fail(state, error, item.wanted.replica)

    def _waiting(self, item: Item) -> list[_Request]:
        """Once for each place."""
        return [self._requests[request_id] for request_id, _ in item.holders]

    def _fail(self, state: _Request, error: EncoderError, replica: str = "") -> None:
        """replica: that was to have the rows, where the request said so."""
        state.failed = True
        self._unavailable.add(state.request_id)
        logger.warning(
            "request %s is rejected, its image rows cannot be had: %s: %s",
            state.request_id,
            error.reason,
            error.message,
        )
        self._tell(state.reply, error, replica)
        self._release(state)

    def _tell(self, reply: str, error: EncoderError, replica: str) -> None:
        """Best effort: nobody may be listening, and the scheduler does not wait."""
        if not reply or not self._settings.failures_path:
            return
        account = {
            "reply": reply,
            "reason": error.reason,
            "message": error.message[:2000],
            "retryable": error.retryable,
            "retry_after_ms": error.retry_after_ms,
            "replica": replica,
        }
        try:
            self._socket.sendto(json.dumps(account).encode(), self._settings.failures_path)
        except OSError as failure:
            logger.warning("nobody takes failures at %s: %s", self._settings.failures_path, failure)

    def _withheld(self, identifier: str, num_places: int) -> EncodedRows:
        """Zeros for a request that is rejected after this step: vLLM has made room for so many rows, and none
        or another number would end its engine. Their KV is cached under the name, which nobody may use."""
        self._names.spoil(identifier)
        return self._geometry.zeros(num_places)

    def _release(self, state: _Request) -> None:
        state.queued = False
        for index in list(state.held):
            self._let_go(state, index)

    def _let_go(self, state: _Request, index: int) -> None:
        item = state.held.pop(index)
        item.holders.discard((state.request_id, index))
        if not item.holders and not item.is_over:
            self._shelf.drop(item)
            if item.rows is None:
                self._fetches.cancel(item)
