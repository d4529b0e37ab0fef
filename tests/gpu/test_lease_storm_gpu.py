"""A million lease operations on device memory, with kills on both sides, between processes that share nothing
but a socket; over NVLink where a second GPU is there.
"""

from __future__ import annotations

import os

import pytest
import torch

from tests.chaos.lease_storm_processes import can_isolate
from tests.chaos.test_lease_storm import storm

pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings", exc_type=ImportError)
pytestmark = pytest.mark.gpu


def visible_devices() -> list[str]:
    """As CUDA_VISIBLE_DEVICES names them: at most two."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(index) for index in range(torch.cuda.device_count())]
    return names[:2]


@pytest.mark.timeout(260)
def test_p21_p25_a_million_lease_operations_with_kills_on_both_sides() -> None:
    """No leak, no stale read accepted, integrity holds, and every reader maps each new encoder by itself."""
    code, report = storm(
        "--operations", 1_000_000, "--readers", 4, "--grpc-clients", 2, "--reader-kills", 12,
        "--encoder-kills", 5, "--reads", 5_000, "--devices", ",".join(visible_devices()),
        *(("--isolate",) if can_isolate() else ()), timeout_s=200,
    )  # fmt: skip
    assert (code, report["failures"]) == (0, []), report
    assert report["operations"] >= 1_000_000
    assert report["kills"] == {"readers": 12, "encoder": 5}
    assert report["remaps"] >= 4 * 6
    assert report["stale_accepted"] == 0
    assert report["reads_by_directory"] > report["stale_by_directory"] > 0
    assert report["leaks"] == {"leases": 0, "slots": 0, "bytes": 0}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("defect", ["returns", "late"])
def test_p21_a_generation_that_fails_its_purpose_is_found_on_the_device(defect: str) -> None:
    code, report = storm(
        "--operations", 20_000, "--readers", 3, "--grpc-clients", 0, "--reader-kills", 0,
        "--encoder-kills", 0, "--reads", 8_000, "--devices", ",".join(visible_devices()),
        "--sabotage", defect,
    )  # fmt: skip
    assert code == 1
    assert report["stale_accepted"] > 0, report
