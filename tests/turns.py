"""Several GPUs under one run: its workers take turns on which is first, since tests run on ``cuda:0``."""

from __future__ import annotations

from collections.abc import MutableMapping

# How many GPUs there are, as whoever starts the run has counted: to ask for them here would fix their order.
NUM_GPUS = "TEST_NUM_GPUS"


def own_gpu_first(environment: MutableMapping[str, str]) -> None:
    """Turns CUDA_VISIBLE_DEVICES in a worker of xdist (gw0, gw1 and so on); nothing without a count."""
    worker = environment.get("PYTEST_XDIST_WORKER", "")
    num_gpus = int(environment.get(NUM_GPUS) or 1)
    if not worker.startswith("gw") or num_gpus < 2:
        return
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(index) for index in range(num_gpus)]
    turn = int(worker[2:]) % len(names)
    del environment[NUM_GPUS]  # or a process that a test starts would turn them once more
    environment["CUDA_VISIBLE_DEVICES"] = ",".join(names[turn:] + names[:turn])
