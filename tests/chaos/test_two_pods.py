"""An encoder's pod and readers' pods on host memory; ``tests/gpu/test_two_gpus.py`` is the same on GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from encoder_service.towers.synthetic import make_checkpoint
from tests.chaos.two_pods import Ground, Site, TwoPods, running_site


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    checkpoint: Path = tmp_path_factory.mktemp("checkpoint") / "tiny"
    make_checkpoint(checkpoint, "qwen3_vl", "tiny", 5)
    with running_site(Ground("host", checkpoint)) as found:
        yield found


@pytest.mark.extended
class TestOnHostMemory(TwoPods):
    num_images = 16
