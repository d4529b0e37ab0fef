"""What the tests of a module find."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(scope="module", autouse=True)
def nothing_waits_for_the_collector() -> None:
    """Tests count descriptors; those that an earlier module's tests dropped must not go meanwhile."""
    gc.collect()
