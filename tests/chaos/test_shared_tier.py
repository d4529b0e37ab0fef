"""What is done to the shared tier's server while the service uses it: everybody is served all the same."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator

import pytest
import torch
from pydantic import SecretStr

from encoder_service.pipeline import Delivered
from encoder_service.scheduler.admission import Admission
from encoder_service.store.shared_tier import ServerTier, SharedTierLimits
from encoder_service.store.shared_tier_breaker import MAX_RUN, BreakerState, CircuitBreaker
from encoder_service.store.shared_tier_entry import VERSION, Seal
from encoder_service.store.shared_tier_server import ValkeyServer
from encoder_service.types import CacheTier
from tests.unit.service.test_pipeline import Rig, image
from tests.valkey_server import ValkeyProcess

pytestmark = pytest.mark.anyio
TIMEOUT_S = 0.25
# What other processes may take of this machine while a look times out.
SLACK_S = 2.0


class Replica(Rig):
    """A pipeline whose store keeps nothing but what a test puts there, in front of a server."""

    def __init__(self, url: str, secret: bytes, **limits: object) -> None:
        super().__init__()
        self.pipeline.admission = Admission(max_patches=1 << 20, max_bytes=1 << 20)
        given = SharedTierLimits(**{"timeout_s": TIMEOUT_S, **limits})  # type: ignore[arg-type]
        self.tier = ServerTier(
            ValkeyServer(SecretStr(url), prefix="ve", max_connections=66),
            Seal(secret),
            self.tower,
            self.pipeline.store,
            self.workers,
            given,
        )
        self.tier.looks = CircuitBreaker(time.monotonic, first_open_s=0.05, max_open_s=0.2)
        self.tier.writes = CircuitBreaker(time.monotonic, first_open_s=0.05, max_open_s=0.2)
        self.pipeline.shared_tier = self.tier
        self.pipeline.__post_init__()

    async def encode(self, value: int) -> Delivered:
        """Of 200 different images; checks the rows."""
        delivered = await self.pipeline.encode(image(value % 200 + 1, side=16))
        assert torch.equal(
            delivered.encoded.rows,
            torch.tensor([value % 200 + 1.0, value % 200 + 2.0]).repeat_interleave(8).expand(64, -1),
        )
        return delivered

    async def written(self) -> None:
        if self.tier._writer is not None:
            await asyncio.wait([self.tier._writer])

    async def stop(self) -> None:
        await self.tier.stop()
        await self.pipeline.drain(10)
        assert self.engine.stop(10)
        self.workers.shutdown()
        self.tier.check_integrity()
        self.pipeline.store.check_integrity()


@pytest.fixture
async def replicas(valkey: ValkeyProcess) -> AsyncIterator[tuple[Replica, Replica]]:
    secret = secrets.token_bytes(32)
    found = Replica(valkey.url, secret), Replica(valkey.url, secret)
    yield found
    for replica in found:
        await replica.stop()


async def until_closed(replica: Replica) -> None:
    """Looks for what nobody has until the server counts as well again."""
    ends_s = time.monotonic() + 20
    while replica.tier.looks.state is not BreakerState.CLOSED:
        assert time.monotonic() < ends_s
        await replica.tier.get("", secrets.token_bytes(32))
        await asyncio.sleep(0.01)


async def test_a_server_that_is_killed_and_comes_back(
    valkey: ValkeyProcess, replicas: tuple[Replica, Replica]
) -> None:
    first, second = replicas
    for value in range(10):
        await first.encode(value)
    await first.written()
    assert (await second.encode(0)).tier is CacheTier.SHARED
    valkey.kill()
    started_s = time.monotonic()
    assert {(await second.encode(value)).tier for value in range(1, 10)} == {CacheTier.MISS}
    assert time.monotonic() - started_s < SLACK_S
    assert second.tier.looks.num_opened == 1
    valkey.start()
    await until_closed(second)
    assert (await second.encode(20)).tier is CacheTier.MISS
    await second.written()
    await until_closed(first)
    assert (await first.encode(20)).tier is CacheTier.SHARED


async def test_a_server_that_stalls_costs_everybody_one_timeout_at_most(
    valkey: ValkeyProcess, replicas: tuple[Replica, Replica]
) -> None:
    first, _ = replicas
    await first.encode(0)
    await first.written()
    valkey.stall()
    started_s = time.monotonic()
    tiers = [each.tier for each in await asyncio.gather(*(first.encode(value) for value in range(1, 21)))]
    assert time.monotonic() - started_s < TIMEOUT_S + SLACK_S
    assert set(tiers) == {CacheTier.MISS}
    assert first.tier.looks.state is not BreakerState.CLOSED
    # From then on nobody waits, but for the one that tries.
    for value in range(21, 61):
        await first.encode(value)
    looks = first.tier.counters.looks
    assert looks["refused"] > looks["timeout"] - 20, "most of the forty did not wait"
    assert first.tier.counters.looks["timeout"] >= MAX_RUN
    valkey.resume()
    await until_closed(first)


async def test_a_server_that_answers_too_late_is_left_alone(
    valkey: ValkeyProcess, replicas: tuple[Replica, Replica]
) -> None:
    """Behind a link that takes longer than a look may."""
    secret = secrets.token_bytes(32)

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, wait_s: float) -> None:
        try:
            while data := await reader.read(1 << 16):
                await asyncio.sleep(wait_s)
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to_server = await asyncio.open_unix_connection(str(valkey.path))
        await asyncio.gather(relay(reader, to_server[1], 0.2), relay(to_server[0], writer, 0.0))

    path = valkey.path.with_name("slow.sock")
    async with await asyncio.start_unix_server(serve, str(path)):
        replica = Replica(f"unix://{path}", secret, timeout_s=0.05)
        started_s = time.monotonic()
        for value in range(40):
            assert (await replica.encode(value)).tier is CacheTier.MISS
        assert time.monotonic() - started_s < 40 * 0.05 + SLACK_S
        assert replica.tier.counters.looks["timeout"] >= MAX_RUN
        assert replica.tier.counters.looks["refused"] > 0
        assert replica.tier.looks.num_opened == 1
        await replica.stop()


async def test_a_server_without_memory_answers_looks_and_gets_no_more_writes(
    valkey: ValkeyProcess, replicas: tuple[Replica, Replica]
) -> None:
    first, second = replicas
    await first.encode(0)
    await first.written()
    valkey.call("CONFIG", "SET", "maxmemory-policy", "noeviction")
    valkey.call("CONFIG", "SET", "maxmemory", "1")
    for value in range(1, 40):
        assert (await first.encode(value)).tier is CacheTier.MISS
        await first.written()
    assert first.tier.counters.writes["full"] >= MAX_RUN
    assert first.tier.counters.writes["refused"] > 0
    assert first.tier.looks.state is BreakerState.CLOSED
    assert (await second.encode(0)).tier is CacheTier.SHARED
    assert len(valkey.names()) == 1, "a refused value left something behind"
    valkey.call("CONFIG", "SET", "maxmemory", "0")
    await asyncio.sleep(0.25)
    await first.encode(60)
    await first.written()
    assert (await second.encode(60)).tier is CacheTier.SHARED


async def test_what_was_corrupted_is_encoded_deleted_and_written_anew(
    valkey: ValkeyProcess, replicas: tuple[Replica, Replica]
) -> None:
    first, second = replicas
    await first.encode(0)
    await first.written()
    (name,) = valkey.names()
    value = bytearray(valkey.value(name))
    value[secrets.randbelow(len(value))] ^= 1 << secrets.randbelow(8)
    # Not the version: that is another test's.
    value[36:38] = VERSION.to_bytes(2, "little")
    value[-1] ^= 1
    assert valkey.call("SET", name, bytes(value)) == b"+OK\r\n"
    assert (await second.encode(0)).tier is CacheTier.MISS
    looks = second.tier.counters.looks
    assert looks["corrupt"] + looks["foreign"] == 1
    await second.written()
    assert valkey.value(name) != bytes(value)


async def test_an_entry_of_another_release_is_no_hit(
    valkey: ValkeyProcess, replicas: tuple[Replica, Replica]
) -> None:
    first, second = replicas
    await first.encode(0)
    await first.written()
    (name,) = valkey.names()
    value = bytearray(valkey.value(name))
    value[36:38] = (VERSION + 1).to_bytes(2, "little")
    valkey.call("SET", name, bytes(value))
    assert (await second.encode(0)).tier is CacheTier.MISS
    assert second.tier.counters.looks == {"foreign": 1}


async def test_flushes_evictions_and_clients_cut_off_in_between(
    valkey: ValkeyProcess, replicas: tuple[Replica, Replica]
) -> None:
    """Everything at once: each caller gets its rows, whichever tier they come from."""
    first, second = replicas
    for value in range(60):
        await asyncio.gather(first.encode(value), second.encode(value))
        if value % 7 == 0:
            valkey.call("FLUSHALL")
        if value % 11 == 0:
            valkey.call("CLIENT", "KILL", "TYPE", "normal")
        if value % 17 == 0:
            valkey.call("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
            valkey.call("CONFIG", "SET", "maxmemory", "2mb")
    for replica in replicas:
        await replica.written()
        assert replica.tier.counters.looks["corrupt"] == 0
