"""How an item's rows reach their caller: inline, or as a place in an arena that the caller reads.

Owns that choice and the counts of lost reads. A place (the wire contract's ``RowsPlace``) names a slot and
its generation. It holds nothing: the reader copies the rows and then compares the generation
(``vision_encoder.layout.control_page``). If an eviction has overtaken its copy, it requests the item again
with ``after_lost_read``. Those rows go inline, and are held until their bytes are copied.
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

# If a namespace loses more than this share of its reads, its rows go inline for WINDOW_S.
MAX_LOST_SHARE = 0.01
WINDOW_S = 1.0
# Number of namespaces whose reads are counted. The least recently used is dropped first.
MAX_NAMESPACES = 4096


class RowsRequest(NamedTuple):
    """How a call asks for its rows. tier: the memory that the caller has mapped; None for inline rows.
    after_lost_read: an eviction overtook the caller's earlier read."""

    namespace: str
    tier: TierName | None
    after_lost_read: bool


class LossRate:
    """The share of reads that one namespace lost: lost reads of the current window, over the reads of this
    window and the one before. Not every read is reported, so the number of reads is that of the reports or of
    the announced places, whichever is larger. clock: seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ends_s = clock() + WINDOW_S
        self._num_lost = 0
        self._announced, self._reported = [0, 0], [0, 0]  # in this window, in the one before
        self._inline_until_s = float("-inf")

    def count_announced(self) -> None:
        self._roll()
        self._announced[0] += 1

    def count_reported(self, num_read: int, num_lost: int) -> int:
        """num_read: successful reads, at announced places and by the directory. Returns the number of lost
        reads that count. Callers are not trusted: at most as many count as there were reads, plus one."""
        self._roll()
        self._reported[0] += num_read
        num_reads = max(sum(self._announced), sum(self._reported))
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
            self._announced, self._reported = (
                [0, counts[0] if is_next else 0] for counts in (self._announced, self._reported)
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

    async def prepare(
        self, delivered: EncodeResult, requested: RowsRequest
    ) -> tuple[EncodeResult, Location | None]:
        """The rows and the place where the caller reads them. With None as the place, the rows are in host
        memory and go inline. Takes over ``delivered``, even when it raises. Raises as
        ``Pipeline.ensure_tier``."""
        metrics, (namespace, tier, after_lost_read) = self._metrics, requested
        if after_lost_read and delivered.tier is CacheTier.MISS:
            metrics.encodes_repeated.inc()
        if tier is not None and not after_lost_read:
            reason = self._inline_reason(delivered, tier, namespace)
            if not reason:
                delivered = await self._pipeline.ensure_tier(delivered, namespace, tier)
                if delivered.held.tier == tier:
                    self._losses_of(namespace).count_announced()
                    return delivered, delivered.held.announce()
                reason = "no_room"
            metrics.count(metrics.inline_fallbacks, reason)
        return await self._pipeline.ensure_tier(delivered, namespace, "host"), None

    def count_reads(self, namespace: str, num_read: int, num_lost: int) -> None:
        """Counts reads that a caller reports. num_lost: reads that an eviction overtook."""
        self._metrics.directory_reads.inc(num_read)
        self._metrics.reads_lost.inc(self._losses_of(namespace).count_reported(num_read, num_lost))

    def _losses_of(self, namespace: str) -> LossRate:
        rate = self._losses.pop(namespace, None) or LossRate(self._pipeline.clock)
        self._losses[namespace] = rate
        while len(self._losses) > MAX_NAMESPACES:
            self._losses.popitem(last=False)
        return rate

    def _inline_reason(self, delivered: EncodeResult, tier: TierName, namespace: str) -> str:
        """The reason to send the rows inline although the caller has mapped ``tier``; empty if there is
        none."""
        max_bytes = self._store.max_announced_bytes(tier, namespace)
        if not max_bytes:  # the namespace has no arena of this tier
            return "no_room"
        if delivered.encoded.spec.num_bytes > max_bytes:
            return "large"
        return "losses" if self._losses_of(namespace).is_high() else ""
