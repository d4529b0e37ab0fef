"""A load on a service, and its figures: a closed loop of callers, or an open loop of so many images a second.

Owns when images are sent and what is measured of each. In an open loop, latency counts from when an image was
due, also if the service or this process was late: a slow service cannot hide by slowing its callers down."""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from encoder_service.cli.bench_images import Contents
    from lm_adapter import AsyncVisionEncoderClient, EncodedRows

PERCENTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
FAILURE_PAUSE_S = 0.1
"""Before a caller of a closed loop goes on after a failed call: of a server that is away, every call fails at
once."""
HITS = ("device", "host")


@dataclass(frozen=True)
class Sample:
    """One image. due_s, sent_s, end_s: from the start of the load. reason: of its failure, or empty."""

    due_s: float
    sent_s: float
    end_s: float
    reason: str
    tier: str = ""
    timings: tuple[float, ...] = ()
    num_patches: int = 0
    num_bytes: int = 0

    @property
    def latency_ms(self) -> float:
        return (self.end_s - self.due_s) * 1e3


@dataclass(frozen=True)
class Extent:
    """When a load ends: after a time or a number of images, whichever comes first."""

    duration_s: float
    num_images: float

    def has_ended(self, at_s: float, num_sent: int) -> bool:
        return at_s >= self.duration_s or num_sent >= self.num_images


class Load:
    """One load on its event loop. samples: of what has ended, also while it runs."""

    def __init__(self, client: AsyncVisionEncoderClient, contents: Contents, extent: Extent) -> None:
        self.samples: list[Sample] = []
        self.num_sent = 0
        self._client = client
        self._contents = contents
        self._extent = extent
        self._loop = asyncio.get_running_loop()
        self._start_s = self._loop.time()

    @property
    def elapsed_s(self) -> float:
        return self._loop.time() - self._start_s

    async def closed(self, concurrency: int) -> None:
        """Callers that each send an image as soon as they have the rows of the one before."""
        async with asyncio.TaskGroup() as callers:
            for _ in range(concurrency):
                callers.create_task(self._call_repeatedly())

    async def open(self, rate: float) -> None:
        """Images at random times, ``rate`` a second on average, whatever has come back."""
        generator = random.Random()  # noqa: S311 - only spreads arrivals
        due_s = 0.0
        async with asyncio.TaskGroup() as calls:
            while not self._extent.has_ended(due_s := due_s + generator.expovariate(rate), self.num_sent):
                # In any case other calls get their turn.
                await asyncio.sleep(max(0.0, due_s - self.elapsed_s))
                self.num_sent += 1
                calls.create_task(self._send(due_s))

    async def _call_repeatedly(self) -> None:
        while not self._extent.has_ended(self.elapsed_s, self.num_sent):
            self.num_sent += 1
            if not await self._send(self.elapsed_s):
                await asyncio.sleep(FAILURE_PAUSE_S)

    async def _send(self, due_s: float) -> bool:
        """Whether the call itself went well."""
        from lm_adapter import CallFailed, ImageItem, ItemFailed

        item = ImageItem(self._contents.next())
        sent_s = self.elapsed_s
        try:
            rows = await self._client.encode_one(item)
        except (ItemFailed, CallFailed) as error:
            self.samples.append(Sample(due_s, sent_s, self.elapsed_s, error.reason))
            return isinstance(error, ItemFailed)
        self.samples.append(sample_of(rows, due_s, sent_s, self.elapsed_s))
        return True


def sample_of(rows: EncodedRows, due_s: float, sent_s: float, end_s: float) -> Sample:
    timings = tuple(getattr(rows.timings, each.name) for each in fields(rows.timings))
    return Sample(
        due_s, sent_s, end_s, "", rows.tier.value, timings, rows.grid_thw.num_patches, rows.num_bytes
    )


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """By nearest rank; None without values."""
    if not values:
        return None
    ranked = sorted(values)
    return {name: ranked[math.ceil(share * len(ranked)) - 1] for name, share in PERCENTILES.items()}


def figures(samples: Sequence[Sample], elapsed_s: float, duration_s: float) -> dict[str, Any]:
    """Of a load that took ``elapsed_s``. Rates count what ended within ``duration_s``, latencies all that was
    sent. stages_ms: of encoded images, by the service's clock; ``outside``: the rest of their latency."""
    from lm_adapter import StageTimings

    fine = [sample for sample in samples if not sample.reason]
    span_s = max(min(elapsed_s, duration_s), 1e-6)
    ended = [sample for sample in fine if sample.end_s <= span_s]
    misses = [sample for sample in fine if sample.tier == "miss"]
    tiers = Counter(sample.tier for sample in fine)
    names = [each.name for each in fields(StageTimings)]
    total, delivery = names.index("total_ms"), names.index("delivery_ms")
    stages = {
        name.removesuffix("_ms"): percentiles([sample.timings[index] for sample in misses])
        for index, name in enumerate(names)
    }
    stages["outside"] = percentiles(
        [max(0.0, each.latency_ms - each.timings[total] - each.timings[delivery]) for each in misses]
    )
    return {
        "elapsed_s": elapsed_s,
        "num_images": len(samples),
        "num_failed": len(samples) - len(fine),
        "images_per_s": len(ended) / span_s,
        "patches_per_s": sum(sample.num_patches for sample in ended) / span_s,
        "rows_bytes_per_s": sum(sample.num_bytes for sample in ended) / span_s,
        "latency_ms": percentiles([sample.latency_ms for sample in fine]),
        "late_ms": percentiles([(sample.sent_s - sample.due_s) * 1e3 for sample in samples]),
        "stages_ms": stages if misses else {},
        "tiers": dict(tiers),
        "hit_share": sum(tiers[tier] for tier in HITS) / len(fine) if fine else 0.0,
        "failures": dict(Counter(sample.reason for sample in samples if sample.reason)),
    }
