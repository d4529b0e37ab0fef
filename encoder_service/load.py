"""The device work that is queued, in seconds.

Owns the estimate of the device time of the items that are admitted and not yet encoded. Used from the event
loop only. Reads single numbers from counters that other threads write.
"""

from __future__ import annotations

from dataclasses import dataclass

from encoder_service.engine.jobs import EngineCounters
from encoder_service.scheduler.admission import Admission
from encoder_service.scheduler.buckets import BucketLadder


@dataclass(frozen=True)
class DeviceLoad:
    """The work that is admitted and not yet encoded.

    counters: the engine's, for the average time per patch. ladder: the buckets with their cost model; None
    where there is no cost model.
    """

    admission: Admission
    counters: EngineCounters
    ladder: BucketLadder | None = None

    @property
    def queued_s(self) -> float:
        """Seconds that the device will need for the queued work. With a cost model, assumes the largest
        batches; without one, uses the average time per patch so far (0 before the first batch)."""
        num_patches, num_squares = self.admission.num_patches, self.admission.num_squares
        if not num_patches:
            return 0.0
        if self.ladder is None:
            done = self.counters.patches
            return num_patches * self.counters.busy_s / done if done else 0.0
        cost = self.ladder.cost
        full, rest = divmod(num_patches, self.ladder.max_patches)
        us = full * cost.patches_us(self.ladder.max_patches) + cost.us_per_square * num_squares
        return (us + (cost.patches_us(rest) if rest else 0.0)) / 1e6
