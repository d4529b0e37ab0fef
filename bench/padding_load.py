"""What padding costs under load, for a tower bench's result: the simulation of padding.py by a device's cost.

Owns which policies and loads go into the result. padding.py owns the traffic and the queue.
"""

from __future__ import annotations

import random
from dataclasses import asdict
from typing import Any

from padding import BACKLOG, LOADS, Device, arrivals_of, image_patches, powers_of_two, simulate

from encoder_service.ingest.qwen_vl import AreaLimits
from encoder_service.scheduler.buckets import BucketLadder, default_ladder
from encoder_service.scheduler.cost import H200_COST, CostModel
from encoder_service.scheduler.planner import Planner

NUM_IMAGES = 2000
AREA = AreaLimits(65_536, 2_097_152)
MODEL_ERROR = 0.05
SERVICE, POWERS = "service", "powers_of_two"


def padding_under_load(
    *, max_patches: int, max_items: int, seed: int, cost: CostModel = H200_COST, num_images: int = NUM_IMAGES
) -> dict[str, Any]:
    """Waste by offered load (None: a backlog) of the service's planner and ladder, and, to compare, of
    batches in order of arrival in sizes that are powers of two. max_patches, max_items: of one batch."""
    generator = random.Random(seed)
    sizes = [image_patches(generator, AREA) for _ in range(num_images)]
    ladder = default_ladder(max_patches, cost=cost)
    doubling = BucketLadder(powers_of_two(max_patches).buckets, cost)
    policies = {SERVICE: (ladder, Planner(max_patches, max_items, ladder))}
    policies[POWERS] = (doubling, Planner(max_patches, max_items))
    records = []
    for load in (*LOADS, BACKLOG):
        arrivals = arrivals_of(sizes, load, cost, random.Random(seed + 1))
        for policy, (buckets, planner) in policies.items():
            device = Device(buckets, MODEL_ERROR, seed)
            records.append(simulate(policy, planner, device, buckets, load, arrivals).record())
    return {
        "max_patches": max_patches,
        "max_items": max_items,
        "num_images": num_images,
        "seed": seed,
        "num_sizes": {SERVICE: len(ladder.sizes), POWERS: len(doubling.sizes)},
        "cost": asdict(cost),
        "records": records,
    }
