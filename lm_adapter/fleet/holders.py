"""Which replicas hold what, asked of all of them: for callers that have keys and no digests.

Owns that round of Lookups and how their answers are put together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TypeAlias

from lm_adapter.errors import CallFailed, EncoderUnavailable
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
    answers = await asyncio.gather(
        *(one.client.lookup(keys, timeout_s=max(deadline.left_s, 1e-3)) for one in members),
        return_exceptions=True,
    )
    heard: list[tuple[Member, list[KeyStatus]]] = []
    failure: BaseException = EncoderUnavailable("no replica can be asked", reason="NO_ENDPOINTS")
    for member, answer in zip(members, answers, strict=True):
        if not isinstance(answer, BaseException):
            heard.append((member, answer))
            continue
        failure = answer
        if not isinstance(answer, CallFailed):
            break
        member.failed(answer)
        directory.has_failed(member)
    if not heard or not isinstance(failure, CallFailed):
        raise failure
    found: Holders = []
    for position in range(len(keys)):
        said = [(member, statuses[position]) for member, statuses in heard]
        said.sort(key=lambda one: (_rank(one[1].state), not one[0].is_local, one[0].num_items))
        found.append([one for one in said if one[1].state in _HELD] or said[:1])
    return found


def _rank(state: KeyState) -> int:
    return _HELD.index(state) if state in _HELD else len(_HELD)
