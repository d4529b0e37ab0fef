"""One room: an item's rows and the prefill ranks that request them, paired by a number that the gateway drew.

Owns a room's state, with transitions that neither wait nor send. ``rooms`` owns the table of rooms and acts
on their states. A room starts in WAITING_ITEM, or in WAITING_ROWS where the gateway is first. Ranks join in
any order until the rows are sent. Each state may end in OVER.

    WAITING_ITEM -> WAITING_ROWS -> WAITING_RANKS -> SENDING -> OVER
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from encoder_service.errors import InvalidRequest
from encoder_service.pipeline import EncodeResult
from encoder_service.protocols.tokenspeed.wire import MAX_RANKS, RowsRequest
from encoder_service.rpc.observed import Call

# How long ranks wait for their item, and rows for their ranks.
ROOM_S = 60.0


class State(Enum):
    WAITING_ITEM = auto()
    """Ranks are there, the gateway has not sent the item."""
    WAITING_ROWS = auto()
    """The item is being encoded. Its call ends this state, also by a failure."""
    WAITING_RANKS = auto()
    """The rows are ready, at least one rank is missing."""
    SENDING = auto()
    OVER = auto()


@dataclass(frozen=True)
class Rank:
    """A prefill rank to which rows may be sent. peer: the host that its request came from. endpoint: receives
    its status, for ZMQ. session: its Mooncake engine, host:port."""

    request: RowsRequest
    peer: str
    endpoint: str
    session: str


@dataclass(frozen=True)
class CallItem:
    """An item of a gateway's call."""

    call: Call
    index: int


class Room:
    """ranks: by session. item: set from WAITING_ROWS on. result: the item's rows, in WAITING_RANKS and
    SENDING. ends_s: of the state, in the clock's seconds; None where it has no limit."""

    def __init__(self, number: int, clock: Callable[[], float], limit_s: float = ROOM_S) -> None:
        """clock: monotonic seconds. limit_s: of WAITING_ITEM and of WAITING_RANKS."""
        self.number = number
        self.ranks: dict[str, Rank] = {}
        self.item: CallItem | None = None
        self.result: EncodeResult | None = None
        self._clock, self._limit_s = clock, limit_s
        self._enter(State.WAITING_ITEM)

    def check_open(self) -> None:
        """Raises InvalidRequest where no rank can join."""
        if self.state in (State.SENDING, State.OVER) or len(self.ranks) >= MAX_RANKS:
            raise InvalidRequest(f"room {self.number} has its {len(self.ranks)} ranks")

    def join(self, rank: Rank) -> None:
        """Adds a rank. It replaces one of the same session. Raises InvalidRequest as ``check_open``."""
        self.check_open()
        self.ranks[rank.session] = rank
        self._send_when_complete()

    def begin_encode(self, item: CallItem) -> None:
        """Raises InvalidRequest for a room that has an item."""
        if self.state is not State.WAITING_ITEM:
            raise InvalidRequest(f"room {self.number} already has an item")
        self.item = item
        self._enter(State.WAITING_ROWS)

    def add_rows(self, result: EncodeResult) -> None:
        assert self.state is State.WAITING_ROWS
        self.result = result
        self._enter(State.WAITING_RANKS)
        self._send_when_complete()

    def end(self) -> EncodeResult | None:
        """Returns the rows that the room held, for their release."""
        self._enter(State.OVER)
        result, self.result = self.result, None
        return result

    def _send_when_complete(self) -> None:
        if self.state is State.WAITING_RANKS and self.ranks:
            first = next(iter(self.ranks.values()))
            if len(self.ranks) >= first.request.num_ranks:
                self._enter(State.SENDING)

    def _enter(self, state: State) -> None:
        self.state = state
        is_waiting = state in (State.WAITING_ITEM, State.WAITING_RANKS)
        self.ends_s = self._clock() + self._limit_s if is_waiting else None
