"""What the tests of the vLLM connector's book begin with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lm_adapter.engines.vllm_book import Book
from tests.unit.lm_adapter.book_rig import GEOMETRY, SETTINGS, Fetches


@pytest.fixture
def fetches() -> Fetches:
    return Fetches()


@pytest.fixture
def book(fetches: Fetches) -> Iterator[Book]:
    """Room for four items; vLLM has no tower."""
    found = Book(fetches, GEOMETRY, SETTINGS, has_tower=False)
    yield found
    found.close()
