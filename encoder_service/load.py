"""How much work is queued for the device, in seconds, and how near the service is to its limit.

Owns the sums over items that are admitted and not yet encoded, the estimate of their device time, and the
formula of the saturation that autoscalers follow. Used from the event loop only. It reads single numbers from
counters that other threads write.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from encoder_service.engine.jobs import EngineCounters
from encoder_service.scheduler.buckets import BucketLadder


@dataclass
class DeviceLoad:
    """The work that is admitted and not yet encoded.

    counters: the engine's, for the average time per patch. ladder: the buckets with their cost model; None
    where there is no cost model.
    """

    counters: EngineCounters
    ladder: BucketLadder | None = None
    num_patches: int = 0
    _sum_squares: int = 0
    _items: dict[object, tuple[int, int]] = field(default_factory=dict)

    def add(self, item: object, num_patches: int, seqlen: int) -> None:
        """Adds an admitted item. seqlen: patches per attention sequence."""
        squares = num_patches * seqlen
        self._items[item] = num_patches, squares
        self.num_patches += num_patches
        self._sum_squares += squares

    def remove(self, item: object) -> None:
        """Removes an item that was encoded or failed. Does nothing for an item that was not added."""
        num_patches, squares = self._items.pop(item, (0, 0))
        self.num_patches -= num_patches
        self._sum_squares -= squares

    @property
    def queued_s(self) -> float:
        """Seconds that the device will need for the queued work. With a cost model, assumes the largest
        batches; without one, uses the average time per patch so far (0 before the first batch)."""
        if not self.num_patches:
            return 0.0
        if self.ladder is None:
            done = self.counters.patches
            return self.num_patches * self.counters.busy_s / done if done else 0.0
        cost = self.ladder.cost
        full, rest = divmod(self.num_patches, self.ladder.max_patches)
        us = full * cost.patches_us(self.ladder.max_patches) + cost.us_per_square * self._sum_squares
        return (us + (cost.patches_us(rest) if rest else 0.0)) / 1e6


def saturation(busy_share: float, queued_s: float, full_queue_s: float, filled_share: float) -> float:
    """From 0 (idle) to 1 (more work only waits or is refused): the largest of

    - the share of recent time that the device computed,
    - the queued device work in seconds, divided by full_queue_s,
    - the share of the admission limits that is in use.
    """
    return min(1.0, max(0.0, busy_share, queued_s / full_queue_s, filled_share))
