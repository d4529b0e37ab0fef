"""Rows that the directory lists are read without a lease and without a word, and the encoder hears of it."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lm_adapter import (
    AsyncVisionEncoderClient,
    DigestItem,
    EncodedRows,
    InvalidRequest,
    ItemFailed,
    LeaseStatus,
    RequestRefused,
    VisionEncoderClient,
)
from lm_adapter.transport import unleased
from lm_adapter.transport.control_page import ControlPageReader
from tests.integration.test_resident_rows import OWN, Counted, connected, new_item, rows_of, same
from tests.integration.test_shared_memory import Shared, sharing
from tests.unit.transport.broker_rig import RawClient, wait_until
from vision_encoder.v1 import broker_pb2, encoder_pb2


@pytest.fixture(scope="module")
def module_shared(checkpoints: dict[str, Path], device: torch.device) -> Iterator[Shared]:
    settings = {
        "isolated_namespaces": OWN,
        "broker_tokens": {"alone": "secret"},
        "device_arena_bytes": 0,
    }
    with sharing(checkpoints["qwen3_vl"], device, **settings) as found:
        yield found


@pytest.fixture
def shared(module_shared: Shared) -> Iterator[Shared]:
    yield module_shared
    # What a client tells at its end comes before that, and is not to count in the next test.
    wait_until(lambda: module_shared.memory.broker.num_connections == 0, "the end of every connection")
    module_shared.check()


class Told(Counted):
    """Counts, once every read was told."""

    def __init__(self, shared: Shared, num_reads: int) -> None:
        super().__init__(shared)
        self._broker = shared.memory.broker
        self._expected = self._broker.counters.read_unasked + num_reads

    def __exit__(self, *given: object) -> None:
        wait_until(lambda: self._broker.counters.read_unasked >= self._expected, "word of every read")
        super().__exit__(*given)


def reading(shared: Shared, **given: object) -> VisionEncoderClient:
    return connected(shared, directory=True, **given)


def counts(num_reads: int, num_uses: int) -> dict[str, int]:
    return {"read": num_reads, "items": num_reads, "delivered": num_reads, "hits": num_uses}


def test_rows_are_read_without_a_word_and_count_as_used_and_delivered(shared: Shared) -> None:
    items = [new_item() for _ in range(3)]
    with reading(shared) as client:
        first = client.encode(items)
        keys = [rows_of(rows).key for rows in first]
        requests = shared.memory.leases.counters.granted
        with Told(shared, 12) as counted:
            outcomes = [*client.encode(items), *client.fetch(keys), *client.fetch(keys)]
            outcomes += [client.fetch([key])[0] for key in keys]
        # How often a key is used in between two messages does not matter, and depends on the time.
        assert counted.pop("hits") in range(3, 13)
        assert counted == {"read": 12, "items": 12, "delivered": 12}
        assert shared.memory.leases.counters.granted == requests
        for number, rows in enumerate(outcomes):
            same(rows, first[number % 3])
            assert rows_of(rows).reading is None
            assert vars(rows_of(rows)).keys() == {field.name for field in fields(EncodedRows)}


def test_reads_are_told_within_a_while_also_the_last_ones(shared: Shared) -> None:
    counters = shared.memory.broker.counters
    with reading(shared) as client:
        (first,) = client.encode([new_item()])
        for _ in range(3):
            before = counters.read_unasked
            client.fetch([rows_of(first).key])
            started_s = time.monotonic()
            wait_until(lambda: counters.read_unasked == before + 1, "word of it")  # noqa: B023
            assert time.monotonic() - started_s < 10
        before = counters.read_unasked
        client.fetch([rows_of(first).key])
    wait_until(lambda: counters.read_unasked == before + 1, "word of the last one, at the client's end")


def test_rows_go_into_the_callers_buffers(shared: Shared) -> None:
    items = [new_item() for _ in range(2)]
    with reading(shared) as client:
        first = client.encode(items)
        keys = [rows_of(rows).key for rows in first]
        num_bytes = rows_of(first[0]).num_bytes
        granted = shared.leases.counters.granted
        arrays: list[Any] = [np.zeros(num_bytes, np.uint8), np.zeros((2, num_bytes), np.float32)]
        tensors: list[Any] = [torch.zeros(num_bytes, dtype=torch.uint8), torch.zeros(num_bytes * 2)]
        for out in (arrays, tensors):
            for rows, one, buffer in zip(client.fetch(keys, out=out), first, out, strict=True):
                same(rows, one)
                memory = buffer if isinstance(buffer, np.ndarray) else buffer.numpy()
                assert np.shares_memory(rows_of(rows).payload, memory)
        assert shared.leases.counters.granted == granted
        small, good = client.fetch(keys, out=[np.zeros(8, np.uint8), np.zeros(num_bytes, np.uint8)])
        assert isinstance(small, ItemFailed)
        assert small.reason == "BUFFER_TOO_SMALL"
        same(good, first[1])
        with pytest.raises(InvalidRequest, match="out has 1 buffers, the call 2 items"):
            client.fetch(keys, out=[np.zeros(8, np.uint8)])
        with pytest.raises(InvalidRequest, match="timeout_s is -1"):
            client.fetch(keys, timeout_s=-1)


def test_what_wants_a_lease_has_one(shared: Shared) -> None:
    with reading(shared) as client:
        (first,) = client.encode([new_item()])
        key = rows_of(first).key
        granted = shared.leases.counters.granted
        with rows_of(client.fetch([key], borrow=True)[0]) as rows:
            same(rows, first)
        rows_of(client.fetch([key], confirm_later=True)[0]).confirm()
        rows = rows_of(client.fetch([key], num_readers=2)[0])
        assert rows.shared is not None
        same(client.read_shared(rows.shared, reader=1), first)
        assert shared.leases.counters.granted == granted + 3
        wait_until(lambda: len(shared.leases) == 0, "the end of every lease")


def test_what_is_not_listed_comes_in_the_ways_behind(shared: Shared) -> None:
    known, new = new_item(), new_item()
    with reading(shared) as client:
        (first,) = client.encode([known])
        with Told(shared, 1) as counted:
            outcomes = client.encode([new, known, DigestItem(bytes(31) + b"x")])
        assert counted["read"] == 1
        assert counted["missed"] == 2
        assert counted["encode"] == 1
        same(outcomes[1], first)
        assert isinstance(outcomes[2], ItemFailed)
        same(client.fetch([rows_of(outcomes[0]).key])[0], outcomes[0])


def test_the_async_client_does_the_same(shared: Shared) -> None:
    items = [new_item() for _ in range(2)]

    async def main() -> None:
        async with AsyncVisionEncoderClient(shared.service.target, timeout_s=60) as client:
            assert (await client.wait_transport()).resident == "directory"
            first = await client.encode(items)
            keys = [rows_of(rows).key for rows in first]
            granted = shared.leases.counters.granted
            with Told(shared, 18) as counted:
                many = await asyncio.gather(*(client.fetch(keys) for _ in range(8)))
                again = await client.encode(items)
            assert counted["read"] == 18
            assert shared.leases.counters.granted == granted
            for rows, *others in zip(first, again, *many, strict=True):
                for other in others:
                    same(rows, other)

    asyncio.run(main())


def test_p25_many_threads_of_one_client(shared: Shared) -> None:
    items = [new_item() for _ in range(4)]
    with reading(shared) as client:
        first = client.encode(items)
        go = threading.Barrier(8)

        def work(worker: int) -> None:
            go.wait(20)
            for turn in range(100):
                index = (worker + turn) % 4
                (rows,) = client.fetch([rows_of(first[index]).key])
                same(rows, first[index])

        with Told(shared, 800) as counted, ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(8)))
        assert counted["read"] == 800
        assert "fetched" not in counted


def test_p18_a_namespace_finds_its_own_rows_alone(shared: Shared) -> None:
    """Also where it shares an arena and asks for a key that is another's."""
    with reading(shared) as everyone, reading(shared, namespace="other") as other:
        (public,) = everyone.encode([new_item()])
        with Counted(shared) as counted:
            outcome = other.fetch([rows_of(public).key])[0]
        assert isinstance(outcome, ItemFailed)
        assert outcome.reason == "UNKNOWN_KEY"
        assert "read" not in counted
        with reading(shared, namespace="alone", token="secret") as alone:
            item = new_item()
            (own,) = alone.encode([item])
            with Told(shared, 1) as counted:
                same(alone.encode([item])[0], own)
            assert counted["read"] == 1


def test_reads_that_are_made_again_count_once(shared: Shared) -> None:
    """Where not every row can be had at once, the call starts over: what it had read by then is not told."""
    with reading(shared) as client:
        keys = [rows_of(rows).key for rows in client.encode([new_item() for _ in range(3)])]
        out: list[Any] = [np.zeros(1 << 20, np.uint8), np.zeros(1 << 20, np.uint8), np.zeros(8, np.uint8)]
        with Told(shared, 2) as counted:
            *good, small = client.fetch(keys, out=out)
            assert [rows_of(rows).key for rows in good] == keys[:2]
            assert isinstance(small, ItemFailed)
            # Word goes in order: what would be told too often has been told with this one.
            wait_until(lambda: _tell(client), "the end of what is told")
        assert counted["read"] == 2


def _tell(client: VisionEncoderClient) -> bool:
    transport = client._session.transports.current()
    assert transport is not None
    link = transport.chooser._broker.fetch_link(transport.owner_id)  # type: ignore[union-attr]
    assert link is not None
    link.tell_uses()
    return True


def test_a_read_that_is_lost_makes_no_other_count_twice(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second item of two goes while it is copied; the first was read by then, and is read again."""
    with reading(shared) as client:
        first = client.encode([new_item() for _ in range(2)])
        keys = [rows_of(rows).key for rows in first]
        unchanged, answers = ControlPageReader.unchanged, [True, False]

        def check(page: ControlPageReader, slot_index: int, generation: int) -> bool:
            is_whole = unchanged(page, slot_index, generation)
            return is_whole and (not answers or answers.pop(0))

        monkeypatch.setattr(ControlPageReader, "unchanged", check)
        with Told(shared, 2) as counted:
            for rows, one in zip(client.fetch(keys), first, strict=True):
                same(rows, one)
            _tell(client)
        assert counted["read"] == 2
        assert counted["stale"] == 1


def test_an_item_with_a_wrong_digest_fails_alone_beside_rows_that_are_listed(shared: Shared) -> None:
    item = new_item()
    with reading(shared) as client:
        (first,) = client.encode([item])
        for wrong in (DigestItem(b"short"), replace(item, digest=b"short")):
            good, bad = client.encode([item, wrong])
            same(good, first)
            assert isinstance(bad, ItemFailed)
            assert "5 bytes" in bad.message


def test_a_model_that_is_not_served_has_no_rows_here_either(shared: Shared) -> None:
    """Its name is the server's to refuse, whatever lies in the directory under the one model's key."""
    item = new_item()
    with reading(shared) as client, reading(shared, model="another") as other:
        client.encode_one(item)
        with Counted(shared) as counted, pytest.raises(RequestRefused, match="'another' is not served here"):
            other.encode([item])
        assert "read" not in counted
        assert "fetched" not in counted


def in_mid_copy(monkeypatch: pytest.MonkeyPatch, what: Callable[[], None], times: int) -> None:
    """So many times, after a copy and before its check."""
    unchanged, pending = ControlPageReader.unchanged, [what] * times

    def check(page: ControlPageReader, slot_index: int, generation: int) -> bool:
        if pending:
            pending.pop()()
        return unchanged(page, slot_index, generation)

    monkeypatch.setattr(ControlPageReader, "unchanged", check)


@pytest.mark.parametrize("times", [1, 2])
def test_p21_rows_that_go_under_the_copy_are_thrown_away(
    shared: Shared, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """The slot has another generation when the copy has ended: its reader looks once more, then leases."""
    with reading(shared) as client:
        (first,) = client.encode([new_item()])
        key = rows_of(first).key
        store = shared.memory.store.part("")  # type: ignore[call-arg]
        slot = store._entries["", key].slot  # type: ignore[union-attr]
        stale, granted = shared.memory.broker.counters.read_stale, shared.leases.counters.granted

        def revoke() -> None:
            done = threading.Event()
            shared.service.loop.call_soon_threadsafe(lambda: (store.arena.revoke(slot), done.set()))  # type: ignore[union-attr]
            assert done.wait(20)

        in_mid_copy(monkeypatch, revoke, times)
        same(client.fetch([key])[0], first)
        assert shared.leases.counters.granted == granted + (times == 2)
        wait_until(lambda: shared.memory.broker.counters.read_stale == stale + times, "word of it")
        same(client.fetch([key])[0], first)
        assert shared.leases.counters.granted == granted + (times == 2), "listed under its new generation"


def test_p22_a_record_of_another_shape_than_the_models_is_not_believed(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    item = new_item()
    with reading(shared) as client:
        (first,) = client.encode([item])
        key = rows_of(first).key
        granted = shared.leases.counters.granted
        info = client._session.info
        assert info is not None
        others = tuple(replace(model, width=model.width + 2) for model in info.models)
        shapes = unleased.CheckedShapes(others, 1 << 30)
        transport = client._session.transports.current()
        assert transport is not None
        assert transport.unleased is not None
        assert transport.unleased.find(key, None, shapes) is None
        assert (
            transport.unleased.find(key, bytes(32), client._session.resident._known(info).fetched_shapes)
            is None
        )
        small = VisionEncoderClient(shared.service.target, timeout_s=60, max_rows_bytes=16)
        with small:
            small.wait_transport()
            outcome = small.fetch([key])[0]
            assert isinstance(outcome, ItemFailed)
            assert "this client takes 16" in outcome.message
        assert shared.leases.counters.granted == granted + 1


def test_use_keeps_rows_in_the_store(checkpoints: dict[str, Path], device: torch.device) -> None:
    """What is read by the directory is not what goes next."""
    small = {"device_arena_bytes": 0, "arena_bytes": 1 << 20}
    with sharing(checkpoints["qwen3_vl"], device, **small) as shared, reading(shared) as client:
        (kept,) = client.encode([new_item()])
        key = rows_of(kept).key
        for _ in range(400):
            client.encode([new_item()])
            before = shared.memory.broker.counters.read_unasked
            same(client.fetch([key])[0], kept)
            wait_until(lambda: shared.memory.broker.counters.read_unasked > before, "word")  # noqa: B023
            if shared.memory.store.counters.evictions > 30:
                break
        assert shared.memory.store.counters.evictions > 30


def test_p18_a_reader_whose_token_was_withdrawn_reads_no_more(
    checkpoints: dict[str, Path], device: torch.device, tmp_path: Path
) -> None:
    """Nor by the directory, which asks nobody: the end of its connection is the end of its mappings' use."""
    file = tmp_path / "tokens"
    file.write_text("a=first\na=second\n")
    settings = {"device_arena_bytes": 0, "tokens_file": file}
    with (
        sharing(checkpoints["qwen3_vl"], device, **settings) as shared,
        reading(shared, namespace="a", token="first") as withdrawn,
        reading(shared, namespace="a", token="second") as kept,
    ):
        (first,) = kept.encode([new_item()])
        key = rows_of(first).key
        same(withdrawn.fetch([key])[0], first)
        file.write_text("a=second\n")
        wait_until(lambda: withdrawn.transport.name == "inline", "the end of its session")
        with pytest.raises(RequestRefused, match="token opens nothing"):
            withdrawn.fetch([key])
        with Told(shared, 1) as counted:
            same(kept.fetch([key])[0], first)
        assert counted["read"] == 1


# -- the choice ----------------------------------------------------------------------------------------------


def test_it_can_be_turned_off_and_is_told(shared: Shared, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "lm_adapter.transport.chooser"):
        with reading(shared) as client:
            assert client.transport.resident == "directory"
        with connected(shared, directory=False) as client:
            assert client.transport.resident == "lease"
    ways = [record.resident for record in caplog.records if hasattr(record, "resident")]
    assert ways == ["directory", "lease"]
    with pytest.raises(InvalidRequest, match="directory is 'yes'"):
        VisionEncoderClient("localhost:1", directory="yes")  # type: ignore[arg-type]


def test_an_older_broker_has_no_directory(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    """It hands out two descriptors and says nothing of a third."""
    book = shared.memory.broker._offers
    held = {key: replace(one, offer=replace(one.offer, directory_bytes=0)) for key, one in book._held.items()}
    plain = type(book).descriptors
    monkeypatch.setattr(book, "_held", held)
    monkeypatch.setattr(type(book), "descriptors", lambda self, *names, **_: plain(self, *names))
    item = new_item()
    with connected(shared, directory=True) as client:
        assert client.transport.resident == "lease"
        (first,) = client.encode([item])
        with Counted(shared) as counted:
            same(client.encode([item])[0], first)
        assert counted["fetched"] == 1


def test_an_older_client_gets_two_descriptors(shared: Shared) -> None:
    with RawClient(shared.broker_path) as raw:
        arena = next(iter(shared.memory.broker._offers.visible_to("")))
        assert arena.directory_bytes > 0
        reply = raw.ask(attach=broker_pb2.BrokerAttach(arena_id=arena.arena_id))
        assert reply.num_descriptors == 2


def test_word_of_uses_without_meaning_fails_alone(shared: Shared) -> None:
    use = broker_pb2.BrokerUse(key=bytes(32), num_reads=3)
    host = broker_pb2.ARENA_KIND_HOST
    with RawClient(shared.broker_path) as raw:
        for used in (
            broker_pb2.BrokerUsed(uses=[use], kind=9),  # type: ignore[arg-type]
            broker_pb2.BrokerUsed(uses=[broker_pb2.BrokerUse(key=b"short")], kind=host),
            broker_pb2.BrokerUsed(uses=[use] * 129, kind=host),
        ):
            raw.socket.sendall(raw.frame(used=used))
        read = shared.memory.broker.counters.read_unasked
        raw.socket.sendall(raw.frame(used=broker_pb2.BrokerUsed(uses=[use], kind=host, num_stale=2)))
        wait_until(lambda: shared.memory.broker.counters.read_unasked == read + 3, "word of rows that went")


# -- renewals ------------------------------------------------------------------------------------------------


def test_leases_are_renewed_over_the_brokers_socket(shared: Shared) -> None:
    with reading(shared) as client:
        (first,) = client.encode([new_item()])
        rows = rows_of(client.fetch([rows_of(first).key], borrow=True, num_readers=2)[0])
        assert rows.shared is not None
        lease_id = rows.shared.lease_id
        with_time = rows.shared.expires_at_unix_ms
        before = Counted(shared)._now()
        status, unknown = client.renew([lease_id, bytes(16)], 120_000)
        assert isinstance(status, LeaseStatus)
        assert status.expires_at_unix_ms > with_time
        assert isinstance(unknown, ItemFailed)
        assert unknown.reason == "UNKNOWN_LEASE"
        now = Counted(shared)._now()
        assert (now["renewed"] - before["renewed"], now["renew"] - before["renew"]) == (1, 0)
        assert len(client.renew([lease_id] * 65, 120_000)) == 65
        assert Counted(shared)._now()["renew"] > before["renew"], "more than one request takes, by gRPC"
        rows.confirm()
        client.read_shared(rows.shared, reader=1)
        wait_until(lambda: len(shared.leases) == 0, "the end of every lease")

        async def main() -> None:
            async with AsyncVisionEncoderClient(shared.service.target, timeout_s=60) as other:
                await other.wait_transport()
                before = Counted(shared)._now()["renew"]
                (status,) = await other.renew([lease_id], 1000)
                assert isinstance(status, ItemFailed)
                assert status.reason == "STALE_LEASE"
                assert Counted(shared)._now()["renew"] == before

        asyncio.run(main())


def test_an_older_broker_renews_nothing(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared.memory.broker._desk, "fetches", None)
    with reading(shared) as client:
        assert client._session.transports.renew(encoder_pb2.RenewRequest(lease_ids=[bytes(16)])) is None
        (unknown,) = client.renew([bytes(16)], 1000)
        assert isinstance(unknown, ItemFailed)
