"""Both clients and rows in shared host memory: the choice, reading, borrowing, buffers, several readers."""

from __future__ import annotations

import gc
import logging
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from lm_adapter import (
    EncodedRows,
    Grid,
    InvalidRequest,
    ItemFailed,
    LeaseRecord,
    StaleRows,
    TransportUnavailable,
    VisionEncoderClient,
)
from lm_adapter.testing import FakeEncoder, fake_model, fake_rows
from lm_adapter.transport import arenas, probe
from lm_adapter.types import Limits
from tests.unit.lm_adapter.client_drivers import DRIVERS, Driver
from tests.unit.lm_adapter.shared_rig import SharingFake, num_mappings, sharing_fake
from tests.unit.lm_adapter.test_client import assert_rows_of, digest_of, image
from tests.unit.transport.broker_rig import wait_until

Open = Callable[..., Driver]


@pytest.fixture
def encoder() -> Iterator[SharingFake]:
    with sharing_fake() as running:
        yield running


@pytest.fixture(params=sorted(DRIVERS))
def open_client(request: pytest.FixtureRequest, encoder: SharingFake) -> Iterator[Open]:
    drivers: list[Driver] = []

    def opener(target: str | None = None, *, wait: bool = True, **settings: Any) -> Driver:
        driver = DRIVERS[request.param](target or encoder.target, **{"timeout_s": 20.0, **settings})
        drivers.append(driver)
        if wait:
            driver.call("wait_transport")
        return driver

    yield opener
    for driver in drivers:
        driver.call("close")
        driver.close()


def choice_of(driver: Driver) -> Any:
    return driver.client.transport  # type: ignore[attr-defined]


def test_rows_come_through_host_memory_and_leases_go_back(
    encoder: SharingFake, open_client: Open, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "lm_adapter")
    client = open_client()
    choice = choice_of(client)
    assert (choice.name, choice.is_shared) == ("host", True)
    assert "read right" in choice.reason
    assert set(choice.rejected) == {"device"}
    for index, outcome in enumerate(client.call("encode", [image(index) for index in range(6)])):
        assert_rows_of(outcome, digest_of(index))
        assert outcome.payload.flags.owndata
        assert outcome.payload.flags.writeable
        outcome.confirm()
    keys = [outcome.key for outcome in client.call("encode", [image(0), image(1)])]
    for index, outcome in enumerate(client.call("fetch", keys)):
        assert_rows_of(outcome, digest_of(index))
    assert encoder.num_placed == 10
    client.call("lookup", keys)
    wait_until(lambda: client.call("lookup", keys) is not None and len(encoder.leases) == 0)
    chosen = [record for record in caplog.records if hasattr(record, "transport")]
    assert [record.transport for record in chosen] == ["host"], "logged once"
    assert chosen[0].reason == choice.reason
    encoder.arena.check_integrity()


@pytest.mark.parametrize("family", ["qwen3_vl", "kimi_k25"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_geometry_and_dtype_is_bit_equal_to_inline(
    encoder: SharingFake, open_client: Open, family: str, dtype: str
) -> None:
    encoder.fake.script.model = fake_model(family, dtype=dtype)
    shared = open_client().call("encode_one", image(3))
    inline = open_client(transports=("inline",)).call("encode_one", image(3))
    assert encoder.num_placed == 1
    assert shared.payload.tobytes() == inline.payload.tobytes()
    assert torch.equal(shared.torch(), inline.torch())


def test_the_first_call_does_not_wait_for_the_probe(
    encoder: SharingFake, open_client: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    real = probe.arenas_of
    monkeypatch.setattr(probe, "arenas_of", lambda *args: gate.wait(20) and real(*args))
    client = open_client(wait=False)
    assert_rows_of(client.call("encode_one", image(0)), digest_of(0))
    assert choice_of(client).name == "inline"
    assert encoder.num_placed == 0
    gate.set()
    assert client.call("wait_transport").name == "host"
    assert_rows_of(client.call("encode_one", image(0)), digest_of(0))
    assert encoder.num_placed == 1


@pytest.mark.parametrize("make", ["numpy", "torch", "torch_bfloat16", "larger"])
def test_rows_go_into_the_callers_buffer(encoder: SharingFake, open_client: Open, make: str) -> None:
    grid_rows, width = 4, encoder.fake.script.model.width
    encoder.fake.script.grids[digest_of(0)] = Grid(1, 4, 4)
    out: Any = {
        "numpy": np.zeros((grid_rows, width), np.float32),
        "torch": torch.zeros(grid_rows, width),
        "torch_bfloat16": torch.zeros(2 * grid_rows, width, dtype=torch.bfloat16),
        "larger": np.zeros(grid_rows * width * 4 + 77, np.uint8),
    }[make]
    for transports in (("host",), ("inline",)):
        out[:] = 0
        rows = open_client(transports=transports).call("encode_one", image(0), out=[out])
        assert_rows_of(rows, digest_of(0))
        start = out.data_ptr() if isinstance(out, torch.Tensor) else out.ctypes.data
        assert rows.payload.ctypes.data == start


def test_buffers_that_do_not_fit_fail_their_item_and_give_the_lease_back(
    encoder: SharingFake, open_client: Open
) -> None:
    client = open_client()
    read_only = np.zeros(10_000, np.float32)
    read_only.flags.writeable = False
    outs = [np.zeros(3, np.uint8), None, read_only, np.zeros((99, 99), np.float32)[:, ::2], "text"]
    outcomes = client.call("encode", [image(index) for index in range(5)], out=outs)
    assert outcomes[0].reason == "BUFFER_TOO_SMALL"
    assert "3 bytes" in outcomes[0].message
    assert_rows_of(outcomes[1], digest_of(1))
    assert [outcome.reason for outcome in outcomes[2:]] == ["INVALID_BUFFER"] * 3
    with pytest.raises(InvalidRequest, match="out has 1 buffers, the call 2 items"):
        client.call("encode", [image(0), image(1)], out=[None])
    with pytest.raises(InvalidRequest, match="exclude"):
        client.call("encode", [image(0)], out=[None], borrow=True)
    wait_until(lambda: bool(client.call("lookup", [digest_of(0)])) and len(encoder.leases) == 0)


def test_borrowed_rows_are_the_arenas_own_until_confirmed(encoder: SharingFake, open_client: Open) -> None:
    client = open_client()
    with client.call("encode_one", image(0), borrow=True) as rows:
        assert_rows_of(rows, digest_of(0))
        assert not rows.payload.flags.writeable
        assert not rows.payload.flags.owndata
        assert torch.equal(rows.torch(), torch.from_numpy(rows.numpy().copy()))
        assert len(encoder.leases) == 1
    rows.confirm()
    wait_until(lambda: bool(client.call("lookup", [rows.key])) and len(encoder.leases) == 0)
    assert len(encoder.released) == 1
    inline = open_client(transports=("inline",))
    with inline.call("encode_one", image(0), borrow=True) as owned:
        assert owned.payload.flags.owndata, "the same code serves rows that came inline"


@pytest.mark.parametrize("options", [{"borrow": True}, {"confirm_later": True}])
def test_p21_rows_that_change_before_they_are_confirmed_are_stale(
    encoder: SharingFake, open_client: Open, options: dict[str, bool]
) -> None:
    client = open_client()
    rows = client.call("encode_one", image(0), **options)
    encoder.overwrite(encoder.slots[rows.key])
    with pytest.raises(StaleRows, match="changed while they were read") as stale, rows:
        pass
    assert stale.value.retryable
    with pytest.raises(StaleRows):
        rows.confirm()
    with pytest.raises(ZeroDivisionError), client.call("encode_one", image(1), **options) as other:
        raise ZeroDivisionError  # of the body's own; not covered up
    wait_until(lambda: bool(client.call("lookup", [other.key])) and len(encoder.leases) == 0)


def test_forgotten_rows_give_their_lease_back_with_the_next(encoder: SharingFake, open_client: Open) -> None:
    client = open_client()
    rows = client.call("encode_one", image(0), borrow=True)
    view = rows.payload
    del rows
    gc.collect()
    assert len(encoder.leases) == 1
    client.call("encode_one", image(1))
    wait_until(lambda: bool(client.call("lookup", [digest_of(0)])) and len(encoder.leases) == 0)
    client.call("close")
    values = fake_rows(digest_of(0), len(view) // 4 // 128, 128)
    np.testing.assert_array_equal(view.view(np.float32).reshape(values.shape), values)
    assert arenas.num_attached() == 0


def test_p21_a_stale_lease_is_asked_for_again(encoder: SharingFake, open_client: Open) -> None:
    client = open_client()
    revoked: list[int] = []

    def revoke_twice(slot: Any) -> None:
        if len(revoked) < 2:
            revoked.append(encoder.arena.page.revoke(slot.index))

    encoder.before_answer = revoke_twice
    assert_rows_of(client.call("encode_one", image(0)), digest_of(0))
    assert encoder.num_placed == 3
    assert [call.method for call in encoder.fake.calls if call.num_items].count("Encode") == 3


def test_p21_leases_that_stay_stale_end_inline_and_spare_the_others(
    encoder: SharingFake, open_client: Open
) -> None:
    client = open_client()
    fine = client.call("encode", [image(0), image(1), image(2)])
    bad = encoder.slots[fine[1].key]
    encoder.before_answer = lambda slot: slot is bad and encoder.overwrite(slot) and None
    outcomes = client.call("encode", [image(0), image(1), image(2)])
    for index, outcome in enumerate(outcomes):
        assert_rows_of(outcome, digest_of(index))
    assert encoder.num_placed == 3 + 3 + 2
    fetched = client.call("fetch", [outcome.key for outcome in outcomes])
    for index, outcome in enumerate(fetched):
        assert_rows_of(outcome, digest_of(index))
    forced = open_client(transports=("host",))
    (failed,) = forced.call("fetch", [fine[1].key])
    assert isinstance(failed, StaleRows)


def test_an_item_refused_for_its_transport_comes_inline(encoder: SharingFake, open_client: Open) -> None:
    encoder.refuse = {digest_of(1), digest_of(3)}
    client = open_client()
    outcomes = client.call("encode", [image(index) for index in range(4)])
    for index, outcome in enumerate(outcomes):
        assert_rows_of(outcome, digest_of(index))
    assert encoder.num_placed == 2
    assert [call.num_items for call in encoder.fake.calls if call.method == "Encode"] == [4, 2]
    arrived = dict(client.iterate([image(index) for index in range(4)]))
    assert sorted(arrived) == [0, 1, 2, 3]
    forced = open_client(transports=("host",)).call("encode", [image(0), image(1)])
    assert_rows_of(forced[0], digest_of(0))
    assert isinstance(forced[1], ItemFailed)
    assert forced[1].reason == "TRANSPORT_UNAVAILABLE"


def test_calls_in_several_portions_keep_their_indices(encoder: SharingFake, open_client: Open) -> None:
    encoder.fake.script.limits = Limits(max_items_per_request=3, max_message_bytes=1 << 20, chunk_bytes=64)
    encoder.refuse = {digest_of(1), digest_of(5), digest_of(6)}
    outs = [np.zeros(64 * 1024, np.uint8) for _ in range(7)]
    outcomes = open_client().call("encode", [image(index) for index in range(7)], out=outs)
    for index, outcome in enumerate(outcomes):
        assert_rows_of(outcome, digest_of(index))
        assert outcome.payload.ctypes.data == outs[index].ctypes.data


@pytest.mark.parametrize(
    ("lie", "field"),
    [
        (lambda host: setattr(host, "offset_bytes", 1 << 40), "offset_bytes"),
        (lambda host: setattr(host, "offset_bytes", (1 << 20) - 1), "offset_bytes"),
        (lambda host: setattr(host, "slot_index", 64), "slot_index"),
    ],
)
def test_p22_a_lease_beyond_its_arena_is_never_read(
    encoder: SharingFake, open_client: Open, lie: Callable[[Any], None], field: str
) -> None:
    place = encoder.place

    def lying(delivery: int, lease: Any, result: Any, rows: bytes) -> None:
        place(delivery, lease, result, rows)
        lie(result.host)

    encoder.place = lying  # type: ignore[method-assign]
    (outcome,) = open_client().call("encode", [image(0)])
    assert isinstance(outcome, ItemFailed)
    assert (outcome.reason, outcome.details["field"]) == ("INVALID_ROWS", field)


def test_a_lease_of_an_unknown_arena_ends_inline(encoder: SharingFake, open_client: Open) -> None:
    place = encoder.place

    def elsewhere(delivery: int, lease: Any, result: Any, rows: bytes) -> None:
        place(delivery, lease, result, rows)
        result.host.arena_id = b"n" * 16

    encoder.place = elsewhere  # type: ignore[method-assign]
    assert_rows_of(open_client().call("encode_one", image(0)), digest_of(0))


@pytest.mark.parametrize("num_readers", [1, 2, 4])
def test_every_reader_of_one_result_reads_it_and_the_last_frees_it(
    encoder: SharingFake, open_client: Open, num_readers: int
) -> None:
    first = open_client()
    rows = first.call("encode_one", image(0), num_readers=num_readers)
    if num_readers == 1:
        assert rows.shared is None
        return
    record = pickle.loads(pickle.dumps(rows.shared))
    assert isinstance(record, LeaseRecord)
    assert (record, record.transport, record.num_readers) == (rows.shared, "host", num_readers)
    for reader in range(1, num_readers):
        assert len(encoder.leases) == 1
        other = open_client(wait=False)
        with other.call("read_shared", record, reader=reader, borrow=reader % 2 == 0) as read:
            assert_rows_of(read, digest_of(0))
            assert (read.key, read.grid_thw) == (rows.key, rows.grid_thw)
        other.call("read_shared", record, reader=reader)  # releasing again as the same reader counts once
        other.call("close")
        assert len(encoder.released) >= 2 * reader
    wait_until(lambda: bool(first.call("lookup", [rows.key])) and len(encoder.leases) == 0)
    assert {reader for _, reader in encoder.released} == set(range(num_readers))
    with pytest.raises(InvalidRequest, match=f"reader {num_readers} of {num_readers}"):
        first.call("read_shared", record, reader=num_readers)


def test_a_reader_that_cannot_read_fetches_by_key(encoder: SharingFake, open_client: Open) -> None:
    inline = open_client(transports=("inline",))
    rows = inline.call("encode_one", image(0), num_readers=2)
    assert rows.shared.transport == "inline"
    out = np.zeros(64 * 1024, np.uint8)
    assert_rows_of(open_client().call("read_shared", rows.shared, reader=1, out=out), digest_of(0))
    record = open_client().call("encode_one", image(0), num_readers=2).shared
    assert_rows_of(inline.call("read_shared", record, reader=1), digest_of(0))
    encoder.overwrite(encoder.slots[rows.key])
    encoder.slots.clear()
    assert_rows_of(open_client().call("read_shared", record, reader=1), digest_of(0))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda e: setattr(e, "host_id", "another"), "the server is on host 'another'"),
        (lambda e: setattr(e, "path", "/nowhere/broker.sock"), "No such file"),
        (lambda e: e.rig.broker.withdraw(e.arena.arena_id), "no host arena"),
        (lambda e: e.fake.restart(), "belongs to instance"),
        (lambda e: e.arena.view(e.arena.allocate(256), (1,), torch.uint8) and None, None),
    ],
)
def test_what_does_not_work_is_rejected_with_its_reason(
    encoder: SharingFake, open_client: Open, change: Callable[[SharingFake], None], why: str | None
) -> None:
    change(encoder)
    client = open_client()
    assert_rows_of(client.call("encode_one", image(0)), digest_of(0))
    if why is None:
        assert choice_of(client).name == "host"
        return
    assert choice_of(client).name == "inline"
    assert why in choice_of(client).rejected["host"]
    forced = open_client(transports=("host",), wait=False)
    with pytest.raises(TransportUnavailable, match="no way of delivery out of host") as failed:
        forced.call("encode_one", image(0))
    assert why in failed.value.message
    assert choice_of(forced).name == "none"


def test_a_mapping_that_reads_wrong_is_rejected(encoder: SharingFake, open_client: Open) -> None:
    encoder.arena._memory.tensor[:64] += 1
    client = open_client()
    assert "probe read wrong" in choice_of(client).rejected["host"]
    assert_rows_of(client.call("encode_one", image(0)), digest_of(0))


def test_the_brokers_path_may_be_another_here(encoder: SharingFake, open_client: Open) -> None:
    real, encoder.path = encoder.path, "/as/the/server/sees/it.sock"
    assert choice_of(open_client(broker_path=real)).name == "host"
    encoder.path = real


def test_a_server_that_offers_nothing_else_is_not_probed(open_client: Open) -> None:
    with FakeEncoder() as plain:
        client = open_client(plain.target)
        assert choice_of(client).reason == "the server offers nothing else"
        assert [thread for thread in threading.enumerate() if thread.name == "transport-probe"] == []
        with pytest.raises(TransportUnavailable, match="offers nothing else"):
            open_client(plain.target, transports=("device",), wait=False).call("encode_one", image(0))


@pytest.mark.parametrize(
    "settings",
    [
        {"transports": ()},
        {"transports": "host"},
        {"transports": ("host", "host")},
        {"transports": ("rdma",)},
        {"broker_path": "relative"},
        {"lease_ms": -1},
    ],
)
def test_settings_without_a_meaning_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        VisionEncoderClient("127.0.0.1:1", **settings)


def test_thirty_two_readers_at_once_share_one_mapping(encoder: SharingFake, open_client: Open) -> None:
    before = num_mappings()
    clients = [open_client() for _ in range(3)]
    assert arenas.num_attached() == 1
    assert num_mappings() == before + 3, "the arena, its control page and its directory, once"
    answers = clients[0].fan_out(32, lambda index: ("encode", ([image(index % 5), image(index % 7)],)))
    for index, (first, second) in enumerate(answers):
        assert_rows_of(first, digest_of(index % 5))
        assert_rows_of(second, digest_of(index % 7))
    for client in clients[:2]:
        client.call("close")
    assert num_mappings() == before + 3
    assert isinstance(clients[2].call("encode_one", image(0)), EncodedRows)
    clients[2].call("close")
    assert num_mappings() == before


def test_threads_that_find_an_arena_at_once_hold_it_once(
    encoder: SharingFake, open_client: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both map it, or are handed the same mapping, before either has noted it."""
    client = open_client()
    chooser = client.client._session.transports  # type: ignore[attr-defined]
    chooser._drop_arenas()
    barrier = threading.Barrier(4)
    real = arenas.attach

    def attach_together(*args: Any) -> Any:
        found = real(*args)
        barrier.wait(20)
        return found

    monkeypatch.setattr(arenas, "attach", attach_together)
    found: list[Any] = []
    threads = [
        threading.Thread(target=lambda: found.append(chooser.arena("host", encoder.arena.arena_id)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(set(map(id, found))) == 1
    for arena in found:
        arena.drop()
    assert arenas.num_attached() == 1, "the client's own use"
    client.call("close")
    assert arenas.num_attached() == 0
