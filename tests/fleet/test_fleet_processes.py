"""Real service processes with a tiny tower: killed, stopped, standing still, and on one host with shared
memory."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from encoder_service.towers.synthetic import make_checkpoint
from lm_adapter import AsyncFleetClient, EncodedRows, FleetSettings, ImageItem
from lm_adapter.types import Outcome
from tests.integration.images import photo

pytestmark = pytest.mark.anyio
ROOT = Path(__file__).resolve().parents[2]
ENV = {
    **{name: value for name, value in os.environ.items() if not name.startswith("VE_")},
    "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "proto")]),
    "OMP_NUM_THREADS": "1",
}
SETTINGS = FleetSettings(
    refresh_s=0.2, check_interval_s=0.4, check_timeout_s=0.8, hedge_min_s=0.2, hedge_max_s=2.0, max_attempts=6
)


class Encoder:
    """A service process at an address that it keeps through restarts."""

    def __init__(self, model: Path, number: int, folder: Path) -> None:
        self.target = f"127.0.0.{2 + number}:0"
        self._arguments = [
            "--model", str(model), "--device", "cpu", "--dtype", "float32", "--drain-grace-s", "5",
            "--admin-listen", "127.0.0.1:0", "--broker-path", str(folder / f"{number}.sock"),
        ]  # fmt: skip
        self.process: subprocess.Popen[str]

    def start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "encoder_service", "serve", *self._arguments, "--listen", self.target],
            env=ENV, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip

    def wait(self) -> None:
        assert self.process.stdout is not None
        found = re.search(r" at (\S+)", self.process.stdout.readline())
        assert found, "the service did not start"
        self.target = found[1]

    def end(self, number: signal.Signals = signal.SIGKILL) -> None:
        if self.process.poll() is None:
            self.process.send_signal(number)
            if number is not signal.SIGSTOP:
                self.process.communicate(timeout=30)


@pytest.fixture(scope="module")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Encoder]]:
    folder = tmp_path_factory.mktemp("fleet")
    make_checkpoint(folder / "model", "qwen3_vl", "tiny", 5)
    found = [Encoder(folder / "model", number, folder) for number in range(3)]
    for one in found:
        one.start()
    try:
        for one in found:
            one.wait()
        yield found
    finally:
        for one in found:
            one.end()


def running(encoders: list[Encoder]) -> list[Encoder]:
    """All of them: a test that is run again finds those it ended before started anew."""
    for one in encoders:
        if one.process.poll() is not None:
            one.start()
            one.wait()
        one.process.send_signal(signal.SIGCONT)
    return encoders


class Callers:
    """Each image's rows have to be the same every time, from whichever replica."""

    def __init__(self, client: AsyncFleetClient, num_callers: int = 3) -> None:
        self.client, self.num_callers = client, num_callers
        self.images = [ImageItem(photo(64, 64), digest=secrets.token_bytes(32)) for _ in range(12)]
        self.num_served = 0
        self.failures: list[str] = []
        self._rows: dict[bytes | None, np.ndarray] = {}  # type: ignore[type-arg]
        self._stop = asyncio.Event()

    async def __aenter__(self) -> Callers:
        self._tasks = [asyncio.create_task(self._run()) for _ in range(self.num_callers)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stop.set()
        await asyncio.gather(*self._tasks)

    async def until(self, num_items: int, limit_s: float = 40) -> None:
        wanted, ends_s = self.num_served + num_items, time.monotonic() + limit_s
        while self.num_served < wanted:
            assert time.monotonic() < ends_s, (self.num_served, self.failures, self.client.replicas)
            await asyncio.sleep(0.01)

    async def _run(self) -> None:
        while not self._stop.is_set():
            items, begun_s = random.sample(self.images, 2), time.monotonic()
            outcomes = await self.client.encode(items, timeout_s=30)
            for item, outcome in zip(items, outcomes, strict=True):
                self._check(item, outcome, time.monotonic() - begun_s)
            await asyncio.sleep(0.005)

    def _check(self, item: ImageItem, outcome: Outcome, took_s: float) -> None:
        if not isinstance(outcome, EncodedRows):
            self.failures.append(
                f"{outcome.reason} after {took_s:.1f} s: {outcome.message}; {self.client.counts}, "
                f"{self.client.retries.left(time.monotonic()):.1f} retries left, {self.client.replicas}"
            )
            return
        rows = self._rows.setdefault(item.digest, outcome.numpy().copy())
        if not np.allclose(rows, outcome.numpy(), atol=1e-5):
            self.failures.append("rows differ between replicas")
        self.num_served += 1


async def states(client: AsyncFleetClient, wanted: dict[str, str], limit_s: float = 30) -> None:
    ends_s = time.monotonic() + limit_s
    while any(one.state != wanted.get(one.target, "up") for one in client.replicas):
        assert time.monotonic() < ends_s, client.replicas
        await asyncio.sleep(0.02)


def new_image_of(client: AsyncFleetClient, target: str) -> ImageItem:
    """One that nobody holds, whose home the replica is."""
    while True:
        item = ImageItem(photo(64, 64), digest=secrets.token_bytes(32))
        assert item.digest is not None
        if client.home(item.digest) == target:
            return item


@contextlib.asynccontextmanager
async def fleet_client(encoders: list[Encoder], **changes: Any) -> AsyncIterator[AsyncFleetClient]:
    async with AsyncFleetClient([one.target for one in encoders], timeout_s=30, **changes) as client:
        await client.wait_ready(60, num_replicas=len(encoders))
        yield client


async def test_one_item_is_encoded_at_one_replica_and_read_by_several_readers(
    encoders: list[Encoder],
) -> None:
    """Leases are their replica's own: releases and other readers find it."""
    items = [ImageItem(photo(64, 64), digest=secrets.token_bytes(32)) for _ in range(6)]
    started = running(encoders)
    async with fleet_client(started, settings=SETTINGS, transports=("host", "inline")) as client:
        ends_s = time.monotonic() + 30
        while not all(one.is_local for one in client.replicas):  # found out once each is up
            assert time.monotonic() < ends_s, client.replicas
            await asyncio.sleep(0.02)
        for item in items:
            rows = await client.encode_one(item, num_readers=2)
            assert rows.shared is not None
            again = await client.read_shared(rows.shared, reader=1)
            assert np.array_equal(rows.numpy(), again.numpy())
        tiers = [one.tier.value for one in await client.encode(items) if isinstance(one, EncodedRows)]
    assert tiers == ["host"] * 6


async def test_p37_a_standstill_and_a_drain_fail_no_request_of_shared_memory(encoders: list[Encoder]) -> None:
    shared = fleet_client(running(encoders), settings=SETTINGS, transports=("host", "inline"))
    async with shared as client, Callers(client) as callers:
        await callers.until(60)
        still, stopped = encoders[0], encoders[2]
        still.process.send_signal(signal.SIGSTOP)
        # What it holds is read without asking it, and what it does not hold comes from elsewhere.
        outcome = await client.encode_one(new_image_of(client, still.target))
        assert outcome.num_rows > 0
        assert client.counts.retries + client.counts.hedges > 0
        await callers.until(60)
        await states(client, {still.target: "down"})
        still.process.send_signal(signal.SIGCONT)
        await states(client, {})
        await callers.until(30)
        await asyncio.to_thread(stopped.end, signal.SIGTERM)
        await callers.until(60)
        await states(client, {stopped.target: "down"})
    assert stopped.process.returncode == 0
    assert callers.failures == []


async def test_a_kill_fails_no_request_of_inline_rows(encoders: list[Encoder]) -> None:
    settings = replace(SETTINGS, locality="ignore")
    inline = fleet_client(running(encoders[:2]), settings=settings, transports=("inline",))
    async with inline as client, Callers(client) as callers:
        await callers.until(60)
        await asyncio.to_thread(encoders[1].end, signal.SIGKILL)
        await callers.until(60)
        await states(client, {encoders[1].target: "down"})
    assert callers.failures == []
