"""What the transport bench delivers, over which ways, and how one way is timed.

Owns the paths' names, the sizes and the items behind them, which every process of the bench derives for
itself from a size alone, and the timing of calls by any number of callers at once. torch is not needed here.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

MIB = 1 << 20
# In the order of tables and pictures.
PATHS = ("device_same_gpu", "device_nvlink", "host_shm", "inline_uds", "inline_tcp")
DEVICE_PATHS = PATHS[:2]
HOST_PATHS = PATHS[2:]
TRANSPORTS = {
    "device_same_gpu": "device",
    "device_nvlink": "device",
    "host_shm": "host",
    "inline_uds": "inline",
    "inline_tcp": "inline",
}
# Of rows that are resident, besides the client's own choice: leased over the broker's socket, over gRPC.
OTHER_WAYS = ("socket", "grpc")
SIZES_MIB = (0.4, 3.0, 12.0, 32.0, 128.0)
CONCURRENT_SIZES_MIB = (3.0, 12.0)
CONCURRENCIES = (1, 8, 32)
# Rows of the checkpoint that is served take 256 bytes; whole pages are as good for every width.
STEP_BYTES = 4096
MIN_RESIDENT = 3
MIN_CALLS = 3


def bytes_of(size_mib: float) -> int:
    """The rows of one item, to the page below."""
    return int(size_mib * MIB) // STEP_BYTES * STEP_BYTES


def num_resident(num_bytes: int, resident_bytes: int) -> int:
    """How many items of a size take turns, so that no cache holds all of them."""
    return max(MIN_RESIDENT, -(-resident_bytes // num_bytes))


def key_of(num_bytes: int, index: int) -> bytes:
    """The embedding key of the index-th item of a size."""
    return hashlib.sha256(f"{num_bytes} bytes, item {index}".encode()).digest()


def in_turn(count: int, caller: int) -> Iterator[int]:
    """Indices of items for one of several callers, for ever: each begins elsewhere, with a stride of its own
    that meets all of them."""
    return (position % count for position in itertools.count(caller * 7919))


@dataclass(frozen=True)
class Timed:
    """Milliseconds of every call, and the wall time in which all of them were made."""

    calls_ms: list[float]
    wall_s: float


def timed(calls: Sequence[Callable[[], object]], *, budget_s: float, max_calls: int) -> Timed:
    """Each of ``calls`` over and over on a thread of its own, all at once; one alone on this thread. Ends
    with the budget, but not before MIN_CALLS of each, or after ``max_calls`` of each. Raises what a call
    raised."""
    samples: list[list[float]] = [[] for _ in calls]
    if len(calls) == 1:
        begun_s = time.perf_counter()
        _repeat(calls[0], samples[0], begun_s + budget_s, max_calls)
        return Timed(samples[0], time.perf_counter() - begun_s)
    barrier = threading.Barrier(len(calls) + 1)
    errors: list[BaseException] = []

    def run(number: int) -> None:
        barrier.wait()
        try:
            _repeat(calls[number], samples[number], time.perf_counter() + budget_s, max_calls)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    barrier.wait()
    begun_s = time.perf_counter()
    for thread in threads:
        thread.join()
    wall_s = time.perf_counter() - begun_s
    if errors:
        raise errors[0]
    return Timed([sample for own in samples for sample in own], wall_s)


def _repeat(call: Callable[[], object], into: list[float], ends_s: float, max_calls: int) -> None:
    now_s = time.perf_counter()
    while len(into) < max_calls and (now_s < ends_s or len(into) < MIN_CALLS):
        begun_s = now_s
        call()
        now_s = time.perf_counter()
        into.append((now_s - begun_s) * 1e3)
