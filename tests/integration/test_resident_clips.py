"""Clips in shared memory, over the broker's socket: what a frame does not hold is asked for over gRPC."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
import torch

from encoder_service.transport.broker_options import ConnectionLimits
from lm_adapter import EncodedRows, FramesItem, VisionEncoderClient
from tests.integration.test_shared_memory import sharing
from tests.unit.transport.broker_rig import RawClient, wait_until
from vision_encoder.v1 import broker_pb2

NUM_FRAMES, NUM_CLIPS = 900, 14


@pytest.mark.parametrize("num_readers", [1, 3])
def test_clips_whose_timestamps_overflow_a_frame_come_all_the_same(
    checkpoints: dict[str, Path], device: torch.device, num_readers: int
) -> None:
    """Each has 7 KB of timestamps: nine fit a reply. No call waits, and no lease is left."""
    frames = np.random.default_rng(0).integers(0, 255, (NUM_FRAMES, 32, 32, 3), np.uint8)
    times_s = tuple(number / 2 for number in range(NUM_FRAMES))
    with sharing(checkpoints["qwen3_vl"], device, arena_bytes=128 << 20, device_arena_bytes=0) as shared:
        target = shared.service.target
        with VisionEncoderClient(target, timeout_s=60, directory=False) as client:
            client.wait_transport()
            keys = []
            for number in range(NUM_CLIPS):
                frames[0, 0, 0, 0] = number
                rows = client.encode_one(FramesItem(frames, timestamps_s=times_s))
                keys.append(rows.key)
            wait_until(lambda: len(shared.leases) == 0, "the end of every lease")
            counters = shared.memory.broker.counters
            fetched, missed = counters.fetched, counters.fetch_misses
            since_s = time.monotonic()
            outcomes = client.fetch(keys, num_readers=num_readers)
            took_s = time.monotonic() - since_s
            for outcome in outcomes:
                assert isinstance(outcome, EncodedRows)
                assert outcome.timestamps_s == times_s
            assert took_s < 0.9, "the broker answered, and was not waited for"
            assert 0 < counters.fetched - fetched < NUM_CLIPS
            assert counters.fetched - fetched + counters.fetch_misses - missed == NUM_CLIPS
            assert not counters.failed
            if num_readers > 1:
                assert len(shared.leases) == NUM_CLIPS, "the other readers'"
                for outcome in outcomes:
                    assert isinstance(outcome, EncodedRows)
                    assert outcome.shared is not None
                    for reader in range(1, num_readers):
                        client.read_shared(outcome.shared, reader=reader)
            wait_until(lambda: len(shared.leases) == 0, "the end of every lease")

        # Several such replies to one that does not read: the bound ends none, and what is over it is refused.
        with RawClient(shared.broker_path) as raw:
            fetch = broker_pb2.BrokerFetch(keys=keys[:9], kind=broker_pb2.ARENA_KIND_HOST)
            count = 3 * ConnectionLimits().unsent_bytes // 65536
            for _ in range(count):
                raw.socket.sendall(raw.frame(fetch=fetch))
            time.sleep(0.5)
            replies = [raw.reply() for _ in range(count)]
            assert all(reply is not None for reply in replies), "the connection lives"
            num_found = sum(
                item.HasField("result") for reply in replies if reply for item in reply.fetched.items
            )
            assert num_found > 9
            assert raw.ask(ping=broker_pb2.BrokerPing()).HasField("pong")
            assert len(shared.leases) == num_found, "of what was answered, and no more"
        shared.check()
