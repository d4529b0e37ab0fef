"""Flights alone: who holds the rows of one that has ended."""

from __future__ import annotations

import asyncio

import pytest
import torch

from encoder_service.flights import Flight, Flights
from encoder_service.store.arena import PROBE_BYTES, Arena
from encoder_service.store.arena_store import ArenaStore
from encoder_service.store.embedding_store import Held
from encoder_service.store.host_memory import HostMemory
from encoder_service.types import EncodedItem, Grid

pytestmark = pytest.mark.anyio

KEY = b"k" * 32


def stored() -> ArenaStore:
    store = ArenaStore(Arena(HostMemory(PROBE_BYTES + 4096), max_slots=8))
    assert store.put("", EncodedItem(KEY, bytes(32), Grid(1, 4, 4), torch.ones(4, 256), 0))
    return store


async def test_p21_nobody_boards_a_flight_whose_rows_were_given_up() -> None:
    """The last caller leaves in the very turn of the loop in which the flight ends, before it has landed: the
    next one must not read rows that nobody holds."""
    store = stored()
    flights = Flights(asyncio.get_running_loop().time)
    may_end = asyncio.Event()

    async def fly(flight: Flight) -> Held:
        await may_end.wait()
        held = store.hold("", flight.key)
        assert held is not None
        return held

    async def board() -> Held | None:
        flight = flights.join("", KEY, 0, None)
        return None if flight is None else await flights.wait(flight, None)

    first = asyncio.ensure_future(flights.wait(flights.start("", KEY, bytes(32), 0, None, fly), None))
    await asyncio.sleep(0)
    # In one turn, in this order: the flight ends, its only caller leaves, another comes.
    may_end.set()
    first.cancel()
    next_one = asyncio.ensure_future(board())
    with pytest.raises(asyncio.CancelledError):
        await first
    held = await next_one
    if held is not None:
        assert held.slot is not None
        held.drop()
    assert len(flights) == 0
    assert store.arena.num_holders(next(iter(store.arena._holders))) == 1
    store.close()


def test_p21_rows_that_were_given_up_are_not_shared() -> None:
    store = stored()
    held = store.hold("", KEY)
    assert held is not None
    held.share().drop()
    held.drop()
    with pytest.raises(AssertionError, match="given up"):
        held.share()
    store.close()
