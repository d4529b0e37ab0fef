"""The order of the queue: by priority, within it by namespaces' shares, within a namespace first come.

Owns who is next, and forgets whoever has nothing to wait for. What fits beside whom is the planner's.

Namespaces share a priority's device time by start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996):
a namespace's tag is what it has been given over its weight, the least tag is next, and a namespace that comes
starts where those that wait are on the average, so that nobody saves up time by being away. Tags move when an
item goes and not when it comes: what is withdrawn costs nothing. An item costs the queue O(log n) from its
coming to its going.

A higher priority goes first, but for one batch after every AGING_BATCHES that it leads while a lower one
waits: that batch is led by the lower priority that has not led for longest.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, count
from operator import attrgetter

from encoder_service.scheduler.ticket import Ticket

# Batches that the highest priority leads in a row while a lower one waits.
AGING_BATCHES = 16
# A flow that has nothing waiting.
IDLE = -1


class Flow:
    """One namespace within one priority. stamp: of its entry in its line's heap; IDLE: nothing waits."""

    __slots__ = ("line", "namespace", "stamp", "tag", "waiting", "weight")

    def __init__(self, line: Line, namespace: str, weight: float) -> None:
        self.line = line
        self.namespace = namespace
        self.weight = weight
        self.waiting: OrderedDict[Ticket, None] = OrderedDict()
        self.tag = 0.0
        self.stamp = IDLE


class Line:
    """One priority's namespaces."""

    def __init__(self, priority: int, weights: Mapping[str, float]) -> None:
        self.priority = priority
        self._weights = weights
        self._flows: dict[str, Flow] = {}
        self._heap: list[
            tuple[float, int, Flow]
        ] = []  # by tag; an entry is stale unless its stamp is the flow's
        self._idle: list[tuple[float, int, Flow]] = []  # flows that went beyond the tag, which stays noted
        self._stamps = count()
        self._tag = 0.0
        self._total_weight = 0.0  # of those that wait
        self.num_waiting = 0

    @property
    def num_flows(self) -> int:
        """Namespaces that are remembered, whether they wait or not."""
        return len(self._flows)

    def add(self, ticket: Ticket) -> None:
        flow = self._flows.get(ticket.namespace)
        if flow is None:
            flow = Flow(self, ticket.namespace, self._weights.get(ticket.namespace, 1.0))
            self._flows[ticket.namespace] = flow
        if not flow.waiting:
            flow.tag = max(flow.tag, self._tag)
            self._total_weight += flow.weight
            self._enter(flow)
        flow.waiting[ticket] = None
        ticket.flow = flow
        self.num_waiting += 1

    def withdraw(self, ticket: Ticket) -> None:
        """Takes a ticket out at no cost to its namespace."""
        flow = ticket.flow
        assert flow is not None
        del flow.waiting[ticket]
        ticket.flow = None
        self.num_waiting -= 1
        if not flow.waiting:
            self._rest(flow)

    def serve(self, tickets: Sequence[Ticket]) -> None:
        """Takes out what goes to the device, at the cost of its namespaces' tags. The tag that newcomers
        start at moves up by the time that was given over the weights of those that waited, and at least to
        the least tag of those that wait still: a stream of newcomers holds nobody back for good."""
        charge = 0.0
        served = set()
        for ticket in tickets:
            flow = ticket.flow
            assert flow is not None
            del flow.waiting[ticket]
            ticket.flow = None
            flow.tag += ticket.charge / flow.weight
            charge += ticket.charge
            served.add(flow)
        self.num_waiting -= len(tickets)
        self._tag += charge / self._total_weight
        entries = []
        for flow in sorted(served, key=attrgetter("stamp")):
            if flow.waiting:
                flow.stamp = next(self._stamps)
                entries.append((flow.tag, flow.stamp, flow))
            else:
                self._rest(flow)
        heap = self._heap
        while heap and heap[0][1] != heap[0][2].stamp:  # most of those that went were at the top
            if entries:
                heapq.heapreplace(heap, entries.pop())
            else:
                heapq.heappop(heap)
        for entry in entries:
            heapq.heappush(heap, entry)
        if heap:
            self._tag = max(self._tag, heap[0][0])
        while self._idle and self._idle[0][0] <= self._tag:
            flow = heapq.heappop(self._idle)[2]
            if flow.stamp == IDLE and flow.tag <= self._tag and self._flows.get(flow.namespace) is flow:
                del self._flows[flow.namespace]

    def order(self) -> Iterator[Ticket]:
        """All that wait, in the order of their turns if each went at its turn. Valid until something comes or
        goes."""
        if len(self._flows) == 1:
            for flow in self._flows.values():
                yield from flow.waiting
            return
        heap = self._heap.copy()
        coming: dict[int, Iterator[Ticket]] = {}
        while heap:
            tag, stamp, flow = heap[0]
            if stamp != flow.stamp:
                heapq.heappop(heap)
            elif len(flow.waiting) == 1:
                yield from flow.waiting
                heapq.heappop(heap)
            else:
                rest = coming.get(stamp)
                if rest is None:
                    rest = coming[stamp] = iter(flow.waiting)
                ticket = next(rest, None)
                if ticket is None:
                    heapq.heappop(heap)
                else:
                    yield ticket
                    heapq.heapreplace(heap, (tag + ticket.charge / flow.weight, stamp, flow))

    def _enter(self, flow: Flow) -> None:
        if len(self._heap) > 2 * len(self._flows) + 16:  # who comes and goes between two batches
            self._heap = [entry for entry in self._heap if entry[1] == entry[2].stamp]
            heapq.heapify(self._heap)
        flow.stamp = next(self._stamps)
        heapq.heappush(self._heap, (flow.tag, flow.stamp, flow))

    def _rest(self, flow: Flow) -> None:
        """Nothing of a flow waits any more; it is forgotten as soon as that gains it nothing."""
        flow.stamp = IDLE
        self._total_weight -= flow.weight
        if flow.tag <= self._tag:
            del self._flows[flow.namespace]
            return
        if len(self._idle) > 2 * len(self._flows) + 16:
            self._idle = [entry for entry in self._idle if entry[2].stamp == IDLE]
            heapq.heapify(self._idle)
        heapq.heappush(self._idle, (flow.tag, next(self._stamps), flow))


class FairQueue:
    """All that waits. weights: of namespaces' shares; 1 for those left out. Raises nothing for any weight
    above 0."""

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._weights = dict(weights or {})
        self._lines: OrderedDict[int, Line] = OrderedDict()  # the one that has not led for longest first
        self._priorities: list[int] = []  # ascending
        self._led_in_a_row = 0
        self._sizes: list[int] = []  # heap of the keys of _num_of_size
        self._num_of_size: dict[int, int] = {}  # some 0
        self.num_patches = 0
        self._len = 0

    def __len__(self) -> int:
        return self._len

    @property
    def num_flows(self) -> int:
        """Pairs of priority and namespace that are remembered."""
        return sum(line.num_flows for line in self._lines.values())

    @property
    def least_patches(self) -> int:
        """Of the smallest item that waits; 0 when none does."""
        while self._sizes and not self._num_of_size[self._sizes[0]]:
            del self._num_of_size[heapq.heappop(self._sizes)]
        return self._sizes[0] if self._sizes else 0

    def add(self, ticket: Ticket) -> None:
        """Queues a ticket behind those of its priority and namespace."""
        line = self._lines.get(ticket.priority)
        if line is None:
            line = self._lines[ticket.priority] = Line(ticket.priority, self._weights)
            insort(self._priorities, line.priority)
        line.add(ticket)
        self._len += 1
        size = ticket.num_patches
        self.num_patches += size
        if size in self._num_of_size:
            self._num_of_size[size] += 1
        else:
            self._num_of_size[size] = 1
            heapq.heappush(self._sizes, size)

    def withdraw(self, ticket: Ticket) -> None:
        """Takes a ticket out at no cost to its namespace."""
        assert ticket.flow is not None
        line = ticket.flow.line
        line.withdraw(ticket)
        self._forget_sizes((ticket,))
        self._end_if_empty(line)

    def serve(self, tickets: Sequence[Ticket]) -> None:
        """Takes out what goes to the device together, at the cost of its namespaces' shares."""
        of_line: dict[Line, list[Ticket]] = {}
        for ticket in tickets:
            assert ticket.flow is not None
            of_line.setdefault(ticket.flow.line, []).append(ticket)
        for line, served in of_line.items():
            line.serve(served)
            self._end_if_empty(line)
        self._forget_sizes(tickets)

    def _end_if_empty(self, line: Line) -> None:
        if not line.num_waiting:  # whoever was ahead kept nobody waiting
            del self._lines[line.priority]
            del self._priorities[bisect_left(self._priorities, line.priority)]

    def _forget_sizes(self, tickets: Iterable[Ticket]) -> None:
        for ticket in tickets:
            self._num_of_size[ticket.num_patches] -= 1
            self.num_patches -= ticket.num_patches
            self._len -= 1

    def turn(self) -> Iterator[Ticket]:
        """All that wait, in the order of the batch that is to be made now, whose head always goes: counts
        whose turn it is."""
        if len(self._priorities) < 2:
            self._led_in_a_row = 0
            leads = self._priorities[-1] if self._priorities else None
        elif self._led_in_a_row < AGING_BATCHES:
            self._led_in_a_row += 1
            leads = self._priorities[-1]
        else:
            self._led_in_a_row = 0
            leads = next(priority for priority in self._lines if priority != self._priorities[-1])
        if leads is not None:
            self._lines.move_to_end(leads)
        return self._order(leads)

    def drain(self) -> list[Ticket]:
        """Takes everything out, in no useful order."""
        waiting = list(self._order(None))
        for ticket in waiting:
            self.withdraw(ticket)
        return waiting

    def _order(self, leads: int | None) -> Iterator[Ticket]:
        """The line that leads, then the others by priority."""
        others = (priority for priority in reversed(self._priorities) if priority != leads)
        first = () if leads is None else (leads,)
        return chain.from_iterable(self._lines[priority].order() for priority in chain(first, others))
