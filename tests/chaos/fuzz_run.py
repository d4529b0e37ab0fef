"""Ten thousand bad inputs against the service, over gRPC.

Owns the judgement: every call ends in time with an answer of the contract, no answer blames the service, good
images keep getting the same rows in between, and in the end nothing is held: bytes, permits, encodes,
descriptors, threads, objects, memory. Run it by itself:

    python -m tests.chaos.fuzz_run --inputs 10000 [--seed N]
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import json
import logging
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import structlog
from PIL import Image

from encoder_service.checkpoints.synthetic import make_checkpoint
from tests.chaos.fuzz_messages import Call, make_call
from tests.chaos.soak import usage
from tests.integration.conftest import RunningService
from tests.integration.held import held, wait_until_free
from vision_encoder.v1 import encoder_pb2 as pb

SETTINGS: dict[str, object] = {
    "device": "cpu",
    "dtype": "float32",
    "listen": ("127.0.0.1:0",),
    "admin_listen": "",
    "max_image_pixels": 1_000_000,
    "max_patches_per_item": 2048,
    "max_message_bytes": 16 << 20,
    "max_encoded_bytes": 4 << 20,
    "max_queued_bytes": 256 << 20,
    "arena_bytes": 8 << 20,
    "ingest_threads": 2,
    "drain_grace_s": 10,
    "shm_prefixes": "ve-pixels-",
}
# Statuses of a caller's own mistake. All others are the service's.
CALLERS_FAULT = frozenset(
    (
        grpc.StatusCode.OK,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.ABORTED,
    )
)
OUR_FAULT = frozenset(("INTERNAL", "DEVICE_FAULT", ""))
STREAMS = ("Encode", "Fetch")
TIMEOUT_S = 60.0
NUM_CALLERS = 4
# A good image goes between so many inputs.
CANARY_EVERY = 50
# Growth from the first tenth of the inputs to the end: allocators and caches still fill.
MAX_NEW_BYTES = 96 << 20
MAX_NEW_OBJECTS = 0.10
MAX_NEW_DESCRIPTORS = 4
MAX_NEW_THREADS = 4


@dataclass
class Report:
    """The result of a run. complaints: what must not happen."""

    seed: int
    num_inputs: int = 0
    answers: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    complaints: list[str] = field(default_factory=list)
    figures: dict[str, list[float]] = field(default_factory=dict)
    seconds: float = 0.0
    slowest_ms: float = 0.0


class Fuzz:
    """One run against one service."""

    def __init__(self, service: RunningService, seed: int) -> None:
        self._service = service
        self.report = Report(seed)
        self._lock = threading.Lock()
        self._canary: bytes | None = None

    def run(self, num_inputs: int) -> Report:
        started_s = time.monotonic()
        warm = num_inputs // 10
        with (
            grpc.insecure_channel(self._service.target) as channel,
            ThreadPoolExecutor(NUM_CALLERS) as callers,
        ):
            self._channel: Any = channel
            self._many(callers, range(warm))
            wait_until_free(self._service)
            before = self._figures()
            self._many(callers, range(warm, num_inputs))
            with contextlib.suppress(AssertionError):
                wait_until_free(self._service)
            self._judge(before, self._figures())
        self.report.seconds = time.monotonic() - started_s
        return self.report

    def _many(self, callers: ThreadPoolExecutor, indices: range) -> None:
        for _ in callers.map(self._one, indices):
            pass

    def _one(self, index: int) -> None:
        """One input; which it is follows from seed and index alone."""
        call = make_call(random.Random(f"{self.report.seed} {index}"))
        started_s = time.monotonic()
        try:
            answers = self._ask(call)
        except Exception as error:  # what must not happen is what is looked for
            answers = [f"raised {type(error).__name__}: {error}"]
        took_ms = (time.monotonic() - started_s) * 1e3
        bad = [answer for answer in answers if answer.startswith(("raised", "fault"))]
        with self._lock:
            self.report.num_inputs += 1
            self.report.kinds[call.kind] += 1
            self.report.answers.update(answers)
            self.report.slowest_ms = max(self.report.slowest_ms, took_ms)
            self.report.complaints += [
                f"input {index} ({call.kind}, {call.method}): {answer}" for answer in bad
            ]
        if index % CANARY_EVERY == 0:
            self._check_canary(index)

    def _ask(self, call: Call) -> list[str]:
        path = f"/vision_encoder.v1.VisionEncoder/{call.method}"
        try:
            if call.method in STREAMS:
                found = list(self._channel.unary_stream(path)(call.request, timeout=TIMEOUT_S))
                return judge_events(call, [pb.ItemEvent.FromString(event) for event in found])
            self._channel.unary_unary(path)(call.request, timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            return [judge_status(error.code(), error.details())]  # type: ignore[attr-defined]
        return ["answered"]

    def _check_canary(self, index: int) -> None:
        """A good image, encoded anew, has the rows that it always had."""
        item = pb.Item(modality=pb.MODALITY_IMAGE, encoded=canary(), content_digest=index.to_bytes(32, "big"))
        request = pb.EncodeRequest(items=[item], namespace="canary").SerializeToString()
        path = "/vision_encoder.v1.VisionEncoder/Encode"
        try:
            events = [
                pb.ItemEvent.FromString(event)
                for event in self._channel.unary_stream(path)(request, timeout=TIMEOUT_S)
            ]
        except grpc.RpcError as error:
            rows = str(error).encode()
        else:
            rows = b"".join(event.chunk.data for event in events)
        with self._lock:
            self._canary = rows if self._canary is None else self._canary
            expected = np.frombuffer(self._canary, np.float32)
            if len(rows) != len(self._canary) or not np.allclose(
                np.frombuffer(rows, np.float32), expected, atol=1e-4
            ):
                self.report.complaints.append(
                    f"after input {index} a good image has other rows: {rows[:200]!r}"
                )

    def _figures(self) -> dict[str, float]:
        gc.collect()
        return {**usage(os.getpid()), "objects": float(len(gc.get_objects())), **held(self._service)}

    def _judge(self, before: dict[str, float], after: dict[str, float]) -> None:
        report = self.report
        report.figures = {name: [before[name], after[name]] for name in before}
        for name, most in (
            ("rss_bytes", before["rss_bytes"] + MAX_NEW_BYTES),
            ("objects", before["objects"] * (1 + MAX_NEW_OBJECTS)),
            ("descriptors", before["descriptors"] + MAX_NEW_DESCRIPTORS),
            ("threads", before["threads"] + MAX_NEW_THREADS),
        ):
            if after[name] > most:
                report.complaints.append(
                    f"{name} went from {before[name]:.0f} to {after[name]:.0f}, at most {most:.0f}"
                )
        report.complaints += [
            f"{name} is {number} without a caller" for name, number in held(self._service).items() if number
        ]
        engine = self._service.service.engine
        if engine is None or engine.fault is not None:
            report.complaints.append("the engine has a fault")


def judge_status(status: grpc.StatusCode, details: str | None) -> str:
    name = (details or "").partition(":")[0]
    return f"{status.name} {name}" if status in CALLERS_FAULT else f"fault {status.name}: {details}"


def judge_events(call: Call, events: list[pb.ItemEvent]) -> list[str]:
    """The answers by item, and whether each item has just one."""
    answers, answered = [], Counter[int]()
    for event in events:
        match event.WhichOneof("event"):
            case "result":
                answers.append("rows")
            case "failure":
                reason = event.failure.reason
                answers.append(
                    reason if reason not in OUR_FAULT else f"fault {reason}: {event.failure.message}"
                )
            case _:
                continue
        answered[event.item_index] += 1
    request = pb.EncodeRequest if call.method == "Encode" else pb.FetchRequest
    asked = request.FromString(call.request)
    number = len(asked.items) if isinstance(asked, pb.EncodeRequest) else len(asked.keys)
    if answered != Counter(range(number)):
        answers.append(f"fault: {number} items were asked for, answered were {dict(answered)}")
    return answers


def canary() -> bytes:
    out = io.BytesIO()
    Image.linear_gradient("L").resize((96, 64)).convert("RGB").save(out, "PNG")
    return out.getvalue()


def fuzz(num_inputs: int, seed: int, folder: Path) -> Report:
    """A run against a service of its own."""
    make_checkpoint(folder / "model", "qwen3_vl", "tiny", 5)
    service = RunningService(model=folder / "model", **SETTINGS).start()
    try:
        return Fuzz(service, seed).run(num_inputs)
    finally:
        service.stop()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    with tempfile.TemporaryDirectory() as folder:
        report = fuzz(options.inputs, options.seed, Path(folder))
    found = {**vars(report), "answers": dict(report.answers.most_common()), "kinds": dict(report.kinds)}
    print(json.dumps(found, indent=2))
    return 1 if report.complaints else 0


if __name__ == "__main__":
    sys.exit(main())
