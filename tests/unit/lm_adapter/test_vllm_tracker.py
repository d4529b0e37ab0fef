"""The scheduler's half of the vLLM connector, without vLLM: which requests wait, go on or are rejected.

Requests imitate vLLM's; fetches end when a test ends them."""

from __future__ import annotations

import json
import random
import secrets
import socket
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lm_adapter.engines.vllm_fetch import Fetched
from lm_adapter.engines.vllm_items import Geometry, WantedRows, transfer_params
from lm_adapter.engines.vllm_settings import FetchSettings
from lm_adapter.engines.vllm_tracker import RequestTracker
from lm_adapter.errors import InvalidRows, ItemFailed
from lm_adapter.items import Grid
from lm_adapter.types import EncodedRows

GEOMETRY = Geometry(width=12, dtype="float32", num_levels=2, merge_size=2, merges_time=False)
GRID, TURNED, DOUBLE = Grid(1, 4, 6), Grid(1, 6, 4), Grid(1, 8, 6)
ITEM_BYTES = GEOMETRY.num_bytes(GRID)
SETTINGS = FetchSettings(target="nowhere:1", max_resident_bytes=4 * ITEM_BYTES)
UNKNOWN = ItemFailed("no such key", reason="UNKNOWN_KEY", status=5)


@dataclass
class Position:
    offset: int
    length: int

    def get_num_embeds(self) -> int:
        return self.length


@dataclass(eq=False)
class Feature:
    identifier: str
    mm_position: Position
    data: dict[str, Any] | None = None


@dataclass(eq=False)
class Request:
    mm_features: list[Feature]
    ec_transfer_params: dict[str, Any] | None
    request_id: str = field(default_factory=lambda: secrets.token_hex(4))


@dataclass(frozen=True)
class Image:
    """An image as a request describes it."""

    name: str
    key: bytes
    grid: Grid = GRID


class Fetches:
    """grids: of the rows under a key, if not GRID."""

    def __init__(self) -> None:
        self.ended: deque[Fetched] = deque()
        self.open: list[tuple[Any, WantedRows]] = []
        self.grids: dict[bytes, Grid] = {}
        self.cancelled: list[bytes] = []
        self.num_started = 0
        self.num_waits = 0

    def start(self, handle: object, wanted: WantedRows) -> None:
        self.num_started += 1
        self.open.append((handle, wanted))

    def cancel(self, handle: Any) -> None:
        self.cancelled.append(handle.wanted.key)
        self.open = [(other, wanted) for other, wanted in self.open if other is not handle]

    def wait(self, timeout_s: float) -> None:
        self.num_waits += 1

    def end(self, key: bytes, error: ItemFailed | None = None) -> None:
        self.end_at([wanted.key for _, wanted in self.open].index(key), error)

    def end_at(self, number: int, error: ItemFailed | None = None) -> None:
        """As ``Fetcher`` ends it: rows of another grid than wanted are an error."""
        handle, wanted = self.open.pop(number)
        assert wanted.key is not None
        outcome: EncodedRows | ItemFailed = error or rows_of(wanted.key, self.grids.get(wanted.key, GRID))
        if isinstance(outcome, EncodedRows):
            try:
                GEOMETRY.check(outcome, wanted.grid)
            except InvalidRows as misfit:
                outcome = misfit
        self.ended.append(Fetched(handle, outcome))

    def end_all(self) -> None:
        while self.open:
            self.end_at(0)


def rows_of(key: bytes, grid: Grid = GRID) -> EncodedRows:
    payload = np.zeros(GEOMETRY.num_bytes(grid), dtype=np.uint8)
    return EncodedRows(key, b"", grid, GEOMETRY.num_rows(grid), 12, "float32", 2, payload)


def new_key() -> bytes:
    return secrets.token_bytes(32)


def request_for(*keys: bytes, reply: str = "") -> Request:
    return request_of(*(Image(f"id-{key.hex()}", key) for key in keys), reply=reply)


def request_of(*images: Image, reply: str = "") -> Request:
    """Two tokens of text, an image, two tokens of text, an image, ..."""
    features, offset = [], 2
    for image in images:
        num_rows = GEOMETRY.num_rows(image.grid)
        features.append(Feature(image.name, Position(offset, num_rows), grid_field(image.grid)))
        offset += num_rows + 2
    return Request(features, transfer_params([(image.key, image.grid) for image in images], reply))


def request_with_pixels(name: str, grid: Grid) -> Request:
    """An image for vLLM's own tower."""
    place = Position(2, GEOMETRY.num_rows(grid))
    return Request([Feature(name, place, {"pixel_values": object(), **grid_field(grid)})], None)


def grid_field(grid: Grid) -> dict[str, Any]:
    return {"image_grid_thw": SimpleNamespace(data=np.array(grid))}


NewTracker = Callable[..., RequestTracker]


@pytest.fixture
def fetches() -> Fetches:
    return Fetches()


@pytest.fixture
def new_tracker(fetches: Fetches) -> Iterator[NewTracker]:
    trackers: list[RequestTracker] = []

    def make(*, has_tower: bool = False, **changes: Any) -> RequestTracker:
        settings = replace(SETTINGS, **changes)
        trackers.append(RequestTracker(fetches, GEOMETRY, settings, has_tower=has_tower))
        return trackers[-1]

    yield make
    for tracker in trackers:
        tracker.close()


@pytest.fixture
def tracker(new_tracker: NewTracker) -> RequestTracker:
    """With room for four items and no tower."""
    return new_tracker()


def is_ready(tracker: RequestTracker, fetches: Fetches, request: Request) -> bool:
    """Whether vLLM may schedule the request once all fetches have ended."""
    tracker.ensure(request, 0)
    fetches.end_all()
    return tracker.ensure(request, 0)


def assert_rejected(tracker: RequestTracker, *requests: Request) -> None:
    """These and no others, once."""
    assert not any(tracker.ensure(request, 0) for request in requests)
    assert tracker.take_unavailable() == {request.request_id for request in requests}
    assert tracker.take_unavailable() == set()


# Waiting and room -----------------------------------------------------------------------------------------


def test_a_request_is_ready_when_all_its_rows_are(tracker: RequestTracker, fetches: Fetches) -> None:
    keys = [new_key() for _ in range(3)]
    request = request_for(*keys)
    assert not tracker.ensure(request, 0)
    assert fetches.num_started == 3
    for number, key in enumerate(random.sample(keys, 3)):
        assert not tracker.ensure(request, 0), number
        fetches.end(key)
    assert tracker.ensure(request, 0)
    for index, key in enumerate(keys):
        rows = tracker.rows(request, index)
        assert rows is not None
        assert rows.key == key
        assert tracker.holds(request.mm_features[index].identifier)
    assert fetches.num_started == 3


def test_only_pending_rows_are_waited_for(tracker: RequestTracker, fetches: Fetches) -> None:
    tracker.wait(0.5)
    assert fetches.num_waits == 0
    key = new_key()
    tracker.ensure(request_for(key), 0)
    tracker.wait(0.5)
    assert fetches.num_waits == 1
    fetches.end(key)
    tracker.take_unavailable()
    tracker.wait(0.5)
    assert fetches.num_waits == 1


def test_computed_tokens_need_no_rows(tracker: RequestTracker, fetches: Fetches) -> None:
    first, second = new_key(), new_key()
    request = request_for(first, second)
    assert tracker.ensure(request_for(new_key()), 8)
    assert not tracker.ensure(request, 8)
    assert [wanted.key for _, wanted in fetches.open] == [second]
    fetches.end(second)
    assert tracker.ensure(request, 8)
    assert not tracker.ensure(request, 7)
    assert [wanted.key for _, wanted in fetches.open] == [first]


def test_p15_requests_for_one_image_share_a_fetch(tracker: RequestTracker, fetches: Fetches) -> None:
    key = new_key()
    requests = [request_for(key) for _ in range(5)] + [request_for(key, key)]
    for request in requests:
        assert not tracker.ensure(request, 0)
    assert fetches.num_started == 1
    assert tracker.resident_bytes == ITEM_BYTES
    tracker.finished(requests[0])
    fetches.end(key)
    assert all(tracker.ensure(request, 0) for request in requests[1:])
    tracker.passed(requests[-1], 0)
    for request in requests[1:-1]:
        tracker.finished(request)
    assert tracker.rows(requests[-1], 1) is not None  # kept for the second place
    tracker.finished(requests[-1])
    assert tracker.resident_bytes == 0
    assert fetches.cancelled == []


def test_a_finished_request_cancels_its_fetches(tracker: RequestTracker, fetches: Fetches) -> None:
    key = new_key()
    request = request_for(key)
    tracker.ensure(request, 0)
    ((handle, _),) = fetches.open
    tracker.finished(request)
    assert fetches.cancelled == [key]
    fetches.ended.append(Fetched(handle, rows_of(key)))  # it ended before the cancellation arrived
    assert tracker.take_unavailable() == set()
    assert not tracker.holds(f"id-{key.hex()}")
    assert tracker.resident_bytes == 0


def test_p24_rows_are_let_go_behind_them_and_fetched_anew_after_preemption(
    tracker: RequestTracker, fetches: Fetches
) -> None:
    first, second = new_key(), new_key()
    request = request_for(first, second)
    assert is_ready(tracker, fetches, request)
    tracker.passed(request, 0)
    assert tracker.resident_bytes == ITEM_BYTES
    assert tracker.ensure(request, 9)
    assert not tracker.ensure(request, 0)
    assert fetches.num_started == 3  # the second image is still held
    fetches.end(first)
    assert tracker.ensure(request, 0)


def test_p24_rows_whose_tokens_another_request_computed_are_let_go(
    tracker: RequestTracker, fetches: Fetches
) -> None:
    """vLLM does not allocate these features, so it never reports them as passed."""
    request = request_for(new_key(), new_key())
    assert is_ready(tracker, fetches, request)
    assert tracker.ensure(request, 8)
    assert tracker.resident_bytes == ITEM_BYTES
    assert tracker.ensure(request, 16)
    assert tracker.resident_bytes == 0


def test_p17_waiting_rows_are_bounded_in_bytes_and_requests_start_in_order(
    tracker: RequestTracker, fetches: Fetches
) -> None:
    first, small = request_for(new_key(), new_key()), request_for(new_key())
    large = request_for(*(new_key() for _ in range(3)))
    for request in (first, large, small):
        assert not tracker.ensure(request, 0)
    assert fetches.num_started == 2
    fetches.end_all()
    assert tracker.ensure(first, 0)
    assert not tracker.ensure(small, 0)
    tracker.finished(first)
    assert fetches.num_started == 6
    assert tracker.resident_bytes == SETTINGS.max_resident_bytes
    fetches.end_all()
    assert tracker.ensure(large, 0)
    assert tracker.ensure(small, 0)


def test_p17_a_request_larger_than_the_bound_is_rejected_with_both_figures(
    tracker: RequestTracker, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING", "vllm.vision_encoder"):
        assert_rejected(tracker, request_for(*(new_key() for _ in range(5))))
    assert f"have {5 * ITEM_BYTES} bytes, max_resident_bytes is {4 * ITEM_BYTES}" in caplog.text


def test_p24_preempted_requests_do_not_block_each_other(tracker: RequestTracker, fetches: Fetches) -> None:
    """Each of the two has let go of its first image and would keep its second, which together leave too
    little room for the larger request at the head of the queue."""
    large = request_of(*(Image(f"large {number}", new_key(), DOUBLE) for number in range(2)))
    small, last = request_for(new_key(), new_key()), request_for(new_key())
    for item in large.ec_transfer_params["vision_encoder"]["items"]:  # type: ignore[index]
        fetches.grids[bytes.fromhex(item["key"])] = DOUBLE
    for request in (large, small):
        assert is_ready(tracker, fetches, request)
        tracker.passed(request, 0)
    assert is_ready(tracker, fetches, last)
    for _ in range(2):
        is_ready(tracker, fetches, large)
        is_ready(tracker, fetches, small)
    tracker.finished(last)
    others = [large, small]
    for _ in range(3):
        for request in [request for request in others if is_ready(tracker, fetches, request)]:
            tracker.finished(request)
            others.remove(request)
    assert others == []
    assert tracker.resident_bytes == 0


# Failures -------------------------------------------------------------------------------------------------


def test_p32_a_failed_item_rejects_the_requests_that_wait_for_it_and_no_others(
    tracker: RequestTracker, fetches: Fetches
) -> None:
    bad, good = new_key(), new_key()
    failing = [request_for(bad), request_for(good, bad), request_for(bad, good)]
    fine = request_for(good)
    for request in (*failing, fine):
        tracker.ensure(request, 0)
    fetches.end(bad, InvalidRows("width", "width is 9, expected 12", found=9, expected=12))
    assert_rejected(tracker, *failing)
    for request in failing:
        tracker.finished(request)
    fetches.end(good)
    assert tracker.ensure(fine, 0)
    assert is_ready(tracker, fetches, request_for(bad))


def test_p32_a_queued_request_does_not_join_an_entry_that_has_failed(
    new_tracker: NewTracker, fetches: Fetches
) -> None:
    """The failure makes room in which the queued request starts, before all holders have failed."""
    tracker = new_tracker(max_resident_bytes=2 * ITEM_BYTES)
    key = new_key()
    failing = [request_for(key, new_key()), *(request_for(key) for _ in range(30))]
    queued = request_for(key, new_key())
    for request in (*failing, queued):
        assert not tracker.ensure(request, 0)
    assert fetches.num_started == 2
    fetches.end(key, UNKNOWN)
    assert_rejected(tracker, *failing)
    for request in failing:
        tracker.finished(request)
    assert is_ready(tracker, fetches, queued)


def test_p33_any_number_of_queued_requests_can_fail_at_once(
    tracker: RequestTracker, fetches: Fetches
) -> None:
    key = new_key()
    blocker, right = request_for(*(new_key() for _ in range(3))), request_of(Image("x", key))
    queued = [request_of(Image("x", key, TURNED)) for _ in range(2000)]
    for request in (blocker, right, *queued):
        assert not tracker.ensure(request, 0)
    fetches.end_all()
    assert tracker.ensure(right, 0)
    assert tracker.take_unavailable() == set()
    tracker.finished(blocker)
    assert_rejected(tracker, *queued)
    assert tracker.ensure(right, 0)


def test_p33_malformed_requests_and_pixels_without_a_tower_are_rejected(tracker: RequestTracker) -> None:
    broken = Request([Feature("x", Position(2, 6))], {"vision_encoder": {"items": [7]}})
    strange = Request([Feature("y", None)], transfer_params([(new_key(), GRID)]))  # type: ignore[arg-type]
    for request in (request_with_pixels("z", GRID), broken, strange):
        assert_rejected(tracker, request)


def test_reasons_go_to_the_failures_path(new_tracker: NewTracker, fetches: Fetches, tmp_path: Path) -> None:
    path = str(tmp_path / "failures")
    tracker = new_tracker(failures_path=path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.settimeout(5)
        listener.bind(path)
        tracker.ensure(request_for(new_key(), reply="the reply"), 0)
        fetches.end_at(0, UNKNOWN)
        tracker.take_unavailable()
        account = json.loads(listener.recv(4096))
    assert account["reply"] == "the reply"
    assert account["reason"] == "UNKNOWN_KEY"
    unheard = request_for(new_key(), reply="unheard")
    tracker.ensure(unheard, 0)
    fetches.end_at(0, UNKNOWN)
    assert_rejected(tracker, unheard)


# Identifiers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("are_resident", [True, False])
@pytest.mark.parametrize("grid", [DOUBLE, TURNED])
def test_p12_rows_and_their_kv_are_not_given_to_a_request_of_another_grid(
    grid: Grid,
    are_resident: bool,
    tracker: RequestTracker,
    fetches: Fetches,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Rows: vLLM would place them at other positions, or end its engine because of their number. KV: the rows
    are gone and vLLM only asks whether it may go on behind them."""
    key = new_key()
    first, other = request_of(Image("x", key)), request_of(Image("x", key, grid))
    assert is_ready(tracker, fetches, first)
    if not are_resident:
        tracker.finished(first)
    with caplog.at_level("WARNING", "vllm.vision_encoder"):
        assert not tracker.ensure(other, 0 if are_resident else other.mm_features[0].mm_position.length + 2)
    assert_rejected(tracker, other)
    assert f"grid_thw {list(GRID)}, the request has {list(grid)}" in caplog.text
    assert is_ready(tracker, fetches, request_of(Image("x", key)))


@pytest.mark.parametrize("grid", [DOUBLE, TURNED])
@pytest.mark.parametrize("wrong_ends_first", [True, False])
def test_p32_a_request_of_another_grid_fails_alone_while_rows_are_pending(
    wrong_ends_first: bool, grid: Grid, tracker: RequestTracker, fetches: Fetches
) -> None:
    key = new_key()
    wrong, right = request_of(Image("x", key, grid)), request_of(Image("x", key))
    for request in (wrong, right):
        assert not tracker.ensure(request, 0)
    fetches.end_at(0 if wrong_ends_first else 1)
    tracker.ensure(right, 0)
    fetches.end_all()
    assert tracker.ensure(right, 0)
    assert_rejected(tracker, wrong)
    tracker.finished(wrong)
    rows = tracker.rows(right, 0)
    assert rows is not None
    assert rows.grid_thw == GRID


def test_p12_of_two_keys_under_one_identifier_the_first_with_rows_keeps_it(
    tracker: RequestTracker, fetches: Fetches
) -> None:
    key = new_key()
    first, second = request_of(Image("x", new_key())), request_of(Image("x", key))
    for request in (first, second):
        assert not tracker.ensure(request, 0)
    fetches.end(key)
    assert tracker.ensure(second, 0)
    assert_rejected(tracker, first)
    assert len(fetches.cancelled) == 1
    tracker.finished(second)
    assert_rejected(tracker, request_of(Image("x", new_key())))
    for other in (Image("y", new_key()), Image("y", key, TURNED)):
        assert_rejected(tracker, request_of(Image("y", key), other))  # within one request


def test_p32_a_request_without_rows_binds_no_identifier(tracker: RequestTracker, fetches: Fetches) -> None:
    unknown = request_of(Image("x", new_key()))
    tracker.ensure(unknown, 0)
    fetches.end_at(0, UNKNOWN)
    assert_rejected(tracker, unknown)
    full = request_of(*(Image(f"full {number}", new_key()) for number in range(4)))
    assert is_ready(tracker, fetches, full)
    waits, right = request_of(Image("x", new_key())), request_of(Image("x", new_key()))
    assert not tracker.ensure(waits, 0)
    assert not tracker.ensure(right, 0)
    tracker.finished(waits)
    tracker.finished(full)
    assert is_ready(tracker, fetches, right)


def test_p17_remembered_identifiers_are_bounded(new_tracker: NewTracker, fetches: Fetches) -> None:
    tracker = new_tracker(max_bound_items=3)
    for number in range(4):
        request = request_of(Image(str(number), new_key()))
        assert is_ready(tracker, fetches, request)
        tracker.finished(request)
    assert_rejected(tracker, request_of(Image("1", new_key())))
    assert is_ready(tracker, fetches, request_of(Image("0", new_key())))


def test_p12_pixels_and_rows_share_an_identifier_of_one_grid_only(
    new_tracker: NewTracker, fetches: Fetches
) -> None:
    """vLLM takes resident rows for pixels of the same identifier."""
    tracker = new_tracker(has_tower=True)
    assert is_ready(tracker, fetches, request_of(Image("x", new_key())))
    same = request_with_pixels("x", GRID)
    assert tracker.ensure(same, 0)
    assert tracker.rows(same, 0) is not None
    assert_rejected(tracker, request_with_pixels("x", DOUBLE))
    early = request_of(Image("y", new_key()))
    assert not tracker.ensure(early, 0)
    pixels = request_with_pixels("y", DOUBLE)
    assert tracker.ensure(pixels, 0)
    fetches.end_all()
    assert_rejected(tracker, early)
    assert tracker.rows(pixels, 0) is None
    assert_rejected(tracker, request_of(Image("y", new_key())))


def test_p22_rows_of_another_grid_than_wanted_are_not_kept(tracker: RequestTracker, fetches: Fetches) -> None:
    """The fetcher compares as well; the tracker does not rely on it."""
    key = new_key()
    request = request_of(Image("x", key))
    tracker.ensure(request, 0)
    fetches.ended.append(Fetched(fetches.open.pop()[0], rows_of(key, TURNED)))
    assert_rejected(tracker, request)
    assert not tracker.holds("x")


def test_p22_vllm_gets_rows_of_the_allocated_size_in_any_case(
    tracker: RequestTracker, fetches: Fetches, caplog: pytest.LogCaptureFixture
) -> None:
    """It has allocated and cannot be refused: it gets zeros, the request fails, the identifier is barred."""
    key = new_key()
    request = request_of(Image("x", key))
    assert is_ready(tracker, fetches, request)
    request.mm_features[0].mm_position = Position(2, 9)
    with caplog.at_level("WARNING", "vllm.vision_encoder"):
        rows = tracker.rows(request, 0)
    assert rows is not None
    assert (rows.num_rows, rows.width, rows.dtype) == (9, 12, "float32")
    assert not rows.raw().any()
    assert f"has 6 rows with grid_thw {list(GRID)}, the prompt has 9 placeholders" in caplog.text
    assert_rejected(tracker, request)
    tracker.finished(request)
    assert_rejected(tracker, request_of(Image("x", key)))
    assert tracker.resident_bytes == 0


def test_p22_rows_of_a_clip_do_not_fit_the_placeholders_of_an_image() -> None:
    """In a model that merges time, the clip's grid does not show its chunks, each of which has rows."""
    merging = replace(GEOMETRY, merges_time=True)
    clip = Grid(8, 4, 6)
    rows = replace(rows_of(new_key(), Grid(2, 4, 6)), grid_thw=clip, chunk_grids=(Grid(4, 4, 6),) * 2)
    with pytest.raises(InvalidRows, match=r"12 rows .* expected 6 "):
        merging.check(rows, clip)
    merging.check(replace(rows_of(new_key()), grid_thw=clip), clip)


# Any order of events --------------------------------------------------------------------------------------


@dataclass(eq=False)
class Running:
    """computed: tokens now; most: the most that were ever computed."""

    request: Request
    is_right: bool
    computed: int = 0
    most: int = 0


class Vllm:
    """Asks, computes, preempts and rejects at random, as vLLM's scheduler may, over few images."""

    def __init__(self, tracker: RequestTracker, fetches: Fetches) -> None:
        self.tracker, self.fetches = tracker, fetches
        self.running: list[Running] = []
        self.images = [Image(f"image {n}", new_key(), random.choice([GRID, DOUBLE])) for n in range(6)]
        fetches.grids = {image.key: image.grid for image in self.images}

    def arrive(self) -> None:
        images = []
        for image in random.choices(self.images, k=random.randint(1, 3)):
            grid = random.choice([Grid(1, image.grid.w, image.grid.h), Grid(1, 2, 4)])
            wrong = [replace(image, key=new_key()), replace(image, grid=grid)]
            images.append(random.choices([image, *wrong], weights=[8, 1, 1])[0])
        num_bytes = sum({image.name: GEOMETRY.num_bytes(image.grid) for image in images}.values())
        is_right = all(image in self.images for image in images) and num_bytes <= SETTINGS.max_resident_bytes
        self.running.append(Running(request_of(*images), is_right))

    def step(self, one: Running) -> None:
        """One pass: the request goes on by one image, or ends behind its last."""
        if not self.tracker.ensure(one.request, one.computed):
            return
        for index, feature in enumerate(one.request.mm_features):
            end = feature.mm_position.offset + feature.mm_position.length
            if end <= one.computed:
                continue
            assert self.tracker.holds(feature.identifier)
            rows = self.tracker.rows(one.request, index)
            assert rows is not None
            assert rows.num_rows == feature.mm_position.length
            assert list(rows.grid_thw) == feature.data["image_grid_thw"].data.tolist()  # type: ignore[index]
            assert rows.grid_thw == self.fetches.grids[rows.key]
            if random.random() < 0.8:
                self.tracker.passed(one.request, index)
                one.computed, one.most = end, max(one.most, end)
            return
        self.leave(one)

    def preempt(self, one: Running) -> None:
        """It starts anew, behind what vLLM's prefix cache still has of it."""
        ends = [each.mm_position.offset + each.mm_position.length for each in one.request.mm_features]
        one.computed = random.choice([0, *(end for end in ends if end <= one.most)])

    def leave(self, one: Running) -> None:
        self.running.remove(one)
        self.tracker.finished(one.request)

    def reject(self) -> None:
        for request_id in self.tracker.take_unavailable():
            (failed,) = [one for one in self.running if one.request.request_id == request_id]
            assert not failed.is_right
            self.leave(failed)

    def end_fetch(self) -> None:
        number = random.randrange(len(self.fetches.open))
        is_known = self.fetches.open[number][1].key in self.fetches.grids
        self.fetches.end_at(number, None if is_known else UNKNOWN)


@pytest.mark.parametrize("number", range(20))
def test_p17_p24_p32_every_request_ends_in_rows_or_a_rejection(
    number: int, tracker: RequestTracker, fetches: Fetches
) -> None:
    """Preemptions, wrong grids, unknown keys and clients that leave, in any order. Once no more of them come,
    all requests end, the right ones with rows, and nothing is left."""
    vllm = Vllm(tracker, fetches)
    for _ in range(400):
        action = random.random()
        if action < 0.15 and len(vllm.running) < 10:
            vllm.arrive()
        elif action < 0.6 and vllm.running:
            vllm.step(random.choice(vllm.running))
        elif action < 0.7 and vllm.running:
            vllm.preempt(random.choice(vllm.running))
        elif action < 0.95 and fetches.open:
            vllm.end_fetch()
        elif action > 0.98 and vllm.running:
            vllm.leave(random.choice(vllm.running))
        vllm.reject()
        assert 0 <= tracker.resident_bytes <= SETTINGS.max_resident_bytes
    for _ in range(400):
        while fetches.open:
            vllm.end_fetch()
        for one in list(vllm.running):
            if one in vllm.running:
                vllm.step(one)
        vllm.reject()
    assert vllm.running == []
    assert tracker.resident_bytes == 0
    assert not any(tracker.holds(image.name) for image in vllm.images)
