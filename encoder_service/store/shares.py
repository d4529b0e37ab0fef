"""Which entries make room for whom, where namespaces share one store: fair shares.

Owns how much is whose, and which namespace gives. Which of its entries goes is ``use_order``'s; what an entry
is, whether somebody reads it, and what becomes of a victim are the store's. Pure Python, no torch, no clock.

Every namespace that has something here has a share of the capacity by its weight, and so has the one that
asks for room. Nobody is held to it while there is room: a namespace may use whatever is free, and whatever
others hold above their shares. It is a floor: what a namespace holds up to its share stays.

An entry is not divisible. The one that reaches over its namespace's share goes only to a namespace that asks
for no more than its own share, since that one could not get it otherwise; it is never taken for a namespace
that is itself above its share, so that the noisy push nobody below.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from encoder_service.store.integrity import Checked
from encoder_service.store.use_order import UseOrder

# Weights are counted in thousandths, so that sums of them are exact however often namespaces come and go.
WEIGHT_UNITS = 1000
MIN_WEIGHT, MAX_WEIGHT = 0.001, 1000.0

Name: TypeAlias = tuple[str, bytes]
"""An entry's namespace and key."""


@dataclass
class _Member:
    """A namespace with something in the store."""

    weight: int
    reserved_bytes: int = 0
    entries: UseOrder = field(default_factory=UseOrder)

    @property
    def num_bytes(self) -> int:
        """Of the entries and of what is reserved."""
        return self.entries.num_bytes + self.reserved_bytes


class FairShares(Checked):
    """weights: by namespace, MIN_WEIGHT to MAX_WEIGHT, to a thousandth; 1.0 for those that it leaves out."""

    def __init__(self, capacity_bytes: int, weights: Mapping[str, float] | None = None) -> None:
        """Raises ValueError for a weight out of bounds."""
        for namespace, weight in (weights or {}).items():
            if not MIN_WEIGHT <= weight <= MAX_WEIGHT:
                bounds = f"{MIN_WEIGHT} to {MAX_WEIGHT} are possible"
                raise ValueError(f"namespace {namespace!r} has the weight {weight}, {bounds}")
        self.capacity_bytes = capacity_bytes
        self._weights = {
            namespace: round(weight * WEIGHT_UNITS) for namespace, weight in (weights or {}).items()
        }
        self._members: dict[str, _Member] = {}
        self._total_weight = 0
        self._num_uses = 0

    def __len__(self) -> int:
        """Namespaces that have something here."""
        return len(self._members)

    def namespaces(self) -> set[str]:
        """Those that have entries."""
        return {namespace for namespace, member in self._members.items() if member.entries}

    def num_bytes(self, namespace: str) -> int:
        """Of its entries and of what is reserved for it."""
        member = self._members.get(namespace)
        return member.num_bytes if member else 0

    def num_entries(self, namespace: str) -> int:
        member = self._members.get(namespace)
        return len(member.entries) if member else 0

    def share_bytes(self, namespace: str) -> float:
        """What is the namespace's at least, beside those that have something here now."""
        return self.capacity_bytes * self._weight(namespace) / self._total_with(namespace)

    def keep(self, namespace: str, key: bytes, num_bytes: int) -> None:
        """A new entry, the most recently used."""
        member = self._join(namespace)
        assert key not in member.entries
        member.entries.add(key, self._next_use(), num_bytes)

    def use(self, namespace: str, key: bytes) -> None:
        """The entry is the most recently used now."""
        self._members[namespace].entries.use(key, self._next_use())

    def forget(self, namespace: str, key: bytes) -> None:
        """The entry is gone."""
        member = self._members[namespace]
        member.entries.remove(key)
        self._leave_if_empty(namespace, member)

    def reserve(self, namespace: str, num_bytes: int) -> None:
        """Room that was made and has no entry yet counts like one, and is no victim."""
        member = self._join(namespace)
        member.reserved_bytes += num_bytes

    def unreserve(self, namespace: str, num_bytes: int) -> None:
        """The entry is about to be kept, or will never be."""
        member = self._members[namespace]
        member.reserved_bytes -= num_bytes
        self._leave_if_empty(namespace, member)

    def victims(self, requester: str, num_bytes: int, is_evictable: Callable[[Name], bool]) -> Iterator[Name]:
        """What may go for num_bytes of the requester's, in the order in which it should, each as if those
        before it were gone. To be used up before anything changes here.

        First whatever is above its namespace's share, the least recently used first among those that are next
        in their namespaces; then the requester's own; at last, where the requester has come within its share
        by that, the entries that reach over their namespace's. Costs a look at each namespace, a logarithm of
        their number for each victim, and one step for each entry on the way that is not evictable.
        """
        total = self._total_with(requester)
        own = _Heads(requester, self._members.get(requester, _Member(self._weight(requester))), is_evictable)

        def is_claim() -> bool:
            return (own.left_bytes + num_bytes) * total <= self.capacity_bytes * own.weight

        may_reach_over = is_claim()
        heads: list[_Next] = []
        for namespace, member in self._members.items():
            if member.num_bytes * total > self.capacity_bytes * member.weight:
                _push(heads, own if namespace == requester else _Heads(namespace, member, is_evictable))
        reaching_over: list[_Heads] = []
        while heads:
            *_, head = heapq.heappop(heads)
            share = self.capacity_bytes * head.weight
            if head is not own and not may_reach_over and (head.left_bytes - head.next_bytes) * total < share:
                reaching_over.append(head)
                continue
            yield head.take()
            if head.left_bytes * total > share:
                _push(heads, head)
        while own.next_use is not None:
            yield own.take()
        if is_claim():
            for head in reaching_over:  # popped in order of use
                yield head.take()

    def integrity_steps(self) -> Iterator[None]:
        """Bytes, weights and orders agree."""
        assert self._total_weight == sum(member.weight for member in self._members.values())
        for namespace, member in self._members.items():
            assert member.entries or member.reserved_bytes, f"{namespace!r} has nothing and counts"
            assert member.weight == self._weight(namespace)
            assert member.reserved_bytes >= 0
            yield from member.entries.integrity_steps()

    def _weight(self, namespace: str) -> int:
        return self._weights.get(namespace, WEIGHT_UNITS)

    def _total_with(self, namespace: str) -> int:
        return self._total_weight + (0 if namespace in self._members else self._weight(namespace))

    def _next_use(self) -> int:
        self._num_uses += 1
        return self._num_uses

    def _join(self, namespace: str) -> _Member:
        member = self._members.get(namespace)
        if member is None:
            member = self._members[namespace] = _Member(self._weight(namespace))
            self._total_weight += member.weight
        return member

    def _leave_if_empty(self, namespace: str, member: _Member) -> None:
        if not member.entries and not member.reserved_bytes:
            del self._members[namespace]
            self._total_weight -= member.weight


class _Heads:
    """One namespace's evictable entries, one after another. left_bytes: what it has without those taken."""

    def __init__(self, namespace: str, member: _Member, is_evictable: Callable[[Name], bool]) -> None:
        self.weight, self.left_bytes = member.weight, member.num_bytes
        self.namespace = namespace
        self._entries = member.entries.going(lambda key: is_evictable((namespace, key)))
        self._advance()

    def take(self) -> Name:
        """The next entry's name; it counts as gone."""
        assert self._key is not None
        name = (self.namespace, self._key)
        self.left_bytes -= self.next_bytes
        self._advance()
        return name

    def _advance(self) -> None:
        self._key: bytes | None
        self.next_use: int | None
        self._key, self.next_use, self.next_bytes = next(self._entries, (None, None, 0))


_Next: TypeAlias = tuple[int, str, _Heads]
"""When the next entry of a namespace was used last; no two at the same time."""


def _push(heads: list[_Next], head: _Heads) -> None:
    if head.next_use is not None:
        heapq.heappush(heads, (head.next_use, head.namespace, head))
