"""Which requests wait for which rows: the connector's half in vLLM's scheduler.

Owns the states of requests, the rows that they share, the bound on their bytes and the queue for room. vLLM's
scheduler asks about each request on every pass; the first question starts everything, later ones cost a
look-up for each item. The ranks fetch the rows by key (``ranks``), and confirm (``link``). The encoder has
most files already, by the API server's ``Prefetch`` (``frontend``); the others go to it by another one. Rows
never come here.

Rows are held from their order until vLLM has computed past them or their requests are over; then they live on
in vLLM's own encoder cache. A request whose rows are all there orders none. One that is preempted may read
them again. A request that waits for room holds nothing, so that those that hold rows have all that they need,
and end. One whose rows left vLLM's cache after it got KV blocks holds these, though: where it finds no room,
those without blocks give up theirs. More rows than fit into the buffer at once come in portions, in step
with chunked prefill.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Container, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from lm_adapter.client import AsyncVisionEncoderClient
from lm_adapter.engines.shared.calls import EncoderCalls
from lm_adapter.engines.shared.geometry import GRID_FIELDS, Geometry
from lm_adapter.engines.shared.reasons import message_of
from lm_adapter.engines.vllm.file_requests import FileRequest
from lm_adapter.engines.vllm.link import RankLink, RowsOrder, StepRows
from lm_adapter.engines.vllm.settings import Settings
from lm_adapter.errors import EncoderError, InvalidRequest, InvalidRows, ItemFailed
from lm_adapter.items import Grid
from lm_adapter.types import PrefetchStatus

logger = logging.getLogger("vllm.vision_encoder")

FILE_FIELDS = FILE_FIELD, CLIP_FIELD = "vision_encoder_file", "vision_encoder_clip"
"""Fields of vLLM's features that carry a ``FileRequest``: of images, and of clips, as each field of vLLM's is
of one modality."""
MIN_CALL_S = 0.001
TOO_LATE = "DEADLINE_EXCEEDED"
AWAY = "UNAVAILABLE"
GONE = "UNKNOWN_KEY"
"""The reason of rows that an encoder no longer has, or never had."""

Report = Callable[[str, str, EncoderError], None]
"""Gets the address of a request's items, the request's id, and why it failed."""


@dataclass(frozen=True, eq=False)
class WantedItem:
    """One feature of a request. identifier: its name in vLLM's caches. start, end: its tokens."""

    identifier: str
    start: int
    end: int
    grid: Grid
    num_bytes: int
    request: FileRequest

    def is_same(self, other: WantedItem) -> bool:
        mine, others = (replace(one.request, data=b"", reply="", is_announced=False) for one in (self, other))
        return self.grid == other.grid and mine == others


@dataclass(eq=False)
class SharedRows:
    """The rows of one identifier. number: by which every rank has them, 0 until then. is_in_step: a step has
    been given them, which may not have begun yet. holders: (request id, index of the feature), with the time
    at which each came; ordered_s: the time of the first."""

    wanted: WantedItem
    ordered_s: float
    number: int = 0
    is_in_step: bool = False
    holders: dict[tuple[str, int], float] = field(default_factory=dict)


@dataclass(eq=False)
class _Request:
    """replies: of its items. held: rows by index of the feature. needed: features whose rows the request
    queues for. queued_s: when it began to. is_in_portions: while it queues, some are ordered already.
    was_in_step: a step has computed with its rows. request: vLLM's. end: of the tokens of its last item."""

    request_id: str
    request: Any = None
    replies: set[str] = field(default_factory=set)
    wanted: list[WantedItem] = field(default_factory=list)
    held: dict[int, SharedRows] = field(default_factory=dict)
    needed: deque[int] = field(default_factory=deque)
    queued_s: float = 0.0
    is_in_portions: bool = False
    was_in_step: bool = False
    has_failed: bool = False
    end: int = 0

    def is_past(self, request: Any, num_computed_tokens: int) -> bool:
        """Whether all of its items are computed, and none of their rows are held."""
        has_more = num_computed_tokens < self.end or len(request.mm_features) != len(self.wanted)
        return not (has_more or self.held or self.needed or self.has_failed)

    @property
    def has_kv_blocks(self) -> bool:
        """As vLLM counts it: it runs, or a KV connector loads, or has loaded, a part of it."""
        has_status = self.request.status.name in ("RUNNING", "WAITING_FOR_REMOTE_KVS")
        return has_status or bool(self.request.num_computed_tokens)


class RequestTracker:
    """One per engine, used by the scheduler's thread alone."""

    def __init__(
        self,
        calls: EncoderCalls,
        link: RankLink,
        geometry: Geometry,
        settings: Settings,
        *,
        step_tokens: int,
        report: Report = lambda *_: None,
    ) -> None:
        """link: on the loop of ``calls``. step_tokens: at most that many of a request are computed in one
        step. ``in_cache`` is set to what vLLM keeps current."""
        self._calls = calls
        self._link = link
        self._geometry = geometry
        self._settings = settings
        self._step_tokens = step_tokens
        self._report = report
        self._requests: dict[str, _Request] = {}
        self._rows: dict[str, SharedRows] = {}
        self._numbers = itertools.count(1)
        self._queue: deque[_Request] = deque()
        self._unavailable: set[str] = set()
        self._step = StepRows()
        self.in_cache: Collection[str] = ()
        """Identifiers in vLLM's own cache of encoder outputs, at this moment."""
        self._takers: dict[str, str] = {}
        """By identifier that the next step hands over: the request that was given it last."""
        self._not_handed_over: set[str] = set()
        """Identifiers that vLLM counts as in its own cache, though no step has handed over their rows."""
        self._came_s = 0.0
        """When rows came last."""
        self._leaving_bytes = 0
        self.used_bytes = 0
        """Bytes of rows that ranks have or will have."""

    # -- what vLLM asks --------------------------------------------------------------------------------

    def ensure(self, request: Any, num_computed_tokens: int) -> bool:
        """Whether the request's next step can be scheduled: its rows are on every rank. Orders what is
        missing, also for later steps."""
        state = self._requests.get(request.request_id)
        if state is not None and state.is_past(request, num_computed_tokens):
            # As for each token of an answer: vLLM asks about all running requests at each step.
            return True
        self._take_ended()
        state = state or self._admit(request)
        if not state.has_failed and len(request.mm_features) != len(state.wanted):
            # vLLM's streaming sessions. Without its rows an item would be computed as zeros.
            self._fail(state, InvalidRequest("items cannot be added to a request that was admitted"))
        if state.has_failed:
            return False
        ahead = [index for index, wanted in enumerate(state.wanted) if wanted.end > num_computed_tokens]
        if not state.held and not state.needed and self._are_in_cache(state.wanted[index] for index in ahead):
            # vLLM frees none of them before it has looked for those of this step.
            return True
        # vLLM reports no feature as passed if its tokens come from the prefix cache.
        known = {*state.held, *state.needed}
        if behind := known.difference(ahead):
            state.needed = deque(index for index in state.needed if index not in behind)
            for index in behind.intersection(state.held):
                self._let_go(state, index)
            self._start_queued()
        if not known.issuperset(ahead):
            self._enqueue(state, ahead)
        elif state.needed and not state.is_in_portions and state.has_kv_blocks:
            # Another one that held the room may have lost its KV blocks since.
            self._give_up()
            self._start_queued()
        if state.has_failed or (state.needed and not state.is_in_portions):
            # One that waits for room gets no KV blocks: those that have rows may wait for these.
            return False
        end = num_computed_tokens + self._step_tokens
        in_step = [index for index in ahead if state.wanted[index].start < end]
        if not all(index in state.held and state.held[index].number for index in in_step):
            return False
        if self._not_handed_over:
            for rows in (state.held[index] for index in in_step):
                if rows.wanted.identifier in self._not_handed_over:
                    self._hand_over(rows, state.request_id)
        return True

    def _are_in_cache(self, several: Iterable[WantedItem]) -> bool:
        """Also on the ranks when the next step begins."""
        names = {wanted.identifier for wanted in several}
        return self._not_handed_over.isdisjoint(names) and all(name in self.in_cache for name in names)

    def holds(self, identifier: str) -> bool:
        """Whether every rank has the rows of this identifier."""
        rows = self._rows.get(identifier)
        return rows is not None and bool(rows.number)

    def allocated(self, request: Any, index: int) -> None:
        """vLLM computes with a feature in this step."""
        identifier = request.mm_features[index].identifier
        rows = self._rows.get(identifier)
        if rows is not None and rows.number:
            state = self._requests.get(request.request_id)
            if state is not None:
                state.was_in_step = True
            self._hand_over(rows, request.request_id)

    def passed(self, request: Any, index: int) -> None:
        """vLLM has computed past this feature."""
        state = self._requests.get(request.request_id)
        if state is not None and index in state.held:
            self._let_go(state, index)
            self._start_queued()

    def finished(self, request: Any) -> None:
        """The request is over, however it ended."""
        self._take_ended()
        state = self._requests.pop(request.request_id, None)
        self._unavailable.discard(request.request_id)
        if state is not None:
            self._release(state)
            self._start_queued()

    def take_unavailable(self) -> set[str]:
        """Requests to reject; each is returned once."""
        self._take_ended()
        taken, self._unavailable = self._unavailable, set()
        return taken

    def take_step(self, *, has_tokens: bool) -> StepRows:
        """What goes with the next step. Workers may not see a step without tokens: nothing goes with it."""
        if not has_tokens:
            return StepRows()
        taken, self._step = self._step, StepRows()
        self._takers.clear()
        self._have_left()
        return taken

    def freed(self, identifiers: Iterable[str], scheduled: Container[str]) -> None:
        """vLLM has freed these in the pass that ends. A request that is scheduled in it was given them
        afterwards, because it would have kept them; all others gave them up.

        scheduled: ids of requests."""
        gone = {name for name in identifiers if self._takers.get(name) not in scheduled}
        self._not_handed_over -= gone
        self._step.hand_over = [rows for rows in self._step.hand_over if rows[1] not in gone]

    def flush(self) -> None:
        """All steps have begun: what was to leave with the next one leaves now. That may never come while
        requests wait for this room. vLLM counts rows that were allocated as in its own cache, and does not
        allocate them again: the next request for them hands over its own."""
        dropped, hand_over = set(self._step.drop), self._step.hand_over
        for number in dropped:
            self._calls.on_loop(self._link.drop, number)
        self._not_handed_over.update(name for number, name in hand_over if number in dropped)
        self._step = StepRows([(number, name) for number, name in hand_over if number not in dropped])
        self._have_left()

    def check_step(self, computed: Iterable[str]) -> None:
        """computed: requests whose items vLLM would compute in the next step, which it has no tower for."""
        for request_id in computed:
            state = self._requests.get(request_id) or _Request(request_id)
            self._fail(state, ItemFailed("vLLM scheduled an item whose rows had not come"))

    def _hand_over(self, rows: SharedRows, request_id: str) -> None:
        rows.is_in_step = True
        identifier = rows.wanted.identifier
        self._not_handed_over.discard(identifier)
        self._takers[identifier] = request_id
        self._step.hand_over.append((rows.number, identifier))

    def _have_left(self) -> None:
        if self._leaving_bytes:
            self.used_bytes -= self._leaving_bytes
            self._leaving_bytes = 0
            self._start_queued()

    def wait(self, timeout_s: float) -> None:
        """Waits until rows have come or failed; returns at once if none are on their way."""
        if any(not rows.number for rows in self._rows.values()):
            self._calls.wait(timeout_s)

    # -- requests --------------------------------------------------------------------------------------

    def _admit(self, request: Any) -> _Request:
        state = _Request(request.request_id, request)
        self._requests[request.request_id] = state
        try:
            self._take_files(request, state)
            first_of: dict[str, WantedItem] = {}
            for wanted in state.wanted:
                _check_same(wanted, first_of.setdefault(wanted.identifier, wanted))
                present = self._rows.get(wanted.identifier)
                if present is not None:
                    _check_same(wanted, present.wanted)
        except EncoderError as error:
            self._fail(state, error)
        except Exception as error:
            self._fail(state, ItemFailed(f"the request cannot be read: {type(error).__name__}: {error}"))
        return state

    def _take_files(self, request: Any, state: _Request) -> None:
        """The request's images and clips. Their files leave the request, which vLLM sends to every rank."""
        datas = [feature.data or {} for feature in request.mm_features]
        files = [next((data[name] for name in FILE_FIELDS if name in data), None) for data in datas]
        requests = [None if file is None else FileRequest.unpacked(file.data.numpy()) for file in files]
        state.replies = {one.reply for one in requests if one is not None}
        features, wanted = [], []
        for feature, file in zip(request.mm_features, requests, strict=True):
            data = feature.data
            if file is None:
                raise InvalidRequest(f"a feature of modality {feature.modality} has no file")
            position = feature.mm_position
            (grid,) = [Grid(*map(int, data[name].data.reshape(-1))) for name in GRID_FIELDS if name in data]
            num_rows, num_places = self._geometry.num_rows(grid), position.get_num_embeds()
            if num_rows != num_places:
                raise InvalidRequest(
                    f"an item with grid_thw {list(grid)} has {num_rows} rows, the prompt has {num_places} "
                    "placeholders"
                )
            wanted.append(
                WantedItem(
                    feature.identifier,
                    position.offset,
                    position.offset + position.length,
                    grid,
                    self._geometry.num_bytes(grid),
                    file,
                )
            )
            # vLLM's cache of processed items, and other samples of the same prompt, keep theirs.
            kept = {name: value for name, value in data.items() if name not in FILE_FIELDS}
            features.append(replace(feature, data=type(data)(kept)))
        request.mm_features, state.wanted = features, wanted
        state.end = max((one.end for one in wanted), default=0)

    def _enqueue(self, state: _Request, ahead: list[int]) -> None:
        """Queues for the rows of all these features."""
        try:
            self._check_steps([state.wanted[index] for index in ahead])
        except InvalidRequest as error:
            self._fail(state, error)
            return
        is_queued = state in self._queue
        state.needed = deque(index for index in ahead if index not in state.held)
        if state.has_kv_blocks and (self._queue or not self._has_room(state)):
            self._give_up()
        if self._queue or not self._has_room(state):
            # Two requests that each hold a part and wait for the rest would block each other.
            for index in list(state.held):
                self._let_go(state, index)
            state.needed = deque(ahead)
        if not is_queued:
            state.queued_s = time.monotonic()
            # One that was preempted has begun its answer: only one that is in portions is before it.
            has_begun = state.was_in_step or state.has_kv_blocks
            is_behind = bool(self._queue) and self._queue[0].is_in_portions
            self._queue.insert(int(is_behind) if has_begun else len(self._queue), state)
        self._start_queued()

    def _give_up(self) -> None:
        """Those without KV blocks may wait for those of a request that waits for their room. They order their
        rows again."""
        for state in self._requests.values():
            if state.held and not state.has_kv_blocks:
                self._release(state)
                state.is_in_portions = False
                if state in self._queue:
                    self._queue.remove(state)

    def _check_steps(self, ahead: list[WantedItem]) -> None:
        """Raises InvalidRequest if the rows of some step do not fit into the buffer. A step may begin at the
        last token of any item."""
        limit = self._settings.max_resident_bytes
        if _num_bytes(ahead) <= limit:
            return
        for place, first in enumerate(ahead):
            end = first.end - 1 + self._step_tokens
            step = [wanted for wanted in ahead[place:] if wanted.start < end]
            if (num_bytes := _num_bytes(step)) > limit:
                raise InvalidRequest(
                    f"a step of {self._step_tokens} tokens may need the rows of {len(step)} items, which "
                    f"have {num_bytes} bytes, max_resident_bytes is {limit}",
                    reason="ROWS_TOO_LARGE",
                )

    def _has_room(self, state: _Request) -> bool:
        """For all of its rows; for more than the buffer takes at once, an empty buffer."""
        wanted = (state.wanted[index] for index in state.needed)
        new_bytes = _num_bytes(one for one in wanted if one.identifier not in self._rows)
        return not self.used_bytes or self.used_bytes + new_bytes <= self._settings.max_resident_bytes

    def _start_queued(self) -> None:
        """In order of arrival, so that small requests do not overtake a large one without end. One whose rows
        do not fit into the buffer at once gets them in portions. It has the buffer to itself until the last
        are ordered, so that it never waits for others while it holds rows and KV blocks."""
        while self._queue:
            state = self._queue[0]
            if not state.is_in_portions and not self._has_room(state):
                return
            self._order(state)
            state.is_in_portions = bool(state.needed)
            if state.needed:
                return
            self._queue.popleft()

    def _order(self, state: _Request) -> None:
        """The rows that the request needs, in the order of the prompt, as far as there is room."""
        while state.needed:
            index = state.needed[0]
            wanted = state.wanted[index]
            rows = self._rows.get(wanted.identifier)
            if rows is None:
                if self.used_bytes + wanted.num_bytes > self._settings.max_resident_bytes:
                    return
                rows = SharedRows(wanted, time.monotonic())
                self._rows[wanted.identifier] = rows
                self.used_bytes += wanted.num_bytes
                self._calls.start(rows, functools.partial(self._obtain, wanted))
            else:
                try:
                    _check_same(wanted, rows.wanted)
                except InvalidRequest as error:
                    # Two that queued at once.
                    self._fail(state, error)
                    return
            state.needed.popleft()
            rows.holders[state.request_id, index] = time.monotonic()
            state.held[index] = rows

    def _fail(self, state: _Request, error: EncoderError) -> None:
        if state.has_failed:
            return
        state.has_failed = True
        self._unavailable.add(state.request_id)
        logger.warning(
            "request %s is rejected, its rows cannot be had: %s", state.request_id, message_of(error)
        )
        for reply in state.replies:
            self._report(reply, state.request_id, error)
        self._release(state)

    def _release(self, state: _Request) -> None:
        state.needed.clear()
        for index in list(state.held):
            self._let_go(state, index)

    def _let_go(self, state: _Request, index: int) -> None:
        rows = state.held.pop(index)
        rows.holders.pop((state.request_id, index), None)
        if not rows.holders and self._rows.get(rows.wanted.identifier) is rows:
            self._drop(rows)

    # -- rows ------------------------------------------------------------------------------------------

    def _take_ended(self) -> None:
        while self._calls.ended:
            ended = self._calls.ended.popleft()
            rows, outcome = ended.handle, ended.outcome
            assert isinstance(rows, SharedRows)
            if self._rows.get(rows.wanted.identifier) is not rows:
                if not isinstance(outcome, EncoderError):
                    self._calls.on_loop(self._link.drop, outcome)
                continue
            if isinstance(outcome, EncoderError):
                self._lost(rows, outcome)
            else:
                rows.number = outcome
                self._came_s = time.monotonic()
            self._start_queued()

    def _lost(self, rows: SharedRows, error: EncoderError) -> None:
        # Dropped first: a queued request that starts in the room of a failed one must not join these rows.
        self._drop(rows)
        may_pass = error.retryable or error.reason == TOO_LATE
        middle_s = (rows.ordered_s + time.monotonic()) / 2
        for (request_id, index), joined_s in list(rows.holders.items()):
            state = self._requests[request_id]
            if may_pass and joined_s > middle_s:
                # The time that is over was another request's. This one orders them again.
                state.held.pop(index, None)
            else:
                self._fail(state, error)
        if error.reason == AWAY and self._came_s < rows.ordered_s:
            # They have waited for room as long as this call for its encoder, which had nothing for anybody.
            for state in [one for one in self._queue if one.queued_s <= rows.ordered_s]:
                self._fail(state, error)

    def _drop(self, rows: SharedRows) -> None:
        del self._rows[rows.wanted.identifier]
        if rows.is_in_step:
            # Workers may be some steps behind.
            self._step.drop.append(rows.number)
            self._leaving_bytes += rows.wanted.num_bytes
            return
        self.used_bytes -= rows.wanted.num_bytes
        if rows.number:
            self._calls.on_loop(self._link.drop, rows.number)
        else:
            self._calls.cancel(rows)

    # -- on the loop of the calls ----------------------------------------------------------------------

    async def _obtain(self, wanted: WantedItem, client: AsyncVisionEncoderClient, left_s: float) -> int:
        """The number by which every rank has the rows. Of an announced item the key is enough. Rows that a
        rank finds gone are encoded once more, before they are ordered again: the encoder says what is wrong
        with the item, or has them. Raises EncoderError."""
        ends_s = time.monotonic() + left_s

        def left() -> float:
            return max(MIN_CALL_S, ends_s - time.monotonic())

        item = wanted.request.item()
        if wanted.request.is_announced:
            key = await client.known_key(item, timeout_s=left())
            if key is not None:
                with _unless_gone():
                    return await self._ordered(wanted, key, wanted.request.digest, left())
                # The encoder may be another one by now, which has other keys.
                await client.info(timeout_s=left())
        for is_second in (False, True):
            (status,) = await client.prefetch([item], timeout_s=left(), until_encoded=is_second)
            if isinstance(status, ItemFailed):
                raise status
            self._check_grid(status, wanted)
            route = status.routing_digest or wanted.request.digest
            with contextlib.nullcontext() if is_second else _unless_gone():
                return await self._ordered(wanted, status.key, route, left())
        raise AssertionError

    async def _ordered(self, wanted: WantedItem, key: bytes, route: bytes, timeout_s: float) -> int:
        """The number of rows that every rank has read. Raises ItemFailed."""
        order = RowsOrder(next(self._numbers), key, route, wanted.grid)
        await self._link.read(order, timeout_s)
        return order.number

    def _check_grid(self, status: PrefetchStatus, wanted: WantedItem) -> None:
        """The encoder's grid decides."""
        if status.grid_thw is not None and status.grid_thw != wanted.grid:
            found, expected = list(status.grid_thw), list(wanted.grid)
            text = f"the encoder's grid_thw is {found}, the prompt was made for {expected}"
            raise InvalidRows("grid_thw", text, found=found, expected=expected)


@contextlib.contextmanager
def _unless_gone() -> Iterator[None]:
    """Goes on if the encoder has no rows of the key."""
    try:
        yield
    except ItemFailed as error:
        if error.reason != GONE:
            raise


def _check_same(wanted: WantedItem, present: WantedItem) -> None:
    """Raises InvalidRequest if the client's name stands for another item already."""
    if not present.is_same(wanted):
        raise InvalidRequest(
            f"identifier {wanted.identifier} stands for an item of digest "
            f"{present.request.digest.hex()} and grid_thw {list(present.grid)}, this one has "
            f"{wanted.request.digest.hex()} and {list(wanted.grid)}",
            reason="IDENTIFIER_REUSED",
        )


def _num_bytes(several: Iterable[WantedItem]) -> int:
    """Rows that several features share count once."""
    return sum({wanted.identifier: wanted.num_bytes for wanted in several}.values())
