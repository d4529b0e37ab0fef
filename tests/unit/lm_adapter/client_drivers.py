"""One face for both clients, so that a test of one can be a test of the other."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from lm_adapter import AsyncVisionEncoderClient, VisionEncoderClient


class Driver(Protocol):
    client: Any

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """The result of ``client.<method>(...)``."""

    def fan_out(self, num_calls: int, call: Callable[[int], tuple[str, tuple[Any, ...]]]) -> list[Any]:
        """The results of ``call(i) -> (method, args)``, all at once."""

    def pause(self, seconds: float) -> None:
        """Lets the client's event loop run for so long."""

    def close(self) -> None: ...


class SyncDriver:
    def __init__(self, target: str, **settings: Any) -> None:
        self.client = VisionEncoderClient(target, **settings)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.client, method)(*args, **kwargs)

    def fan_out(self, num_calls: int, call: Callable[[int], tuple[str, tuple[Any, ...]]]) -> list[Any]:
        def one(index: int) -> Any:
            method, args = call(index)
            return self.call(method, *args)

        with ThreadPoolExecutor(num_calls) as pool:
            return list(pool.map(one, range(num_calls)))

    def pause(self, seconds: float) -> None:
        time.sleep(seconds)

    def close(self) -> None:
        self.client.close()


class AsyncDriver:
    def __init__(
        self, target: str, client: type[AsyncVisionEncoderClient] = AsyncVisionEncoderClient, **settings: Any
    ) -> None:
        self._runner = asyncio.Runner()

        async def open_client() -> AsyncVisionEncoderClient:
            return client(target, **settings)

        self.client = self._runner.run(open_client())

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self._runner.run(getattr(self.client, method)(*args, **kwargs))

    def fan_out(self, num_calls: int, call: Callable[[int], tuple[str, tuple[Any, ...]]]) -> list[Any]:
        async def all_of_them() -> list[Any]:
            calls = [call(index) for index in range(num_calls)]
            return await asyncio.gather(*(getattr(self.client, method)(*args) for method, args in calls))

        return self._runner.run(all_of_them())

    def pause(self, seconds: float) -> None:
        self._runner.run(asyncio.sleep(seconds))

    def close(self) -> None:
        self._runner.run(self.client.close())
        self._runner.close()


DRIVERS: dict[str, Callable[..., Driver]] = {"sync": SyncDriver, "async": AsyncDriver}


Open = Callable[..., Driver]


@contextlib.contextmanager
def opener(kind: Callable[..., Driver], target: str, **defaults: Any) -> Iterator[Open]:
    """A function that opens drivers, by default of this target and with these settings. All are closed at the
    end."""
    drivers: list[Driver] = []

    def open_driver(target: str = target, **settings: Any) -> Driver:
        drivers.append(kind(target, **{"timeout_s": 20.0, **defaults, **settings}))
        return drivers[-1]

    yield open_driver
    for driver in drivers:
        driver.close()
