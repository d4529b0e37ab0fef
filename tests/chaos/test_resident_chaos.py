"""Rows over the broker's socket while the broker goes away: callers get their rows, by gRPC."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from encoder_service.towers.synthetic import make_checkpoint
from lm_adapter import EncodedRows, VisionEncoderClient
from tests.integration.test_resident_rows import connected, new_item, same
from tests.integration.test_shared_memory import sharing
from tests.unit.transport.broker_rig import wait_until


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints") / "qwen3_vl"
    make_checkpoint(folder, "qwen3_vl", "tiny", 5)
    return folder


def test_p32_the_broker_ends_between_and_under_the_calls_of_many_threads(
    checkpoint: Path, device: torch.device
) -> None:
    with sharing(checkpoint, device, device_arena_bytes=0) as shared:
        with connected(shared) as client:
            (first,) = client.encode([new_item()])
            assert isinstance(first, EncodedRows)
            key, stop, errors = first.key, threading.Event(), []

            def work() -> None:
                while not stop.is_set():
                    try:
                        same(client.fetch([key])[0], first)
                    except BaseException as error:
                        errors.append(error)
                        return

            threads = [threading.Thread(target=work) for _ in range(4)]
            for thread in threads:
                thread.start()
            fetched = shared.memory.broker.counters.fetched
            wait_until(lambda: shared.memory.broker.counters.fetched > fetched + 100, "fetches")
            assert shared.memory.broker.stop()
            wait_until(lambda: client.transport.name == "inline", "the fall back to inline rows")
            stop.set()
            for thread in threads:
                thread.join(20)
            assert not errors
            same(client.fetch([key])[0], first)
        wait_until(lambda: len(shared.leases) == 0, "the end of every lease")


def test_p21_clients_that_close_under_their_calls_leave_no_lease(
    checkpoint: Path, device: torch.device
) -> None:
    with sharing(checkpoint, device, device_arena_bytes=0) as shared:
        with connected(shared) as client:
            (first,) = client.encode([new_item()])
        assert isinstance(first, EncodedRows)

        def fetch_until_closed(client: VisionEncoderClient, begun: threading.Event) -> None:
            while True:
                try:
                    same(client.fetch([first.key])[0], first)
                except Exception:
                    return
                begun.set()

        for _ in range(5):
            client, begun = connected(shared), threading.Event()
            thread = threading.Thread(target=fetch_until_closed, args=(client, begun))
            thread.start()
            assert begun.wait(20)
            client.close()
            thread.join(20)
            assert not thread.is_alive()
        shared.check()
