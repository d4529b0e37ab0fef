"""Which requests wait for which rows: the scheduler's side of the vLLM connector, without vLLM.

Owns the states of requests and the queue for room. vLLM's scheduler asks about each waiting request on every
pass; the first question starts the fetches, later ones cost a look-up and a comparison. Leaves fetching to
``vllm_fetch``, and entries and identifiers to ``vllm_row_cache``. Identifiers are checked when a request
arrives, when it joins an entry, and when rows arrive.

An entry is held from its fetch until vLLM has computed past it or its requests are over; then the rows live
on in vLLM's own encoder cache. A request that is preempted fetches again. A request that waits for room holds
nothing, so that the requests that hold entries have all that they need, and end.
"""

from __future__ import annotations

import json
import logging
import socket
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from lm_adapter.engines.vllm_fetch import Fetcher
from lm_adapter.engines.vllm_items import Geometry, WantedRows, wanted_rows
from lm_adapter.engines.vllm_row_cache import CacheEntry, RowCache, check_same
from lm_adapter.engines.vllm_settings import FetchSettings
from lm_adapter.errors import EncoderError, InvalidRequest, InvalidRows, ItemFailed
from lm_adapter.items import Grid
from lm_adapter.types import EncodedRows

__all__ = ["RequestTracker"]

logger = logging.getLogger("vllm.vision_encoder")

MAX_MESSAGE_CHARS = 2000


@dataclass(eq=False)
class _Request:
    """ready_from: the number of computed tokens from which on nothing is missing; None while rows are
    pending. held: entries by index of the feature. needed: features whose rows the request queues for."""

    request_id: str
    wanted: list[WantedRows] = field(default_factory=list)
    reply: str = ""
    ready_from: int | None = 0
    held: dict[int, CacheEntry] = field(default_factory=dict)
    needed: list[int] = field(default_factory=list)
    num_missing: int = 0
    is_queued: bool = False
    has_failed: bool = False


class RequestTracker:
    """One per engine, used by the scheduler's thread alone."""

    def __init__(
        self, fetches: Fetcher, geometry: Geometry, settings: FetchSettings, *, has_tower: bool
    ) -> None:
        """has_tower: whether vLLM can encode pixels by itself."""
        self._fetches = fetches
        self._geometry = geometry
        self._settings = settings
        self._has_tower = has_tower
        self._requests: dict[str, _Request] = {}
        self._cache = RowCache(settings.max_resident_bytes, settings.max_bound_items)
        self._queue: deque[_Request] = deque()
        self._unavailable: set[str] = set()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)

    @property
    def resident_bytes(self) -> int:
        """Bytes of resident rows, and those reserved for pending ones."""
        return self._cache.used_bytes

    def close(self) -> None:
        self._socket.close()

    def ensure(self, request: Any, num_computed_tokens: int) -> bool:
        """Whether the request can be scheduled from ``num_computed_tokens`` on. Fetches what is missing."""
        self._take_ended()
        state = self._requests.get(request.request_id) or self._admit(request)
        if state.has_failed or state.ready_from is None:
            return False
        if num_computed_tokens >= state.ready_from:
            # vLLM reports no feature as passed if its tokens come from the prefix cache.
            for index in [index for index in state.held if state.wanted[index].end <= num_computed_tokens]:
                self.passed(request, index)
            return True
        self._enqueue(state, num_computed_tokens)
        return state.ready_from is not None and num_computed_tokens >= state.ready_from

    def holds(self, identifier: str) -> bool:
        """Whether rows of this identifier are resident."""
        return self._cache.resident(identifier) is not None

    def rows(self, request: Any, index: int) -> EncodedRows | None:
        """Rows of a feature that vLLM has allocated; None if vLLM encodes the feature by itself.

        vLLM cannot be refused any more. If the rows do not fit, it gets zeros of the allocated size, the
        request is rejected, and the identifier is barred, because vLLM caches the KV of the zeros under it.
        """
        state = self._requests.get(request.request_id) or _Request(request.request_id)
        feature = request.mm_features[index]
        wanted = state.wanted[index] if index < len(state.wanted) else None
        # vLLM looks rows up by identifier alone, also for pixels with that identifier.
        entry = state.held.get(index) or self._cache.resident(feature.identifier)
        if entry is None and (wanted is None or wanted.key is None):
            return None
        grid = wanted.grid if wanted is not None else Grid(0, 0, 0)
        num_places = feature.mm_position.get_num_embeds()
        rows = entry.rows if entry is not None else None
        if rows is not None and rows.num_rows == num_places and (not grid.t or rows.grid_thw == grid):
            return rows
        if not state.has_failed:
            found = "no rows"
            if rows is not None:
                found = f"{rows.num_rows} rows with grid_thw {list(rows.grid_thw)}"
            text = (
                f"identifier {feature.identifier} has {found}, the prompt has {num_places} placeholders for "
                f"{list(grid)}"
            )
            self._fail(state, InvalidRows("num_rows", text, found=found, expected=num_places))
        self._cache.bar(feature.identifier)
        return self._geometry.zeros(num_places)

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

    def wait(self, timeout_s: float) -> None:
        """Waits until a pending fetch has ended; returns at once if none is pending."""
        if self._cache.has_pending():
            self._fetches.wait(timeout_s)

    def finished(self, request: Any) -> None:
        """The request is over, however it ended. Rows that have arrived for it still bind their
        identifiers."""
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

    def _admit(self, request: Any) -> _Request:
        state = _Request(request.request_id)
        self._requests[request.request_id] = state
        try:
            state.wanted, state.reply = wanted_rows(request, self._geometry, has_tower=self._has_tower)
            self._cache.check(state.wanted)
            num_bytes = self._cache.num_bytes(state.wanted)
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
                self._cache.bind(wanted)  # vLLM computes these pixels in any case
        state.ready_from = max((wanted.end for wanted in state.wanted if wanted.key is not None), default=0)
        return state

    def _enqueue(self, state: _Request, num_computed_tokens: int) -> None:
        """Queues for all rows that the tokens from here on need."""
        state.ready_from = None
        state.is_queued = True
        needed = [
            index
            for index, wanted in enumerate(state.wanted)
            if wanted.key is not None and wanted.end > num_computed_tokens
        ]
        state.needed = [index for index in needed if index not in state.held]
        if self._queue or not self._has_room(state):
            # Two requests that each hold a part and wait for the rest would block each other.
            for index in list(state.held):
                self._let_go(state, index)
            state.needed = needed
        self._queue.append(state)
        self._start_queued()

    def _has_room(self, state: _Request) -> bool:
        return self._cache.has_room(state.wanted[index] for index in state.needed)

    def _start_queued(self) -> None:
        """In order of arrival, so that small requests do not overtake a large one without end."""
        while self._queue:
            state = self._queue[0]
            if state.is_queued and not self._has_room(state):
                return
            self._queue.popleft()
            if state.is_queued:
                state.is_queued = False
                self._start(state)

    def _start(self, state: _Request) -> None:
        try:
            self._cache.check(state.wanted[index] for index in state.needed)
        except InvalidRequest as error:
            self._fail(state, error)
            return
        for index in state.needed:
            wanted = state.wanted[index]
            entry = self._cache.find(wanted)
            if entry is None:
                entry = self._cache.add(wanted)
                self._fetches.start(entry, wanted)
            entry.holders.add((state.request_id, index))
            state.held[index] = entry
            state.num_missing += entry.rows is None
        state.needed = []
        self._settle(state)

    def _settle(self, state: _Request) -> None:
        """Sets ``ready_from`` once nothing is pending: behind the last feature that is not held."""
        if state.num_missing == 0 and not state.is_queued:
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
            entry = ended.handle
            assert isinstance(entry, CacheEntry)
            if entry.is_dropped:
                continue
            if isinstance(ended.outcome, EncodedRows):
                self._arrived(entry, ended.outcome)
            else:
                self._lost(entry, ended.outcome)
            self._start_queued()

    def _arrived(self, entry: CacheEntry, rows: EncodedRows) -> None:
        """Binds the identifier to these rows, and rejects requests that claim another image for it."""
        wanted = entry.wanted
        try:
            self._geometry.check_size(rows, wanted.grid)
            self._cache.check([wanted])
        except EncoderError as error:
            self._lost(entry, error)
            return
        entry.rows = rows
        self._cache.bind(wanted)
        for state in self._holders(entry):
            state.num_missing -= 1
            self._settle(state)
        for rival in self._cache.rivals(entry):
            try:
                check_same(rival.wanted, wanted.key, wanted.grid)
            except InvalidRequest as error:
                self._fetches.cancel(rival)
                self._lost(rival, error)

    def _lost(self, entry: CacheEntry, error: EncoderError) -> None:
        # Dropped first: a queued request that starts in the room of a failed one must not join the entry.
        self._cache.drop(entry)
        for state in self._holders(entry):
            if not state.has_failed:
                self._fail(state, error)

    def _holders(self, entry: CacheEntry) -> list[_Request]:
        """The requests that hold the entry, once for each of their features."""
        return [self._requests[request_id] for request_id, _ in entry.holders]

    def _fail(self, state: _Request, error: EncoderError) -> None:
        state.has_failed = True
        self._unavailable.add(state.request_id)
        logger.warning(
            "request %s is rejected, its image rows cannot be had: %s: %s",
            state.request_id,
            error.reason,
            error.message,
        )
        self._report(state.reply, error)
        self._release(state)

    def _report(self, reply: str, error: EncoderError) -> None:
        """Sends the reason to ``failures_path``, if the request came from the front. A report that cannot be
        sent is logged and dropped."""
        if not reply or not self._settings.failures_path:
            return
        account = {
            "reply": reply,
            "reason": error.reason,
            "message": error.message[:MAX_MESSAGE_CHARS],
            "retryable": error.retryable,
            "retry_after_ms": error.retry_after_ms,
        }
        try:
            self._socket.sendto(json.dumps(account).encode(), self._settings.failures_path)
        except OSError as failure:
            logger.warning("no failure report to %s: %s", self._settings.failures_path, failure)

    def _release(self, state: _Request) -> None:
        state.is_queued = False
        for index in list(state.held):
            self._let_go(state, index)

    def _let_go(self, state: _Request, index: int) -> None:
        entry = state.held.pop(index)
        entry.holders.discard((state.request_id, index))
        if not entry.holders and not entry.is_dropped:
            self._cache.drop(entry)
            if entry.rows is None:
                self._fetches.cancel(entry)
