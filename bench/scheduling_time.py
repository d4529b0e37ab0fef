"""How long the planner takes for a batch while 5,000 items wait, by the thread's own clock.

Owns the queues that are tried; the simulation of policies is scheduling.py's.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from encoder_service.scheduler.buckets import default_ladder
from encoder_service.scheduler.planner import Planner, Ticket

WAITING, BATCHES = 5000, 300
SIZES: dict[str, Callable[[random.Random], int]] = {
    "photographs": lambda generator: 4 * generator.choice((64, 72, 216, 400, 670, 972, 1980, 2028, 2028)),
    "64 of 256 patches": lambda _: 256,
    "thumbnails": lambda generator: 4 * generator.randint(64, 200),
}


def planner_times(waiting: int = WAITING, batches: int = BATCHES) -> list[dict[str, Any]]:
    """Median and 90th percentile of ``next_batch``, and the mean of ``add``, in microseconds."""
    ladder = default_ladder(16_384)
    records = []
    for sizes, draw in SIZES.items():
        for num_namespaces in (1, 2, 50, waiting):
            for with_deadlines in (False, True):
                generator = random.Random(1)
                planner = Planner(16_384, 64, ladder)

                def fill(
                    planner: Planner = planner,
                    generator: random.Random = generator,
                    draw: Callable[[random.Random], int] = draw,
                    num_namespaces: int = num_namespaces,
                    with_deadlines: bool = with_deadlines,
                ) -> float:
                    tickets = [
                        Ticket(
                            draw(generator),
                            deadline_s=generator.uniform(1e3, 1e4) if with_deadlines else None,
                            namespace=str(generator.randrange(num_namespaces)),
                        )
                        for _ in range(waiting - len(planner))
                    ]
                    started_s = time.thread_time()
                    for ticket in tickets:
                        planner.add(ticket)
                    return (time.thread_time() - started_s) / len(tickets) * 1e6

                add_us, times_us, num_items = fill(), [], 0
                for turn in range(batches):
                    started_s = time.thread_time()
                    plan = planner.next_batch(turn * 1e-3)
                    times_us.append((time.thread_time() - started_s) * 1e6)
                    num_items += len(plan.batch)
                    fill()
                times_us.sort()
                records.append(
                    {
                        "sizes": sizes,
                        "namespaces": num_namespaces,
                        "deadlines": with_deadlines,
                        "waiting": waiting,
                        "items_per_batch": num_items / batches,
                        "median_us": times_us[len(times_us) // 2],
                        "p90_us": times_us[int(0.9 * len(times_us))],
                        "add_us": add_us,
                    }
                )
    return records
