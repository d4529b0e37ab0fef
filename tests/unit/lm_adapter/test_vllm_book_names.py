"""What a name in vLLM's caches stands for: one key and one grid, and only what rows have shown."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace

import pytest

from lm_adapter.engines.vllm_book import Book
from lm_adapter.errors import InvalidRows, ItemFailed
from lm_adapter.items import Grid
from tests.unit.lm_adapter.book_rig import (
    GEOMETRY,
    GRID,
    SETTINGS,
    Fetches,
    Named,
    Position,
    Request,
    is_ready,
    key,
    pixels,
    request_of,
    rows_of,
)

WIDER = Grid(1, 4, 12)
TURNED = Grid(1, 6, 4)
ROOM = replace(SETTINGS, max_resident_bytes=1 << 20)
UNKNOWN = ItemFailed("nobody has it", reason="UNKNOWN_KEY", status=5)


@pytest.fixture
def book(fetches: Fetches) -> Iterator[Book]:
    found = Book(fetches, GEOMETRY, ROOM, has_tower=False)
    yield found
    found.close()


@pytest.fixture
def both(fetches: Fetches) -> Iterator[Book]:
    """Beside a tower of vLLM's own."""
    found = Book(fetches, GEOMETRY, ROOM, has_tower=True)
    yield found
    found.close()


@pytest.mark.parametrize("grid", [WIDER, TURNED])
def test_p12_rows_that_are_here_are_not_given_to_a_request_of_another_grid(
    grid: Grid, book: Book, fetches: Fetches, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM would place them at other positions, or end its engine on their number."""
    one = key()
    first = request_of([Named("x", one)])
    assert is_ready(book, fetches, first)
    other = request_of([Named("x", one, grid)])
    with caplog.at_level(logging.WARNING, "vllm.vision_encoder"):
        assert not book.ensure(other, 0)
    assert book.take_unavailable() == {other.request_id}
    assert str(list(GRID)) in caplog.text
    assert str(list(grid)) in caplog.text
    assert book.rows(first, 0) is not None
    same = request_of([Named("x", one)])
    assert book.ensure(same, 0)


@pytest.mark.parametrize("grid", [WIDER, TURNED])
def test_p12_kv_of_rows_is_not_taken_by_a_request_of_another_grid(
    grid: Grid, book: Book, fetches: Fetches
) -> None:
    """Rows are gone and their tokens computed: vLLM asks only whether it may go on behind them."""
    one = key()
    first = request_of([Named("x", one)])
    assert is_ready(book, fetches, first)
    book.finished(first)
    other = request_of([Named("x", one, grid)])
    assert not book.ensure(other, other.mm_features[0].mm_position.length + 2)
    assert book.take_unavailable() == {other.request_id}


@pytest.mark.parametrize("grid", [WIDER, TURNED])
@pytest.mark.parametrize("wrong_ends_first", [True, False])
def test_p32_a_request_of_another_grid_fails_alone_while_rows_are_under_way(
    wrong_ends_first: bool, grid: Grid, book: Book, fetches: Fetches, caplog: pytest.LogCaptureFixture
) -> None:
    """The encoder's grid is the truth, and until it is known nobody is believed more than another."""
    one = key()
    wrong, right = request_of([Named("x", one, grid)]), request_of([Named("x", one)])
    for request in (wrong, right):
        assert not book.ensure(request, 0)
    with caplog.at_level(logging.WARNING, "vllm.vision_encoder"):
        fetches.end_one(0 if wrong_ends_first else 1)
        book.ensure(right, 0)
        fetches.end_all()
        assert book.ensure(right, 0)
    assert book.take_unavailable() == {wrong.request_id}
    for figure in (GRID, grid):
        assert str(tuple(figure)) in caplog.text or str(list(figure)) in caplog.text
    rows = book.rows(right, 0)
    assert rows is not None
    assert rows.grid_thw == GRID
    book.finished(wrong)
    assert book.rows(right, 0) is not None
    book.finished(right)
    assert book.resident_bytes == 0


def test_p12_of_two_keys_under_one_name_the_first_that_has_rows_keeps_it(
    book: Book, fetches: Fetches
) -> None:
    first, second = request_of([Named("x", key())]), request_of([Named("x", key())])
    for request in (first, second):
        assert not book.ensure(request, 0)
    fetches.end_one(1)
    assert book.ensure(second, 0)
    assert book.take_unavailable() == {first.request_id}
    assert len(fetches.cancelled) == 1
    book.finished(first)
    rows = book.rows(second, 0)
    assert rows is not None
    assert rows.key.hex() == second.ec_transfer_params["vision_encoder"]["items"][0]["key"]  # type: ignore[index]


def test_p12_one_request_cannot_name_two_images_alike(book: Book, fetches: Fetches) -> None:
    one = key()
    for second in (Named("x", key()), Named("x", one, TURNED)):
        request = request_of([Named("x", one), second])
        assert not book.ensure(request, 0)
        assert book.take_unavailable() == {request.request_id}
    assert fetches.num_started == 0


def test_p32_a_name_is_not_taken_by_a_request_that_never_got_rows(book: Book, fetches: Fetches) -> None:
    unknown = request_of([Named("x", key())])
    book.ensure(unknown, 0)
    fetches.end_one(0, UNKNOWN)
    assert book.take_unavailable() == {unknown.request_id}
    book.finished(unknown)
    right = request_of([Named("x", key())])
    assert is_ready(book, fetches, right)
    again = request_of([Named("x", key())])
    assert not book.ensure(again, 0)
    assert book.take_unavailable() == {again.request_id}


def test_p32_a_name_is_not_taken_by_a_request_that_waits_for_room(fetches: Fetches) -> None:
    book = Book(fetches, GEOMETRY, SETTINGS, has_tower=False)
    first = request_of([Named(f"x{number}", key()) for number in range(4)])
    assert is_ready(book, fetches, first)
    waits, right = request_of([Named("x", key())]), request_of([Named("x", key())])
    assert not book.ensure(waits, 0)
    assert not book.ensure(right, 0)
    book.finished(waits)
    book.finished(first)
    assert is_ready(book, fetches, right)
    book.close()


def test_p12_a_name_that_was_settled_while_a_request_waited_for_room_binds_it(fetches: Fetches) -> None:
    """It is held to the name when it joins, too."""
    book = Book(fetches, GEOMETRY, SETTINGS, has_tower=False)
    one, fill = key(), key()
    full = request_of([Named("fill", fill, Grid(1, 8, 8))])
    fetches.grids[fill] = Grid(1, 8, 8)
    right = request_of([Named("x", one)])
    assert not book.ensure(full, 0)
    assert not book.ensure(right, 0)
    late = request_of([Named("x", one, TURNED)])
    assert not book.ensure(late, 0)
    fetches.end_all()
    assert book.ensure(right, 0)
    book.finished(full)
    assert not book.ensure(late, 0)
    assert book.take_unavailable() == {late.request_id}
    assert book.ensure(right, 0)
    book.close()


def test_p12_pixels_and_rows_share_a_name_of_one_grid_only(both: Book, fetches: Fetches) -> None:
    """vLLM takes resident rows for pixels of the same name without asking whose they are."""
    one = key()
    rows = request_of([Named("x", one)])
    assert is_ready(both, fetches, rows)
    same, other = Request([pixels("x", GRID)], None), Request([pixels("x", WIDER)], None)
    assert both.ensure(same, 0)
    assert both.rows(same, 0) is not None
    assert not both.ensure(other, 0)
    assert both.take_unavailable() == {other.request_id}


def test_p12_pixels_that_came_first_are_not_given_rows_of_another_grid(both: Book, fetches: Fetches) -> None:
    early, late = request_of([Named("x", key())]), request_of([Named("x", key())])
    assert not both.ensure(early, 0)
    own = Request([pixels("x", WIDER)], None)
    assert both.ensure(own, 0)
    fetches.end_all()
    assert both.take_unavailable() == {early.request_id}
    assert not both.holds("x")
    assert both.rows(own, 0) is None
    assert not both.ensure(late, 0)
    assert both.take_unavailable() == {late.request_id}


def test_p22_rows_of_another_grid_than_wanted_are_not_taken_from_the_fetch(
    book: Book, fetches: Fetches
) -> None:
    """Whoever fetches has compared them; the book does not rely on it."""
    one = key()
    fetches.grids[one] = TURNED
    request = request_of([Named("x", one)])
    book.ensure(request, 0)
    fetches.end(one)
    assert not book.ensure(request, 0)
    assert book.take_unavailable() == {request.request_id}
    assert not book.holds("x")


def test_p22_what_is_handed_over_has_the_size_of_the_place_whatever_happened(
    book: Book, fetches: Fetches, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM has made room and cannot be told no any more: it gets rows of nothing, and the request fails.
    The tokens that it computes of them stay under the name, which nobody may use from then on."""
    one = key()
    request = request_of([Named("x", one)])
    assert is_ready(book, fetches, request)
    request.mm_features[0].mm_position = Position(2, 9)
    with caplog.at_level(logging.WARNING, "vllm.vision_encoder"):
        rows = book.rows(request, 0)
    assert rows is not None
    assert (rows.num_rows, rows.width, rows.dtype) == (9, 12, "float32")
    assert not rows.raw().any()
    assert len(rows.payload) == 9 * 12 * 4
    assert book.take_unavailable() == {request.request_id}
    assert "6" in caplog.text
    assert "9" in caplog.text
    book.finished(request)
    later = request_of([Named("x", one)])
    assert not book.ensure(later, 0)
    assert book.take_unavailable() == {later.request_id}
    assert book.resident_bytes == 0


def test_p22_rows_of_a_clip_do_not_fit_the_place_of_an_image() -> None:
    """A model that merges time: the clip's grid says nothing of its chunks, each of which has rows."""
    merging = replace(GEOMETRY, merges_time=True)
    clip = Grid(8, 4, 6)
    rows = replace(rows_of(key(), Grid(2, 4, 6)), grid_thw=clip, chunk_grids=(Grid(4, 4, 6), Grid(4, 4, 6)))
    with pytest.raises(InvalidRows, match=r"12 rows .* expected 6 "):
        merging.check(rows, clip)
    one_chunk = replace(rows_of(key()), grid_thw=clip)
    merging.check(one_chunk, clip)


def test_rows_that_were_fetched_are_handed_over_as_they_are(book: Book, fetches: Fetches) -> None:
    one = key()
    request = request_of([Named("x", one), Named("y", key())])
    assert is_ready(book, fetches, request)
    rows = book.rows(request, 0)
    assert rows is not None
    assert rows.key == one
    assert rows.num_bytes == rows_of(one).num_bytes
