"""The scheduler's side of the vLLM connector against a pretended vLLM: who waits, goes, is rejected."""

from __future__ import annotations

import json
import random
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from lm_adapter.engines.vllm_book import Book
from lm_adapter.engines.vllm_items import transfer_params
from lm_adapter.errors import InvalidRows, ItemFailed
from tests.unit.lm_adapter.book_rig import (
    GEOMETRY,
    GRID,
    ITEM_BYTES,
    SETTINGS,
    Feature,
    Fetches,
    Position,
    Request,
    key,
    request_for,
)


def test_only_rows_under_way_are_waited_for(book: Book, fetches: Fetches) -> None:
    book.idle(0.5)
    one, other = key(), key()
    book.ensure(request_for(one), 0)
    book.ensure(request_for(other), 0)
    fetches.end(one)
    book.take_unavailable()
    assert fetches.waits == []
    book.idle(0.5)
    assert fetches.waits == [0.5]
    fetches.end(other)
    book.take_unavailable()
    book.idle(0.5)
    assert fetches.waits == [0.5]


def test_a_request_is_ready_when_all_its_rows_are(book: Book, fetches: Fetches) -> None:
    keys = [key() for _ in range(3)]
    request = request_for(*keys)
    assert not book.ensure(request, 0)
    assert not book.ensure(request, 0)
    assert fetches.num_started == 3
    assert not any(book.holds(feature.identifier) for feature in request.mm_features)
    for number, one in enumerate(random.sample(keys, 3)):
        assert not book.ensure(request, 0), number
        fetches.end(one)
    assert book.ensure(request, 0)
    assert book.take_unavailable() == set()
    for index, one in enumerate(keys):
        found = book.rows(request, index)
        assert found is not None
        assert found.key == one
        assert book.holds(request.mm_features[index].identifier)


def test_tokens_that_are_computed_need_no_rows(book: Book, fetches: Fetches) -> None:
    """A prefix that vLLM has in its cache covers the first image."""
    first, second = key(), key()
    request = request_for(first, second)
    assert not book.ensure(request, 8)
    assert list(fetches.under_way) == [second]
    fetches.end(second)
    assert book.ensure(request, 8)
    assert not book.ensure(request, 7)
    assert list(fetches.under_way) == [first]


def test_a_request_without_images_left_to_compute_fetches_nothing(book: Book, fetches: Fetches) -> None:
    assert book.ensure(request_for(key()), 8)
    assert fetches.num_started == 0


def test_p24_rows_are_let_go_when_vllm_is_past_them_and_fetched_anew_after_preemption(
    book: Book, fetches: Fetches
) -> None:
    one = key()
    request = request_for(one)
    book.ensure(request, 0)
    fetches.end(one)
    assert book.ensure(request, 0)
    assert book.resident_bytes == ITEM_BYTES
    book.passed(request, 0)
    assert book.resident_bytes == 0
    assert book.ensure(request, 9)
    assert not book.ensure(request, 0)
    assert fetches.num_started == 2
    fetches.end(one)
    assert book.ensure(request, 0)


def test_p15_requests_for_one_image_share_a_fetch(book: Book, fetches: Fetches) -> None:
    one = key()
    requests = [request_for(one) for _ in range(5)] + [request_for(one, one)]
    for request in requests:
        assert not book.ensure(request, 0)
    assert fetches.num_started == 1
    assert book.resident_bytes == ITEM_BYTES
    book.finished(requests[0])
    fetches.end(one)
    for request in requests[1:]:
        assert book.ensure(request, 0)
    for request in requests[1:]:
        book.finished(request)
    assert book.resident_bytes == 0
    assert fetches.cancelled == []


def test_an_image_that_stands_twice_is_kept_until_its_second_place(book: Book, fetches: Fetches) -> None:
    one = key()
    request = request_for(one, one)
    book.ensure(request, 0)
    fetches.end(one)
    assert book.ensure(request, 0)
    book.passed(request, 0)
    assert book.ensure(request, 9)
    assert book.rows(request, 1) is not None


def test_p32_a_failed_item_rejects_every_request_that_waits_for_it_and_no_other(
    book: Book, fetches: Fetches
) -> None:
    bad, good = key(), key()
    failing = [request_for(bad), request_for(good, bad), request_for(bad, good)]
    fine = request_for(good)
    for request in (*failing, fine):
        book.ensure(request, 0)
    fetches.end(bad, InvalidRows("width", "width is 9, expected 12", found=9, expected=12))
    assert book.take_unavailable() == {request.request_id for request in failing}
    assert book.take_unavailable() == set()
    assert not any(book.ensure(request, 0) for request in failing)
    for request in failing:
        book.finished(request)
    fetches.end(good)
    assert book.ensure(fine, 0)
    assert not book.holds(f"id-{bad.hex()}")
    again = request_for(bad)
    assert not book.ensure(again, 0)
    fetches.end(bad)
    assert book.ensure(again, 0)


def test_a_request_that_is_over_takes_its_fetches_along(book: Book, fetches: Fetches) -> None:
    one = key()
    request = request_for(one)
    book.ensure(request, 0)
    book.finished(request)
    assert fetches.cancelled == [one]
    assert book.resident_bytes == 0
    # What ended before the cancellation arrived changes nothing.
    fetches.end(one)
    assert book.take_unavailable() == set()
    assert not book.holds(f"id-{one.hex()}")


def test_p17_what_waits_is_bounded_in_bytes_and_nobody_is_overtaken(book: Book, fetches: Fetches) -> None:
    first, large, small = (
        request_for(key(), key()),
        request_for(*(key() for _ in range(3))),
        request_for(key()),
    )
    for request in (first, large, small):
        assert not book.ensure(request, 0)
    assert fetches.num_started == 2
    assert book.resident_bytes == 2 * ITEM_BYTES
    for one in list(fetches.under_way):
        fetches.end(one)
    assert book.ensure(first, 0)
    assert not book.ensure(small, 0)
    book.finished(first)
    assert fetches.num_started == 6
    assert book.resident_bytes == SETTINGS.max_resident_bytes
    for one in list(fetches.under_way):
        fetches.end(one)
    assert book.ensure(large, 0)
    assert book.ensure(small, 0)


def test_p17_a_request_that_could_never_start_is_rejected_with_both_figures(
    book: Book, caplog: pytest.LogCaptureFixture
) -> None:
    request = request_for(*(key() for _ in range(5)))
    with caplog.at_level("WARNING", "vllm.vision_encoder"):
        assert not book.ensure(request, 0)
    assert book.take_unavailable() == {request.request_id}
    assert str(5 * ITEM_BYTES) in caplog.text
    assert str(SETTINGS.max_resident_bytes) in caplog.text


def test_p12_one_identifier_never_stands_for_two_keys(book: Book, fetches: Fetches) -> None:
    one = key()
    request = request_for(one)
    book.ensure(request, 0)
    fetches.end(one)
    book.finished(request)
    other = request_for(key())
    other.mm_features[0].identifier = request.mm_features[0].identifier
    assert not book.ensure(other, 0)
    assert book.take_unavailable() == {other.request_id}


def test_p17_remembered_identifiers_are_bounded(fetches: Fetches) -> None:
    book = Book(fetches, GEOMETRY, replace(SETTINGS, max_bound_items=3), has_tower=False)
    first = request_for(key())
    for request in (first, *(request_for(key()) for _ in range(3))):
        book.ensure(request, 0)
        fetches.end_all()
        assert book.ensure(request, 0)
        book.finished(request)
    other = request_for(key())
    other.mm_features[0].identifier = first.mm_features[0].identifier
    assert book.ensure(other, 8)
    book.close()


def test_pixels_are_vllms_own_where_it_has_a_tower(fetches: Fetches) -> None:
    book = Book(fetches, GEOMETRY, SETTINGS, has_tower=True)
    one = key()
    request = request_for(one)
    pixels = Feature("pixels", Position(40, 9), {"pixel_values": object()})
    request.mm_features.append(pixels)
    assert not book.ensure(request, 0)
    fetches.end(one)
    assert book.ensure(request, 0)
    assert not book.holds("pixels")
    assert book.rows(request, 1) is None
    book.close()


def test_p33_pixels_without_a_tower_and_requests_of_another_make_are_rejected(book: Book) -> None:
    pixels = Request([Feature("pixels", Position(2, 6), {"pixel_values": object()})], None)
    broken = Request([Feature("x", Position(2, 6))], {"vision_encoder": {"items": [7]}})
    strange = Request([Feature("y", None)], transfer_params([(key(), GRID)]))  # type: ignore[arg-type]
    for request in (pixels, broken, strange):
        assert not book.ensure(request, 0)
        assert book.take_unavailable() == {request.request_id}


def test_the_reason_goes_to_whoever_listens(fetches: Fetches, tmp_path: Path) -> None:
    path = str(tmp_path / "failures")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    listener.settimeout(5)
    listener.bind(path)
    book = Book(fetches, GEOMETRY, replace(SETTINGS, failures_path=path), has_tower=False)
    one = key()
    book.ensure(request_for(one, reply="the reply", replica="10.0.0.7:50051"), 0)
    fetches.end(one, ItemFailed("gone", reason="UNKNOWN_KEY", status=5))
    book.take_unavailable()
    account = json.loads(listener.recv(4096))
    assert account["reply"] == "the reply"
    assert account["reason"] == "UNKNOWN_KEY"
    assert account["replica"] == "10.0.0.7:50051"
    listener.close()
    # Nobody listens now: rejected all the same.
    request = request_for(key(), reply="unheard")
    book.ensure(request, 0)
    fetches.end(next(iter(fetches.under_way)), ItemFailed("gone"))
    assert book.take_unavailable() == {request.request_id}
    book.close()


def test_p17_nothing_is_left_after_any_order_of_events(fetches: Fetches) -> None:
    """Random requests over few images, with failures, preemptions and clients that leave. Those that stay end
    with rows as soon as fetches do."""
    book = Book(fetches, GEOMETRY, SETTINGS, has_tower=False)
    choice = random.Random()
    keys = [key() for _ in range(6)]
    alive: list[Request] = []
    for _ in range(3000):
        action = choice.random()
        if action < 0.25 and len(alive) < 8:
            alive.append(request_for(*choice.choices(keys, k=choice.randint(1, 3))))
        elif action < 0.5 and alive:
            request = choice.choice(alive)
            ready = book.ensure(request, 0)
            if ready:
                for index in range(len(request.mm_features)):
                    assert book.rows(request, index) is not None
                if choice.random() < 0.5:
                    book.passed(request, choice.randrange(len(request.mm_features)))
        elif action < 0.8 and fetches.under_way:
            one = choice.choice(list(fetches.under_way))
            fetches.end(one, ItemFailed("no") if choice.random() < 0.2 else None)
        elif alive:
            book.finished(alive.pop(choice.randrange(len(alive))))
        for request_id in book.take_unavailable():
            (failed,) = [request for request in alive if request.request_id == request_id]
            alive.remove(failed)
            book.finished(failed)
        assert 0 <= book.resident_bytes <= SETTINGS.max_resident_bytes
    for _ in range(2 * len(alive)):
        fetches.end_all()
        for request in [request for request in alive if book.ensure(request, 0)]:
            alive.remove(request)
            book.finished(request)
    assert alive == []
    assert book.take_unavailable() == set()
    assert book.resident_bytes == 0
    book.close()
