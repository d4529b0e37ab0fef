"""The fixtures of both faces of the fleet client."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lm_adapter.testing import FakeEncoder
from tests.fleet.faces import FACES


@pytest.fixture(params=FACES)
def face(request: pytest.FixtureRequest) -> Callable[..., Any]:
    return FACES[request.param]


@pytest.fixture
def fakes() -> Iterator[list[FakeEncoder]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(FakeEncoder(f"127.0.0.{number}:0")) for number in (2, 3, 4)]
