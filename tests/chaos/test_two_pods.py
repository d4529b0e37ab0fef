"""An encoder's pod and readers' pods on host memory; ``tests/gpu/test_shared_rows.py`` is the same on GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from encoder_service.towers.synthetic import make_checkpoint
from tests.chaos.two_pods import MIB, Setup, Site, Storm, TwoPods, check_late_readers, running_site

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("checkpoint") / "tiny"
    make_checkpoint(path, "qwen3_vl", "tiny", 5)
    return path


@pytest.fixture(scope="module")
def site(checkpoint: Path) -> Iterator[Site]:
    with running_site(Setup("host", checkpoint, settings={"arena_bytes": 64 * MIB})) as found:
        yield found


@pytest.mark.extended
class TestOnHostMemory(TwoPods):
    pass


@pytest.mark.parametrize(
    ("arena_bytes", "storm"),
    [
        pytest.param(MIB, Storm(8, 0.3, 2), id="8 readers"),
        pytest.param(4 * MIB, Storm(32, 2, 20), id="32 readers", marks=pytest.mark.extended),
    ],
)
def test_p21_late_readers(checkpoint: Path, arena_bytes: int, storm: Storm) -> None:
    """The arena has no tier behind it: an item that was evicted is encoded again."""
    settings: dict[str, object] = {"arena_bytes": arena_bytes, "max_items_per_batch": 1}
    with running_site(Setup("host", checkpoint, settings=settings, num_readers=1)) as site:
        check_late_readers(site, storm, has_host_tier=False)
