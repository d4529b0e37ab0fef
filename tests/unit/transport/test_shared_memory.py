"""Delivery by shared memory without gRPC: owners, leases, upkeep, and what a reader of the arena sees."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from encoder_service.config import parse_settings
from encoder_service.errors import (
    ConfigurationError,
    InvalidRequest,
    StaleLease,
    TransportUnavailable,
    UnknownLease,
)
from encoder_service.metrics import Metrics
from encoder_service.store.embedding_store import Held
from encoder_service.store.host_memory import HostMemory
from encoder_service.store.partitions import PartitionedStore, open_host_partitions
from encoder_service.transport import shared_memory
from encoder_service.transport.broker_options import BrokerOptions
from encoder_service.transport.shared_memory import LeasedRows, LeaseTerms, SharedMemory, host_id, share
from encoder_service.transport.shared_metrics import export_shared
from encoder_service.types import EncodedItem, Grid
from lm_adapter.transport.broker_client import BrokerClient
from lm_adapter.transport.control_page import ControlPageReader
from lm_adapter.transport.mapping import map_host
from tests.unit.transport.broker_rig import OPEN, socket_folder

pytestmark = pytest.mark.anyio

KEY = b"k" * 32


@pytest.fixture(params=["asyncio", "uvloop"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, bool]]:
    """Timers of the two differ in what they tell."""
    if request.param == "uvloop":
        pytest.importorskip("uvloop")
    return "asyncio", {"use_uvloop": request.param == "uvloop"}


@dataclass
class Clock:
    now_s: float = 1000.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Rig:
    shared: SharedMemory
    clock: Clock
    clients: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    async def connect(self, namespace: str = "") -> BrokerClient:
        client = self.clients.enter_context(BrokerClient(self.shared.options.path, namespace=namespace))
        await asyncio.to_thread(client.connect, 10.0)
        return client

    def keep(self, value: float = 1.0, namespace: str = "") -> Held:
        """Rows in the store, held as a delivery does."""
        store = self.shared.store
        item = EncodedItem(KEY, bytes(32), Grid(1, 4, 4), torch.full((4, 8), value), 1)
        writing = store.begin_put(namespace, item)
        assert writing is not None
        writing.copy()
        store.finish_put(writing)
        held = store.hold(namespace, KEY)
        assert held is not None
        return held


@pytest.fixture
async def rig(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    monkeypatch.setattr(shared_memory, "BEAT_S", 0.01)
    clock = Clock()
    with socket_folder() as folder:
        shared = SharedMemory(
            open_host_partitions(1 << 16, {"alone": 1 << 16}),
            BrokerOptions(str(folder / "broker.sock"), "one", "host-1", access=OPEN),
            default_lease_s=5.0,
            max_lease_s=60.0,
            max_leases_per_client=2,
            clock=clock,
            unix_clock=lambda: 7000.0 + clock.now_s,
        )
        shared.start()
        rig = Rig(shared, clock)
        yield rig
        await asyncio.to_thread(rig.clients.close)
        assert shared.num_integrity_failures == 0
        await shared.stop()
        await shared.stop()
        assert shared.broker.failure is None


async def until(condition: object) -> None:
    for _ in range(2000):
        if condition():  # type: ignore[operator]
            return
        await asyncio.sleep(0.005)
    raise AssertionError("condition never came true")


def terms_of(client: BrokerClient, **given: object) -> LeaseTerms:
    assert client.session is not None
    return LeaseTerms(client.session.owner_id, **given)  # type: ignore[arg-type]


def lease_of(rig: Rig, held: Held, terms: LeaseTerms, namespace: str = "") -> LeasedRows:
    leased = rig.shared.lease(held, namespace, terms)
    assert leased is not None
    return leased


async def read(client: BrokerClient, leased: LeasedRows) -> torch.Tensor | None:
    """The rows as another process reads them; None when they are stale."""
    with await asyncio.to_thread(client.attach, leased.arena.arena_id) as attachment:
        geometry = attachment.geometry
        mapping = map_host(attachment.data_fd, geometry.size_bytes)
        page = ControlPageReader(attachment.page_fd, geometry.page_bytes, arena_id=geometry.arena_id)
    end = leased.offset_bytes + 4 * 8 * 4
    rows = mapping.tensor[leased.offset_bytes : end].view(torch.float32).reshape(4, 8).clone()
    found = rows if page.unchanged(leased.slot_index, leased.generation) else None
    page.close()
    mapping.close()
    return found


async def test_a_lease_says_where_the_rows_are(rig: Rig) -> None:
    client = await rig.connect()
    held = rig.keep(3.0)
    leased = lease_of(rig, held, terms_of(client))
    held.drop()
    assert leased.expires_at_unix_ms == (7000 + 1000 + 5) * 1000
    rows = await read(client, leased)
    assert rows is not None
    assert torch.equal(rows, torch.full((4, 8), 3.0))
    assert rig.shared.release(leased.lease_id, None)
    assert not rig.shared.release(leased.lease_id, None)
    assert rig.shared.counters.shared == 1


async def test_time_is_the_default_or_what_is_asked_for_up_to_the_limit(rig: Rig) -> None:
    client = await rig.connect()
    held = rig.keep()
    ends = {}
    for ttl_s in (None, 2.0, 3600.0):
        leased = lease_of(rig, held, terms_of(client, ttl_s=ttl_s))
        ends[ttl_s] = leased.expires_at_unix_ms - (7000 + 1000) * 1000
        rig.shared.release(leased.lease_id, None)
    assert ends == {None: 5000, 2.0: 2000, 3600.0: 60_000}
    held.drop()


@pytest.mark.parametrize("owner", ["", "nobody", "other namespace"])
async def test_p18_only_a_live_connection_of_the_namespace_owns_leases(rig: Rig, owner: str) -> None:
    if owner == "other namespace":
        client = await rig.connect("alone")
        assert client.session is not None
        owner = client.session.owner_id
    held = rig.keep()
    with pytest.raises(TransportUnavailable):
        rig.shared.lease(held, "", LeaseTerms(owner))
    assert len(rig.shared.leases) == 0
    assert rig.shared.counters.no_owner == 1
    held.drop()


async def test_an_owner_that_leaves_while_its_lease_is_made_gets_none(rig: Rig) -> None:
    client = await rig.connect()
    terms = terms_of(client)
    held = rig.keep()
    answers = iter([True, False])
    rig.shared.broker.is_connected = lambda owner_id, namespace: next(answers)  # type: ignore[method-assign]
    with pytest.raises(TransportUnavailable):
        rig.shared.lease(held, "", terms)
    assert len(rig.shared.leases) == 0
    held.drop()


async def test_rows_without_a_slot_and_too_many_leases_go_inline(rig: Rig) -> None:
    client = await rig.connect()
    held = rig.keep()
    assert rig.shared.lease(Held(held.item), "", terms_of(client)) is None
    for _ in range(2):
        lease_of(rig, held, terms_of(client))
    assert rig.shared.lease(held, "", terms_of(client)) is None
    counters = rig.shared.counters
    assert (counters.shared, counters.not_held, counters.too_many) == (2, 1, 1)
    held.drop()


async def test_a_lease_for_too_many_readers_is_refused_and_leaves_nothing(rig: Rig) -> None:
    client = await rig.connect()
    held = rig.keep()
    with pytest.raises(InvalidRequest, match="257 readers"):
        rig.shared.lease(held, "", terms_of(client, num_readers=257))
    assert len(rig.shared.leases) == 0
    held.drop()


async def test_every_reader_releases_once(rig: Rig) -> None:
    client = await rig.connect()
    held = rig.keep()
    leased = lease_of(rig, held, terms_of(client, num_readers=3))
    held.drop()
    assert [rig.shared.release(leased.lease_id, reader) for reader in (0, 0, 2)] == [True, False, True]
    assert len(rig.shared.leases) == 1
    assert rig.shared.release(leased.lease_id, 1)
    assert len(rig.shared.leases) == 0
    with pytest.raises(UnknownLease):
        rig.shared.release(b"x" * 16, None)


async def test_p21_time_ends_a_lease_by_itself_and_makes_its_generation_stale(rig: Rig) -> None:
    client = await rig.connect()
    held = rig.keep()
    leased = lease_of(rig, held, terms_of(client, ttl_s=0.5))
    held.drop()
    rig.clock.now_s += 0.6
    await until(lambda: len(rig.shared.leases._grants) == 0)
    assert rig.shared.leases.counters.expired == 1
    assert await read(client, leased) is None
    with pytest.raises(StaleLease):
        rig.shared.renew(leased.lease_id, None)
    again = rig.keep(2.0)
    renewed = lease_of(rig, again, terms_of(client))
    again.drop()
    rows = await read(client, renewed)
    assert rows is not None
    assert (rows == 2.0).all()


async def test_p21_leases_go_on_while_the_end_of_one_is_due(rig: Rig) -> None:
    """The timer is moved to a moment that is as good as now, for which uvloop's handle tells no time."""
    client, other = await rig.connect(), await rig.connect()
    held = rig.keep()
    lease_of(rig, held, terms_of(client, ttl_s=0.5))
    rig.clock.now_s += 0.4999
    for _ in range(2):
        lease_of(rig, held, terms_of(other, ttl_s=30.0))
    rig.clock.now_s += 0.1
    held.drop()
    await until(lambda: rig.shared.leases.counters.expired == 1)
    assert len(rig.shared.leases) == 2


async def test_a_short_lease_is_not_late_because_of_a_long_one(rig: Rig) -> None:
    client = await rig.connect()
    held = rig.keep()
    lease_of(rig, held, terms_of(client, ttl_s=50.0))
    assert rig.shared._timer is not None
    late = rig.shared._timer.when()
    lease_of(rig, held, terms_of(client, ttl_s=1.0))
    assert rig.shared._timer.when() == pytest.approx(late - 49.0, abs=1.0)
    held.drop()


async def test_renewing_gives_time_up_to_the_limit(rig: Rig) -> None:
    client = await rig.connect()
    held = rig.keep()
    leased = lease_of(rig, held, terms_of(client))
    rig.clock.now_s += 4.0
    assert rig.shared.renew(leased.lease_id, None) == leased.expires_at_unix_ms + 4000
    assert rig.shared.renew(leased.lease_id, 3600.0) == (7000 + 1004 + 60) * 1000
    with pytest.raises(UnknownLease):
        rig.shared.renew(b"x" * 16, None)
    held.drop()


async def test_p21_a_connection_that_ends_takes_its_leases_along(rig: Rig) -> None:
    client, other = await rig.connect(), await rig.connect()
    held = rig.keep()
    leased = lease_of(rig, held, terms_of(client))
    kept = lease_of(rig, held, terms_of(other))
    held.drop()
    await asyncio.to_thread(client.close)
    await until(lambda: len(rig.shared.leases) == 1)
    assert rig.shared.leases.counters.revoked == 1
    rows = await read(other, kept)
    assert rows is not None
    with pytest.raises(StaleLease):
        rig.shared.leases.get(leased.lease_id)


async def test_p18_an_isolated_namespace_sees_its_arena_only(rig: Rig) -> None:
    everyone, alone = await rig.connect(), await rig.connect("alone")
    assert everyone.session is not None
    assert alone.session is not None
    seen = [{arena.arena_id for arena in each.session.arenas} for each in (everyone, alone) if each.session]
    assert [len(arenas) for arenas in seen] == [1, 1]
    assert seen[0].isdisjoint(seen[1])
    held = rig.keep(5.0, "alone")
    leased = lease_of(rig, held, terms_of(alone), "alone")
    held.drop()
    assert leased.arena.arena_id in seen[1]
    rows = await read(alone, leased)
    assert rows is not None
    assert (rows == 5.0).all()


async def test_readers_see_that_the_service_lives_and_that_it_ended(rig: Rig) -> None:
    client = await rig.connect()
    assert client.session is not None
    (geometry,) = client.session.arenas
    with await asyncio.to_thread(client.attach, geometry.arena_id) as attachment:
        page = ControlPageReader(attachment.page_fd, geometry.page_bytes, arena_id=geometry.arena_id)
    before = page.heartbeat
    await until(lambda: page.heartbeat > before + 1)
    assert not page.closed
    await rig.shared.stop()
    assert page.closed
    page.close()


async def test_p37_leases_are_waited_for_within_the_grace(rig: Rig) -> None:
    client = await rig.connect()
    held = rig.keep()
    leased = lease_of(rig, held, terms_of(client))
    held.drop()
    assert not await rig.shared.drain(0.0)
    draining = asyncio.ensure_future(rig.shared.drain(30.0))
    await asyncio.sleep(0)
    assert not draining.done()
    rig.shared.release(leased.lease_id, None)
    assert await draining


async def test_wrong_bookkeeping_is_counted_when_idle(rig: Rig) -> None:
    rig.shared.is_idle = lambda: False
    held = rig.keep()
    held.drop()
    (part, _) = rig.shared.store.parts()
    part.num_bytes += 1
    await asyncio.sleep(0.1)
    assert rig.shared.num_integrity_failures == 0
    rig.shared.is_idle = lambda: True
    await until(lambda: rig.shared.num_integrity_failures == 1)
    await asyncio.sleep(0.1)
    assert rig.shared.num_integrity_failures == 1, "once for each change"
    part.num_bytes -= 1
    rig.shared.num_integrity_failures = 0


async def test_figures(rig: Rig) -> None:
    metrics = Metrics()
    export_shared(metrics, rig.shared)
    client = await rig.connect()
    held = rig.keep()
    lease_of(rig, held, terms_of(client))
    held.drop()
    value = metrics.registry.get_sample_value
    assert value("ve_arena_slots", {"namespace": ""}) == 1
    assert value("ve_arena_slots", {"namespace": "alone"}) == 0
    free = value("ve_arena_free_bytes", {"namespace": ""})
    assert free == value("ve_arena_bytes", {"namespace": ""}) - 256  # type: ignore[operator]
    for name, expected in (
        ("ve_leases", 1),
        ("ve_leased_bytes", 4 * 8 * 4),
        ("ve_leases_granted_total", 1),
        ("ve_shared_deliveries_total", 1),
        ("ve_broker_up", 1),
        ("ve_broker_connections", 1),
    ):
        assert value(name) == expected, name
    assert b"ve_broker_accepted_total 1.0" in metrics.exposition()


async def test_settings_become_the_broker_s(tmp_path: Path) -> None:
    settings = parse_settings(
        model=tmp_path,
        broker_path="/run/broker.sock",
        isolated_namespaces="a=1048576",
        broker_tokens="a=hush-hush, =open sesame",
        broker_open_namespaces=False,
        broker_allowed_uids="0,1000",
        broker_mode="666",
        lease_default_ms=1500,
        lease_max_age_ms=400_000,
    )
    store = PartitionedStore(next(open_host_partitions(1 << 16, {}).parts()), {})
    shared = share(settings, store, "instance")
    options = shared.options
    assert (options.path, options.instance_id, options.host_id) == ("/run/broker.sock", "instance", host_id())
    opens = options.access.opens
    assert opens is not None
    assert opens("a", "hush-hush")
    assert opens("", "open sesame")
    assert not opens("a", "open sesame")
    assert not opens("b", "hush-hush")
    assert options.access.allowed_uids == {0, 1000}
    assert options.mode == 0o666
    assert shared.leases.max_age_s == 400.0
    assert "hush-hush" not in repr(settings)
    await shared.stop()
    assert all(part.arena.closed for part in store.parts())


async def test_a_socket_that_cannot_be_bound_stops_the_start(tmp_path: Path) -> None:
    settings = parse_settings(model=tmp_path, broker_path=f"{tmp_path}/none/broker.sock")
    shared = share(settings, open_host_partitions(1 << 16, {}), "instance")
    with pytest.raises(ConfigurationError, match="does not exist"):
        shared.start()
    await shared.stop()


async def test_p14_the_memory_goes_with_the_last_reference() -> None:
    """Without waiting for the collector: no cycle keeps gigabytes."""

    async def live(path: str) -> tuple[weakref.ref[SharedMemory], HostMemory]:
        shared = SharedMemory(
            open_host_partitions(1 << 16, {}),
            BrokerOptions(path, "one", "host-1", access=OPEN),
            default_lease_s=5.0,
            max_lease_s=60.0,
            max_leases_per_client=2,
        )
        memory = shared.store.part("").arena._memory
        assert isinstance(memory, HostMemory)
        shared.start()
        rig = Rig(shared, Clock())
        client = await rig.connect()
        held = rig.keep()
        lease_of(rig, held, terms_of(client))
        held.drop()
        await asyncio.to_thread(rig.clients.close)
        await until(lambda: len(shared.leases) == 0)
        await shared.stop()
        return weakref.ref(shared), memory

    gc.disable()
    try:
        with socket_folder() as folder:
            watch, memory = await live(str(folder / "broker.sock"))
        assert watch() is None
        assert not memory.mapped
    finally:
        gc.enable()
