"""Rows by key out of a fleet: from the replica that the caller names, else from whoever holds them.

Owns the order of the two. A key says nothing of its home, so that without a name every replica is asked.
Names are compared with those that are listed, and with nothing else: for one that is not the list is looked
up again, and it is never connected to.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import TypeAlias

from lm_adapter.errors import CallFailed, EncoderError, EncoderUnavailable, InvalidRequest, ItemFailed
from lm_adapter.fleet.call import UNKNOWN_KEY, FleetCounts
from lm_adapter.fleet.directory import Directory, Member, until_done
from lm_adapter.fleet.holders import find_holders
from lm_adapter.fleet.outcomes import moves_on
from lm_adapter.fleet.replica import ReplicaState
from lm_adapter.session import Deadline
from lm_adapter.types import EncodedRows, Outcome

__all__ = ["FetchAt", "OpenByKey", "fetch_steps", "read_where_held"]

OpenByKey: TypeAlias = Callable[[Member, Sequence[int]], AsyncGenerator[tuple[int, Outcome], None]]
"""Asks a replica for some of the keys; indices that come back are of these."""
FetchAt: TypeAlias = Callable[
    [Sequence[Sequence[Member]], OpenByKey, bool], AsyncGenerator[tuple[int, Outcome], None]
]
"""Given the replicas that may have each key: asks them, once only or as often as any item is tried."""


async def fetch_steps(
    directory: Directory,
    counts: FleetCounts,
    keys: Sequence[bytes],
    first: Sequence[str],
    deadline: Deadline,
    open_attempt: OpenByKey,
    fetch_at: FetchAt,
) -> AsyncGenerator[tuple[int, Outcome], None]:
    """Each key's outcome, once. first: of each key a target, or nothing for all. Raises CallFailed when no
    replica answered, InvalidRequest for names that are not one for each key."""

    def step(places: Mapping[int, Sequence[Member]], once: bool) -> AsyncGenerator[tuple[int, Outcome], None]:
        asked = list(places)
        chosen = lambda member, positions: open_attempt(member, [asked[one] for one in positions])  # noqa: E731
        return _renumbered(fetch_at(list(places.values()), chosen, once), asked)

    async def wherever(indices: Sequence[int]) -> list[tuple[int, Outcome]]:
        if not indices:
            return []
        holders = await find_holders(directory, [keys[index] for index in indices], deadline)
        places = {
            index: [member for member, _ in found] for index, found in zip(indices, holders, strict=True)
        }
        async with aclosing(step(places, False)) as stream:
            return [finished async for finished in stream]

    named = _named(directory, first, len(keys))
    # A replica that is named and says nothing costs its own keys their time, and no others.
    unnamed = asyncio.ensure_future(wherever([index for index in range(len(keys)) if index not in named]))
    moved: list[int] = []
    try:
        async with aclosing(step(named, True)) as stream:
            async for index, outcome in stream:
                if isinstance(outcome, ItemFailed) and (outcome.reason == UNKNOWN_KEY or moves_on(outcome)):
                    # Asked for again below: the item counts once, and has not failed.
                    counts.items -= 1
                    counts.failures -= 1
                    counts.moves += 1
                    moved.append(index)
                else:
                    yield index, outcome
        for finished in await wherever(moved):
            yield finished
        await asyncio.wait((unnamed,))
        for finished in unnamed.result():
            yield finished
    finally:
        unnamed.cancel()
        await until_done([unnamed])


async def read_where_held(
    order: Sequence[Member], read: Callable[[Member], Awaitable[EncodedRows]]
) -> EncodedRows:
    """From the first replica that knows them. Raises ItemFailed, CallFailed."""
    failure: EncoderError = EncoderUnavailable("no replica can be asked", reason="NO_ENDPOINTS")
    for member in order:
        try:
            return await read(member)
        except (ItemFailed, CallFailed) as error:
            if not moves_on(error) and error.reason != UNKNOWN_KEY:
                raise
            failure = error
    raise failure


async def _renumbered(
    outcomes: AsyncGenerator[tuple[int, Outcome], None], asked: Sequence[int]
) -> AsyncGenerator[tuple[int, Outcome], None]:
    async with aclosing(outcomes) as stream:
        async for position, outcome in stream:
            yield asked[position], outcome


def _named(directory: Directory, first: Sequence[str], num_keys: int) -> dict[int, list[Member]]:
    """A replica that drains or was taken out is asked too: what it holds, nobody else may."""
    if len(first) not in (0, num_keys):
        raise InvalidRequest(f"first names {len(first)} replicas for {num_keys} keys, needs one for each")
    listed = {one.target: one for one in directory.members}
    if any(target and target not in listed for target in first):
        directory.look_again()
    return {
        index: [listed[target]]
        for index, target in enumerate(first)
        if target in listed and listed[target].state is not ReplicaState.DOWN
    }
