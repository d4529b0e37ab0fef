"""Rows in device memory, read by processes of their own: ``two_pods`` on GPUs, and what only a GPU has.

The readers are on another GPU than the encoder where there are two.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from encoder_service.checkpoints.synthetic import make_checkpoint
from tests.chaos.two_pods import MIB, UNMAP_S, Setup, Site, Storm, TwoPods, check_late_readers, running_site

pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings", exc_type=ImportError)
# Each encoder and each reader has a CUDA context of its own, and one test looks at the device's free memory.
pytestmark = [pytest.mark.gpu, pytest.mark.whole_device, pytest.mark.timeout(400)]

CUDA = torch.device("cuda:0")
ARENA_BYTES = 4 << 30
# Few graphs, so that a start takes seconds: larger images run without one.
SETTINGS: dict[str, object] = {"bucket_sizes": "256,1024", "arena_bytes": 256 * MIB}


def visible_gpus() -> list[str]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",") if visible else [str(index) for index in range(torch.cuda.device_count())]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("checkpoint") / "small"
    make_checkpoint(path, "qwen3_vl", "small", 5)
    return path


@pytest.fixture(scope="module")
def site(checkpoint: Path) -> Iterator[Site]:
    gpus = visible_gpus()
    settings = {**SETTINGS, "device_arena_bytes": ARENA_BYTES}
    with running_site(Setup("device", checkpoint, gpus[0], (gpus[-1],), settings)) as found:
        yield found


class TestOnDeviceMemory(TwoPods):
    free_bytes = 0

    def before_kill(self, site: Site) -> None:
        type(self).free_bytes = torch.cuda.mem_get_info(CUDA)[0]

    def after_kill(self, site: Site) -> None:
        """A restart needs the arena's memory."""
        ends_s = time.monotonic() + UNMAP_S
        gained_bytes = 0
        while gained_bytes < ARENA_BYTES and time.monotonic() < ends_s:
            gained_bytes = torch.cuda.mem_get_info(CUDA)[0] - self.free_bytes
            time.sleep(0.01)
        assert gained_bytes >= ARENA_BYTES, f"{gained_bytes} of {ARENA_BYTES} bytes came back"


def test_p21_late_readers_over_a_small_arena(checkpoint: Path) -> None:
    """32 readers, up to two seconds late, over a tenth of their working set; all of it fits on the host."""
    gpus = visible_gpus()
    # Room for one image of 144 patches in a batch.
    settings = {**SETTINGS, "bucket_sizes": "256", "max_patches_per_batch": 256}
    with running_site(
        Setup("device", checkpoint, gpus[0], (gpus[-1],), {**settings, "device_arena_bytes": 8 * MIB}, 1)
    ) as site:
        check_late_readers("device", site.reader.ask, site.encoder.figure, Storm(32, 2, 20))
