"""Measures the cost of batches on the device that will run them.

Owns the choice of the batches that are timed after capture, and their timing: one replay between device
events, in the bucket that the ladder chooses, with its padding. ``scheduler/cost.py`` fits the cost model.

The batches are chosen so that they determine every term of the cost model. Each of several sizes is filled in
three ways: with long sequences (much attention); with as many short ones as there are slots (little
attention); and with short ones beside one that is long enough to need a bucket with a high bound (little
attention, but empty slots).
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable
from itertools import pairwise

import structlog

from encoder_service.engine.graphs import GraphRunner
from encoder_service.errors import ConfigurationError
from encoder_service.scheduler.buckets import Bucket, BucketLadder
from encoder_service.scheduler.cost import Calibration, Launch, Timing
from encoder_service.towers.fused_inputs import FusedInputs
from encoder_service.types import Grid

log = structlog.get_logger(__name__)

# The ladder's sizes nearest to these are timed, and its largest size.
SIZES = (64, 256, 784, 1568, 2304, 4096, 8192, 16_384)
# The longest sequences that a batch is filled with: 1024 pixels square at 16 pixels per patch side.
LONG_SEQUENCE = 4096
SHORTEST_SEQUENCE = 64
# Each round times every batch. The first round is a warm-up; as many follow as the time budget allows.
MIN_ROUNDS, MAX_ROUNDS = 2, 5
BUDGET_S = 1.2


def calibrate(
    runner: GraphRunner, merge_size: int, *, clock: Callable[[], float], budget_s: float = BUDGET_S
) -> Calibration | None:
    """The cost model of this device. None, with a warning, if the ladder's buckets do not determine it.

    Runs batches through the runner, so its counters change. clock: seconds. budget_s: after this time no
    further round begins, except for the first MIN_ROUNDS.
    """
    started_s = clock()
    batches: list[tuple[FusedInputs, Bucket]] = []
    for seqlens in calibration_batches(runner.ladder, merge_size):
        inputs = runner.prepare([grid_of(seqlen, merge_size) for seqlen in seqlens])
        if (bucket := runner.can_use(inputs)) is not None:
            batches.append((inputs, bucket))
    samples_us: list[list[float]] = [[] for _ in batches]
    order = list(range(len(batches)))
    shuffle = random.Random(0).shuffle  # noqa: S311 - an order, no secret
    for round_ in range(MAX_ROUNDS + 1):
        if round_ > MIN_ROUNDS and clock() - started_s >= budget_s:
            break
        # A batch is slower after a heavy one than after a light one, so the order changes in each round.
        shuffle(order)
        for index in order:
            us = replay_us(runner, batches[index][0])
            if round_:
                samples_us[index].append(us)
    timings = [
        Timing(
            Launch.of(inputs.seqlens),
            bucket.num_patches,
            bucket.num_sequences,
            bucket.max_seqlen,
            statistics.median(samples),
        )
        for (inputs, bucket), samples in zip(batches, samples_us, strict=True)
    ]
    try:
        calibration = Calibration.fit(timings, clock() - started_s)
    except ConfigurationError as error:
        log.warning("cost model is not calibrated", reason=error.message, timings=len(timings))
        return None
    cost = calibration.cost
    log.info(
        "cost model calibrated",
        fixed_us=round(cost.fixed_us),
        us_per_patch=round(cost.us_per_patch, 4),
        us_per_square=float(f"{cost.us_per_square:.4g}"),
        us_per_slot_patch=float(f"{cost.us_per_slot_patch:.4g}"),
        curve=bool(cost.curve),
        max_error=round(calibration.max_error, 3),
        mean_error=round(calibration.mean_error, 3),
        timings=len(timings),
        seconds=round(calibration.seconds, 2),
    )
    return calibration


def replay_us(runner: GraphRunner, inputs: FusedInputs) -> float:
    """Device time in microseconds of one batch of random pixels, from pixels in place to rows."""
    streams = runner.streams
    started, ended = streams.make_event(), streams.make_event()
    batch = runner.stage(inputs)
    streams.compute.run(batch.pixels.normal_)
    streams.compute.record(started)
    streams.compute.run(lambda: runner.forward(batch))
    streams.compute.record(ended)
    ended.synchronize()
    return started.elapsed_time(ended) * 1e3


def calibration_batches(ladder: BucketLadder, merge_size: int) -> list[list[int]]:
    """The sequence lengths of each batch to time. They are whole merges, and some bucket takes each batch."""
    unit = merge_size**2
    sizes = {min(ladder.sizes, key=lambda size: abs(size - target)) for target in SIZES}
    batches: list[list[int]] = []
    for size in sorted(sizes | {ladder.max_patches}):
        at_size = sorted(
            (bucket for bucket in ladder.buckets if bucket.num_patches == size),
            key=lambda bucket: (bucket.max_seqlen, bucket.num_sequences),
        )
        long = max(
            (bucket.max_seqlen for bucket in at_size if bucket.max_seqlen <= LONG_SEQUENCE),
            default=at_size[0].max_seqlen,
        )
        candidates = [equal(size, long, unit), shortest(size, at_size[0].num_sequences, unit)]
        for lower, bucket in pairwise(at_size if size <= SIZES[-1] else []):
            head = lower.max_seqlen // unit * unit + unit
            if bucket.max_seqlen >= head:
                candidates.append([head, *shortest(size - head, bucket.num_sequences - 1, unit)])
        batches += [
            batch
            for index, batch in enumerate(candidates)
            if batch not in candidates[:index] and ladder.choose(Launch.of(batch)) is not None
        ]
    return batches


def equal(size: int, seqlen: int, unit: int) -> list[int]:
    """Sequences of one length that fill ``size``, and one for the remainder."""
    seqlen = max(unit, seqlen // unit * unit)
    rest = size % seqlen // unit * unit
    return [seqlen] * (size // seqlen) + [rest] * (rest > 0)


def shortest(size: int, max_sequences: int, unit: int) -> list[int]:
    """Sequences that fill ``size``: at most ``max_sequences``, of at least SHORTEST_SEQUENCE patches each."""
    if size < unit or max_sequences < 1:
        return []
    count = max(1, min(max_sequences, size // SHORTEST_SEQUENCE))
    whole, more = divmod(size // unit, count)
    return [(whole + (index < more)) * unit for index in range(count)]


def grid_of(seqlen: int, merge_size: int) -> Grid:
    """The grid of an image of ``seqlen`` patches, as near to a square as whole merges allow."""
    merges = seqlen // merge_size**2
    height = next(side for side in range(math.isqrt(merges), 0, -1) if merges % side == 0)
    return Grid(1, height * merge_size, merges // height * merge_size)
