"""The service's entry in the lists of encoders that SGLang's bootstrap servers keep."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import json
import time
from collections.abc import Sequence

import httpcore
import structlog

log = structlog.get_logger(__name__)

# Interval at which a bootstrap server is checked.
CHECK_EVERY_S = 10.0
# SGLang's default of SGLANG_ENCODER_BOOTSTRAP_EVICTED_TTL, after which it forgets an evicted encoder.
REGISTER_AGAIN_S = 600.0
# Bounds the delay of the stop, during which work is still taken.
REQUEST_TIMEOUT_S = 2.0


class State(enum.Enum):
    """What the last request to a bootstrap server found."""

    UNKNOWN = "unknown"
    REGISTERED = "registered at SGLang"
    UNREACHABLE = "not registered"


class Registration:
    """Keeps the service registered from ``start`` until ``leave``."""

    def __init__(self, bootstrap_urls: Sequence[str], service_url: str) -> None:
        """service_url: the URL that SGLang lists and probes."""
        self._bootstrap_urls = bootstrap_urls
        self._content = json.dumps({"url": service_url}).encode()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._keep_registered(url)) for url in self._bootstrap_urls]

    async def leave(self) -> None:
        """Removes the service from all lists. Does nothing before ``start``."""
        tasks, self._tasks = self._tasks, []
        if not tasks:
            return
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        lists = [f"{url}/unregister_encoder_url" for url in self._bootstrap_urls]
        await asyncio.gather(*(self._request("DELETE", url) for url in lists))

    async def _keep_registered(self, bootstrap_url: str) -> None:
        """Registers when the server has become reachable, because a new server has an empty list, and again
        after REGISTER_AGAIN_S, because SGLang forgets an encoder whose probes have failed for that long. Not
        more often: a registration resets SGLang's count of failed probes and lists an evicted encoder again,
        and SGLang must be able to evict an encoder that it cannot reach."""
        state, registered_s = State.UNKNOWN, 0.0
        while True:
            if state is State.REGISTERED and time.monotonic() < registered_s + REGISTER_AGAIN_S:
                is_ok = await self._request("GET", f"{bootstrap_url}/health")
            else:
                is_ok = await self._request("POST", f"{bootstrap_url}/register_encoder_url")
                registered_s = time.monotonic()
            before, state = state, State.REGISTERED if is_ok else State.UNREACHABLE
            if state is not before:
                report = log.info if is_ok else log.warning
                report(state.value, bootstrap=bootstrap_url)
            await asyncio.sleep(CHECK_EVERY_S)

    async def _request(self, method: str, url: str) -> bool:
        """Whether the bootstrap server answered 200."""
        failures = (TimeoutError, OSError, ValueError, httpcore.NetworkError, httpcore.ProtocolError)
        with contextlib.suppress(*failures):
            async with asyncio.timeout(REQUEST_TIMEOUT_S), httpcore.AsyncConnectionPool() as client:
                answer = await client.request(
                    method, url, headers={"Content-Type": "application/json"}, content=self._content
                )
                return answer.status == 200
        return False
