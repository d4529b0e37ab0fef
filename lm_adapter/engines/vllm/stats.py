"""What the scheduler counts for vLLM's metrics, on its way to the process that has ``/metrics``.

Owns the record, and its line in vLLM's log. vLLM takes the record from the scheduler's half of the connector
at the end of a step, with both of its model runners. Ranks report to the scheduler (``rank_socket``), so that
an item counts once, however many ranks read it. ``api_server.metrics`` has the metrics. Imports neither vLLM
nor torch.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

from lm_adapter.engines.shared.error_text import MAX_REASON_CHARS
from lm_adapter.engines.shared.rank_socket import RowsRead

WAITS = "waits_s"
BYTES, QUERIES, HITS, LOST_READS, FAILURES = "bytes", "queries", "hits", "lost_reads", "failures"
LINE = (
    (BYTES, "MB by {}"),
    (QUERIES, "Num items"),
    (HITS, "Num items in cache"),
    (LOST_READS, "Num lost reads"),
    (FAILURES, "Num failed {}"),
)
"""What vLLM's log calls the counts, with their labels."""
MAX_WAITS = 10_000
"""Waits that a sum of records keeps. A logger that is never asked to log would collect them without end."""


class RowStats:
    """What happened since the last record; vLLM's ``ECConnectorStats``.

    data: seconds that requests waited, by WAITS; the counts by their names, each by its label, which is empty
    where a count has none. What did not happen has no entry. Not thread-safe."""

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        self.data: dict[str, Any] = copy.deepcopy(data or {})  # which several loggers of vLLM add up

    # What happens -----------------------------------------------------------------------------------------

    def waited(self, seconds: float) -> None:
        """A request waited so long for rows that it got."""
        self.data.setdefault(WAITS, []).append(seconds)

    def looked_up(self, num_items: int, *, is_hit: bool) -> None:
        """A request with so many items began. is_hit: vLLM's own cache had the rows of all."""
        self._add(QUERIES, num_items)
        if is_hit:
            self._add(HITS, num_items)

    def got(self, num_bytes: int, rows: RowsRead) -> None:
        """Every rank has read the rows of an item."""
        self._add(BYTES, num_bytes, rows.transport)
        if rows.was_lost:
            self._add(LOST_READS, 1)

    def failed(self, reason: str) -> None:
        """A request was rejected."""
        self._add(FAILURES, 1, reason[:MAX_REASON_CHARS])

    def _add(self, name: str, number: int, label: str = "") -> None:
        counts = self.data.setdefault(name, {})
        counts[label] = counts.get(label, 0) + number

    # What vLLM calls --------------------------------------------------------------------------------------

    def is_empty(self) -> bool:
        return not self.data

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: RowStats) -> RowStats:
        """With what the other has."""
        for name, counts in other.data.items():
            if name == WAITS:
                self.data[WAITS] = [*self.data.get(WAITS, ()), *counts][-MAX_WAITS:]
            else:
                for label, number in counts.items():
                    self._add(name, number, label)
        return self

    def reduce(self) -> dict[str, int | float]:
        """What vLLM writes into its log: the name and value of all that happened in the interval."""
        waits_s: Sequence[float] = sorted(self.data.get(WAITS, ()))
        line: dict[str, int | float] = {}
        if waits_s:
            line["Num waits for rows"] = len(waits_s)
            line["Avg wait (ms)"] = round(1e3 * sum(waits_s) / len(waits_s), 1)
            line["P90 wait (ms)"] = round(1e3 * waits_s[math.ceil(0.9 * len(waits_s)) - 1], 1)
        for name, text in LINE:
            for label, number in self.data.get(name, {}).items():
                line[text.format(label)] = round(number / 1e6, 3) if name == BYTES else number
        return line
