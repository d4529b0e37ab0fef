"""Both faces of the fleet client behind one, for tests that say the same of both, and their fakes.

Owns no expectations."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from lm_adapter import AsyncFleetClient, EncodedRows, FleetClient, FleetSettings, ImageItem
from lm_adapter.testing import FakeEncoder, fake_rows

NO_HEDGES = FleetSettings(
    refresh_s=0.1, check_interval_s=0.2, check_timeout_s=1.0, max_hedges=0, backoff_s=0.02
)


class AsyncFace:
    """``FleetClient``'s face over the asyncio client."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._runner = asyncio.Runner()

        async def made() -> AsyncFleetClient:
            return AsyncFleetClient(*args, **kwargs)

        try:
            self.client = self._runner.run(made())
        except BaseException:
            self._runner.close()
            raise

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.client, name)
        if not asyncio.iscoroutinefunction(found):
            return found
        return lambda *args, **kwargs: self._runner.run(found(*args, **kwargs))

    def encode_iter(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        stream = self.client.encode_iter(*args, **kwargs)

        async def step() -> Any:
            return await anext(stream, None)

        try:
            while (finished := self._runner.run(step())) is not None:
                yield finished
        finally:
            self._runner.run(stream.aclose())

    def close(self) -> None:
        self._runner.run(self.client.close())
        self._runner.close()

    def __enter__(self) -> AsyncFace:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


FACES: dict[str, Callable[..., Any]] = {"sync": FleetClient, "async": AsyncFace}


def targets(fakes: list[FakeEncoder]) -> list[str]:
    return [one.target for one in fakes]


def image(digest: bytes | None = None) -> ImageItem:
    return ImageItem(b"content", digest=digest or secrets.token_bytes(32))


def homes_of(client: Any, num_replicas: int) -> dict[str, ImageItem]:
    """One item for each replica, by its target."""
    found: dict[str, ImageItem] = {}
    while len(found) < num_replicas:
        item = image()
        found.setdefault(client.home(item.digest), item)
    return found


def is_right(outcome: Any, item: ImageItem) -> bool:
    return isinstance(outcome, EncodedRows) and np.array_equal(
        outcome.numpy(), fake_rows(item.digest or b"", outcome.num_rows, outcome.width)
    )
