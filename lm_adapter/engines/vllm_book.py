"""Which requests wait for which rows: the scheduler's side of the vLLM connector, without vLLM.

Owns the states of requests and items, the bound on bytes that wait, and the rule that one identifier of
vLLM's caches stands for one key. A fetch is started when a request is first asked about, and vLLM's scheduler
asks on every pass, so that an answer costs one look-up and a comparison. Leaves fetching to ``vllm_fetch``.

An item is held from its fetch until vLLM has computed past it, or its request is over: then the connector
lets go of the rows, which live on in vLLM's own encoder cache alone. A request that is preempted and starts
anew fetches again.
"""

from __future__ import annotations

import json
import logging
import socket
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Any, Protocol

from lm_adapter.engines.vllm_fetch import Fetched, FetchSettings
from lm_adapter.engines.vllm_items import Geometry, WantedRows, wanted_rows
from lm_adapter.errors import EncoderError, InvalidRequest, ItemFailed
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
class _Item:
    """Rows under way or here. holders: (request, index of its feature)."""

    wanted: WantedRows
    rows: EncodedRows | None = None
    holders: set[tuple[str, int]] = field(default_factory=set)


@dataclass(eq=False)
class _Request:
    """ready_from: from this many computed tokens on nothing is missing; None while rows are under way."""

    request_id: str
    wanted: list[WantedRows]
    reply: str = ""
    ready_from: int | None = 0
    held: dict[int, _Item] = field(default_factory=dict)
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
        self._items: dict[str, _Item] = {}
        self._keys: OrderedDict[str, bytes] = OrderedDict()
        self._used_bytes = 0
        self._queue: deque[_Request] = deque()
        self._unavailable: set[str] = set()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)

    @property
    def resident_bytes(self) -> int:
        """Of rows that are held, and of room promised to those under way."""
        return self._used_bytes

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
            return True
        self._need(state, num_computed_tokens)
        return state.ready_from is not None and num_computed_tokens >= state.ready_from

    def holds(self, identifier: str) -> bool:
        """Whether rows under this identifier are here."""
        item = self._items.get(identifier)
        return item is not None and item.rows is not None

    def rows(self, request: Any, index: int) -> EncodedRows | None:
        """Rows of a feature that vLLM has made room for. None for features that vLLM encodes by itself."""
        state = self._requests.get(request.request_id)
        item = state.held.get(index) if state is not None else None
        if item is not None:
            return item.rows
        other = self._items.get(request.mm_features[index].identifier)
        return other.rows if other is not None else None

    def passed(self, request: Any, index: int) -> None:
        """vLLM has computed past this feature."""
        state = self._requests.get(request.request_id)
        if state is not None and index in state.held:
            self._let_go(state, index)
            if state.ready_from is not None:
                state.ready_from = max(state.ready_from, state.wanted[index].end)
            self._start_queued()

    def idle(self, timeout_s: float) -> None:
        """vLLM has nothing to compute: waits for rows under way, where there are any."""
        if any(item.rows is None for item in self._items.values()):
            self._fetches.wait(timeout_s)

    def finished(self, request: Any) -> None:
        """The request is over, however it ended."""
        state = self._requests.pop(request.request_id, None)
        self._unavailable.discard(request.request_id)
        if state is not None:
            self._release(state)

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
            for wanted in state.wanted:
                self._bind(wanted)
            num_bytes = sum({wanted.identifier: wanted.num_bytes for wanted in state.wanted}.values())
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
        state.ready_from = max((wanted.end for wanted in state.wanted if wanted.key is not None), default=0)
        return state

    def _bind(self, wanted: WantedRows) -> None:
        """Two images under one identifier would share rows and KV. Raises InvalidRequest."""
        if wanted.key is None:
            return
        bound = self._keys.setdefault(wanted.identifier, wanted.key)
        self._keys.move_to_end(wanted.identifier)
        if bound != wanted.key:
            raise InvalidRequest(
                f"identifier {wanted.identifier} stands for key {bound.hex()}, the request has "
                f"{wanted.key.hex()}: one UUID cannot name two images",
                reason="IDENTIFIER_REUSED",
            )
        if len(self._keys) > self._settings.max_bound_items:
            self._keys.popitem(last=False)

    def _need(self, state: _Request, num_computed_tokens: int) -> None:
        """Fetches what the tokens from here on need, as soon as there is room for all of it."""
        state.ready_from = None
        state.queued = True
        missing = [
            index
            for index, wanted in enumerate(state.wanted)
            if wanted.key is not None and wanted.end > num_computed_tokens and index not in state.held
        ]
        state.num_missing = 0
        for index in missing:
            state.held[index] = _Item(state.wanted[index])
        self._queue.append(state)
        self._start_queued()

    def _start_queued(self) -> None:
        """In order of arrival: a large request is not overtaken for ever by small ones."""
        while self._queue:
            state = self._queue[0]
            if state.queued:
                new = {
                    item.wanted.identifier: item.wanted.num_bytes
                    for item in state.held.values()
                    if item.wanted.identifier not in self._items
                }
                room = self._settings.max_resident_bytes - self._used_bytes
                if sum(new.values()) > room:
                    return
                state.queued = False
                self._queue.popleft()
                self._start(state)
            else:
                self._queue.popleft()

    def _start(self, state: _Request) -> None:
        for index, placeholder in state.held.items():
            wanted = placeholder.wanted
            item = self._items.get(wanted.identifier)
            if item is None:
                item = self._items[wanted.identifier] = _Item(wanted)
                self._used_bytes += wanted.num_bytes
                self._fetches.start(item, wanted)
            item.holders.add((state.request_id, index))
            state.held[index] = item
            state.num_missing += item.rows is None
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
            assert isinstance(item, _Item)
            if self._items.get(item.wanted.identifier) is not item:
                continue
            if isinstance(ended.outcome, EncodedRows):
                item.rows = ended.outcome
            waiting = [(self._requests.get(request_id), index) for request_id, index in item.holders]
            for state, _ in waiting:
                if state is None or state.failed:
                    continue
                if isinstance(ended.outcome, EncodedRows):
                    state.num_missing -= 1
                    self._settle(state)
                else:
                    self._fail(state, ended.outcome, item.wanted.replica)

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

    def _release(self, state: _Request) -> None:
        state.queued = False
        for index in list(state.held):
            self._let_go(state, index)
        self._start_queued()

    def _let_go(self, state: _Request, index: int) -> None:
        item = state.held.pop(index)
        item.holders.discard((state.request_id, index))
        identifier = item.wanted.identifier
        if not item.holders and self._items.get(identifier) is item:
            del self._items[identifier]
            self._used_bytes -= item.wanted.num_bytes
            if item.rows is None:
                self._fetches.cancel(item)
