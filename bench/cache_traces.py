"""Mixes of requests for ``cache_policies.py``: what is asked for again, and when.

Owns the mixes. None was recorded from traffic: each is one pattern that a cache of visual tokens meets, drawn
from a seed that the result names, so that the same requests can be had again. An item's size is that of the
padding bench's images (photos, screenshots, pages), in patches; popularity and size are independent.
"""

from __future__ import annotations

import bisect
import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from padding import image_patches

from encoder_service.ingest.qwen_vl import AreaLimits

AREA = AreaLimits(65_536, 2_097_152)
NUM_HOT = 8000
NUM_SIZES = 4096


@dataclass(frozen=True)
class Trace:
    """keys: in the order in which they are asked for. sizes: patches, by key. text: the pattern."""

    name: str
    text: str
    keys: list[int]
    sizes: dict[int, int]

    @property
    def footprint(self) -> int:
        """Patches of everything that is asked for, each once."""
        return sum(self.sizes.values())


class Popularity:
    """Zipf: ranks' weights fall with rank to the power of ``exponent``."""

    def __init__(self, generator: random.Random, num_items: int, exponent: float) -> None:
        self._generator = generator
        self._cumulative = list(itertools.accumulate(rank**-exponent for rank in range(1, num_items + 1)))
        self.items = list(range(num_items))
        generator.shuffle(self.items)

    def draw(self) -> int:
        point = self._generator.random() * self._cumulative[-1]
        return self.items[bisect.bisect_left(self._cumulative, point)]


def zipf(generator: random.Random) -> Iterator[int]:
    """Zipf 0.9 over 8,000 items that stay as popular as they are."""
    popularity = Popularity(generator, NUM_HOT, 0.9)
    while True:
        yield popularity.draw()


def one_offs(generator: random.Random) -> Iterator[int]:
    """60 % of the requests are for items that are never seen again, between those of ``zipf``."""
    popularity, fresh = Popularity(generator, NUM_HOT, 0.9), itertools.count(NUM_HOT)
    while True:
        yield next(fresh) if generator.random() < 0.6 else popularity.draw()


def scans(generator: random.Random) -> Iterator[int]:
    """``zipf``, and now and then 4,000 new items in a row at nine of ten requests: a job over a data set."""
    popularity, fresh = Popularity(generator, NUM_HOT, 0.9), itertools.count(NUM_HOT)
    while True:
        for _ in range(12_000):
            yield popularity.draw()
        for _ in range(4444):
            yield next(fresh) if generator.random() < 0.9 else popularity.draw()


def loop(generator: random.Random) -> Iterator[int]:
    """Half ``zipf``, half one set of 3,000 items asked for in the same order over and over: an evaluation."""
    popularity = Popularity(generator, NUM_HOT, 0.9)
    looped = itertools.cycle(range(NUM_HOT, NUM_HOT + 3000))
    while True:
        yield next(looped) if generator.random() < 0.5 else popularity.draw()


def shifting(generator: random.Random) -> Iterator[int]:
    """Zipf 1.0 whose popular items are replaced by new ones: a hundredth of all each 400 requests."""
    popularity, fresh = Popularity(generator, NUM_HOT, 1.0), itertools.count(NUM_HOT)
    while True:
        for _ in range(400):
            yield popularity.draw()
        for _ in range(NUM_HOT // 100):
            popularity.items[int(NUM_HOT * generator.random() ** 2)] = next(fresh)


def chat(generator: random.Random) -> Iterator[int]:
    """400 conversations at a time. Each begins with 1 to 4 new items and asks for all of them at every turn,
    4 turns on the average; then it is over and another one begins."""
    fresh = itertools.count()
    talks: list[list[int]] = []
    while True:
        if len(talks) < 400:
            talks.append([next(fresh) for _ in range(generator.randint(1, 4))])
            at = len(talks) - 1
        else:
            at = generator.randrange(len(talks))
        yield from talks[at]
        if generator.random() < 0.25:
            talks[at] = talks[-1]
            talks.pop()


def bursts(generator: random.Random) -> Iterator[int]:
    """New items that are asked for 1 to 30 times within a few hundred requests and then no more, between a
    third of ``zipf``."""
    popularity, fresh = Popularity(generator, NUM_HOT, 0.9), itertools.count(NUM_HOT)
    waiting: list[int] = []
    while True:
        while len(waiting) < 300:
            waiting += [next(fresh)] * min(30, int(generator.paretovariate(1.1)))
        at = generator.randrange(len(waiting))
        waiting[at], waiting[-1] = waiting[-1], waiting[at]
        yield popularity.draw() if generator.random() < 1 / 3 else waiting.pop()


def prefetched(generator: random.Random) -> Iterator[int]:
    """``one-offs`` and ``chat`` in turn, 5,000 requests each, but each new item is asked for once more within
    30 requests: a gateway's prefetch, and the call that wanted it."""
    parts = [one_offs(generator), (2 * NUM_HOT + 10**9 + key for key in chat(generator))]
    seen: set[int] = set()
    again: list[tuple[int, int]] = []
    for at in itertools.count():
        key = next(parts[at // 5000 % 2])
        yield key
        if key not in seen:
            seen.add(key)
            again.append((at + generator.randint(1, 30), key))
        due = [each for when, each in again if when <= at]
        again = [(when, each) for when, each in again if when > at]
        yield from due


def day(generator: random.Random) -> Iterator[int]:
    """All but ``prefetched`` in turn, 3,000 requests at a time, each with items of its own."""
    parts = [pattern(generator) for pattern in (zipf, one_offs, scans, loop, shifting, chat, bursts)]
    numbers: dict[tuple[int, int], int] = {}
    while True:
        for which, part in enumerate(parts):
            for key in itertools.islice(part, 3000):
                # Popular items are the same in all mixes, the others are not.
                name = (0 if key < NUM_HOT and part is not parts[5] else which + 1, key)
                yield numbers.setdefault(name, len(numbers))


PATTERNS: Mapping[str, Callable[[random.Random], Iterator[int]]] = {
    "zipf": zipf,
    "one-offs": one_offs,
    "scans": scans,
    "loop": loop,
    "shifting": shifting,
    "chat": chat,
    "bursts": bursts,
    "prefetched": prefetched,
    "day": day,
}


def make_trace(name: str, num_requests: int, seed: int) -> Trace:
    generator = random.Random(f"{name} {seed}")
    sizes = [image_patches(generator, AREA) for _ in range(NUM_SIZES)]
    keys = list(itertools.islice(PATTERNS[name](generator), num_requests))
    by_key = {key: sizes[hash((key, seed)) % NUM_SIZES] for key in set(keys)}
    text = " ".join((PATTERNS[name].__doc__ or "").split())
    return Trace(name, text, keys, by_key)
