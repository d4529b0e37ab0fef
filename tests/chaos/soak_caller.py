"""A process of callers: ``soak_caller FOLDER NUMBER SEED TARGET``.

Owns the load of a soak: images of many sizes, most of them asked for again and again, pixels, bad inputs,
calls whose deadline passes, and streams that are read slowly or left in the middle.
While FOLDER/rest exists no call begins. FOLDER/<NUMBER>.json counts the calls once a second, and says whether
an image got other rows than before. The process may be killed at any moment.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import sys
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from PIL import Image

from lm_adapter import (
    CallFailed,
    EncodedRows,
    Grid,
    ImageItem,
    PixelItem,
    VisionEncoderClient,
)
from tests.chaos.fuzz_messages import make_call
from vision_encoder.v1 import encoder_pb2 as pb

NUM_IMAGES = 2000
ZIPF = 1.1
PAUSE_S = 0.08
"""Between two calls of one thread, the mean: the machine is not to be full."""
TOLERANCE = 1e-4
KNOWN_ROWS = 256
STREAMS = ("Encode", "Fetch")
METHOD = "/vision_encoder.v1.VisionEncoder/"


@lru_cache(maxsize=128)
def picture(number: int) -> bytes:
    """One of NUM_IMAGES files; the same for the same number in every process."""
    rng = random.Random(number)
    width, height = (int(16 * 2 ** rng.uniform(0, 5.3)) for _ in range(2))
    small = Image.frombytes("RGB", (8, 8), rng.randbytes(192))
    out = io.BytesIO()
    small.resize((width, height), Image.Resampling.BICUBIC).save(out, rng.choice(("JPEG", "PNG", "WEBP")))
    return out.getvalue()


class Callers:
    """Threads of one process, each with one kind of call."""

    def __init__(self, folder: Path, number: int, seed: int, target: str) -> None:
        self._folder, self._number, self._target = folder, number, target
        self._seed = seed
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._wrong: list[str] = []
        self._known: OrderedDict[int, np.ndarray[tuple[int, int], np.dtype[np.float32]]] = OrderedDict()
        weights = np.arange(1, NUM_IMAGES + 1, dtype=np.float64) ** -ZIPF
        self._cumulative = list(np.cumsum(weights))
        self._numbers = range(NUM_IMAGES)

    def run(self) -> None:
        with (
            VisionEncoderClient(self._target, timeout_s=60, waits=False) as shared,
            VisionEncoderClient(self._target, transports=("inline",), timeout_s=60, waits=False) as inline,
            grpc.insecure_channel(self._target) as channel,
        ):
            ways: tuple[Callable[[random.Random], None], ...] = (
                lambda rng: self._images(rng, shared),
                lambda rng: self._images(rng, inline),
                lambda rng: self._pixels(rng, rng.choice((shared, inline))),
                lambda rng: self._bad_input(rng, channel),
                lambda rng: self._too_late(rng, inline),
                lambda rng: self._left_stream(rng, channel),
            )
            for index, way in enumerate(ways):
                threading.Thread(target=self._forever, args=(way, index), daemon=True).start()
            while True:
                time.sleep(1)
                self._report()

    def _forever(self, way: Callable[[random.Random], None], index: int) -> None:
        rng = random.Random(f"{self._seed} {self._number} {index}")
        while True:
            while (self._folder / "rest").exists():
                time.sleep(0.1)
            try:
                way(rng)
            except CallFailed as error:
                self._count(f"failed {error.reason or type(error).__name__}")
            except Exception as error:
                self._complain(f"{type(error).__name__}: {error}")
            time.sleep(rng.uniform(0, 2 * PAUSE_S))

    # -- ways ------------------------------------------------------------------------------------------

    def _images(self, rng: random.Random, client: VisionEncoderClient) -> None:
        numbers = rng.choices(self._numbers, cum_weights=self._cumulative, k=rng.randint(1, 4))
        for number, outcome in zip(
            numbers, client.encode([ImageItem(picture(number)) for number in numbers]), strict=True
        ):
            if isinstance(outcome, EncodedRows):
                self._check(number, outcome)
                self._count(f"rows {outcome.tier.value}")
            else:
                self._count(f"item {outcome.reason}")

    def _pixels(self, rng: random.Random, client: VisionEncoderClient) -> None:
        grid = Grid(1, 2 * rng.randint(1, 8), 2 * rng.randint(1, 8))
        values = np.frombuffer(rng.randbytes(grid.num_patches * 1536), np.uint8).astype(np.float32) / 255
        item = PixelItem(values.reshape(grid.num_patches, 1536), grid)
        outcome = client.encode([item])[0]
        self._count("pixels" if isinstance(outcome, EncodedRows) else f"item {outcome.reason}")

    def _bad_input(self, rng: random.Random, channel: grpc.Channel) -> None:
        call = make_call(rng)
        try:
            if call.method in STREAMS:
                stream: Any = channel.unary_stream(METHOD + call.method)
                for _ in stream(call.request, timeout=60):
                    pass
            else:
                unary: Any = channel.unary_unary(METHOD + call.method)
                unary(call.request, timeout=60)
        except grpc.RpcError as error:
            code = error.code()  # type: ignore[attr-defined]
            if code in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN):
                self._complain(f"{call.kind} to {call.method}: {code.name}: {error.details()}")  # type: ignore[attr-defined]
        self._count("bad inputs")

    def _too_late(self, rng: random.Random, client: VisionEncoderClient) -> None:
        """A deadline that is too short."""
        fresh = [ImageItem(picture(rng.randrange(NUM_IMAGES)), digest=rng.randbytes(32)) for _ in range(4)]
        with contextlib.suppress(CallFailed):
            client.encode(fresh, timeout_s=rng.uniform(0.001, 0.05))
        self._count("deadlines")

    def _left_stream(self, rng: random.Random, channel: grpc.Channel) -> None:
        """A stream that is read slowly, and cancelled before its first message, in the middle, or not."""
        items = [
            pb.Item(
                modality=pb.MODALITY_IMAGE,
                encoded=picture(rng.randrange(NUM_IMAGES)),
                content_digest=rng.randbytes(32),
            )
            for _ in range(4)
        ]
        request = pb.EncodeRequest(items=items).SerializeToString()
        encode: Any = channel.unary_stream(METHOD + "Encode")
        stream = encode(request, timeout=60)
        for _ in range(rng.choice((0, 1, 10, 1 << 30))):
            if (self._folder / "rest").exists() or next(stream, None) is None:
                break
            time.sleep(rng.uniform(0, 0.05))
        stream.cancel()
        self._count("left streams")

    # -- the report ------------------------------------------------------------------------------------

    def _check(self, number: int, rows: EncodedRows) -> None:
        """The rows as before; another batch may differ in the last bits."""
        found = rows.numpy()
        with self._lock:
            expected = self._known.setdefault(number, found)
            self._known.move_to_end(number)
            if len(self._known) > KNOWN_ROWS:
                self._known.popitem(last=False)
        if found.shape != expected.shape:
            self._complain(f"image {number} has rows of {found.shape}, had {expected.shape}")
        elif (error := float(np.linalg.norm(found - expected))) > TOLERANCE * np.linalg.norm(expected):
            self._complain(f"image {number} has other rows: they differ by {error}")

    def _count(self, what: str) -> None:
        with self._lock:
            self._counts[what] += 1

    def _complain(self, text: str) -> None:
        with self._lock:
            self._wrong.append(text[:500])
            del self._wrong[20:]

    def _report(self) -> None:
        with self._lock:
            found = {"counts": dict(self._counts), "complaints": list(self._wrong)}
        partial = self._folder / f"{self._number}.partial"
        partial.write_text(json.dumps(found))
        partial.replace(self._folder / f"{self._number}.json")


if __name__ == "__main__":
    Callers(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]).run()
