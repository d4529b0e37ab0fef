"""The shared tier against a real server: what travels, what lies there, and replicas that use it."""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
import torch
from pydantic import SecretStr

from encoder_service.errors import ConfigurationError
from encoder_service.store.embedding_store import EmbeddingStore, Held
from encoder_service.store.shared_tier import ServerTier, SharedTierLimits
from encoder_service.store.shared_tier_entry import HEADER_BYTES, Seal, rows_view
from encoder_service.store.shared_tier_server import PIECE_BYTES, ServerFailed, ValkeyServer
from encoder_service.types import EncodedItem, Grid
from lm_adapter import CacheTier, DigestItem, EncodedRows, ImageItem, KeyState, VisionEncoderClient
from tests.integration.conftest import RunningService, running
from tests.integration.images import photo
from tests.valkey_server import ValkeyProcess

pytestmark = pytest.mark.anyio
WIDTH = 1024
SECRET = secrets.token_bytes(32)


class Rows:
    width, dtype, num_deepstack_levels = WIDTH, torch.bfloat16, 3

    def num_rows(self, grid: Grid) -> int:
        return grid.num_patches // 4


def make_item(num_bytes: int) -> EncodedItem:
    num_rows = max(1, num_bytes // (2 * WIDTH))
    rows = torch.randn(num_rows, WIDTH).bfloat16()
    return EncodedItem(secrets.token_bytes(32), secrets.token_bytes(32), Grid(1, 2, 2 * num_rows), rows, 3)


@pytest.fixture
def workers() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as found:
        yield found


@asynccontextmanager
async def tier_on(
    server: ValkeyProcess, workers: ThreadPoolExecutor, secret: bytes = SECRET, **limits: object
) -> AsyncIterator[ServerTier]:
    client = ValkeyServer(SecretStr(server.url), prefix="t", max_connections=16)
    given = SharedTierLimits(**{"timeout_s": 20.0, **limits})  # type: ignore[arg-type]
    tier = ServerTier(client, Seal(secret), Rows(), EmbeddingStore(1 << 20), workers, given)
    try:
        yield tier
    finally:
        await tier.stop()
        tier.check_integrity()


async def put(tier: ServerTier, namespace: str, item: EncodedItem) -> None:
    tier.put(namespace, Held(item))
    assert tier._writer is not None
    await asyncio.wait([tier._writer])


@pytest.mark.parametrize(
    "num_bytes",
    [2048, PIECE_BYTES - HEADER_BYTES, PIECE_BYTES, PIECE_BYTES + 2048, 5 * PIECE_BYTES, 20 << 20],
)
async def test_rows_of_every_size_come_back(
    valkey: ValkeyProcess, workers: ThreadPoolExecutor, num_bytes: int
) -> None:
    item = make_item(num_bytes)
    async with tier_on(valkey, workers) as writer, tier_on(valkey, workers) as reader:
        assert await reader.get("a", item.key) is None
        await put(writer, "a", item)
        assert writer.counters.writes == {"stored": 1}
        found = await reader.get("a", item.key)
    assert found is not None
    assert torch.equal(found.rows.view(torch.uint8), item.rows.view(torch.uint8))
    assert (found.key, found.content_digest, found.grid) == (item.key, item.content_digest, item.grid)
    assert len(valkey.names()) == 1


async def test_what_lies_on_the_server_ends_and_tells_no_names(
    valkey: ValkeyProcess, workers: ThreadPoolExecutor
) -> None:
    items = [make_item(4096), make_item(3 * PIECE_BYTES)]
    async with tier_on(valkey, workers, ttl_s=500.0) as tier:
        for item in items:
            await put(tier, "tenant", item)
    keys = valkey.names()
    assert len(keys) == 2
    for key in keys:
        assert 400_000 < int(valkey.call("PTTL", key)[1:]) <= 500_000
        assert key.startswith(b"t:{")
        for item in items:
            assert b"tenant" not in key
            assert item.key.hex().encode() not in key
    assert {len(valkey.value(key)) for key in keys} == {HEADER_BYTES + item.spec.num_bytes for item in items}


async def test_p18_neither_another_namespace_nor_another_secret_finds_rows(
    valkey: ValkeyProcess, workers: ThreadPoolExecutor
) -> None:
    item = make_item(4096)
    async with tier_on(valkey, workers) as tier, tier_on(valkey, workers, secrets.token_bytes(32)) as other:
        await put(tier, "a", item)
        assert await tier.get("b", item.key) is None
        assert await other.get("a", item.key) is None
        assert tier.counters.looks == other.counters.looks == {"miss": 1}


def seconds_without_a_core(workers: ThreadPoolExecutor) -> float:
    """How long this thread and the workers were ready to run and had to wait (sched-stats.rst of the kernel's
    documentation); 0 where that is not counted. Other tests' threads are left out: where hundreds are left in
    the process, to read of each would take longer than what is measured."""
    waited_ns = 0
    for thread in (threading.current_thread(), *workers._threads):
        with suppress(OSError):  # not counted here
            account = Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text()
            waited_ns += int(account.split()[1])
    return waited_ns / 1e9


async def test_p34_tens_of_megabytes_do_not_hold_the_loop(
    valkey: ValkeyProcess, workers: ThreadPoolExecutor
) -> None:
    """A copy of as many bytes must not happen on the loop, nor in a thread that keeps the interpreter. What
    other processes take of the machine does not count."""
    item = make_item(48 << 20)
    gaps_s: list[float] = []

    async def tick() -> None:
        while True:
            started_s, starved_s = time.perf_counter(), seconds_without_a_core(workers)
            await asyncio.sleep(0)
            gap_s = time.perf_counter() - started_s
            gaps_s.append(gap_s - (seconds_without_a_core(workers) - starved_s))

    async with tier_on(valkey, workers, timeout_s=120.0) as tier:  # not a test of the server's speed
        ticking = asyncio.ensure_future(tick())
        await put(tier, "a", item)
        assert tier.counters.writes == {"stored": 1}
        found = await tier.get("a", item.key)
        ticking.cancel()
        assert found is not None
        assert torch.equal(found.rows, item.rows)
    # Many short steps, and hardly a long one: the kernel's account is not to the microsecond.
    assert len(gaps_s) > 100
    assert sorted(gaps_s)[-3] < 0.1
    assert len([gap for gap in gaps_s if gap > 0.03]) < 10


async def test_a_password_is_sent_and_a_wrong_one_is_a_server_that_fails(
    valkey: ValkeyProcess, workers: ThreadPoolExecutor
) -> None:
    valkey.call("CONFIG", "SET", "requirepass", "open-sesame")
    good, bad = (
        ValkeyServer(SecretStr(f"{valkey.url}?password={word}"), prefix="t", max_connections=2)
        for word in ("open-sesame", "guess")
    )
    assert await good.read(bytes(32), 0, 10) == [b""]
    with pytest.raises(ServerFailed) as caught:
        await bad.read(bytes(32), 0, 10)
    assert "guess" not in str(caught.value)
    await good.close()
    await bad.close()


def test_a_url_that_is_none_is_refused_without_being_repeated() -> None:
    with pytest.raises(ConfigurationError) as caught:
        ValkeyServer(SecretStr("http://user:hunter2@host"), prefix="t", max_connections=2)
    assert "hunter2" not in str(caught.value)


async def test_a_caller_that_leaves_never_gives_another_its_reply(
    valkey: ValkeyProcess, workers: ThreadPoolExecutor
) -> None:
    items = [make_item(3 * PIECE_BYTES) for _ in range(4)]
    async with tier_on(valkey, workers) as tier:
        for item in items:
            await put(tier, "a", item)
        for _ in range(30):
            looks = [asyncio.ensure_future(tier.get("a", item.key)) for item in items]
            await asyncio.sleep(secrets.randbelow(3000) / 1e6)
            for look in looks[::2]:
                look.cancel()
            await asyncio.wait(looks)
            for item, look in zip(items, looks, strict=True):
                if not look.cancelled():
                    found = look.result()
                    assert found is not None
                    assert torch.equal(found.rows, item.rows)
        assert tier.counters.looks["corrupt"] == tier.counters.looks["failed"] == 0
        assert len(valkey.names()) == 4


async def test_a_writer_that_dies_leaves_nothing_that_stays(
    valkey: ValkeyProcess, workers: ThreadPoolExecutor
) -> None:
    item = make_item(16 * PIECE_BYTES)
    async with tier_on(valkey, workers) as tier:
        tier.put("a", Held(item))
        while not valkey.names():  # noqa: ASYNC110  # another process's event
            await asyncio.sleep(0)
        await tier.stop()
    for key in valkey.names():
        assert 0 < int(valkey.call("PTTL", key)[1:]) <= 86_400_000
    async with tier_on(valkey, workers) as tier:
        found = await tier.get("a", item.key)
        assert found is None or torch.equal(found.rows, item.rows)
    assert rows_view(item.rows).nbytes == item.spec.num_bytes


def figure(service: RunningService, name: str, **labels: str) -> float | None:
    return service.service.metrics.registry.get_sample_value(name, labels)


def test_a_replica_serves_what_another_made(
    valkey: ValkeyProcess, checkpoints: dict[str, Path], device: torch.device
) -> None:
    """Whole services over their wire: the same rows, no encode, and figures that say so."""
    settings = {"shared_url": valkey.url, "shared_secret": SECRET.hex(), "shared_timeout_ms": 10_000}
    items = [ImageItem(photo()) for _ in range(3)]
    model = checkpoints["qwen3_vl"]
    with running(model, device, **settings) as first, running(model, device, **settings) as second:
        with VisionEncoderClient(first.target) as client:
            made = client.encode(items)
        ends_s = time.monotonic() + 30
        while figure(first, "ve_shared_tier_writes_total", outcome="stored") != 3:
            assert time.monotonic() < ends_s
            time.sleep(0.01)
        with VisionEncoderClient(second.target) as client:
            found, again = client.encode(items), client.encode(items)
        for one, other, last in zip(made, found, again, strict=True):
            assert isinstance(one, EncodedRows)
            assert isinstance(other, EncodedRows)
            assert isinstance(last, EncodedRows)
            assert (one.tier, other.tier) == (CacheTier.MISS, CacheTier.SHARED)
            assert last.tier not in (CacheTier.MISS, CacheTier.SHARED)
            assert one.key == other.key
            assert torch.equal(torch.as_tensor(one.payload), torch.as_tensor(other.payload))
        assert figure(second, "ve_encoded_items_total") == 0
        assert figure(second, "ve_tier_hits_total", tier="shared") == 3
        assert figure(second, "ve_tier_hits_total", tier="host") == 3
        assert figure(second, "ve_tier_lookups_total", tier="host") == 6
        assert figure(second, "ve_tier_lookups_total", tier="shared") == 3
        assert figure(second, "ve_shared_tier_breaker", calls="looks") == 0
        assert figure(second, "ve_shared_tier_look_seconds_count", outcome="hit") == 3


def test_digests_and_keys_alone_find_what_another_replica_made(
    valkey: ValkeyProcess, checkpoints: dict[str, Path], device: torch.device
) -> None:
    """Lookup tells of it, Fetch and an item without content bring it; another namespace sees none of it."""
    settings = {"shared_url": valkey.url, "shared_secret": SECRET.hex(), "shared_timeout_ms": 10_000}
    model, files = checkpoints["qwen3_vl"], [photo() for _ in range(2)]
    with running(model, device, **settings) as first, running(model, device, **settings) as second:
        with VisionEncoderClient(first.target) as client:
            results = client.encode([ImageItem(data) for data in files])
            made = [each for each in results if isinstance(each, EncodedRows)]
        ends_s = time.monotonic() + 30
        while figure(first, "ve_shared_tier_writes_total", outcome="stored") != 2:
            assert time.monotonic() < ends_s
            time.sleep(0.01)
        keys = [each.key for each in made]
        with VisionEncoderClient(second.target, namespace="other") as client:
            assert [each.state for each in client.lookup(keys)] == [KeyState.ABSENT] * 2
        with VisionEncoderClient(second.target) as client:
            told = client.lookup([*keys, secrets.token_bytes(32)])
            assert [each.state for each in told] == [KeyState.RESIDENT] * 2 + [KeyState.ABSENT]
            assert [each.tier for each in told[:2]] == [CacheTier.SHARED] * 2
            assert [(each.grid_thw, each.num_rows) for each in told[:2]] == [
                (each.grid_thw, each.num_rows) for each in made
            ]
            (fetched,) = client.fetch(keys[:1])
            (sent,) = client.encode([DigestItem(made[1].content_digest)])
            again = client.lookup(keys)
        for one, other in zip(made, (fetched, sent), strict=True):
            assert isinstance(other, EncodedRows)
            assert other.tier is CacheTier.SHARED
            assert torch.equal(torch.as_tensor(one.payload), torch.as_tensor(other.payload))
        assert [each.tier for each in again] == [CacheTier.HOST] * 2, "kept from then on"
        assert figure(second, "ve_encoded_items_total") == 0


def test_a_service_starts_and_serves_without_its_server(
    tmp_path: Path, checkpoints: dict[str, Path], device: torch.device
) -> None:
    settings = {"shared_url": f"unix://{tmp_path}/none.sock", "shared_secret": SECRET.hex()}
    with running(checkpoints["qwen3_vl"], device, **settings) as service:
        with VisionEncoderClient(service.target) as client:
            (result,) = client.encode([ImageItem(photo())])
        assert isinstance(result, EncodedRows)
        assert result.tier is CacheTier.MISS
        assert figure(service, "ve_shared_tier_looks_total", outcome="failed") == 1
