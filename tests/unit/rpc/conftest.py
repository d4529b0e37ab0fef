"""A server of local calls and a client of it, for every test of either."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lm_adapter.transport.local_calls import LocalCalls
from tests.unit.rpc.local_rig import LocalRig, local_rig
from tests.unit.transport.broker_rig import socket_folder


@pytest.fixture
def folder() -> Iterator[Path]:
    """Its name is short: it becomes a socket's."""
    with socket_folder() as found:
        yield found


@pytest.fixture
def rig(folder: Path) -> Iterator[LocalRig]:
    with local_rig(folder) as found:
        yield found


@pytest.fixture
def calls() -> Iterator[LocalCalls]:
    found = LocalCalls()
    yield found
    found.close()
