"""Ten thousand bad inputs against the service, over gRPC.

Every call has to end with an answer of the contract (``answers_of``); good images keep getting the same rows
in between; in the end nothing is held. ``soak`` looks at memory and descriptors.

    python -m tests.chaos.fuzz_run --inputs 10000 [--seed N]
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
import structlog

from encoder_service.checkpoints.synthetic import make_checkpoint
from tests.chaos.fuzz_messages import answers_of, events_of, make_call
from tests.integration.conftest import RunningService
from tests.integration.held import wait_until_free
from tests.integration.images import photo
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
NUM_CALLERS = 4
# A good image goes between so many inputs.
CANARY_EVERY = 50


def fuzz(num_inputs: int, seed: int, folder: Path) -> tuple[Counter[str], list[str]]:
    """The answers of a service of its own, and those that must not be. An input follows from seed and number
    alone. Raises AssertionError if something is held in the end."""
    make_checkpoint(folder / "model", "qwen3_vl", "tiny", 5)
    service = RunningService(model=folder / "model", **SETTINGS).start()
    good, answers, complaints = photo(seed=1), Counter[str](), list[str]()

    def good_rows(channel: grpc.Channel, index: int) -> np.ndarray:
        """Of a good image, encoded anew."""
        item = pb.Item(modality=pb.MODALITY_IMAGE, encoded=good, content_digest=index.to_bytes(32, "big"))
        request = pb.EncodeRequest(items=[item], namespace="good").SerializeToString()
        return np.frombuffer(
            b"".join(e.chunk.data for e in events_of(channel, "Encode", request)), np.float32
        )

    try:
        with grpc.insecure_channel(service.target) as channel, ThreadPoolExecutor(NUM_CALLERS) as callers:
            expected = good_rows(channel, num_inputs)

            def ask(index: int) -> list[str]:
                found = answers_of(channel, make_call(random.Random(f"{seed} {index}")))
                if index % CANARY_EVERY == 0:
                    rows = good_rows(channel, index)
                    if rows.shape != expected.shape or not np.allclose(rows, expected, atol=1e-4):
                        found.append("fault: a good image has other rows afterwards")
                return found

            for index, found in enumerate(callers.map(ask, range(num_inputs))):
                answers.update(found)
                faults = [answer for answer in found if answer.startswith("fault")]
                complaints += [f"input {index} of seed {seed}: {fault}" for fault in faults]
        wait_until_free(service)
        engine = service.service.engine
        assert engine is not None
        assert engine.fault is None
    finally:
        service.stop()
    return answers, complaints


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    with tempfile.TemporaryDirectory() as folder:
        answers, complaints = fuzz(options.inputs, options.seed, Path(folder))
    print(json.dumps({"complaints": complaints, "answers": dict(answers.most_common())}, indent=2))
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
