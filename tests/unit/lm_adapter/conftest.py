"""What tests of clients share: a fake encoder, and blocking clients, which carry out every call by the
asynchronous one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import pytest

from lm_adapter import VisionEncoderClient
from lm_adapter.testing import FakeEncoder

Open: TypeAlias = Callable[..., Any]


@contextlib.contextmanager
def opener(target: str, **defaults: Any) -> Iterator[Open]:
    """A function that opens clients, by default of this target and with these settings. All are closed at the
    end."""
    with contextlib.ExitStack() as clients:

        def open_client(target: str = target, **settings: Any) -> Any:
            return clients.enter_context(
                VisionEncoderClient(target, **{"timeout_s": 20.0, **defaults, **settings})
            )

        yield open_client


@pytest.fixture
def fake() -> Iterator[FakeEncoder]:
    with FakeEncoder() as running:
        yield running


@pytest.fixture
def open_client(fake: FakeEncoder) -> Iterator[Open]:
    with opener(fake.target) as open_one:
        yield open_one
