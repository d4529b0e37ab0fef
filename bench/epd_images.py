"""The further servers of a peer of ``epd.py``: sends their images to the encoder, as their plugins would.

Runs as a process of its own, beside the one that takes the times. Rows are read onto the GPU that this
process sees, the encoder's own, so that the measured server's GPU has no part in it.
"""

from __future__ import annotations

import asyncio
import base64
import json
import time
from typing import Any

from bench.epd_figures import percentiles
from bench.epd_rates import MIXES, Requests, Sent
from bench.harness.children import serve_commands

CONNECT_S, TIMEOUT_S = 60.0, 30.0


class Images:
    """Commands: ``connect``, then any number of ``prepare`` and ``run``."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._requests: dict[str, Requests] = {}
        self._prepared: list[tuple[float, list[bytes]]] = []
        self._client: Any = None

    def connect(self, target: str, on_gpu: bool) -> dict[str, str]:
        return {"rows_come_by": self._runner.run(self._connect(target, on_gpu))}

    async def _connect(self, target: str, on_gpu: bool) -> str:
        from lm_adapter import AsyncVisionEncoderClient

        device = "cuda:0" if on_gpu else None
        self._client = AsyncVisionEncoderClient(target, timeout_s=CONNECT_S, device=device)
        await self._client.info()
        return str((await self._client.wait_transport()).name)

    def prepare(self, size: str, mix: str, rate: float, seconds: float, part: str) -> None:
        """The images of the mix's requests at this rate. Makes them before they are due."""
        if mix not in self._requests:
            self._requests[mix] = Requests(MIXES[size][mix], f"{mix} of others")
        sent = self._requests[mix].arrivals(rate, seconds, part)
        self._prepared = [(one.at_s, files_of(one)) for one in sent]

    def run(self) -> dict[str, Any]:
        """Sends them. Times are of a request's images together."""
        return self._runner.run(self._send_all())

    async def _send_all(self) -> dict[str, Any]:
        begun, tasks = time.perf_counter(), []
        for at_s, files in self._prepared:
            await asyncio.sleep(max(0.0, at_s - (time.perf_counter() - begun)))
            tasks.append(asyncio.create_task(self._send(files)))
        times = await asyncio.gather(*tasks)
        good = [one for one in times if one is not None]
        images = sum(len(files) for _, files in self._prepared)
        return {"images": images, "failed_requests": len(times) - len(good), "rows_ms": percentiles(good)}

    async def _send(self, files: list[bytes]) -> float | None:
        """Milliseconds until all rows are there; None if some failed."""
        from lm_adapter import EncodedRows, EncoderError, ImageItem

        begun = time.perf_counter()
        try:
            outcomes = await self._client.encode([ImageItem(file) for file in files], timeout_s=TIMEOUT_S)
        except EncoderError:
            return None
        is_complete = all(isinstance(outcome, EncodedRows) for outcome in outcomes)
        return (time.perf_counter() - begun) * 1e3 if is_complete else None


def files_of(sent: Sent) -> list[bytes]:
    parts = [
        part
        for body in sent.bodies
        for message in json.loads(body)["messages"]
        for part in message["content"]
        if part["type"] == "image_url"
    ]
    return [base64.b64decode(part["image_url"]["url"].partition(",")[2]) for part in parts]


if __name__ == "__main__":
    images = Images()
    serve_commands({name: getattr(images, name) for name in ("connect", "prepare", "run")})
