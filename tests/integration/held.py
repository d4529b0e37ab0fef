"""What a service holds for callers. Once they have left, every figure is 0."""

from __future__ import annotations

import time
from collections.abc import Mapping

from bench.harness.waiting import PATIENCE_S
from tests.integration.conftest import RunningService
from tests.unit.store.integrity import num_holds


def held(service: RunningService) -> Mapping[str, int]:
    """Figures by name, read on the service's loop."""

    def read() -> Mapping[str, int]:
        found = service.service
        assert found.pipeline is not None
        assert found.store is not None
        return {
            "bytes of content": found.admission.num_bytes,
            "admitted patches": found.admission.num_patches,
            "undelivered bytes": found.pipeline.undelivered.num_bytes,
            "encodes": len(found.pipeline.inflight),
            "late bytes": found.gate.arrivals.num_bytes,
            "calls": found.gate.permits.num_calls,
            "holds": num_holds(found.store),
        }

    figures = service.on_loop(read)
    assert isinstance(figures, Mapping)
    return figures


def wait_until_free(service: RunningService) -> None:
    """Raises AssertionError with the figures if something is still held after PATIENCE_S."""
    ends_s = time.monotonic() + PATIENCE_S
    while any((figures := held(service)).values()):
        assert time.monotonic() < ends_s, figures
        time.sleep(0.02)
