"""The order in which a run's workers take its tests, so that they end together.

Owns what is known of the tests' times and how tests are dealt to workers. xdist's ``worksteal`` gives each
worker one stretch of the list, and half of the longest stretch's end to a worker without work. So a stretch
begins with what takes long or shares a costly fixture, which then stays with one worker, and ends with what
is short and may be taken over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

SECONDS_FILE = Path(__file__).with_name("seconds.txt")
# Of a test that is in no file, about the mean of those; and what is worth a place of its own.
UNKNOWN_S, LONG_S = 0.5, 5.0

One = TypeVar("One")


def known_seconds(lines: Iterable[str]) -> dict[str, float]:
    """By node id, with setup and teardown. lines: ``seconds node-id``, as ``--seconds-file`` writes them."""
    return {nodeid: float(seconds) for seconds, _, nodeid in (line.strip().partition(" ") for line in lines)}


def stretches(num_tests: int, num_workers: int) -> list[int]:
    """Tests in each worker's stretch, as worksteal cuts them."""
    lengths = []
    for left in range(num_workers, 0, -1):
        lengths.append(num_tests // left)
        num_tests -= lengths[-1]
    return lengths


def dealt(
    tests: Sequence[One],
    num_workers: int,
    unit_of: Callable[[One], object],
    seconds_of: Callable[[One], float],
) -> list[One]:
    """All tests in another order. unit_of: tests of one unit stay together. Longest units first, each to the
    worker with the least to do."""
    units: dict[object, list[One]] = {}
    for test in tests:
        units.setdefault(unit_of(test), []).append(test)
    weighed = [(sum(map(seconds_of, unit)), unit) for unit in units.values()]
    room = stretches(len(tests), num_workers)
    taken: list[list[One]] = [[] for _ in room]
    busy_s = [0.0] * len(room)
    short: list[One] = []
    for unit_s, unit in sorted(weighed, key=lambda one: -one[0]):
        fitting = [index for index in range(len(room)) if len(taken[index]) + len(unit) <= room[index]]
        if unit_s < LONG_S or not fitting:
            short += unit
            continue
        index = min(fitting, key=lambda index: busy_s[index])
        taken[index] += unit
        busy_s[index] += unit_s
    rest = iter(short)
    return [
        test
        for length, stretch in zip(room, taken, strict=True)
        for test in [*stretch, *(next(rest) for _ in range(length - len(stretch)))]
    ]


def unit_name(
    path: str, nodeid: str, shared: Mapping[str, object] | None, seconds: float
) -> tuple[str, object]:
    """The unit of a test. shared: parameters of the fixtures that it shares with others of its module, None
    where it shares none. What shares none and takes long is alone."""
    if shared is not None:
        return path, tuple(sorted((name, repr(value)) for name, value in shared.items()))
    return (path, nodeid) if seconds >= LONG_S else (path, None)
