"""What is offered to whom, and whose descriptors they are."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator

import pytest

from encoder_service.transport import offers
from encoder_service.transport.offers import ArenaOffer, OfferBook, ProbeSlot, close_all
from tests.unit.transport.broker_rig import num_descriptors

A, B = b"a" * 16, b"b" * 16


@pytest.fixture
def book() -> Iterator[OfferBook]:
    before = num_descriptors()
    book = OfferBook(isolated_namespaces=["tenant"])
    yield book
    book.close()
    assert len(book) == 0
    assert num_descriptors() == before


def add(book: OfferBook, arena_id: bytes, content: bytes = b"", namespace: str | None = None) -> None:
    fd = os.memfd_create("arena")
    try:
        os.write(fd, content)
        book.add(ArenaOffer(arena_id, "host", 4096, 64), fd, fd, namespace)
    finally:
        os.close(fd)


def seen_by(book: OfferBook, namespace: str) -> set[bytes]:
    return {offer.arena_id for offer in book.visible_to(namespace)}


def test_p18_an_isolated_namespace_sees_its_own_arenas_only_and_nobody_else_does(book: OfferBook) -> None:
    add(book, A)
    add(book, B, namespace="tenant")
    assert seen_by(book, "") == seen_by(book, "other") == {A}
    assert seen_by(book, "tenant") == {B}
    assert book.find("tenant", A) is None
    assert book.descriptors("tenant", A) is None
    assert book.find("other", B) is None
    assert book.descriptors("other", B) is None
    could_see = book.remove(B)
    assert could_see is not None
    assert could_see("tenant")
    assert not could_see("other")
    assert seen_by(book, "tenant") == set()


def test_descriptors_are_the_arenas_after_its_maker_closed_and_reused_the_numbers(book: OfferBook) -> None:
    add(book, A, b"rows")
    imposter = os.memfd_create("other")
    os.write(imposter, b"evil")
    found = book.descriptors("", A)
    assert found is not None
    contents = [os.pread(fd, 4, 0) for fd in found[1]]
    close_all(found[1])
    os.close(imposter)
    assert contents == [b"rows", b"rows"]


def test_an_arena_is_offered_once_and_removed_once(book: OfferBook) -> None:
    add(book, A)
    with pytest.raises(ValueError, match="offered already"):
        add(book, A)
    assert book.remove(A) is not None
    assert book.remove(A) is None
    add(book, A)


def test_offers_are_bounded_by_what_one_frame_tells(book: OfferBook, monkeypatch: pytest.MonkeyPatch) -> None:
    from encoder_service.transport.broker_requests import geometry_of
    from vision_encoder.v1 import broker_pb2 as pb

    largest = ArenaOffer(A, "device", (1 << 64) - 1, (1 << 64) - 1, device_uuid="u" * 64)
    reply = pb.BrokerReply(
        request_id=(1 << 64) - 1,
        welcome=pb.BrokerWelcome(
            instance_id="i" * 256, host_id="h" * 256, arenas=[geometry_of(largest)] * offers.MAX_OFFERS
        ),
    )
    assert len(reply.SerializeToString()) <= 65536
    monkeypatch.setattr(offers, "MAX_OFFERS", 1)
    add(book, A)
    with pytest.raises(ValueError, match="1 arenas are offered, at most 1"):
        add(book, B)


def test_running_out_of_descriptors_loses_none(book: OfferBook) -> None:
    add(book, A)
    before = num_descriptors()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free + 1, hard))  # room for one of two
    try:
        with pytest.raises(OSError, match="Too many open files"):
            book.descriptors("", A)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert num_descriptors() == before


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"arena_id": b"short"}, "16 bytes, found 5"),
        ({"kind": "device"}, "kind device"),
        ({"device_uuid": "GPU-1"}, "kind host"),
        ({"kind": "device", "device_uuid": "u" * 65}, "65 characters, at most 64"),
        ({"probe": ProbeSlot(4090, 7, bytes(32))}, "ends at byte 4097, the arena has 4096"),
        ({"probe": ProbeSlot(0, 0, bytes(32))}, "ends at byte 0"),
        ({"probe": ProbeSlot(0, 1, bytes(31))}, "32 bytes, found 31"),
    ],
)
def test_an_offer_that_makes_no_sense_is_refused(given: dict[str, object], words: str) -> None:
    fields: dict[str, object] = {"arena_id": A, "kind": "host", "size_bytes": 4096, "page_bytes": 64}
    with pytest.raises(ValueError, match=words):
        ArenaOffer(**{**fields, **given})  # type: ignore[arg-type]
