"""Which requests wait for which rows: the connector's half in vLLM's scheduler.

Owns the requests and the answers to vLLM. vLLM's scheduler asks about each request on every pass; the first
question starts the work, each later one costs only a look-up for each item. ``room`` bounds the bytes of rows
and has the queue for them, ``rows`` has who shares which rows, ``orders`` the calls that fetch them.

Rows are held from their order until vLLM has computed past them or their requests are over; then they live on
in vLLM's own encoder cache. A request whose rows are all there orders none. A preempted request may read its
rows again. Rows that do not fit into the room at once come in portions, in step with chunked prefill.

A waiting request holds no rows, so requests that hold rows can always finish. Exception: a request that has
KV blocks and must read its rows again. If there is no room for it, requests without KV blocks release their
rows.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Container, Iterable

from lm_adapter.engines.shared.encoder_thread import EncoderThread
from lm_adapter.engines.shared.error_text import message_of
from lm_adapter.engines.shared.geometry import Geometry
from lm_adapter.engines.shared.rank_socket import RankSocket
from lm_adapter.engines.vllm.scheduler.items import (
    RequestItem,
    VllmRequest,
    check_steps,
    read_files,
    take_items,
    total_bytes,
)
from lm_adapter.engines.vllm.scheduler.orders import RowOrders
from lm_adapter.engines.vllm.scheduler.requests import RequestState
from lm_adapter.engines.vllm.scheduler.room import Room
from lm_adapter.engines.vllm.scheduler.rows import RowsEntry, SharedRows
from lm_adapter.engines.vllm.settings import Settings
from lm_adapter.engines.vllm.stats import RowStats
from lm_adapter.engines.vllm.step_rows import StepRows
from lm_adapter.errors import EncoderError, InvalidRequest, ItemFailed

logger = logging.getLogger("vllm.vision_encoder")

TOO_LATE = "DEADLINE_EXCEEDED"
AWAY = "UNAVAILABLE"

Report = Callable[[str, str, EncoderError], None]
"""Gets the address of a request's items, the request's id, and why it failed."""


class RequestTracker:
    """One per engine, used by the scheduler's thread alone."""

    def __init__(
        self,
        encoder_thread: EncoderThread,
        rank_socket: RankSocket,
        geometry: Geometry,
        settings: Settings,
        *,
        step_tokens: int,
        report: Report = lambda *_: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """rank_socket: on the loop of ``encoder_thread``. step_tokens: limit on the tokens of a request that
        one step computes. clock: in seconds, monotonic."""
        self._geometry = geometry
        self._step_tokens = step_tokens
        self._report = report
        self._clock = clock
        self._orders = RowOrders(encoder_thread, rank_socket, clock)
        self._room: Room[RequestState] = Room(settings.max_resident_bytes)
        self._rows = SharedRows(self._room, self._orders)
        self._requests: dict[str, RequestState] = {}
        self._unavailable: set[str] = set()
        self._in_cache: Collection[str] = ()
        self._stats = RowStats()

    @property
    def used_bytes(self) -> int:
        """Bytes of rows that ranks have or will have."""
        return self._room.used_bytes

    def watch_cache(self, in_cache: Collection[str]) -> None:
        """in_cache: a view of the identifiers in vLLM's own cache of encoder outputs, which stays current.
        Before this call, none count as cached."""
        self._in_cache = in_cache

    # -- what vLLM asks --------------------------------------------------------------------------------

    def ensure(self, request: VllmRequest, num_computed_tokens: int) -> bool:
        """Whether the request's next step can be scheduled: its rows are on every rank. Orders what is
        missing, also for later steps."""
        state = self._requests.get(request.request_id)
        if state is not None and state.is_past(len(request.mm_features), num_computed_tokens):
            # The usual case: vLLM asks about all running requests at each step, for each token of an answer.
            return True
        self._take_completed()
        state = state or self._admit(request)
        if not state.has_failed and len(request.mm_features) != len(state.items):
            # vLLM's streaming sessions add items. Without rows they would be computed as zeros.
            self._fail(state, InvalidRequest("items cannot be added to a request that was admitted"))
        ready_s = None if state.has_failed else self._ready_since(state, num_computed_tokens)
        if ready_s is None:
            if state.waits_since_s is None:
                state.waits_since_s = self._clock()
            return False
        if state.waits_since_s is not None:
            # vLLM may ask much later than the rows came, for example while it has no room for a request.
            self._stats.waited(max(0.0, ready_s - state.waits_since_s))
            state.waits_since_s = None
        return True

    def _ready_since(self, state: RequestState, num_computed_tokens: int) -> float | None:
        """When the last rows of the request's next step came; None if some have not."""
        ahead = state.ahead(num_computed_tokens)
        known = state.known
        if not known:
            is_in_cache = self._are_in_cache(state.items[index] for index in ahead)
            if ahead and not state.was_looked_up:
                state.was_looked_up = True
                self._stats.looked_up(len(ahead), is_hit=is_in_cache)
            if is_in_cache:
                # vLLM looks up all items of this step in its cache before it frees any.
                return self._clock()
        # vLLM reports no feature as passed if its tokens come from the prefix cache.
        if behind := known.difference(ahead):
            state.need_no_more(behind)
            for index in behind.intersection(state.held):
                self._let_go(state, index)
            self._serve_queue()
        if not known.issuperset(ahead):
            self._enqueue(state, ahead)
        elif self._waits_for_room(state) and state.has_kv_blocks:
            # A request that held the room may have lost its KV blocks since.
            self._break_deadlock()
            self._serve_queue()
        if state.has_failed or self._waits_for_room(state):
            # Do not give KV blocks to a request without rows: a request with rows may need those blocks.
            return None
        in_step = state.in_step(ahead, num_computed_tokens + self._step_tokens)
        if not state.are_present(in_step):
            return None
        entries = [state.held[index] for index in in_step]
        self._rows.hand_over_missing(entries, state.request_id)
        return max((entry.arrived_s for entry in entries), default=self._clock())

    def _are_in_cache(self, items: Iterable[RequestItem]) -> bool:
        """Also on the ranks when the next step begins."""
        names = {item.identifier for item in items}
        return self._rows.are_handed_over(names) and all(name in self._in_cache for name in names)

    def holds(self, identifier: str) -> bool:
        """Whether every rank has the rows of this identifier."""
        entry = self._rows.get(identifier)
        return entry is not None and entry.is_present

    def allocated(self, request: VllmRequest, index: int) -> None:
        """vLLM computes with a feature in this step."""
        entry = self._rows.get(request.mm_features[index].identifier)
        if entry is not None and entry.is_present:
            state = self._requests.get(request.request_id)
            if state is not None:
                state.was_in_step = True
            self._rows.hand_over(entry, request.request_id)

    def passed(self, request: VllmRequest, index: int) -> None:
        """vLLM has computed past this feature."""
        state = self._requests.get(request.request_id)
        if state is not None and index in state.held:
            self._let_go(state, index)
            self._serve_queue()

    def finished(self, request: VllmRequest) -> None:
        """The request is over, however it ended."""
        self._take_completed()
        state = self._requests.pop(request.request_id, None)
        self._unavailable.discard(request.request_id)
        if state is not None:
            self._release(state)
            self._serve_queue()

    def take_unavailable(self) -> set[str]:
        """Requests to reject; each is returned once."""
        self._take_completed()
        taken, self._unavailable = self._unavailable, set()
        return taken

    def take_stats(self) -> RowStats | None:
        """What happened since the last call; None if nothing did."""
        if self._stats.is_empty():
            return None
        taken, self._stats = self._stats, RowStats()
        return taken

    def take_step(self, *, has_tokens: bool) -> StepRows:
        """What goes with the next step. Workers may not see a step without tokens: nothing goes with it."""
        if not has_tokens:
            return StepRows()
        step, has_room = self._rows.take_step()
        if has_room:
            self._serve_queue()
        return step

    def freed(self, identifiers: Iterable[str], scheduled: Container[str]) -> None:
        """vLLM freed these identifiers in the pass that ends. Those last given to a request scheduled in this
        pass stay; the others are not handed over. scheduled: ids of requests."""
        self._rows.freed(identifiers, scheduled)

    def flush(self) -> None:
        """Applies pending drops now: while requests wait for this room there may be no next step to carry
        them. All steps have begun."""
        if self._rows.flush():
            self._serve_queue()

    def check_step(self, computed: Iterable[str]) -> None:
        """computed: requests with items that vLLM would compute itself in the next step, without a tower."""
        for request_id in computed:
            error = ItemFailed("vLLM scheduled an item whose rows had not come")
            if (state := self._requests.get(request_id)) is not None:
                self._fail(state, error)
            else:
                self._reject(request_id, error)

    def wait(self, timeout_s: float) -> None:
        """Waits until rows have come or failed; returns at once if none are on their way."""
        if self._rows.is_any_ordered:
            self._orders.wait(timeout_s)

    # -- requests --------------------------------------------------------------------------------------

    def _admit(self, request: VllmRequest) -> RequestState:
        state = RequestState(request)
        self._requests[request.request_id] = state
        try:
            files = read_files(request.mm_features)
            state.replies = {file.reply for file in files if file is not None}
            state.has_items(take_items(request, files, self._geometry))
            first_of: dict[str, RequestItem] = {}
            for item in state.items:
                item.check_same(first_of.setdefault(item.identifier, item))
                if (entry := self._rows.get(item.identifier)) is not None:
                    item.check_same(entry.item)
        except EncoderError as error:
            self._fail(state, error)
        except Exception as error:
            self._fail(state, ItemFailed(f"the request cannot be read: {type(error).__name__}: {error}"))
        return state

    def _enqueue(self, state: RequestState, ahead: list[int]) -> None:
        """Queues for the rows of all these features."""
        items = [state.items[index] for index in ahead]
        try:
            check_steps(items, step_tokens=self._step_tokens, max_bytes=self._room.max_bytes)
        except InvalidRequest as error:
            self._fail(state, error)
            return
        state.need(ahead)
        if state.has_kv_blocks and self._must_wait(state):
            self._break_deadlock()
        if self._must_wait(state):
            # Two requests that each hold a part and wait for the rest would block each other.
            self._release(state)
            state.need(ahead)
        # A preempted request has begun its answer: only one that is served in portions is before it.
        if self._room.join(state, goes_first=state.has_begun):
            state.queued_s = self._clock()
        self._serve_queue()

    def _must_wait(self, state: RequestState) -> bool:
        return self._room.is_awaited or not self._room.can_begin(self._needed_bytes(state))

    def _waits_for_room(self, state: RequestState) -> bool:
        """Whether it queues and holds nothing."""
        return bool(state.needed) and not self._room.is_in_portions(state)

    def _break_deadlock(self) -> None:
        """Requests without KV blocks release their rows, so that a request with KV blocks can read its own.
        They order theirs again when vLLM asks about them."""
        for state in self._requests.values():
            if state.held and not state.has_kv_blocks:
                self._release(state)
                self._room.leave(state)

    def _serve_queue(self) -> None:
        self._room.serve(self._needed_bytes, self._take_rows)

    def _needed_bytes(self, state: RequestState) -> int:
        """Bytes of the rows that it needs and nobody holds."""
        return total_bytes(item for item in state.needed_items() if self._rows.get(item.identifier) is None)

    def _take_rows(self, state: RequestState) -> bool:
        """Holds the rows that the request needs, in the order of the prompt, as far as there is room. Returns
        whether it needs no more."""
        while state.needed:
            index = state.needed[0]
            try:
                entry = self._rows.hold(state.items[index], state.holder(index), self._clock())
            except InvalidRequest as error:
                # Another request with this identifier was in the queue before it.
                self._fail(state, error)
                return True
            if entry is None:
                return False
            state.got_next(entry)
        return True

    def _fail(self, state: RequestState, error: EncoderError) -> None:
        if state.has_failed:
            return
        state.has_failed = True
        self._reject(state.request_id, error)
        for reply in state.replies:
            self._report(reply, state.request_id, error)
        self._release(state)

    def _reject(self, request_id: str, error: EncoderError) -> None:
        self._unavailable.add(request_id)
        self._stats.failed(error.reason)
        logger.warning("request %s is rejected, it has no rows: %s", request_id, message_of(error))

    def _release(self, state: RequestState) -> None:
        """It neither holds nor needs any rows."""
        state.needed.clear()
        for index in list(state.held):
            self._let_go(state, index)

    def _let_go(self, state: RequestState, index: int) -> None:
        self._rows.let_go(state.held.pop(index), state.holder(index))

    # -- outcomes --------------------------------------------------------------------------------------

    def _take_completed(self) -> None:
        for entry, outcome in self._orders.take_completed():
            is_current = self._rows.is_current(entry)
            if not isinstance(outcome, EncoderError):
                self._rows.arrived(entry, outcome.number, self._clock())
                self._stats.got(entry.item.num_bytes, outcome)
            elif is_current:
                self._lost(entry, outcome)
            if is_current:
                self._serve_queue()

    def _lost(self, entry: RowsEntry, error: EncoderError) -> None:
        """Fails those that wait for these rows. Requests that joined after half of the call's time order them
        again, unless the item is at fault."""
        # First: a queued request that starts in the room of a failed one must not join these rows.
        self._rows.failed(entry)
        may_pass = error.retryable or error.reason == TOO_LATE
        middle_s = (entry.ordered_s + self._clock()) / 2
        for (request_id, index), joined_s in list(entry.holders.items()):
            state = self._requests[request_id]
            if may_pass and joined_s > middle_s:
                # The deadline was an earlier request's; this one joined late, so it retries.
                state.held.pop(index, None)
            else:
                self._fail(state, error)
        if error.reason in (AWAY, TOO_LATE) and self._rows.arrived_s < entry.ordered_s:
            # No rows have arrived since this call began, so requests queued before it fail too.
            for state in self._room.waiters:
                if state.queued_s <= entry.ordered_s:
                    self._fail(state, error)
