"""How a rank of the vLLM connector waits for keys that the encoder's directory will list."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from lm_adapter import AsyncVisionEncoderClient
from lm_adapter.engines.vllm.listing import LOOK_S, MAX_LOOK_S, ListedKeys
from lm_adapter.keys import item_key
from lm_adapter.testing import fake_model
from tests.unit.lm_adapter.shm_rig import NAMESPACE, Encoder
from tests.unit.lm_adapter.test_client import image

LONG_S = 60.0
FIRST, SECOND, THIRD = KEYS = [
    item_key(image(index), fake_model(), namespace=NAMESPACE) for index in range(3)
]


class Memory:
    """Attached memory that lists ``keys``."""

    def __init__(self) -> None:
        self.keys: set[bytes] = set()
        self.num_listed = 0
        self.num_finds = 0

    def find(self, key: bytes) -> object | None:
        self.num_finds += 1
        return key if key in self.keys else None

    def list(self, key: bytes) -> None:
        self.keys.add(key)
        self.num_listed += 1


class Waiter:
    """ListedKeys with what they look at."""

    def __init__(self) -> None:
        self.memory: Any = Memory()
        self.listed_keys = ListedKeys(lambda: self.memory)

    def start(self, key: bytes, timeout_s: float = LONG_S) -> asyncio.Task[bool]:
        return asyncio.create_task(self.listed_keys.wait(key, timeout_s))

    def assert_idle(self) -> None:
        assert (self.listed_keys._waits, self.listed_keys._timer) == ({}, None)


def on_a_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 30))


@pytest.mark.parametrize("ends_by", ["another call", "detached", "attached to another", "time"])
def test_a_wait_ends(ends_by: str) -> None:
    async def run() -> None:
        waiter = Waiter()
        waiter.memory.list(THIRD)
        timeout_s = 0.1 if ends_by == "time" else LONG_S
        waits = [waiter.start(key, timeout_s) for key in (FIRST, SECOND, FIRST)]
        left = waiter.start(FIRST)
        assert await waiter.start(THIRD)
        assert not await waiter.start(FIRST, 0.03)
        assert not any(wait.done() for wait in waits)
        left.cancel()
        expected = ends_by not in ("detached", "time")
        if ends_by == "detached":
            waiter.memory = None
        elif ends_by == "attached to another":
            waiter.memory = Memory()
            waiter.memory.keys = {FIRST, SECOND}
        elif ends_by == "another call":
            waiter.memory.list(SECOND)
            assert await waits[1]
            assert not waits[0].done()
            waiter.memory.list(FIRST)
        assert await asyncio.gather(*waits) == [expected] * 3
        with contextlib.suppress(asyncio.CancelledError):
            await left
        await asyncio.sleep(2 * MAX_LOOK_S)
        waiter.assert_idle()

    on_a_loop(run)


def test_nothing_is_waited_for_without_memory() -> None:
    async def run() -> None:
        waiter = Waiter()
        waiter.memory = None
        assert not await waiter.start(FIRST)
        waiter.assert_idle()

    on_a_loop(run)


def test_keys_are_looked_for_only_after_something_was_listed() -> None:
    async def run() -> None:
        waiter, num_waits = Waiter(), 20
        waits = [waiter.start(bytes([index])) for index in range(num_waits)]
        await asyncio.sleep(10 * MAX_LOOK_S)
        assert waiter.memory.num_finds <= 2 * num_waits
        waiter.memory.list(b"another")
        await asyncio.sleep(10 * MAX_LOOK_S)
        assert waiter.memory.num_finds <= 3 * num_waits
        for wait in waits:
            wait.cancel()

    on_a_loop(run)


def test_a_single_key_is_found_sooner_than_several() -> None:
    async def run() -> None:
        waiter, loop = Waiter(), asyncio.get_running_loop()
        pauses_s = []
        for index in range(8):
            waiter.start(bytes([index]))
            await asyncio.sleep(0)
            timer = waiter.listed_keys._timer
            assert timer is not None
            timer.cancel()
            waiter.listed_keys._look()
            timer = waiter.listed_keys._timer
            assert timer is not None
            pauses_s.append(timer.when() - loop.time())
        expected = [min(number * LOOK_S, MAX_LOOK_S) for number in range(1, 9)]
        assert pauses_s == pytest.approx(expected, abs=0.5 * LOOK_S)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    on_a_loop(run)


def test_no_listing_is_missed() -> None:
    """Waits begin, are listed and are cancelled at any time."""
    seed = time.time_ns() % 2**32
    print("seed", seed)
    chance = random.Random(seed)

    async def one(waiter: Waiter, key: bytes) -> None:
        await asyncio.sleep(chance.uniform(0, 0.3))
        wait = waiter.start(key)
        if chance.random() < 0.2:
            await asyncio.sleep(chance.uniform(0, 0.02))
            wait.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await wait
        else:
            assert await wait

    async def run() -> None:
        waiter = Waiter()
        keys = [chance.randbytes(32) for _ in range(300)]
        tasks = [asyncio.create_task(one(waiter, key)) for key in keys for _ in range(2)]
        for key in chance.sample(keys, len(keys)):
            await asyncio.sleep(chance.uniform(0, 0.002))
            waiter.memory.list(key)
        await asyncio.gather(*tasks)
        await asyncio.sleep(2 * MAX_LOOK_S)
        waiter.assert_idle()

    on_a_loop(run)


def test_a_key_is_found_in_the_encoders_directory(tmp_path: Path) -> None:
    async def run(encoder: Encoder) -> None:
        target = encoder.fake.target
        async with (
            AsyncVisionEncoderClient(target, namespace=NAMESPACE) as reader,
            AsyncVisionEncoderClient(target, namespace=NAMESPACE) as other,
        ):
            listed_keys = ListedKeys(lambda: reader.attached)
            assert not await listed_keys.wait(FIRST, LONG_S)
            for client in (reader, other):
                assert (await client.wait_transport(10)).name == "host"
            waits = [asyncio.create_task(listed_keys.wait(key, LONG_S)) for key in (FIRST, SECOND)]
            await other.encode_one(image(0))
            assert await waits[0]
            assert not waits[1].done()
            (rows,) = await reader.fetch([FIRST])
            assert rows.key == FIRST
            encoder.broker.stop()
            assert not await waits[1]
        assert encoder.fake.num_calls["Fetch"] == 0

    with Encoder(tmp_path) as encoder:
        asyncio.run(asyncio.wait_for(run(encoder), 30))
