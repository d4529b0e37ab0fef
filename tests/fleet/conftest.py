"""One fleet for all tests of a file: four encoders, two gateways, two callers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.harness.fleet.fleet import Fleet
from tests.programs import program


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Iterator[Fleet]:
    program("envoy")
    with Fleet(tmp_path_factory.mktemp("fleet"), checkpoint) as found:
        yield found
