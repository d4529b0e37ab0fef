"""What the serving bench sends: photographs of a realistic mix of sizes, and when each is asked for.

Owns the files and the schedule; both follow from a seed, so that every process of the bench has the same. The
sizes are those of ``padding.py``'s mix, or one size throughout. Times are an open loop's: nobody waits for an
answer before the next request is due. torch is needed only for the mix's module.
"""

from __future__ import annotations

import io
import itertools
import random
import struct
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("astronaut.jpg", "coffee.jpg", "chelsea_exif_rotated.jpg")
CHAT = "chat"
# Mixes of one size throughout: pixels a side.
UNIFORM = {"1024": 1024, "448": 448, "224": 224}
# Mostly of one size: its share and those of others, by pixels a side.
HEAVY = {
    "448-heavy": ((448, 0.9), (224, 0.05), (1024, 0.05)),
    "1024-heavy": ((1024, 0.8), (448, 0.15), (1536, 0.05)),
}
MIXES = (CHAT, *HEAVY, *UNIFORM)
# What a server of a chat service would set, and what padding.py takes: an image's area after resizing.
MAX_PIXELS = 2_097_152
ORIENTATION = 0x0112
# A camera held upright stores its rows as they come and says how to turn them.
TURNED = 6
PROGRESSIVE_SHARE = 1 / 3
# In each cycle of a bursty load the first quarter has three times the mean rate, the rest a third of it.
BURST_CYCLE_S, BURST_PART, BURST_FACTOR = 1.0, 0.25, 3.0


@dataclass(frozen=True)
class Kind:
    """One file to be. width, height: pixels as they are stored, before any rotation."""

    name: str
    width: int
    height: int
    turned: bool
    progressive: bool
    quality: int


@dataclass(frozen=True)
class Request:
    """at_s: when it is due, from the start of the load. content: equal numbers are equal bytes; the file
    that they are made of is ``photo``."""

    at_s: float
    content: int
    photo: int


@dataclass(frozen=True)
class Load:
    """One load, whole: what every client derives its own part of the requests from.

    rate: requests a second. repeat_share: of the requests, for one of ``num_hot`` contents, whose popularity
    falls with their rank to the power of ``zipf``; each of the others is new.
    """

    rate: float
    duration_s: float
    num_photos: int
    seed: int
    repeat_share: float = 0.3
    num_hot: int = 1000
    zipf: float = 1.1
    bursty: bool = False

    def requests(self) -> list[Request]:
        """In order of time."""
        generator = random.Random(self.seed)
        cumulative = list(itertools.accumulate(rank**-self.zipf for rank in range(1, self.num_hot + 1)))
        photos = photos_in_turn(self.num_photos, random.Random(self.seed + 1))
        photo_of: dict[int, int] = {}
        fresh = itertools.count(self.num_hot)
        found = []
        for at_s in self._times(generator):
            if generator.random() < self.repeat_share:
                content = bisect_left(cumulative, generator.random() * cumulative[-1])
            else:
                content = next(fresh)
            if content not in photo_of:
                photo_of[content] = next(photos)
            found.append(Request(at_s, content, photo_of[content]))
        return found

    def new_share(self) -> float:
        """Of the requests, those that are the first for their content."""
        requests = self.requests()
        return len({one.content for one in requests}) / max(1, len(requests))

    def _times(self, generator: random.Random) -> Iterator[float]:
        """Random arrivals: exponential gaps at the mean rate, stretched where a burst's rate differs."""
        at_s = 0.0
        while True:
            at_s += generator.expovariate(self.rate)
            due_s = stretched(at_s) if self.bursty else at_s
            if due_s >= self.duration_s:
                return
            yield due_s


def stretched(at_s: float) -> float:
    """When a bursty load has had as many arrivals as a steady one of the same mean at ``at_s``."""
    cycles, within = divmod(at_s, BURST_CYCLE_S)
    in_burst = BURST_PART * BURST_FACTOR * BURST_CYCLE_S
    if within < in_burst:
        return cycles * BURST_CYCLE_S + within / BURST_FACTOR
    quiet_rate = (1 - BURST_PART * BURST_FACTOR) / (1 - BURST_PART)
    return cycles * BURST_CYCLE_S + BURST_PART * BURST_CYCLE_S + (within - in_burst) / quiet_rate


def photos_in_turn(count: int, generator: random.Random) -> Iterator[int]:
    """Every photo once in a random order, then again in another: any stretch of it has about the mix."""
    while True:
        order = list(range(count))
        generator.shuffle(order)
        yield from order


def load_of(encodes_per_s: float, **given: object) -> Load:
    """The load in which so many contents a second are new, by its own schedule."""
    load = Load(rate=encodes_per_s, **given)  # type: ignore[arg-type]
    for _ in range(3):
        load = Load(rate=encodes_per_s / load.new_share(), **given)  # type: ignore[arg-type]
    return load


# -- files -----------------------------------------------------------------------------------------------


def kinds_of(mix: str, count: int, *, scale: float, seed: int) -> list[Kind]:
    """The files of a mix. scale: of both sides, for machines that are slow."""
    generator = random.Random(seed)
    if mix in UNIFORM:
        side = max(16, round(UNIFORM[mix] * scale))
        return [Kind(mix, side, side, False, False, generator.randint(80, 92)) for _ in range(count)]
    if mix in HEAVY:
        return shuffled(
            [
                Kind(f"{side}", scaled, scaled, False, False, generator.randint(80, 92))
                for side, number in shared_out(HEAVY[mix], count)
                for scaled in [max(16, round(side * scale))] * number
            ],
            generator,
        )
    from padding import MIX

    found = []
    # By share rather than by chance: a small pool has the mix too.
    names = [name for name, (share, _) in MIX.items() for _ in range(round(share * count))]
    names += [next(iter(MIX))] * (count - len(names))
    for name in names[:count]:
        width, height = (max(16, round(side * scale)) for side in MIX[name][1](generator))
        turned = name == "phone photo" and height > width
        if turned:
            width, height = height, width
        progressive = name == "web image" and generator.random() < PROGRESSIVE_SHARE
        found.append(Kind(name, width, height, turned, progressive, generator.randint(75, 92)))
    return found


def shuffled(kinds: list[Kind], generator: random.Random) -> list[Kind]:
    generator.shuffle(kinds)
    return kinds


def shared_out(shares: Sequence[tuple[int, float]], count: int) -> list[tuple[int, int]]:
    """So many of each, the first with what rounding leaves."""
    others = [(side, round(share * count)) for side, share in shares[1:]]
    return [(shares[0][0], count - sum(number for _, number in others)), *others]


def write_photos(folder: Path, kinds: Sequence[Kind], *, seed: int, threads: int) -> int:
    """Writes ``<number>.jpg`` for each; their bytes in all."""
    folder.mkdir(parents=True)
    sources = [Image.open(ROOT / "tests" / "data" / "photos" / name).convert("RGB") for name in SOURCES]

    def write(number: int) -> int:
        data = photograph(kinds[number], sources, seed + number)
        (folder / f"{number}.jpg").write_bytes(data)
        return len(data)

    with ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(write, range(len(kinds))))


def read_photos(folder: Path) -> list[bytes]:
    return [(folder / f"{number}.jpg").read_bytes() for number in range(len(list(folder.glob("*.jpg"))))]


def photograph(kind: Kind, sources: Sequence[Image.Image], seed: int) -> bytes:
    """A part of a photograph at the wanted size, with a camera's noise: a photo's pixels, a photo's bytes."""
    generator = np.random.default_rng(seed)
    source = sources[int(generator.integers(len(sources)))]
    side = min(source.size) * float(generator.uniform(0.5, 1.0))
    left, top = (float(generator.uniform(0, extent - side)) for extent in source.size)
    picture = source.resize(
        (kind.width, kind.height), Image.Resampling.BICUBIC, box=(left, top, left + side, top + side)
    )
    pixels = np.asarray(picture)
    # A tile of it, repeated: as random to an encoder, and made in no time.
    tile = generator.normal(0, 3.0, (256, 256, 3)).round().astype(np.int16)
    noise = np.tile(tile, (-(-kind.height // 256), -(-kind.width // 256), 1))[: kind.height, : kind.width]
    noisy = np.clip(pixels + noise, 0, 255).astype(np.uint8)
    exif = Image.Exif()
    if kind.turned:
        exif[ORIENTATION] = TURNED
    file = io.BytesIO()
    Image.fromarray(noisy).save(
        file, "JPEG", quality=kind.quality, subsampling=2, progressive=kind.progressive, exif=exif
    )
    return file.getvalue()


def with_comment(data: bytes, seed: int, content: int) -> bytes:
    """The same picture as another file: a comment behind the first segment makes its bytes its own, so that
    no cache knows it, and costs no decoder anything."""
    text = struct.pack(">QQ", seed, content)
    end = 4 + int.from_bytes(data[4:6], "big")
    return b"".join((data[:end], b"\xff\xfe", struct.pack(">H", 2 + len(text)), text, data[end:]))
