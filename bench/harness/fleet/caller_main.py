"""A caller: sends images through the adapter without a pause, and compares every row.

A process of its own. Commands come as JSON lines: one starts the calls, the next one stops them; meanwhile,
lines with the number of calls so far go out. What became of each call is written to a file at the stop. No
call is repeated here: what the adapter cannot carry past a failure counts as failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.harness.fleet.images import image_file
from lm_adapter import AsyncVisionEncoderClient, CacheTier, EncoderError, ImageItem

HIT, JOINED, MISS, FAILED, WRONG = range(5)
STATES = {CacheTier.HOST: HIT, CacheTier.DEVICE: HIT, CacheTier.IN_FLIGHT: JOINED, CacheTier.MISS: MISS}
TOLERANCE = 1e-4
"""Of float32 rows, whose last bits depend on the batch that they were encoded in."""
REPORT_S = 0.05
TIMEOUT_S = 60.0


class Calls:
    """What became of each call: start and duration in seconds, state, number of the image."""

    def __init__(self) -> None:
        self.records: list[tuple[float, float, int, int]] = []
        self.failures: list[str] = []

    def write(self, path: Path) -> None:
        columns = np.array(self.records, dtype=np.float64).reshape(-1, 4)
        np.savez(
            path,
            started_s=columns[:, 0],
            took_s=columns[:, 1],
            state=columns[:, 2].astype(np.uint8),
            image=columns[:, 3].astype(np.int32),
            failures=np.array(self.failures, dtype=np.str_),
        )


async def send(
    client: AsyncVisionEncoderClient,
    items: Sequence[ImageItem],
    expected: npt.NDArray[np.float32],
    numbers: Sequence[int],
    calls: Calls,
    is_stopping: asyncio.Event,
) -> None:
    """One of the caller's tasks. numbers: of the images, in the order in which it sends them, repeatedly."""
    while True:
        for number in numbers:
            if is_stopping.is_set():
                return
            started_s = time.monotonic()
            try:
                rows = await client.encode_one(items[number])
            except EncoderError as error:
                state = FAILED
                calls.failures.append(f"image {number}: {type(error).__name__}: {error}")
            else:
                state = STATES[rows.tier]
                if not agree(rows.numpy(), expected[number]):
                    state = WRONG
            calls.records.append((started_s, time.monotonic() - started_s, state, number))


def agree(rows: npt.NDArray[np.float32], expected: npt.NDArray[np.float32]) -> bool:
    """Most are equal, which is quick to see."""
    return np.array_equal(rows, expected) or np.allclose(rows, expected, rtol=TOLERANCE, atol=TOLERANCE)


async def report(calls: Calls) -> None:
    while True:
        await asyncio.sleep(REPORT_S)
        write_line({"calls": len(calls.records)})


def write_line(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


async def run(command: dict[str, Any], next_line: Any) -> None:
    """From one command to the next one."""
    expected = np.load(command["expected"])
    items = [ImageItem(image_file(number, command["num_bytes"])) for number in range(command["num_images"])]
    numbers = list(range(command["num_images"]))
    shuffler = random.Random(command["seed"])
    calls, is_stopping = Calls(), asyncio.Event()
    async with AsyncVisionEncoderClient(
        command["target"], fleet=True, timeout_s=TIMEOUT_S, waits=False
    ) as client:
        await client.info()
        tasks = []
        for _ in range(command["concurrency"]):
            shuffler.shuffle(numbers)
            tasks.append(
                asyncio.create_task(send(client, items, expected, list(numbers), calls, is_stopping))
            )
        reporting = asyncio.create_task(report(calls))
        stop = json.loads(await next_line())
        is_stopping.set()
        await asyncio.gather(*tasks)
        reporting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reporting
    calls.write(Path(stop["out"]))
    write_line({"stopped": True, "calls": len(calls.records)})


async def main() -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        await run(json.loads(line), reader.readline)


if __name__ == "__main__":
    asyncio.run(main())
