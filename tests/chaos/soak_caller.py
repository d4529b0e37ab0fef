"""A process of callers: ``soak_caller FOLDER NUMBER SEED TARGET``.

Owns the load of a soak: images of many sizes, most of them asked for again and again, bad inputs, calls
whose deadline passes, and streams that are read slowly or left in the middle; a thread for each. While
FOLDER/rest exists no call begins. FOLDER/<NUMBER>.json counts the calls once a second, and says whether an
image got other rows than before. The process may be killed at any moment.
"""

from __future__ import annotations

import contextlib
import json
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from lm_adapter import CallFailed, EncodedRows, ImageItem, VisionEncoderClient
from tests.chaos.fuzz_messages import METHOD, answers_of, make_call
from tests.integration.images import photo
from vision_encoder.v1 import encoder_pb2 as pb

NUM_IMAGES = 2000
POPULARITY = list(accumulate(number**-1.1 for number in range(1, NUM_IMAGES + 1)))
PAUSE_S = 0.08
"""Between two calls of one thread, the mean: the machine is not to be full."""
TOLERANCE = 1e-4


def picture(number: int) -> bytes:
    """One of NUM_IMAGES files; the same for the same number in every process."""
    rng = random.Random(number)
    width, height = (int(16 * 2 ** rng.uniform(0, 5.3)) for _ in range(2))
    return photo(width, height, rng.choice(("JPEG", "PNG", "WEBP")), seed=number)


def fresh(rng: random.Random) -> tuple[bytes, bytes]:
    """A file, and a digest that makes it another one for the service."""
    return picture(rng.randrange(NUM_IMAGES)), rng.randbytes(32)


class Callers:
    """Each method but the last two is one call; it returns what to count."""

    def __init__(self, folder: Path, channel: grpc.Channel) -> None:
        self.folder, self.channel = folder, channel
        self.counts: Counter[str] = Counter()
        self.complaints: list[str] = []
        self.known: dict[int, Any] = {}

    def images(self, client: VisionEncoderClient, rng: random.Random) -> list[str]:
        numbers = rng.choices(range(NUM_IMAGES), cum_weights=POPULARITY, k=rng.randint(1, 4))
        found = client.encode([ImageItem(picture(number)) for number in numbers])
        for number, outcome in zip(numbers, found, strict=True):
            if number < 100 and isinstance(outcome, EncodedRows):  # few are known, and those asked for most
                rows = outcome.numpy()
                expected = self.known.setdefault(number, rows)
                error = np.linalg.norm(rows - expected)  # another batch may differ in the last bits
                assert error <= TOLERANCE * np.linalg.norm(expected), f"image {number} differs by {error}"
        return [f"rows {one.tier.value}" if isinstance(one, EncodedRows) else one.reason for one in found]

    def bad_input(self, rng: random.Random) -> list[str]:
        call = make_call(rng)
        for answer in answers_of(self.channel, call):
            assert not answer.startswith(("fault INTERNAL", "fault UNKNOWN")), (
                call.kind,
                call.method,
                answer,
            )
        return ["bad inputs"]

    def too_late(self, client: VisionEncoderClient, rng: random.Random) -> list[str]:
        items = [ImageItem(data, digest=digest) for data, digest in (fresh(rng) for _ in range(4))]
        with contextlib.suppress(CallFailed):
            client.encode(items, timeout_s=rng.uniform(0.001, 0.05))
        return ["deadlines"]

    def left_stream(self, rng: random.Random) -> list[str]:
        """Read slowly, and cancelled before its first message, in the middle, or not."""
        items = [
            pb.Item(modality=pb.MODALITY_IMAGE, encoded=data, content_digest=digest)
            for data, digest in (fresh(rng) for _ in range(4))
        ]
        encode: Any = self.channel.unary_stream(METHOD + "Encode")
        stream = encode(pb.EncodeRequest(items=items).SerializeToString(), timeout=60)
        for _ in range(rng.choice((0, 1, 10, 1 << 30))):
            if (self.folder / "rest").exists() or next(stream, None) is None:
                break
            time.sleep(rng.uniform(0, 0.05))
        stream.cancel()
        return ["left streams"]

    def repeat(self, way: Callable[[random.Random], list[str]], seed: str) -> None:
        rng = random.Random(seed)
        while True:
            while (self.folder / "rest").exists():
                time.sleep(0.1)
            try:
                self.counts.update(way(rng))
            except CallFailed as error:
                self.counts[f"failed {error.reason}"] += 1
            except Exception as error:
                self.complaints.append(f"{type(error).__name__}: {error}"[:500])
            time.sleep(rng.uniform(0, 2 * PAUSE_S))

    def report(self, number: str) -> None:
        file = self.folder / f"{number}.partial"
        file.write_text(json.dumps({"counts": self.counts.copy(), "complaints": self.complaints[:20]}))
        file.replace(self.folder / f"{number}.json")


def main(folder: str, number: str, seed: str, target: str) -> None:
    with (
        VisionEncoderClient(target, timeout_s=60, waits=False) as shared,
        VisionEncoderClient(target, transports=("inline",), timeout_s=60, waits=False) as inline,
        grpc.insecure_channel(target) as channel,
    ):
        callers = Callers(Path(folder), channel)
        ways = (
            partial(callers.images, shared),
            partial(callers.images, inline),
            callers.bad_input,
            partial(callers.too_late, inline),
            callers.left_stream,
        )
        for index, way in enumerate(ways):
            arguments = (way, f"{seed} {number} {index}")
            threading.Thread(target=callers.repeat, args=arguments, daemon=True).start()
        while True:
            time.sleep(1)
            callers.report(number)


if __name__ == "__main__":
    main(*sys.argv[1:])
