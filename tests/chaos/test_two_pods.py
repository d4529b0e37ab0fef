"""An encoder's and readers' pods on host memory; ``tests/gpu/test_shared_rows.py`` is the same on GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from bench.harness.pods import figure
from tests.chaos.reader_pod import ReaderPod
from tests.chaos.two_pods import MIB, Setup, Site, Storm, TwoPods, check_late_readers, running_site
from tests.integration.conftest import running
from tests.unit.transport.broker_rig import socket_folder

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def site(checkpoint: Path) -> Iterator[Site]:
    with running_site(Setup("host", checkpoint, settings={"arena_bytes": 64 * MIB})) as found:
        yield found


@pytest.mark.extended
class TestOnHostMemory(TwoPods):
    pass


def test_p21_late_readers(checkpoint: Path) -> None:
    """In one process. The arena has no tier behind it: an item that was evicted is encoded again."""
    with (
        socket_folder() as folder,
        running(
            checkpoint,
            torch.device("cpu"),
            broker_path=str(folder / "broker.sock"),
            arena_bytes=MIB,
            max_patches_per_batch=4,
        ) as service,
    ):
        reader = ReaderPod(service.target, "host")
        check_late_readers(
            "host",
            lambda do, **command: getattr(reader, do)(**command),
            partial(figure, f"http://{service.service.addresses['admin']}"),
            Storm(8, 0.2, 1, side=320, factor=4),
        )
        reader.close()
