"""The reader's process of ``two_pods``: whole clients of the adapter.

Run as ``python -m tests.chaos.reader_pod TARGET KIND``; KIND is ``device`` or ``host`` for how rows have to
come, ``any`` for the best way. It reads one command in JSON from each line of its input and answers with one
line. A GPU is cuda:0 here, whichever it is on the host.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import lm_adapter.resident as resident_module
from lm_adapter import AsyncVisionEncoderClient, EncodedRows, EncoderError, ImageItem, VisionEncoderClient
from lm_adapter.calls import Server
from lm_adapter.shm.reader import MappedArena
from tests.integration.images import photo

PATIENCE_S = 30.0
# One rounding to bfloat16 is 0.2 %; another process may batch, and so sum, in another order.
RELATIVE = 2e-2
_requests: ContextVar[list[int]] = ContextVar("requests")


def counted_streams() -> AbstractContextManager[object]:
    """Adds an entry to ``_requests`` of the calling task for every stream of rows that it requests."""
    stream = Server.stream

    def counted(server: Server, *arguments: Any) -> Any:
        _requests.get().append(1)
        return stream(server, *arguments)

    return mock.patch.object(Server, "stream", counted)


@contextmanager
def late_reads(late_s: float) -> Iterator[None]:
    """Every copy begins up to late_s after its location became known. All copies run on threads, so that a
    delayed one delays no other."""
    read: Callable[..., Any] = MappedArena.read
    bound_s = resident_module.MAX_LOOP_COPY_S

    def late(self: MappedArena, *arguments: Any, **keywords: Any) -> Any:
        time.sleep(random.uniform(0, late_s))
        return read(self, *arguments, **keywords)

    setattr(MappedArena, "read", late)  # noqa: B010
    resident_module.MAX_LOOP_COPY_S = 0
    try:
        yield
    finally:
        setattr(MappedArena, "read", read)  # noqa: B010
        resident_module.MAX_LOOP_COPY_S = bound_s


def digest_of(rows: EncodedRows) -> str:
    content = rows.torch().contiguous().view(-1).view(torch.uint8).cpu().numpy()
    return hashlib.sha256(bytes(content)).hexdigest()


def item_of(image: list[int]) -> ImageItem:
    return _item(*image)


@cache
def _item(width: int, height: int, seed: int) -> ImageItem:
    return ImageItem(photo(width, height, seed=seed))


class ReaderPod:
    """An LM server's stand-in: two clients."""

    def __init__(self, target: str, kind: str) -> None:
        self.target = target
        self.device = torch.device("cuda:0" if kind == "device" else "cpu")
        self.transports = ("device", "host", "inline") if kind == "any" else (kind, "inline")
        self.client = self._client(self.transports)
        self.inline = self._client(("inline",))
        self.known: dict[int, str] = {}
        self.rows: dict[int, torch.Tensor] = {}

    def _client(self, transports: tuple[str, ...]) -> VisionEncoderClient:
        device = "cuda:0" if self.device.type == "cuda" else None
        return VisionEncoderClient(self.target, transports=transports, device=device, timeout_s=60)

    def close(self) -> None:
        self.client.close()
        self.inline.close()

    # -- commands --------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        transport = self.client.wait_transport()
        return {
            "pid": os.getpid(),
            "num_devices": torch.cuda.device_count(),
            "transport": transport.name,
            "reason": transport.reason,
        }

    def until(self, transport: str, image: list[int]) -> dict[str, Any]:
        """Calls until rows come in this way. Counts errors on the way, and those without a reason."""
        started_s = time.monotonic()
        reasons: Counter[str] = Counter()
        while time.monotonic() < started_s + PATIENCE_S:
            try:
                self.client.encode_one(item_of(image), timeout_s=2)
            except EncoderError as error:
                reasons[error.reason] += 1
            else:
                if self.client.transport.name == transport:
                    break
            time.sleep(0.02)
        return {"transport": self.client.transport.name, "reasons": reasons}

    def compare(self, images: list[list[int]], concurrency: int) -> dict[str, Any]:
        """Rows in the way under test against the very same rows inline, several images at a time."""
        with ThreadPoolExecutor(concurrency) as pool:
            found = list(pool.map(self._compare_one, images))
        return {
            "equal": sum(is_equal for is_equal, _, _ in found),
            "here": sum(is_here for _, is_here, _ in found),
            "worst": max(error for _, _, error in found),
        }

    def _compare_one(self, image: list[int]) -> tuple[bool, bool, float]:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        rows = self.client.encode_one(item_of(image))
        found = rows.torch()
        (inline,) = self.inline.fetch([rows.key])
        assert isinstance(inline, EncodedRows), inline
        expected = inline.torch()
        known = self.rows.setdefault(image[2], expected.clone()).float()
        error = (known - found.cpu().float()).norm() / known.norm()
        return torch.equal(found.cpu(), expected), found.device == self.device, float(error)

    def learn(self, images: list[list[int]]) -> dict[str, Any]:
        """The digest of each image's rows, inline. Answers with their largest size."""
        num_bytes = 0
        for image in images:
            rows = self.inline.encode_one(item_of(image))
            self.known[image[2]] = digest_of(rows)
            num_bytes = max(num_bytes, rows.num_bytes)
        return {"num_bytes": num_bytes}

    def hammer(
        self, images: list[list[int]], num_readers: int, seconds: float, late_s: float, by: str
    ) -> dict[str, Any]:
        """Readers that each take a random image again and again, and copy its rows late. Images are learned
        before. by: ``inline``, or the way under test."""
        transports = ("inline",) if by == "inline" else self.transports
        return asyncio.run(self._hammer(images, num_readers, seconds, late_s, transports))

    async def _hammer(
        self,
        images: list[list[int]],
        num_readers: int,
        seconds: float,
        late_s: float,
        transports: tuple[str, ...],
    ) -> dict[str, Any]:
        files = [(item_of(image), self.known[image[2]]) for image in images]
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2 * num_readers))
        count: Counter[str] = Counter()
        reasons: Counter[str] = Counter()
        device = "cuda:0" if self.device.type == "cuda" else None
        async with AsyncVisionEncoderClient(
            self.target, transports=transports, device=device, timeout_s=20
        ) as client:
            await client.wait_transport()
            ends_s = time.monotonic() + seconds

            async def read(seed: int) -> None:
                generator = random.Random(seed)
                while time.monotonic() < ends_s:
                    item, expected = generator.choice(files)
                    requests: list[int] = []
                    _requests.set(requests)
                    try:
                        rows = await client.encode_one(item)
                    except EncoderError as error:
                        reasons[error.reason] += 1
                        await asyncio.sleep(0.02)
                        continue
                    if transports == ("inline",):
                        await asyncio.sleep(generator.uniform(0, late_s))
                    count["wrong"] += digest_of(rows) != expected
                    count["right"] += digest_of(rows) == expected
                    count["without_request"] += not requests
                    count["most_requests"] = max(count["most_requests"], len(requests))

            with late_reads(late_s), counted_streams():
                await asyncio.gather(*(read(random.getrandbits(31)) for _ in range(num_readers)))
        return {"reasons": reasons, **{name: count[name] for name in RESULTS}}

    def watch_end(self, timeout_s: float) -> dict[str, Any]:
        """When, in seconds of the host's monotonic clock, this process had no arena mapped any more."""
        ends_s = time.monotonic() + timeout_s
        while is_mapped() and time.monotonic() < ends_s:
            time.sleep(0.002)
        return {"mapped": is_mapped(), "time_s": time.monotonic()}


RESULTS = ("wrong", "right", "without_request", "most_requests")


def is_mapped() -> bool:
    return "/memfd:vision-encoder" in Path("/proc/self/maps").read_text()


def main(target: str, kind: str) -> None:
    pod = ReaderPod(target, kind)
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = getattr(pod, command.pop("do"))(**command)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
