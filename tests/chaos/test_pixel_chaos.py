"""Publishers and services that are killed with pixels in shared memory on their way."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from lm_adapter.transport.segment_names import is_lock_name

from encoder_service.towers.synthetic import make_checkpoint
from lm_adapter import CallFailed, EncodedRows, Grid, PixelItem, VisionEncoderClient
from tests.integration.test_process import ENV, ServiceProcess
from tests.unit.transport.broker_rig import num_descriptors, socket_folder, wait_until

PREFIX = "ve-chaos-"
GRID = Grid(1, 8, 8)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
    make_checkpoint(folder, "qwen3_vl", "tiny", 5)
    return folder


class Services:
    """Service processes, one after another, at the same addresses."""

    def __init__(self, checkpoint: Path, folder: Path, sockets: Path) -> None:
        self.checkpoint, self.folder, self.sockets = checkpoint, folder, sockets
        self.target = f"unix:{sockets}/grpc.sock"
        self.running: list[ServiceProcess] = []

    def start(self) -> ServiceProcess:
        found = ServiceProcess(
            "--model", self.checkpoint, "--device", "cpu", "--dtype", "float32", "--listen", self.target,
            "--admin-listen", "127.0.0.1:0", "--broker-path", self.sockets / "broker.sock",
            "--arena-bytes", 8 << 20,
        )  # fmt: skip
        self.running.append(found)
        return found

    @property
    def names(self) -> list[str]:
        return [name for name in os.listdir(self.folder) if not is_lock_name(name)]


@pytest.fixture
def services(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Services]:
    monkeypatch.setitem(ENV, "VE_SHM_DIR", str(tmp_path))
    monkeypatch.setitem(ENV, "VE_SHM_PREFIXES", PREFIX)
    with socket_folder() as sockets:
        found = Services(checkpoint, tmp_path, sockets)
        found.start()
        yield found
        for each in found.running:
            if each.process.poll() is None:
                each.end(signal.SIGKILL)


PUBLISHER = f"""
import sys
import numpy as np
from lm_adapter import CallFailed, Grid, PixelItem, VisionEncoderClient
folder, target, pixels = sys.argv[1:]
rng = np.random.default_rng()
with VisionEncoderClient(target, timeout_s=60, pixels=pixels, shm_dir=folder) as client:
    client.wait_transport()
    while True:
        values = [rng.standard_normal((64, 1536), dtype=np.float32) for _ in range(4)]
        client.encode([PixelItem(each, Grid{tuple(GRID)}) for each in values])
        print("round", flush=True)
"""


def start_publisher(services: Services, pixels: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PUBLISHER, str(services.folder), services.target, pixels],
        env=ENV,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


@pytest.mark.extended
@pytest.mark.parametrize("pixels", ["shm", "memfd"])
def test_p19_publishers_killed_at_any_moment_leave_nothing_that_lasts(
    services: Services, pixels: str
) -> None:
    """Names that no request had carried yet are the next start's to sweep; all else ends by itself."""
    service = services.running[0]
    idle = num_descriptors(service.process.pid)
    for _ in range(6):
        publisher = start_publisher(services, pixels)
        assert publisher.stdout is not None
        assert publisher.stdout.readline() == "round\n"
        time.sleep(float(np.random.default_rng().uniform(0, 0.1)))
        publisher.kill()
        publisher.communicate(timeout=30)
    with VisionEncoderClient(services.target, timeout_s=60, pixels=pixels) as client:
        assert client.wait_transport().name == "host"
        assert isinstance(client.encode_one(an_item()), EncodedRows)
    wait_until(lambda: num_descriptors(service.process.pid) <= idle + 4, "the close of every memfd")
    assert len(services.names) <= 6 * 4
    assert service.end(signal.SIGTERM) == 0
    services.start()
    assert services.names == []


@pytest.mark.extended
@pytest.mark.parametrize("pixels", ["shm", "memfd"])
def test_p19_a_service_killed_under_calls_is_swept_after_by_those_who_live(
    services: Services, pixels: str
) -> None:
    """The publisher lives, so its segments are its own to end, and it does; then it goes on with the next
    service."""
    stop = threading.Event()
    num_rounds = [0, 0]

    def publish() -> None:
        with VisionEncoderClient(
            services.target, timeout_s=10, pixels=pixels, shm_dir=str(services.folder)
        ) as client:
            client.wait_transport()
            while not stop.is_set():
                with contextlib.suppress(CallFailed):
                    client.encode([an_item() for _ in range(4)])
                    num_rounds[len(services.running) - 1] += 1

    publisher = threading.Thread(target=publish)
    publisher.start()
    try:
        wait_until(lambda: num_rounds[0] > 3)
        services.running[0].end(signal.SIGKILL)
        services.start()
        wait_until(lambda: num_rounds[1] > 3)
    finally:
        stop.set()
        publisher.join(60)
    wait_until(lambda: services.names == [], "the end of every segment")


def an_item() -> PixelItem:
    values = np.random.default_rng().standard_normal((GRID.num_patches, 1536), dtype=np.float32)
    return PixelItem(values, GRID)
