"""Whoever waits for rows gets them or is rejected, whatever room, order, preemption and failures do."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest

from lm_adapter.engines.vllm_book import Book
from lm_adapter.errors import ItemFailed
from lm_adapter.items import Grid
from tests.unit.lm_adapter.book_rig import (
    GEOMETRY,
    GRID,
    SETTINGS,
    Fetches,
    Named,
    Request,
    is_ready,
    key,
    request_for,
    request_of,
)

DOUBLE = Grid(1, 8, 6)
TURNED = Grid(1, 6, 4)
UNKNOWN = ItemFailed("nobody has it", reason="UNKNOWN_KEY", status=5)


def test_p24_preempted_requests_do_not_wait_for_each_others_rows(book: Book, fetches: Fetches) -> None:
    """Room for four items. Each of the two preempted requests has let go of its first image and still has
    its second; kept, those would leave too little for the larger one at the head of the queue."""
    large = request_of([Named(f"large {number}", key(), DOUBLE) for number in range(2)])
    small = request_for(key(), key())
    last = request_for(key())
    for item in large.ec_transfer_params["vision_encoder"]["items"]:  # type: ignore[index]
        fetches.grids[bytes.fromhex(item["key"])] = DOUBLE
    assert is_ready(book, fetches, large)
    book.passed(large, 0)
    assert is_ready(book, fetches, small)
    book.passed(small, 0)
    assert is_ready(book, fetches, last)
    for _ in range(2):
        is_ready(book, fetches, large)
        is_ready(book, fetches, small)
    book.finished(last)
    others = [large, small, request_for(key())]
    for _ in range(3):
        for request in [request for request in others if is_ready(book, fetches, request)]:
            book.finished(request)
            others.remove(request)
    assert others == []
    assert book.take_unavailable() == set()
    assert book.resident_bytes == 0


def test_p24_rows_that_a_preempted_request_still_has_are_kept_where_the_rest_fits(
    book: Book, fetches: Fetches
) -> None:
    first, second = key(), key()
    request = request_for(first, second)
    assert is_ready(book, fetches, request)
    book.passed(request, 0)
    assert not book.ensure(request, 0)
    assert fetches.num_started == 3
    assert is_ready(book, fetches, request)


def test_p32_a_request_from_the_queue_does_not_join_an_item_that_has_failed(fetches: Fetches) -> None:
    """The failure makes room, in which the queued request starts, while other holders are still to fail."""
    half = replace(SETTINGS, max_resident_bytes=SETTINGS.max_resident_bytes // 2)
    book = Book(fetches, GEOMETRY, half, has_tower=False)
    one = key()
    first, queued = request_for(one, key()), request_for(one, key())
    failing = [first, *(request_for(one) for _ in range(30))]
    for request in (*failing, queued):
        assert not book.ensure(request, 0)
    assert fetches.num_started == 2
    fetches.end(one, UNKNOWN)
    assert book.take_unavailable() == {request.request_id for request in failing}
    for request in failing:
        book.finished(request)
    fetches.end_all()
    assert book.ensure(queued, 0)
    book.finished(queued)
    assert book.resident_bytes == 0
    book.close()


def test_p33_any_number_of_queued_requests_can_fail_at_once(book: Book, fetches: Fetches) -> None:
    """Each that fails makes way for the next."""
    one = key()
    blocker, right = request_for(*(key() for _ in range(3))), request_of([Named("x", one)])
    queued = [request_of([Named("x", one, TURNED)]) for _ in range(2000)]
    for request in (blocker, right, *queued):
        assert not book.ensure(request, 0)
    fetches.end_all()
    assert book.ensure(right, 0)
    assert book.take_unavailable() == set()
    book.finished(blocker)
    assert book.take_unavailable() == {request.request_id for request in queued}
    assert book.ensure(right, 0)


def test_p24_rows_whose_tokens_were_computed_for_another_request_are_let_go(
    book: Book, fetches: Fetches
) -> None:
    """vLLM makes no room for these, and so never says that it is past them. The request may run for long."""
    first, second = key(), key()
    request = request_for(first, second)
    assert is_ready(book, fetches, request)
    assert book.ensure(request, 8)
    assert not book.holds(f"id-{first.hex()}")
    assert book.rows(request, 1) is not None
    assert book.ensure(request, 16)
    assert book.resident_bytes == 0
    assert not book.ensure(request, 8)
    fetches.end_all()
    assert book.ensure(request, 8)


def test_rows_that_vllm_is_past_while_others_are_under_way_are_not_waited_for(
    book: Book, fetches: Fetches
) -> None:
    first, second = key(), key()
    request = request_for(first, second)
    assert not book.ensure(request, 0)
    book.passed(request, 0)
    fetches.end(second)
    assert book.ensure(request, 8)


@dataclass(eq=False)
class _Running:
    """A request in the pretended vLLM. computed: tokens; most: that were ever computed."""

    request: Request
    is_right: bool
    computed: int = 0
    most: int = 0


class _Vllm:
    """Asks, computes, preempts and rejects as vLLM's scheduler may, at random, over few images."""

    def __init__(self, choice: random.Random) -> None:
        self.choice = choice
        self.fetches = Fetches()
        self.book = Book(self.fetches, GEOMETRY, SETTINGS, has_tower=False)
        self.alive: list[_Running] = []
        self.num_served = 0
        self.num_rejected = 0
        self.images = [Named(f"image {number}", key(), choice.choice([GRID, DOUBLE])) for number in range(6)]
        self.fetches.grids = {image.key: image.grid for image in self.images}

    def arrive(self) -> None:
        images, is_right = [], True
        for image in self.choice.choices(self.images, k=self.choice.randint(1, 3)):
            kind = self.choice.random()
            if kind < 0.1:
                images.append(replace(image, key=key()))
            elif kind < 0.2:
                grid = Grid(1, image.grid.w, image.grid.h) if kind < 0.15 else Grid(1, 2, 4)
                images.append(replace(image, grid=grid))
            else:
                images.append(image)
            is_right = is_right and images[-1] == image
        distinct = {image.name: GEOMETRY.num_bytes(image.grid) for image in images}
        is_right = is_right and sum(distinct.values()) <= SETTINGS.max_resident_bytes
        self.alive.append(_Running(request_of(images), is_right))

    def step(self, running: _Running) -> None:
        """One pass: the request goes on by one image, or ends behind its last."""
        request = running.request
        if not self.book.ensure(request, running.computed):
            return
        for index, feature in enumerate(request.mm_features):
            position = feature.mm_position
            end = position.offset + position.length
            if end <= running.computed:
                continue
            assert self.book.holds(feature.identifier)
            rows = self.book.rows(request, index)
            assert rows is not None
            assert rows.num_rows == position.length
            assert list(rows.grid_thw) == [int(side) for side in feature.data["image_grid_thw"].data]  # type: ignore[index]
            assert rows.grid_thw == self.fetches.grids[rows.key]
            if self.choice.random() < 0.2:
                return  # its tokens take another step
            self.book.passed(request, index)
            running.computed = end
            running.most = max(running.most, end)
            return
        self.alive.remove(running)
        self.book.finished(request)
        self.num_served += 1

    def preempt(self, running: _Running) -> None:
        """It starts anew, behind what vLLM's prefix cache still has of it."""
        ends = [one.mm_position.offset + one.mm_position.length for one in running.request.mm_features]
        running.computed = self.choice.choice([0, *(end for end in ends if end <= running.most)])

    def reject(self) -> None:
        for request_id in self.book.take_unavailable():
            (failed,) = [one for one in self.alive if one.request.request_id == request_id]
            assert not failed.is_right
            self.alive.remove(failed)
            self.book.finished(failed.request)
            self.num_rejected += 1

    def end_fetch(self) -> None:
        number = self.choice.randrange(len(self.fetches.open))
        is_known = self.fetches.open[number][1].key in self.fetches.grids
        self.fetches.end_one(number, None if is_known else UNKNOWN)


@pytest.mark.parametrize("number", range(40))
def test_p24_p32_every_request_ends_in_rows_or_a_rejection(number: int) -> None:
    """Any preemptions, wrong grids, unknown keys and clients that leave: once no more of them come, all end,
    those that say what is right with rows, and nothing is left."""
    choice = random.Random()
    vllm = _Vllm(choice)
    num_left = num_arrived = 0
    for _ in range(400):
        action = choice.random()
        if action < 0.15 and len(vllm.alive) < 10:
            vllm.arrive()
            num_arrived += 1
        elif action < 0.6 and vllm.alive:
            vllm.step(choice.choice(vllm.alive))
        elif action < 0.7 and vllm.alive:
            vllm.preempt(choice.choice(vllm.alive))
        elif action < 0.95 and vllm.fetches.open:
            vllm.end_fetch()
        elif action > 0.98 and vllm.alive:
            vllm.book.finished(vllm.alive.pop(choice.randrange(len(vllm.alive))).request)
            num_left += 1
        vllm.reject()
        assert 0 <= vllm.book.resident_bytes <= SETTINGS.max_resident_bytes
    for _ in range(400):
        if not vllm.alive:
            break
        while vllm.fetches.open:
            vllm.end_fetch()
        for running in list(vllm.alive):
            if running in vllm.alive:
                vllm.step(running)
        vllm.reject()
    assert [one.request for one in vllm.alive] == []
    assert vllm.num_served + vllm.num_rejected + num_left == num_arrived
    assert vllm.book.resident_bytes == 0
    assert not any(vllm.book.holds(image.name) for image in vllm.images)
    vllm.book.close()
