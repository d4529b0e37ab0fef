"""When the shared tier is asked, for how long, and what waits for it: against a server that is a dict."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from encoder_service.store import shared_tier
from encoder_service.store.arena import PROBE_BYTES, Arena
from encoder_service.store.arena_store import ArenaStore
from encoder_service.store.embedding_store import EmbeddingStore, Held
from encoder_service.store.host_memory import HostMemory
from encoder_service.store.shared_tier import ServerTier, SharedTierLimits
from encoder_service.store.shared_tier_breaker import BreakerState
from encoder_service.store.shared_tier_entry import HEADER_BYTES, Seal
from encoder_service.store.shared_tier_server import Piece, ServerFailed, ServerRefused
from encoder_service.types import EncodedItem, Grid

pytestmark = pytest.mark.anyio
WIDTH = 64


class Rows:
    width, dtype, num_deepstack_levels = WIDTH, torch.float32, 1

    def num_rows(self, grid: Grid) -> int:
        return grid.num_patches // 4


class DictServer:
    """gate: cleared, it answers nothing. error: what it raises."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        self.gate = asyncio.Event()
        self.gate.set()
        self.error: Exception | None = None
        self.num_calls = 0
        self.closed = False

    async def _answer(self) -> None:
        self.num_calls += 1
        await self.gate.wait()
        if self.error is not None:
            raise self.error

    async def read(self, name: bytes, offset: int, num_bytes: int) -> list[bytes]:
        await self._answer()
        return [self.values.get(name, b"")[offset : offset + num_bytes]]

    async def read_heads(self, names: Sequence[bytes], num_bytes: int) -> list[bytes]:
        await self._answer()
        return [self.values.get(name, b"")[:num_bytes] for name in names]

    async def write(self, name: bytes, pieces: Sequence[Piece], ttl_ms: int) -> None:
        await self._answer()
        self.values[name] = b"".join(pieces)

    async def delete(self, name: bytes) -> None:
        await self._answer()
        self.values.pop(name, None)

    async def close(self) -> None:
        self.closed = True


class Rig:
    def __init__(self, **limits: object) -> None:
        self.server = DictServer()
        self.workers = ThreadPoolExecutor(2)
        self.store = EmbeddingStore(1 << 20)
        self.now_s = 0.0
        self.tier = ServerTier(
            self.server,
            Seal(secrets.token_bytes(32)),
            Rows(),
            self.store,
            self.workers,
            SharedTierLimits(**{"timeout_s": 30.0, **limits}),  # type: ignore[arg-type]
            clock=lambda: self.now_s,
            wall_clock=lambda: 1.0,
        )

    async def written(self) -> None:
        if self.tier._writer is not None:
            await asyncio.wait([self.tier._writer])

    async def fail_looks(self) -> None:
        self.server.error = ServerFailed("gone")
        while self.tier.looks.state is BreakerState.CLOSED:
            assert await self.tier.get("a", bytes(32)) is None


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig()
    yield rig
    rig.server.gate.set()
    await rig.tier.stop()
    rig.tier.check_integrity()
    assert rig.server.closed
    rig.workers.shutdown()


def make_item(num_rows: int = 4) -> EncodedItem:
    rows = torch.randn(num_rows, WIDTH)
    return EncodedItem(secrets.token_bytes(32), bytes(32), Grid(1, 2, 2 * num_rows), rows, 1)


async def test_what_is_put_is_found_in_its_namespace_only(rig: Rig) -> None:
    item = make_item()
    assert await rig.tier.get("a", item.key) is None
    rig.tier.put("a", Held(item))
    await rig.written()
    found = await rig.tier.get("a", item.key)
    assert found is not None
    assert torch.equal(found.rows, item.rows)
    assert await rig.tier.get("b", item.key) is None
    assert rig.tier.counters.looks == {"miss": 2, "hit": 1}
    assert rig.tier.counters.writes == {"stored": 1}
    rig.tier.check_integrity()


async def test_what_is_broken_is_a_miss_and_deleted(rig: Rig) -> None:
    item = make_item()
    rig.tier.put("a", Held(item))
    await rig.written()
    ((name, value),) = rig.server.values.items()
    rig.server.values[name] = value[:-1] + bytes([value[-1] ^ 1])
    assert await rig.tier.get("a", item.key) is None
    assert (rig.tier.counters.looks, rig.server.values) == ({"corrupt": 1}, {})
    assert rig.tier.looks.state is BreakerState.CLOSED


async def test_p17_what_waits_to_be_written_is_bounded_and_given_up_beyond(rig: Rig) -> None:
    items = [make_item() for _ in range(5)]
    num_bytes = items[0].spec.num_bytes
    object.__setattr__(rig.tier.limits, "max_queued_bytes", 3 * num_bytes)
    rig.server.gate.clear()
    for item in items:
        rig.tier.put("a", Held(item))
        await asyncio.sleep(0)
    assert rig.tier.queued_bytes == 3 * num_bytes
    assert rig.tier.counters.writes == {"queue": 2}
    rig.server.gate.set()
    await rig.written()
    assert rig.tier.counters.writes == {"queue": 2, "stored": 3}
    assert rig.tier.queued_bytes == 0


async def test_p17_looks_are_bounded_in_number_and_in_bytes(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    item = make_item()
    rig.tier.put("a", Held(item))
    await rig.written()
    monkeypatch.setattr(shared_tier, "MAX_LOOKS", 2)
    rig.server.gate.clear()
    looks = [asyncio.ensure_future(rig.tier.get("a", item.key)) for _ in range(3)]
    await asyncio.wait(looks[2:])
    assert rig.tier.counters.looks == {"busy": 1}
    rig.server.gate.set()
    assert all(await asyncio.gather(*looks[:2]))
    object.__setattr__(rig.tier.limits, "max_read_bytes", item.spec.num_bytes - 1)
    assert await rig.tier.get("a", item.key) is None
    assert rig.tier.counters.looks == {"busy": 2, "hit": 2}
    assert rig.server.values


async def test_values_above_the_bound_go_neither_way(rig: Rig) -> None:
    small, large = make_item(1), make_item(9)
    object.__setattr__(rig.tier.limits, "max_value_bytes", small.spec.num_bytes)
    rig.tier.put("a", Held(large))
    assert (rig.tier.counters.writes, rig.tier.queued_bytes) == ({"oversized": 1}, 0)
    rig.tier.put("a", Held(small))
    await rig.written()
    object.__setattr__(rig.tier.limits, "max_value_bytes", small.spec.num_bytes - 1)
    assert await rig.tier.get("a", small.key) is None
    assert rig.tier.counters.looks == {"oversized": 1}
    assert len(rig.server.values) == 1


async def test_rows_of_excluded_namespaces_never_leave_the_process() -> None:
    rig = Rig(excluded=frozenset({"alone"}))
    item = make_item()
    rig.tier.put("alone", Held(item))
    assert await rig.tier.get("alone", item.key) is None
    assert rig.server.num_calls == 0
    await rig.tier.stop()
    rig.workers.shutdown()


async def test_a_server_that_is_gone_is_asked_no_more_until_it_is_tried_again(rig: Rig) -> None:
    await rig.fail_looks()
    calls = rig.server.num_calls
    for _ in range(50):
        assert await rig.tier.get("a", bytes(32)) is None
        rig.tier.put("a", Held(make_item()))
    assert rig.server.num_calls == calls
    assert (rig.tier.counters.looks["refused"], rig.tier.counters.writes["refused"]) == (50, 50)
    rig.server.error = None
    rig.now_s += 1.0
    assert await rig.tier.get("a", bytes(32)) is None
    assert rig.tier.looks.state is BreakerState.CLOSED
    assert rig.tier.counters.looks["miss"] == 1


async def test_a_full_server_still_answers_looks(rig: Rig) -> None:
    rig.server.error = ServerRefused("OOM")
    for _ in range(10):
        rig.tier.put("a", Held(make_item()))
        await rig.written()
    assert rig.tier.writes.state is BreakerState.OPEN
    assert rig.tier.counters.writes == {"full": 3, "refused": 7}
    rig.server.error = None
    assert await rig.tier.get("a", bytes(32)) is None
    assert rig.tier.counters.looks == {"miss": 1}


async def test_a_caller_with_little_time_says_nothing_of_the_server(rig: Rig) -> None:
    rig.server.gate.clear()
    for _ in range(20):
        assert await rig.tier.get("a", bytes(32), within_s=0.0) is None
    assert rig.tier.counters.looks == {"late": 20}
    assert rig.tier.looks.state is BreakerState.CLOSED


async def test_a_stalled_server_costs_one_timeout_each_until_it_is_left_alone() -> None:
    rig = Rig(timeout_s=0.001)
    rig.server.gate.clear()
    for _ in range(20):
        assert await rig.tier.get("a", bytes(32)) is None
    assert rig.tier.counters.looks == {"timeout": 3, "refused": 17}
    await rig.tier.stop()
    rig.workers.shutdown()


async def test_rows_that_would_not_come_in_time_are_not_begun_and_open_nothing(rig: Rig) -> None:
    """A slow link is no reason to leave the server alone: smaller rows still come."""
    small, large = make_item(1), make_item(200)
    for item in (small, large):
        rig.tier.put("a", Held(item))
    await rig.written()
    rig.tier.pace.took(small.spec.num_bytes, 20.0)  # of the 30 seconds that a look may take
    for _ in range(10):
        assert await rig.tier.get("a", small.key) is not None
        rig.tier.pace.bytes_per_s = small.spec.num_bytes / 20.0
        assert await rig.tier.get("a", large.key) is None
    assert rig.tier.counters.looks == {"hit": 10, "slow": 10}
    assert rig.tier.looks.state is BreakerState.CLOSED
    assert len(rig.server.values) == 2
    # It is tried again in the end.
    for _ in range(1000):
        if await rig.tier.get("a", large.key) is not None:
            break
    assert rig.tier.counters.looks["hit"] == 11


async def test_a_transfer_that_is_cut_off_is_slow_and_sets_the_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_tier, "PIECE_BYTES", 512)
    rig = Rig(timeout_s=0.05)
    item = make_item(200)
    rig.tier.put("a", Held(item))
    await rig.written()
    read, calls = rig.server.read, 0

    async def stalls_after_the_first(name: bytes, offset: int, num_bytes: int) -> list[bytes]:
        nonlocal calls
        calls += 1
        if offset:
            rig.now_s += 0.05
            await asyncio.Event().wait()
        return await read(name, offset, num_bytes)

    rig.server.read = stalls_after_the_first  # type: ignore[method-assign]
    assert await rig.tier.get("a", item.key) is None
    assert rig.tier.looks.state is BreakerState.CLOSED
    assert rig.tier.pace.bytes_per_s == item.spec.num_bytes / 0.05
    rig.tier.pace.bytes_per_s /= 2
    assert await rig.tier.get("a", item.key) is None
    assert rig.tier.counters.looks == {"slow": 2}
    assert calls == 3, "the second look asked for the header alone"
    assert rig.tier.reading_bytes == 0
    await rig.tier.stop()
    rig.workers.shutdown()


async def test_a_caller_that_leaves_leaves_nothing_behind(rig: Rig) -> None:
    rig.server.gate.clear()
    looks = [asyncio.ensure_future(rig.tier.get("a", bytes(32))) for _ in range(8)]
    await asyncio.sleep(0)
    for look in looks:
        look.cancel()
    await asyncio.wait(looks)
    assert rig.tier.counters.looks == {"left": 8}
    assert rig.tier.looks.state is BreakerState.CLOSED
    rig.tier.check_integrity()


async def test_p14_rows_stay_in_place_until_they_are_written_and_no_longer(rig: Rig) -> None:
    store = ArenaStore(Arena(HostMemory(PROBE_BYTES + (1 << 16)), max_slots=8))
    item = make_item()
    store.put("a", item)
    held = store.hold("a", item.key)
    assert held is not None
    assert held.slot is not None
    slot = held.slot
    rig.server.gate.clear()
    rig.tier.put("a", held)
    await asyncio.sleep(0)
    assert store.arena.num_holders(slot) == 2
    rig.server.gate.set()
    await rig.written()
    assert store.arena.num_holders(slot) == 1
    assert len(rig.server.values) == 1
    store.close()


async def test_p14_stopping_gives_up_what_waits(rig: Rig) -> None:
    store = ArenaStore(Arena(HostMemory(PROBE_BYTES + (1 << 16)), max_slots=8))
    items = [make_item() for _ in range(3)]
    rig.server.gate.clear()
    for item in items:
        store.put("a", item)
        held = store.hold("a", item.key)
        assert held is not None
        rig.tier.put("a", held)
        await asyncio.sleep(0)
    await rig.tier.stop()
    assert rig.tier.counters.writes == {"stopped": 3}
    assert rig.tier.queued_bytes == 0
    store.check_integrity()
    assert all(store.arena.num_holders(entry.slot) == 1 for entry in store._entries.values())
    rig.tier.put("a", Held(items[0]))
    assert await rig.tier.get("a", items[0].key) is None
    store.close()


async def test_a_defect_costs_an_encode_and_not_the_item(rig: Rig) -> None:
    rig.server.error = RuntimeError("a bug")
    assert await rig.tier.get("a", bytes(32)) is None
    rig.tier.put("a", Held(make_item()))
    await rig.written()
    assert (rig.tier.counters.looks, rig.tier.counters.writes) == ({"failed": 1}, {"failed": 1})


async def test_grids_of_many_keys_take_one_look(rig: Rig) -> None:
    items = [make_item(rows) for rows in (1, 2, 3)]
    for item in items:
        rig.tier.put("a", Held(item))
    await rig.written()
    calls = rig.server.num_calls
    keys = [item.key for item in items]
    found = await rig.tier.grids("a", [*keys, bytes(32)])
    assert found == {item.key: item.grid for item in items}
    assert await rig.tier.grids("b", keys) == {}, "of another namespace"
    assert rig.server.num_calls == calls + 2
    assert rig.tier.counters.looks == {"hit": 1, "miss": 1}


async def test_heads_that_are_none_of_ours_tell_no_grid(rig: Rig) -> None:
    good, foreign, short, wide = (make_item() for _ in range(4))
    for item in (good, foreign, short, wide):
        rig.tier.put("a", Held(item))
    await rig.written()
    for item, change in (
        (foreign, lambda data: data[:32] + b"ZZZZ" + data[36:]),
        (short, lambda data: data[:40]),
        # Of rows that the model served does not have.
        (wide, lambda data: data[: HEADER_BYTES - 56] + b"\x07" + data[HEADER_BYTES - 55 :]),
    ):
        name = rig.tier._seal.name("a", item.key)
        rig.server.values[name] = change(rig.server.values[name])
    keys = [item.key for item in (foreign, short, wide, good)]
    assert await rig.tier.grids("a", keys) == {good.key: good.grid}


async def test_p17_grids_are_bounded_as_looks_are(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_tier, "MAX_LOOKS", 1)
    rig.server.gate.clear()
    first = asyncio.ensure_future(rig.tier.grids("a", [bytes(32)]))
    await asyncio.sleep(0)
    assert await rig.tier.grids("a", [bytes(32)]) == {}
    assert rig.tier.counters.looks == {"busy": 1}
    rig.server.gate.set()
    assert await first == {}
    await rig.fail_looks()
    calls = rig.server.num_calls
    assert await rig.tier.grids("a", [bytes(32)]) == {}
    assert rig.server.num_calls == calls, "it is left alone"
    assert rig.tier.counters.looks["refused"] == 1
    rig.tier.check_integrity()


async def test_a_stalled_server_costs_grids_their_time_and_no_more() -> None:
    rig = Rig(timeout_s=0.01)
    rig.server.gate.clear()
    assert await rig.tier.grids("a", [bytes(32)]) == {}
    assert rig.tier.counters.looks == {"timeout": 1}
    assert await rig.tier.grids("a", [bytes(32)], within_s=0.0) == {}
    assert rig.tier.counters.looks["late"] == 1
    rig.server.gate.set()
    await rig.tier.stop()
    rig.workers.shutdown()
