"""An encoder on one GPU and its readers on another, each in namespaces of its own with one GPU in sight. With
one GPU in all, they share it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from encoder_service.towers.synthetic import make_checkpoint
from tests.chaos.two_pods import Ground, Site, TwoPods, images, running_site

pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings", exc_type=ImportError)
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(200)]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    checkpoint: Path = tmp_path_factory.mktemp("checkpoint") / "small"
    make_checkpoint(checkpoint, "qwen3_vl", "small", 5)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(index) for index in range(torch.cuda.device_count())]
    ground = Ground(
        "device",
        checkpoint,
        names[0],
        tuple(names[1:2]) or (names[0],),
        # Few graphs, so that a start takes seconds: larger images run without one.
        ("--bucket-sizes", "256,1024"),
        {"VE_DEVICE_ARENA_BYTES": str(256 << 20)},
    )
    with running_site(ground) as found:
        yield found


class TestTwoGpus(TwoPods):
    def test_the_reader_reads_another_gpus_memory(self, site: Site) -> None:
        """Where there are two: said by the adapter, whose own GPU the encoder does not see."""
        reason = site.reader.ask("state")["reason"]
        same = site.ground.encoder_gpu == site.ground.reader_gpus[0]
        assert ("this GPU itself" if same else "another GPU's memory") in reason

    def test_p24_allocator_and_graphs_of_the_reader_are_undisturbed(self, site: Site) -> None:
        assert site.reader.ask("undisturbed", images=images(6)) == {"allocator": True, "graph": True}
        site.encoder.no_lease_is_left()
