"""The requests of the serving bench: photographs in a mix of sizes, and the time when each is due.

Owns the files and the schedule. Both are derived from a seed, so every process of the bench derives the same
ones. The load is open-loop: a request is due whether or not earlier requests were answered.
"""

from __future__ import annotations

import io
import itertools
import math
import random
import struct
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("astronaut.jpg", "coffee.jpg", "chelsea_exif_rotated.jpg")
# Squares of 448-heavy: pixels of a side, and the share of images of that size.
SQUARES = ((448, 0.9), (224, 0.05), (1024, 0.05))
MIXES = ("chat", "448-heavy")
# The largest area of an image after resizing, as a chat service might configure it.
MAX_PIXELS = 2_097_152
ORIENTATION = 0x0112
# A camera held upright stores rotated pixels with this EXIF orientation.
TURNED = 6
PROGRESSIVE_SHARE = 1 / 3

# A plausible mix for a chat service, composed of common formats, not measured. Widths and heights in pixels,
# before the processor's rounding and area limits.
PHONE_PHOTOS = ((4032, 3024), (3024, 4032), (4000, 3000), (3000, 4000), (4080, 3072), (1920, 1080))
SCREENSHOTS = ((1920, 1080), (2560, 1440), (1440, 900), (1366, 768), (1170, 2532), (1080, 2400))
DOCUMENT_PAGES = ((827, 1169), (1240, 1754), (1654, 2339), (850, 1100), (1275, 1650))
WEB_RATIOS = (4 / 3, 3 / 2, 16 / 9, 1.0, 3 / 4, 2 / 3)


def web_image(generator: random.Random) -> tuple[float, float]:
    """About 800 x 600 pixels in usual aspect ratios. Most areas are between a quarter and four times that."""
    area = 480_000 * math.exp(generator.gauss(0.0, 0.7))
    ratio = generator.choice(WEB_RATIOS)
    return math.sqrt(area * ratio), math.sqrt(area / ratio)


def screenshot(generator: random.Random) -> tuple[float, float]:
    """A whole screen or, with equal probability, a part of one."""
    width, height = generator.choice(SCREENSHOTS)
    if generator.random() < 0.5:
        return width, height
    return width * generator.uniform(0.2, 1.0), height * generator.uniform(0.2, 1.0)


CHAT: Mapping[str, tuple[float, Callable[[random.Random], tuple[float, float]]]] = {
    "phone photo": (0.30, lambda generator: generator.choice(PHONE_PHOTOS)),
    "web image": (0.30, web_image),
    "thumbnail": (0.15, lambda generator: (generator.uniform(96, 320), generator.uniform(96, 320))),
    "screenshot": (0.15, screenshot),
    "document page": (0.10, lambda generator: generator.choice(DOCUMENT_PAGES)),
}


# -- requests --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """at_s: when it is due, from the start of the load. content: equal numbers mean equal bytes. photo: index
    of the file from which the content is made."""

    at_s: float
    content: int
    photo: int


@dataclass(frozen=True)
class Load:
    """One load. Every client derives its own part of the requests from it.

    rate: requests a second. repeat_share: the share of requests for one of ``num_hot`` contents, whose
    popularity is rank ** -zipf. Every other request has a new content.
    """

    rate: float
    duration_s: float
    num_photos: int
    seed: int
    repeat_share: float = 0.3
    num_hot: int = 1000
    zipf: float = 1.1

    def requests(self) -> list[Request]:
        """All requests in order of time. Arrivals are random, with exponential gaps."""
        generator = random.Random(self.seed)
        cumulative = list(itertools.accumulate(rank**-self.zipf for rank in range(1, self.num_hot + 1)))
        photos = photos_in_turn(self.num_photos, random.Random(self.seed + 1))
        photo_of: dict[int, int] = {}
        new_contents = itertools.count(self.num_hot)
        found = []
        at_s = 0.0
        while (at_s := at_s + generator.expovariate(self.rate)) < self.duration_s:
            if generator.random() < self.repeat_share:
                content = bisect_left(cumulative, generator.random() * cumulative[-1])
            else:
                content = next(new_contents)
            if content not in photo_of:
                photo_of[content] = next(photos)
            found.append(Request(at_s, content, photo_of[content]))
        return found

    def new_share(self) -> float:
        """The share of requests that are the first for their content."""
        requests = self.requests()
        return len({one.content for one in requests}) / max(1, len(requests))


def load_of(encodes_per_s: float, **given: object) -> Load:
    """The load that has this many new contents a second, measured on its own schedule."""
    load = Load(rate=encodes_per_s, **given)  # type: ignore[arg-type]
    for _ in range(3):
        load = Load(rate=encodes_per_s / load.new_share(), **given)  # type: ignore[arg-type]
    return load


def photos_in_turn(count: int, generator: random.Random) -> Iterator[int]:
    """All photos in a random order, then again in another order, so that any part has about the same mix."""
    while True:
        order = list(range(count))
        generator.shuffle(order)
        yield from order


# -- files -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PhotoSpec:
    """One file to be written. width, height: stored pixels, before any rotation."""

    name: str
    width: int
    height: int
    turned: bool
    progressive: bool
    quality: int


def specs_of(mix: str, count: int, *, scale: float, seed: int) -> list[PhotoSpec]:
    """The files of a mix. scale: factor for both sides, for slow machines."""
    generator = random.Random(seed)
    if mix == "448-heavy":
        (first, _), *others = SQUARES
        sides = [side for side, share in others for _ in range(round(share * count))]
        sides += [first] * (count - len(sides))
        generator.shuffle(sides)
        scaled = [max(16, round(side * scale)) for side in sides]
        return [PhotoSpec(mix, side, side, False, False, generator.randint(80, 92)) for side in scaled]
    # Counts follow the shares exactly, so that a small pool also has the right mix.
    names = [name for name, (share, _) in CHAT.items() for _ in range(round(share * count))]
    names += [next(iter(CHAT))] * (count - len(names))
    found = []
    for name in names[:count]:
        width, height = (max(16, round(side * scale)) for side in CHAT[name][1](generator))
        turned = name == "phone photo" and height > width
        if turned:
            width, height = height, width
        progressive = name == "web image" and generator.random() < PROGRESSIVE_SHARE
        found.append(PhotoSpec(name, width, height, turned, progressive, generator.randint(75, 92)))
    return found


def write_photos(folder: Path, specs: Sequence[PhotoSpec], *, seed: int, threads: int) -> int:
    """Writes ``<number>.jpg`` for each spec. Returns the total number of bytes."""
    folder.mkdir(parents=True)
    sources = [Image.open(ROOT / "tests" / "data" / "photos" / name).convert("RGB") for name in SOURCES]

    def write(number: int) -> int:
        data = photograph(specs[number], sources, seed + number)
        (folder / f"{number}.jpg").write_bytes(data)
        return len(data)

    with ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(write, range(len(specs))))


def read_photos(folder: Path) -> list[bytes]:
    return [(folder / f"{number}.jpg").read_bytes() for number in range(len(list(folder.glob("*.jpg"))))]


def photograph(spec: PhotoSpec, sources: Sequence[Image.Image], seed: int) -> bytes:
    """A crop of a photograph at the given size with camera-like noise, so that the file is as large as that
    of a real photo."""
    generator = np.random.default_rng(seed)
    source = sources[int(generator.integers(len(sources)))]
    side = min(source.size) * float(generator.uniform(0.5, 1.0))
    left, top = (float(generator.uniform(0, extent - side)) for extent in source.size)
    picture = source.resize(
        (spec.width, spec.height), Image.Resampling.BICUBIC, box=(left, top, left + side, top + side)
    )
    pixels = np.asarray(picture)
    # Repeats one tile of noise, which is fast to make and no easier to compress.
    tile = generator.normal(0, 3.0, (256, 256, 3)).round().astype(np.int16)
    noise = np.tile(tile, (-(-spec.height // 256), -(-spec.width // 256), 1))[: spec.height, : spec.width]
    noisy = np.clip(pixels + noise, 0, 255).astype(np.uint8)
    exif = Image.Exif()
    if spec.turned:
        exif[ORIENTATION] = TURNED
    file = io.BytesIO()
    Image.fromarray(noisy).save(
        file, "JPEG", quality=spec.quality, subsampling=2, progressive=spec.progressive, exif=exif
    )
    return file.getvalue()


def with_comment(data: bytes, seed: int, content: int) -> bytes:
    """The same picture as a different file: a comment after the first segment changes its digest, at no cost
    for the decoder."""
    text = struct.pack(">QQ", seed, content)
    end = 4 + int.from_bytes(data[4:6], "big")
    return b"".join((data[:end], b"\xff\xfe", struct.pack(">H", 2 + len(text)), text, data[end:]))
