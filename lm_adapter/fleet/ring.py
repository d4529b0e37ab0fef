"""Which replica is an item's home, and which come after it.

Owns rendezvous hashing (Thaler and Ravishankar, 1998) and the bound on a replica's load (after Mirrokni,
Thorup and Zadimoghaddam, 2018). Pure: the same key and the same targets give the same order in every process.
A replica that comes takes its share of the keys from all others, one that goes leaves its own to all others,
and no other key moves: with rendezvous hashing that is exact and needs no table of virtual nodes.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

__all__ = ["Placed", "TargetHash", "home_order", "load_bound", "within_load"]


class TargetHash:
    """One target's part of every score, hashed once."""

    def __init__(self, target: str) -> None:
        self.target = target
        self._started = hashlib.blake2b(target.encode() + b"\0", digest_size=8)

    def score(self, key: bytes) -> int:
        """64 bits, alike for all keys and targets."""
        hasher = self._started.copy()
        hasher.update(key)
        return int.from_bytes(hasher.digest(), "big")


class Placed(Protocol):
    """What the ring has to know of a replica. num_items: under way there."""

    @property
    def hash(self) -> TargetHash: ...

    @property
    def num_items(self) -> int: ...


PlacedT = TypeVar("PlacedT", bound=Placed)


def home_order(key: bytes | None, replicas: Iterable[PlacedT]) -> list[PlacedT]:
    """The key's home first, then where it would live without it, and so on. Without a key: the replica with
    the least under way first, by lot among equals: many clients with little to do have not one favourite."""
    if key is None:
        return sorted(replicas, key=lambda one: (one.num_items, random.random()))  # noqa: S311
    return sorted(replicas, key=lambda one: (one.hash.score(key), one.hash.target), reverse=True)


def load_bound(replicas: Sequence[Placed], factor: float, floor: int) -> int:
    """The items that one replica may have under way, the next one among them, before it is passed over."""
    total = 1 + sum(one.num_items for one in replicas)
    return max(floor, math.ceil(factor * total / max(1, len(replicas))))


def within_load(order: Sequence[PlacedT], bound: int) -> PlacedT | None:
    """The first with room, or the first of all where none has any; None for an empty order."""
    return next((one for one in order if one.num_items < bound), order[0] if order else None)
