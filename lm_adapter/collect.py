"""A whole call's outcomes in one list, from the stream of them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing
from typing import TypeVar

from lm_adapter.errors import CallFailed
from lm_adapter.types import Outcome

__all__ = ["collect", "collect_on_loop", "in_order"]

OutcomeT = TypeVar("OutcomeT")


def in_order(outcomes: Mapping[int, OutcomeT]) -> list[OutcomeT]:
    """Outcomes of every item, by index."""
    return [outcomes[index] for index in range(len(outcomes))]


def collect(stream: Iterable[tuple[int, Outcome]]) -> list[Outcome]:
    """The outcomes of a whole call, by index; those that came are in ``completed`` of a CallFailed."""
    outcomes: dict[int, Outcome] = {}
    try:
        outcomes.update(stream)
    except CallFailed as error:
        error.completed = outcomes
        raise
    return in_order(outcomes)


async def collect_on_loop(stream: AsyncGenerator[tuple[int, Outcome], None]) -> list[Outcome]:
    """As ``collect``."""
    outcomes: dict[int, Outcome] = {}
    try:
        async with aclosing(stream):
            async for finished in stream:
                outcomes.update([finished])
    except CallFailed as error:
        error.completed = outcomes
        raise
    return in_order(outcomes)
