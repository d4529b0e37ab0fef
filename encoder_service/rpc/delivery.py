"""How an item's rows reach their caller: by their place in an arena, or inline.

Owns that choice and the counts of lost reads. Rows at a place are not held for the reader. It copies them and
then compares the slot's generation (``vision_encoder.layout.control_page``). A reader whose copy was
overtaken by an eviction requests the item again with ``after_lost_read``. The answer is inline, from rows
that stay held until their bytes are copied.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from encoder_service.ops.metrics import Metrics
from encoder_service.pipeline import EncodeResult, Pipeline
from encoder_service.store.arena import TierName
from encoder_service.store.embedding_store import Location
from encoder_service.types import CacheTier

# If more lost reads than this share of all reads are reported, rows go inline for a second.
MAX_LOST_SHARE = 0.01
WINDOW_S = 1.0
# Number of namespaces whose reads are counted. The least recently used is dropped first.
MAX_NAMESPACES = 4096


class Wanted(NamedTuple):
    """How a call wants its rows. tier: the memory that the caller has mapped; None for inline rows.
    after_lost_read: an eviction overtook the caller's earlier read."""

    namespace: str
    tier: TierName | None
    after_lost_read: bool


class LossRate:
    """The reads that one namespace lost in the current second, relative to its reads in this second and the
    one before: the reported ones, or the announced places where these are more. clock: seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ends_s = clock() + WINDOW_S
        self._num_lost = 0
        self._placed, self._reported = [0, 0], [0, 0]  # in this second, in the one before
        self._inline_until_s = float("-inf")

    def count_placed(self) -> None:
        self._roll()
        self._placed[0] += 1

    def count_reported(self, num_read: int, num_lost: int) -> int:
        """num_read: reads, at places and by the directory, that were not lost. Returns how many of the lost
        ones count: what callers state is not checked, so no more than there were reads, and one."""
        self._roll()
        self._reported[0] += num_read
        num_reads = max(sum(self._placed), sum(self._reported))
        num_lost = min(num_lost, max(0, num_reads + 1 - self._num_lost))
        self._num_lost += num_lost
        if num_lost and self._num_lost > MAX_LOST_SHARE * num_reads:
            self._inline_until_s = self._clock() + WINDOW_S
        return num_lost

    def is_high(self) -> bool:
        """Whether the namespace gets inline rows for now."""
        return self._clock() < self._inline_until_s

    def _roll(self) -> None:
        now_s = self._clock()
        if now_s >= self._ends_s:
            is_next = now_s < self._ends_s + WINDOW_S
            self._placed, self._reported = (
                [0, counts[0] if is_next else 0] for counts in (self._placed, self._reported)
            )
            self._num_lost = 0
            self._ends_s = now_s + WINDOW_S


class Delivery:
    """Delivers the rows of all calls of a server."""

    def __init__(self, pipeline: Pipeline, metrics: Metrics) -> None:
        self._losses: OrderedDict[str, LossRate] = OrderedDict()
        self._pipeline = pipeline
        self._store = pipeline.store
        self._metrics = metrics

    async def prepare(self, delivered: EncodeResult, wanted: Wanted) -> tuple[EncodeResult, Location | None]:
        """The rows with the place where the caller reads them, or with None: then they are in host memory and
        sent in chunks. Takes over ``delivered``, even when it raises. Raises as ``Pipeline.ensure_tier``."""
        metrics = self._metrics
        if wanted.after_lost_read and delivered.tier in (CacheTier.MISS, CacheTier.IN_FLIGHT):
            metrics.encodes_repeated.inc()
        if wanted.tier is not None and not wanted.after_lost_read:
            reason = self._inline_reason(delivered, wanted.tier, wanted.namespace)
            if not reason:
                delivered = await self._pipeline.ensure_tier(delivered, wanted.namespace, wanted.tier)
                if delivered.held.tier == wanted.tier:
                    self._losses_of(wanted.namespace).count_placed()
                    return delivered, delivered.held.announce()
                reason = "no_room"
            metrics.count(metrics.inline_fallbacks, reason)
        return await self._pipeline.ensure_tier(delivered, wanted.namespace, "host"), None

    def count_reads(self, namespace: str, num_read: int, num_lost: int) -> None:
        """Counts reads that callers report. num_lost: those that an eviction overtook."""
        self._metrics.directory_reads.inc(num_read)
        self._metrics.reads_lost.inc(self._losses_of(namespace).count_reported(num_read, num_lost))

    def _losses_of(self, namespace: str) -> LossRate:
        rate = self._losses.pop(namespace, None) or LossRate(self._pipeline.clock)
        self._losses[namespace] = rate
        while len(self._losses) > MAX_NAMESPACES:
            self._losses.popitem(last=False)
        return rate

    def _inline_reason(self, delivered: EncodeResult, tier: TierName, namespace: str) -> str:
        """Why the rows go inline although the caller could read them in place; empty if they do not."""
        max_bytes = self._store.max_announced_bytes(tier, namespace)
        if not max_bytes:  # this namespace has no such arena
            return "no_room"
        if delivered.encoded.spec.num_bytes > max_bytes:
            return "large"
        return "losses" if self._losses_of(namespace).is_high() else ""
