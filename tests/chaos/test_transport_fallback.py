"""A real service's broker goes away and comes back under clients; clients that are closed under reads."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bench.harness.waiting import wait_until
from encoder_service.broker import Broker
from lm_adapter import CallFailed, EncodedRows, ImageItem, VisionEncoderClient
from tests.chaos.reader_pod import digest_of
from tests.integration.conftest import RunningService, running
from tests.integration.images import photo
from tests.unit.transport.broker_rig import socket_folder

NUM_IMAGES = 9
IMAGES = [ImageItem(photo(seed=1000 + index)) for index in range(NUM_IMAGES)]


@pytest.fixture
def service(checkpoint: Path) -> Iterator[RunningService]:
    with (
        socket_folder() as folder,
        running(
            checkpoint, torch.device("cpu"), broker_path=str(folder / "broker.sock"), arena_bytes=4 << 20
        ) as found,
    ):
        yield found


@pytest.fixture
def rows(service: RunningService) -> list[str]:
    """Digests of the rows of IMAGES, inline."""
    with VisionEncoderClient(service.target, transports=("inline",), timeout_s=20) as client:
        return [digest_of(client.encode_one(item)) for item in IMAGES]


def broker_of(service: RunningService) -> Broker:
    broker = service.service.broker
    assert broker is not None
    return broker


def replaced_broker(service: RunningService) -> Broker:
    """Ends the service's broker. The test starts the returned one."""
    old = broker_of(service)
    assert old.stop()
    store = service.service.store
    assert store is not None
    new = Broker(old.options, store.arenas(), lambda namespace, token: True)
    service.service.broker = new
    return new


def num_mappings() -> int:
    """Mappings of arenas in this process, in which the service runs too."""
    return Path("/proc/self/maps").read_text().count("/memfd:vision-encoder")


def until_host(client: VisionEncoderClient) -> None:
    wait_until(lambda: client.transport.name == "host", "the way back to host memory")


def test_p23_calls_never_fail_while_the_broker_comes_and_goes(
    service: RunningService, rows: list[str]
) -> None:
    stop = threading.Event()
    failures: list[BaseException] = []
    num_rows = [0] * 4

    def read(worker: int, client: VisionEncoderClient) -> None:
        index = worker
        while not stop.is_set():
            try:
                found = client.encode([IMAGES[index], IMAGES[index - 1]])
                digests = [digest_of(one) for one in found if isinstance(one, EncodedRows)]
                assert digests == [rows[index], rows[index - 1]]
            except BaseException as error:
                failures.append(error)
                return
            num_rows[worker] += 1
            index = (index + 4) % NUM_IMAGES

    with VisionEncoderClient(service.target, timeout_s=20) as client:
        client.wait_transport()
        threads = [threading.Thread(target=read, args=(worker, client)) for worker in range(4)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(3):
                new = replaced_broker(service)
                wait_until(lambda: client.transport.name == "inline", "the end of the attachment")
                time.sleep(0.05)
                new.start()
                until_host(client)
        finally:
            stop.set()
            for thread in threads:
                thread.join(30)
    assert failures == []
    assert min(num_rows) > 0


def test_clients_closed_under_reads_leave_nothing(service: RunningService) -> None:
    mappings = num_mappings()
    before = set(threading.enumerate())

    def call(client: VisionEncoderClient) -> None:
        try:
            while True:
                client.encode(IMAGES[:2])
        except CallFailed:
            return

    for pause_s in (0.0, 0.002, 0.01, 0.05, 0.2):
        client = VisionEncoderClient(service.target, timeout_s=20)
        client.info()
        threads = [threading.Thread(target=call, args=(client,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(pause_s)
        client.close()
        client.close()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()
        assert num_mappings() == mappings
        names = {thread.name for thread in threading.enumerate() if thread not in before}
        assert not names & {"encoder-memory", "vision-encoder-client"}
    wait_until(lambda: not broker_of(service).num_connections, "the end of the connections")
