"""Which replicas hold what, asked of all of them: for callers that have keys and no digests.

Owns that round of Lookups and how their answers are put together.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import TypeAlias

from lm_adapter.errors import CallFailed, EncoderError, EncoderUnavailable
from lm_adapter.fleet.call import NO_ENDPOINTS
from lm_adapter.fleet.directory import Directory, Member
from lm_adapter.session import Deadline
from lm_adapter.types import KeyState, KeyStatus

__all__ = ["Holders", "find_holders"]

Holders: TypeAlias = list[list[tuple[Member, KeyStatus]]]
"""Of each key the replicas that hold it, resident rows first; one that does not, where none does."""
_HELD = (KeyState.RESIDENT, KeyState.IN_FLIGHT)


async def find_holders(directory: Directory, keys: Sequence[bytes], deadline: Deadline) -> Holders:
    """Raises CallFailed when no replica answered; those that did not are as if they held nothing."""
    members = [one for one in directory.members if one.is_up] or directory.members
    heard: list[tuple[Member, list[KeyStatus]]] = []
    failure: EncoderError = EncoderUnavailable(
        f"no replica can be asked: {directory.why_nobody()}", reason=NO_ENDPOINTS
    )
    lookups = {
        asyncio.ensure_future(one.client.lookup(keys, timeout_s=max(deadline.left_s, 1e-3))): one
        for one in members
    }
    running, begun_s = set(lookups), time.monotonic()
    try:
        while running:
            wait_s = _patience_s(directory, heard, len(keys)) + begun_s - time.monotonic() if heard else None
            done, running = await asyncio.wait(
                running,
                timeout=None if wait_s is None else max(0.0, wait_s),
                return_when=asyncio.FIRST_COMPLETED,
            )
            if not done:
                for task in running:
                    directory.was_late(lookups[task])
                break
            answers = [(lookups[task], task.exception(), task) for task in done]
            for member, error, task in answers:
                if error is None:
                    heard.append((member, task.result()))
                elif isinstance(error, CallFailed):
                    failure = error
                    member.failed(error)
                    directory.has_failed(member)
                else:
                    raise error
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    if not heard:
        raise failure
    found: Holders = []
    for position in range(len(keys)):
        said = [(member, statuses[position]) for member, statuses in heard]
        said.sort(key=lambda one: (_rank(one[1].state), not one[0].is_local, one[0].num_items))
        found.append([one for one in said if one[1].state in _HELD] or said[:1])
    return found


def _patience_s(directory: Directory, heard: list[tuple[Member, list[KeyStatus]]], num_keys: int) -> float:
    """How long a round may take once somebody has answered: one replica that says nothing must not cost all
    keys their deadline, and hardly any time where it is not needed."""
    settings = directory.settings
    found = all(
        any(statuses[position].state in _HELD for _, statuses in heard) for position in range(num_keys)
    )
    return settings.hedge_min_s if found else settings.check_timeout_s


def _rank(state: KeyState) -> int:
    return _HELD.index(state) if state in _HELD else len(_HELD)
