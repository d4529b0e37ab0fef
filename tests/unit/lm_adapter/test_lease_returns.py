"""Leases on their way back: in whose name, from which reader, and at once where nothing was read."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from lm_adapter import InvalidRows, LeaseRecord
from lm_adapter.assembly import Assembler, Expected
from lm_adapter.errors import StreamViolation
from lm_adapter.leases import LeaseReturns
from lm_adapter.transport.buffers import RowsHandling
from lm_adapter.transport.reading import Receiver
from tests.unit.lm_adapter.client_drivers import DRIVERS, Driver
from tests.unit.lm_adapter.shared_rig import SharingFake, sharing_fake
from tests.unit.lm_adapter.test_client import assert_rows_of, digest_of, image
from tests.unit.transport.broker_rig import wait_until
from vision_encoder.v1 import encoder_pb2 as pb


@pytest.fixture
def encoder() -> Iterator[SharingFake]:
    with sharing_fake() as running:
        yield running


@pytest.fixture(params=sorted(DRIVERS))
def open_client(request: pytest.FixtureRequest, encoder: SharingFake) -> Iterator[Callable[[], Driver]]:
    drivers: list[Driver] = []

    def opener() -> Driver:
        drivers.append(DRIVERS[request.param](encoder.target, timeout_s=20.0))
        drivers[-1].call("wait_transport")
        return drivers[-1]

    yield opener
    for driver in drivers:
        driver.call("close")
        driver.close()


def wait_for_no_lease(encoder: SharingFake, driver: Driver) -> None:
    """The async client's releases need its loop to turn."""
    wait_until(lambda: bool(driver.call("lookup", [digest_of(0)])) and len(encoder.leases) == 0, "all leases")


def requests_of(driver: Driver) -> list[pb.ReleaseRequest]:
    """Every Release that the client sends from here on."""
    returns = driver.client._session.returns  # type: ignore[attr-defined]
    seen: list[pb.ReleaseRequest] = []
    send = returns._send
    returns._send = lambda request, done: (seen.append(request), send(request, done))[1]
    return seen


# In whose name


def test_one_release_is_of_one_owner_and_one_reader() -> None:
    sent: list[tuple[list[bytes], int | None, bytes]] = []
    hold = threading.Event()
    pending: list[Callable[[], None]] = []

    def send(request: pb.ReleaseRequest, done: Callable[[], None]) -> None:
        reader = request.reader if request.HasField("reader") else None
        sent.append((list(request.lease_ids), reader, request.owner_id))
        done() if hold.is_set() else pending.append(done)

    returns = LeaseReturns(send)
    for lease_id, reader, owner_id in (
        (b"1", None, b"me"),
        (b"2", None, b"me"),
        (b"3", None, b"me"),
        (b"4", None, b"you"),
        (b"5", 0, b"you"),
        (b"6", 0, b"you"),
        (b"7", 1, b"you"),
        (b"8", None, b""),
    ):
        returns.give_back(lease_id, reader, owner_id=owner_id)
    hold.set()
    pending.pop()()
    assert sent == [
        ([b"1"], None, b"me"),
        ([b"2", b"3"], None, b"me"),
        ([b"4"], None, b"you"),
        ([b"5", b"6"], 0, b"you"),
        ([b"7"], 1, b"you"),
        ([b"8"], None, b""),
    ]


def test_a_reader_names_whom_the_lease_was_granted_to(
    encoder: SharingFake, open_client: Callable[[], Driver]
) -> None:
    """Its own session is another; the record says what it has to know."""
    first, second = open_client(), open_client()
    rows = first.call("encode_one", image(0), num_readers=2)
    owner_id = first.client._session.transports.current().owner_id  # type: ignore[attr-defined]
    assert rows.shared.owner_id == owner_id
    assert second.client._session.transports.current().owner_id != owner_id  # type: ignore[attr-defined]
    seen = requests_of(second)
    assert_rows_of(second.call("read_shared", rows.shared, reader=1), digest_of(0))
    wait_until(
        lambda: bool(first.call("lookup", [rows.key])) and (rows.shared.lease_id, 0) in encoder.released
    )
    wait_for_no_lease(encoder, second)
    assert [(request.owner_id, request.reader) for request in seen] == [(owner_id, 1)]
    assert first.call("encode_one", image(0)).shared is None


# At once


def spoiling(encoder: SharingFake, spoil: Callable[[pb.ItemResult], None]) -> None:
    place = encoder.place

    def lying(delivery: int, lease: Any, result: pb.ItemResult, rows: bytes) -> None:
        place(delivery, lease, result, rows)
        spoil(result)

    encoder.place = lying  # type: ignore[method-assign]


def set_field(name: str, value: object) -> Callable[[pb.ItemResult], None]:
    return lambda result: setattr(result, name, value)


@pytest.mark.parametrize("num_readers", [1, 3])
@pytest.mark.parametrize(
    ("spoil", "found"),
    [
        (set_field("content_digest", bytes(32)), "content_digest"),
        (set_field("width", 7), "width"),
        (set_field("num_rows", 1 << 20), "num_rows"),
        (set_field("rows_bytes", 12), "rows_bytes"),
        (set_field("num_deepstack_levels", 9), "num_deepstack_levels"),
    ],
)
def test_p22_a_result_that_fails_its_checks_gives_its_lease_back_at_once(
    encoder: SharingFake,
    open_client: Callable[[], Driver],
    spoil: Callable[[pb.ItemResult], None],
    found: str,
    num_readers: int,
) -> None:
    spoiling(encoder, spoil)
    client = open_client()
    (outcome,) = client.call("encode", [image(0)], num_readers=num_readers)
    assert isinstance(outcome, InvalidRows)
    assert outcome.details["field"] == found
    assert encoder.num_placed == 1
    wait_for_no_lease(encoder, client)
    assert len(encoder.released) == num_readers, "the other readers never hear of it"


def test_stale_leases_for_several_readers_go_back_for_all_of_them(
    encoder: SharingFake, open_client: Callable[[], Driver]
) -> None:
    client = open_client()
    revoked: list[int] = []

    def revoke_twice(slot: Any) -> None:
        if len(revoked) < 2:
            revoked.append(encoder.arena.page.revoke(slot.index))

    encoder.before_answer = revoke_twice
    rows = client.call("encode_one", image(0), num_readers=3)
    assert encoder.num_placed == 3
    wait_until(lambda: bool(client.call("lookup", [rows.key])) and len(encoder.leases) == 1)
    for reader in (1, 2):
        client.call("read_shared", rows.shared, reader=reader)
    wait_for_no_lease(encoder, client)


# The assembler alone


@dataclass
class Transport:
    """What a receiver needs of ``SharedTransport``; every read fails with ``failure``."""

    failure: Exception | None = None
    name: str = "host"
    owner_id: bytes = b"me"
    given_back: list[tuple[bytes, int | None, bytes]] = field(default_factory=list)

    @property
    def returns(self) -> Transport:
        return self

    def give_back(self, lease: Any, by: Any = None, *, owner_id: bytes = b"") -> None:
        if isinstance(lease, LeaseRecord):
            reader = by.reader if lease.num_readers > 1 else None
            self.given_back.append((lease.lease_id, reader, lease.owner_id))
        else:
            self.given_back.append((lease, by, owner_id))

    def read(self, record: LeaseRecord, handling: RowsHandling, out: Any) -> Any:
        if self.failure is not None:
            self.give_back(record, handling)
            raise self.failure
        import numpy as np

        return np.zeros(record.rows_bytes, np.uint8), None


def leased_result(index: int = 0, lease_id: bytes = b"lease") -> bytes:
    result = pb.ItemResult(
        key=bytes(32),
        content_digest=bytes(32),
        grid_thw=pb.GridTHW(t=1, h=4, w=4),
        num_rows=4,
        width=8,
        dtype=pb.DTYPE_FLOAT32,
        rows_bytes=128,
        host=pb.HostRows(arena_id=b"a" * 16, lease_id=lease_id),
    )
    return pb.ItemEvent(item_index=index, result=result).SerializeToString()


def assembler_of(transport: Transport, num_readers: int = 1) -> Assembler:
    receiver = Receiver(RowsHandling(num_readers=num_readers), (0, 1), transport)  # type: ignore[arg-type]
    return Assembler([Expected(), Expected()], receiver=receiver)


def test_a_result_that_nobody_waits_for_gives_its_lease_back() -> None:
    transport = Transport()
    assembler = assembler_of(transport)
    assert assembler.feed(leased_result()) is not None
    assert (assembler.num_shared, transport.given_back) == (1, []), (
        "the reading's, which this one has none of"
    )
    for index in (0, 7):  # answered in full; of no item
        with pytest.raises(StreamViolation):
            assembler.feed(leased_result(index, b"late"))
    assert transport.given_back == [(b"late", None, b"me")] * 2


def test_rows_that_could_not_be_read_go_back_once_for_each_reader() -> None:
    transport = Transport(InvalidRows("slot_index", "beyond", found=1, expected=0))
    assembler = assembler_of(transport, num_readers=3)
    finished = assembler.feed(leased_result())
    assert finished is not None
    assert isinstance(finished[1], InvalidRows)
    assert sorted(transport.given_back) == [(b"lease", reader, b"me") for reader in range(3)]
    assert assembler.feed(leased_result(0, b"again")) is None, "of an item that failed: let pass, not kept"
    assert sorted(transport.given_back[3:]) == [(b"again", reader, b"me") for reader in range(3)]


def test_a_whole_call_that_was_refused_says_why() -> None:
    assembler = assembler_of(Transport())
    assert assembler.ask_again("no memory is shared here")
    assert (assembler.refusal, assembler.again) == ("no memory is shared here", {0: False, 1: False})
