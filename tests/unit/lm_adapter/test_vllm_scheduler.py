"""The scheduler's half of the vLLM connector, without vLLM: which requests wait, go on or are rejected.

Requests imitate vLLM's; calls to the encoder end when a test ends them."""

from __future__ import annotations

import asyncio
import itertools
import random
import secrets
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from lm_adapter.engines.shared.encoder_thread import Call, Completed
from lm_adapter.engines.shared.geometry import Geometry
from lm_adapter.engines.shared.rank_socket import RowsOrder, RowsRead
from lm_adapter.engines.vllm.file_items import CLIP_FIELD, FILE_FIELD, FileItem
from lm_adapter.engines.vllm.scheduler.items import RequestItem
from lm_adapter.engines.vllm.scheduler.orders import GONE
from lm_adapter.engines.vllm.scheduler.rows import RowsEntry
from lm_adapter.engines.vllm.scheduler.tracker import RequestTracker
from lm_adapter.engines.vllm.settings import Settings
from lm_adapter.engines.vllm.step_rows import StepRows
from lm_adapter.errors import DeadlineExceeded, EncoderError, EncoderUnavailable, InvalidRows, ItemFailed
from lm_adapter.items import ClipItem, Grid, Modality, PreprocessOptions
from lm_adapter.types import KeyState, PrefetchStatus
from tests.unit.lm_adapter.connector_rig import (
    Element,
    Feature,
    Fields,
    Position,
    Request,
    RequestStatus,
)

GEOMETRY = Geometry("qwen3_vl", width=12, dtype="float32", num_levels=2, merge_size=2, merges_time=False)
GRID, TURNED, DOUBLE = Grid(1, 4, 6), Grid(1, 6, 4), Grid(1, 8, 6)
CLIP_GRID = Grid(2, 4, 6)
TEXT_TOKENS = 3
"""Between two frames of a clip."""
ITEM_BYTES = GEOMETRY.num_bytes(GRID)
SETTINGS = Settings(target="nowhere:1", max_resident_bytes=4 * ITEM_BYTES)
UNDECODABLE = ItemFailed("the file is no image", reason="UNDECODABLE_IMAGE", status=3)


@dataclass(frozen=True)
class Image:
    """An image or a clip as a request describes it. name: its identifier."""

    name: str
    grid: Grid = GRID
    digest: bytes = field(default_factory=lambda: secrets.token_bytes(32))
    min_pixels: int = 0
    modality: Modality = Modality.IMAGE
    is_announced: bool = False


def new_image(grid: Grid = GRID) -> Image:
    return Image(secrets.token_hex(4), grid)


def request_of(*images: Image, reply: str = "") -> Request:
    """Two tokens of text, an image, two tokens of text, an image, ..."""
    features, offset = [], 2
    for image in images:
        num_rows = GEOMETRY.num_rows(image.grid)
        options = PreprocessOptions(min_pixels=image.min_pixels or None)
        file = FileItem(b"file", image.digest, image.modality, options, reply, image.is_announced)
        packed = file.packed()
        is_clip = image.modality is Modality.VIDEO
        data = {
            f"{image.modality.value}_grid_thw": Element(torch.tensor(image.grid)),
            CLIP_FIELD if is_clip else FILE_FIELD: Element(torch.from_numpy(packed)),
        }
        num_text = TEXT_TOKENS * image.grid.t if is_clip else 0
        position = Position(offset, num_rows + num_text, num_text)
        features.append(Feature(Fields(data), image.modality.value, image.name, position))
        offset += position.length + 2
    return Request(features)


class Engine:
    """``EncoderThread`` and ``RankSocket`` of a tracker, and its reports. on_ranks: rows by number."""

    def __init__(self) -> None:
        self.completed: deque[Completed] = deque()
        self.open: dict[RowsEntry, Call] = {}
        self.on_ranks: dict[int, RequestItem] = {}
        self.reported: list[tuple[str, str, EncoderError]] = []
        self.cancelled: list[str] = []
        self.num_started = 0
        self.num_waits = 0
        self._numbers = itertools.count(1)

    def submit(self, handle: RowsEntry, call: Call) -> None:
        self.num_started += 1
        self.open[handle] = call

    def cancel(self, handle: RowsEntry) -> None:
        self.cancelled.append(handle.item.identifier)
        self.open.pop(handle, None)

    def call_soon(self, function: Callable[..., object], *arguments: object) -> None:
        function(*arguments)

    def wait(self, timeout_s: float) -> None:
        self.num_waits += 1

    def drop(self, number: int) -> None:
        del self.on_ranks[number]

    def begin(self, step: StepRows) -> dict[str, RequestItem]:
        """On the workers. Returns the rows that it computes with, by identifier."""
        found = {identifier: self.on_ranks[number] for number, identifier in step.hand_over}
        for number in step.drop:
            self.drop(number)
        return found

    def report(self, reply: str, request_id: str, error: EncoderError) -> None:
        self.reported.append((reply, request_id, error))

    @property
    def under_way(self) -> list[str]:
        return [handle.item.identifier for handle in self.open]

    def end(self, name: str, error: EncoderError | None = None) -> None:
        (handle,) = [handle for handle in self.open if handle.item.identifier == name]
        del self.open[handle]
        number = next(self._numbers)
        if error is None:
            self.on_ranks[number] = handle.item
        self.completed.append(Completed(handle, error or RowsRead(number, "host")))

    def end_all(self) -> None:
        for name in self.under_way:
            self.end(name)


def tracker_of(
    engine: Engine,
    step_tokens: int = 1000,
    clock: Callable[[], float] = time.monotonic,
    **changes: Any,
) -> RequestTracker:
    """By default with room for four items."""
    both: Any = engine
    settings = replace(SETTINGS, **changes)
    return RequestTracker(
        both, both, GEOMETRY, settings, step_tokens=step_tokens, report=engine.report, clock=clock
    )


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def tracker(engine: Engine) -> RequestTracker:
    return tracker_of(engine)


def is_ready(tracker: RequestTracker, engine: Engine, request: Request) -> bool:
    """Whether vLLM may schedule the request once all calls have ended."""
    tracker.ensure(request, 0)
    engine.end_all()
    return tracker.ensure(request, 0)


def assert_rejected(tracker: RequestTracker, *requests: Request) -> None:
    """These and no others, once."""
    assert not any(tracker.ensure(request, 0) for request in requests)
    assert tracker.take_unavailable() == {request.request_id for request in requests}
    assert tracker.take_unavailable() == set()
    assert not any(tracker.ensure(request, tokens) for request in requests for tokens in (0, 1000))


# Waiting and room -----------------------------------------------------------------------------------------


def test_a_request_is_ready_when_all_its_rows_are_on_every_rank(
    tracker: RequestTracker, engine: Engine
) -> None:
    images = [new_image() for _ in range(3)]
    request = request_of(*images)
    assert not tracker.ensure(request, 0)
    assert engine.num_started == 3
    for image in random.sample(images, 3):
        assert not tracker.holds(image.name)
        assert not tracker.ensure(request, 0)
        engine.end(image.name)
    assert tracker.ensure(request, 0)
    assert all(tracker.holds(image.name) for image in images)
    assert engine.num_started == 3


def test_rows_in_vllms_own_cache_are_not_ordered(tracker: RequestTracker, engine: Engine) -> None:
    """Unless others are missing, for which vLLM may free them in the same pass."""
    known, other, new = new_image(), new_image(), new_image()
    in_cache = {known.name, other.name}
    tracker.watch_cache(in_cache)
    assert tracker.ensure(request_of(known, other, known), 0)
    assert engine.num_started == 0
    request = request_of(known, new)
    assert not tracker.ensure(request, 0)
    assert engine.under_way == [known.name, new.name]
    in_cache.add(new.name)
    assert not tracker.ensure(request, 0)
    engine.end_all()
    assert tracker.ensure(request, 0)
    tracker.finished(request)
    in_cache.clear()
    assert not tracker.ensure(request_of(known), 0)
    assert engine.under_way == [known.name]


def test_only_pending_rows_are_waited_for(tracker: RequestTracker, engine: Engine) -> None:
    tracker.wait(0.5)
    assert engine.num_waits == 0
    tracker.ensure(request_of(new_image()), 0)
    tracker.wait(0.5)
    assert engine.num_waits == 1
    engine.end_all()
    tracker.take_unavailable()
    tracker.wait(0.5)
    assert engine.num_waits == 1


def test_p15_requests_for_one_image_share_a_call(tracker: RequestTracker, engine: Engine) -> None:
    image = new_image()
    requests = [request_of(image) for _ in range(5)] + [request_of(image, image)]
    for request in requests:
        assert not tracker.ensure(request, 0)
    assert engine.num_started == 1
    assert tracker.used_bytes == ITEM_BYTES
    tracker.finished(requests[0])
    engine.end(image.name)
    assert all(tracker.ensure(request, 0) for request in requests[1:])
    tracker.passed(requests[-1], 0)
    for request in requests[1:-1]:
        tracker.finished(request)
    assert tracker.holds(image.name)  # for the second place
    tracker.finished(requests[-1])
    assert not tracker.holds(image.name)
    assert (tracker.used_bytes, engine.on_ranks, engine.cancelled) == (0, {}, [])


def test_a_finished_request_cancels_its_calls(tracker: RequestTracker, engine: Engine) -> None:
    image = new_image()
    request = request_of(image)
    tracker.ensure(request, 0)
    ((handle, _),) = engine.open.items()
    tracker.finished(request)
    assert engine.cancelled == [image.name]
    engine.completed.append(Completed(handle, UNDECODABLE))  # it ended before the cancellation arrived
    assert tracker.take_unavailable() == set()
    assert not tracker.holds(image.name)
    assert tracker.used_bytes == 0
    tracker.ensure(failing := request_of(image), 0)
    engine.end(image.name, UNDECODABLE)
    tracker.finished(failing)  # nothing is left to reject
    assert tracker.take_unavailable() == set()


def test_p17_rows_are_bounded_in_bytes_and_requests_start_in_order(
    tracker: RequestTracker, engine: Engine
) -> None:
    first, small = request_of(new_image(), new_image()), request_of(new_image())
    large = request_of(*(new_image() for _ in range(3)))
    for request in (first, large, small):
        assert not tracker.ensure(request, 0)
    assert engine.num_started == 2
    engine.end_all()
    assert tracker.ensure(first, 0)
    assert not tracker.ensure(small, 0)
    tracker.finished(first)
    assert engine.num_started == 6
    assert tracker.used_bytes == SETTINGS.max_resident_bytes
    engine.end_all()
    assert tracker.ensure(large, 0)
    assert tracker.ensure(small, 0)


def test_p17_a_step_larger_than_the_bound_is_rejected_with_both_figures(
    tracker: RequestTracker, engine: Engine
) -> None:
    image = new_image()
    assert is_ready(tracker, engine, request_of(*[image] * 9))  # shared rows count once
    assert_rejected(tracker, request_of(*(new_image() for _ in range(5))))
    one_item = tracker_of(engine, step_tokens=8, max_resident_bytes=ITEM_BYTES)
    assert_rejected(one_item, request_of(new_image(DOUBLE)))
    for (_, _, error), (num_items, num_bytes, limit) in zip(
        engine.reported, [(5, 5, 4), (1, 2, 1)], strict=True
    ):
        assert error.reason == "ROWS_TOO_LARGE"
        assert f"{num_items} items, which have {num_bytes * ITEM_BYTES} bytes" in error.message
        assert f"max_resident_bytes is {limit * ITEM_BYTES}" in error.message


def compute(tracker: RequestTracker, engine: Engine, request: Request, start: int, end: int) -> None:
    """One step with these tokens of the request, which is ready for it."""
    for index, feature in enumerate(request.mm_features):
        first = feature.mm_position.offset
        if first < end and first + feature.mm_position.length > start:
            assert tracker.holds(feature.identifier)
            tracker.allocated(request, index)
    used = engine.begin(tracker.take_step(has_tokens=True))
    assert all(name in {feature.identifier for feature in request.mm_features} for name in used)


def prefill(
    tracker: RequestTracker, engine: Engine, request: Request, start: int = 0, end: int = 10**6
) -> int:
    """In steps of 8 tokens. Returns the most bytes of rows that it had."""
    most = 0
    for place in range(start, min(end, request.num_tokens), 8):
        wait_until_ready(tracker, engine, request, place)
        compute(tracker, engine, request, place, place + 8)
        most = max(most, tracker.used_bytes)
    return most


def wait_until_ready(tracker: RequestTracker, engine: Engine, request: Request, computed: int) -> None:
    for _ in range(3):  # rows leave with a step, or when there is none
        if tracker.ensure(request, computed):
            return
        engine.end_all()
        tracker.flush()
    raise AssertionError(f"it is not ready at {computed} of {request.num_tokens} tokens")


def test_p17_more_rows_than_fit_at_once_come_in_portions(engine: Engine) -> None:
    """Also rows of one image in several places. The next ones are ordered while a step computes."""
    tracker = tracker_of(engine, step_tokens=8)
    images = [new_image() for _ in range(9)]
    large, later = request_of(*images, images[0], *images[:3]), request_of(new_image())
    assert not tracker.ensure(large, 0)
    assert engine.under_way == [image.name for image in images[:4]]
    assert not tracker.ensure(later, 0)
    assert prefill(tracker, engine, large, end=16) == SETTINGS.max_resident_bytes
    assert len(engine.under_way) == 1
    assert not tracker.ensure(later, 0)  # all room is the large one's
    assert prefill(tracker, engine, large, 16) == SETTINGS.max_resident_bytes
    tracker.finished(large)
    assert is_ready(tracker, engine, later)
    tracker.finished(later)
    tracker.flush()
    assert (tracker.used_bytes, engine.on_ranks) == (0, {})


def test_p17_p24_portions_begin_in_an_empty_buffer_and_again_after_preemption(engine: Engine) -> None:
    """Others that hold rows may wait for KV blocks of a request that has begun."""
    tracker = tracker_of(engine, step_tokens=8)
    first, second = (request_of(*(new_image() for _ in range(6))) for _ in range(2))
    small, preempted = request_of(new_image()), request_of(new_image())
    wait_until_ready(tracker, engine, small, 0)
    wait_until_ready(tracker, engine, preempted, 0)
    compute(tracker, engine, preempted, 0, 8)
    num_started = engine.num_started
    assert not any(tracker.ensure(request, 0) for request in (first, second))
    assert engine.num_started == num_started
    tracker.finished(small)
    tracker.passed(preempted, 0)
    tracker.flush()
    prefill(tracker, engine, first, end=24)
    assert not tracker.ensure(preempted, 0)  # its answer has begun, but it gets no part of the buffer
    prefill(tracker, engine, first)  # from the start, as after a preemption
    tracker.finished(first)
    wait_until_ready(tracker, engine, preempted, 0)
    tracker.finished(preempted)
    prefill(tracker, engine, second)
    tracker.finished(second)
    tracker.flush()
    assert (tracker.used_bytes, engine.on_ranks) == (0, {})


def test_a_pass_over_a_request_that_waits_is_linear_in_its_images(engine: Engine) -> None:
    """vLLM's scheduler asks about it on every pass."""
    tracker = tracker_of(engine, max_resident_bytes=1000 * ITEM_BYTES)
    images = [new_image() for _ in range(1000)]
    assert not tracker.ensure(request_of(new_image()), 0)
    request = request_of(*images)
    assert not tracker.ensure(request, 0)
    assert engine.num_started == 1

    def pass_s() -> float:
        begun_s = time.thread_time()
        assert not tracker.ensure(request, 0)
        return time.thread_time() - begun_s

    assert min(pass_s() for _ in range(20)) < 0.001  # comparing all with all takes some ms


# Failures -------------------------------------------------------------------------------------------------


def test_p32_a_failed_item_rejects_the_requests_that_wait_for_it_and_no_others(
    tracker: RequestTracker, engine: Engine
) -> None:
    bad, good = new_image(), new_image()
    failing = [request_of(*images, reply="socket") for images in ((bad,), (good, bad), (bad, good, bad))]
    fine = request_of(good, reply="socket")
    for request in (*failing, fine):
        tracker.ensure(request, 0)
    engine.end(bad.name, UNDECODABLE)
    assert_rejected(tracker, *failing)
    assert {(reply, request_id) for reply, request_id, _ in engine.reported} == {
        ("socket", request.request_id) for request in failing
    }
    assert [error for _, _, error in engine.reported] == [UNDECODABLE] * 3
    for request in failing:
        tracker.finished(request)
    engine.end(good.name)
    assert tracker.ensure(fine, 0)
    assert is_ready(tracker, engine, request_of(bad))


@pytest.mark.parametrize("error", [UNDECODABLE, EncoderUnavailable("away"), DeadlineExceeded("slow")])
def test_p32_a_request_that_joined_late_has_time_of_its_own(error: EncoderError, engine: Engine) -> None:
    """After the second half of the time that the first request had, unless the item is at fault."""
    clock = [100.0]
    tracker = tracker_of(engine, clock=lambda: clock[0])
    image, other = new_image(), new_image()
    first, early, late = request_of(image), request_of(image), request_of(other, image)
    for clock[0], request in ((100.0, first), (101.0, early), (104.0, late)):
        assert not tracker.ensure(request, 0)
    engine.end(other.name)
    clock[0] = 105.0
    engine.end(image.name, error)
    if error is UNDECODABLE:
        assert_rejected(tracker, first, early, late)
        return
    assert not tracker.ensure(late, 0)
    assert_rejected(tracker, first, early)
    assert engine.under_way == [image.name]
    engine.end(image.name)
    assert tracker.ensure(late, 0)
    for request in (first, early, late):
        tracker.finished(request)
    assert (tracker.used_bytes, engine.on_ranks) == (0, {})


@pytest.mark.parametrize("is_away", [True, False])
def test_p32_requests_that_wait_for_room_do_not_outwait_an_encoder_that_is_away(
    engine: Engine, is_away: bool
) -> None:
    """They wait at most twice as long as a call, unless the encoder has rows for others meanwhile."""
    clock = [100.0]
    tracker = tracker_of(engine, clock=lambda: clock[0])
    first, second = ([request_of(new_image()) for _ in range(4)] for _ in range(2))
    rest = [request_of(new_image()) for _ in range(20)]
    for clock[0], requests in ((100.0, first), (101.0, second), (102.0, rest)):
        assert not any(tracker.ensure(request, 0) for request in requests)
    for clock[0], failing in ((105.0, first), (110.0, second)):
        assert engine.under_way == [request.mm_features[0].identifier for request in failing]
        if failing is second and not is_away:
            engine.end(engine.under_way[0])
            assert tracker.ensure(failing.pop(0), 0)
        for name in engine.under_way:
            engine.end(name, EncoderUnavailable("away"))
        assert_rejected(tracker, *failing, *(rest if failing is second and is_away else ()))
        for request in failing:
            tracker.finished(request)
    late = request_of(new_image())
    assert not tracker.ensure(late, 0)
    expected = [late] if is_away else rest[:3]
    assert engine.under_way == [request.mm_features[0].identifier for request in expected]


def test_p32_rows_stay_on_the_ranks_until_vllm_has_passed_them(
    tracker: RequestTracker, engine: Engine
) -> None:
    """With asynchronous scheduling vLLM asks for a request's next step, with the tokens of the one before
    counted as computed, while workers have yet to begin that one."""
    request = request_of(new_image())
    assert is_ready(tracker, engine, request)
    tracker.allocated(request, 0)
    step = tracker.take_step(has_tokens=True)
    assert tracker.ensure(request, request.num_tokens)
    assert len(engine.begin(step)) == 1
    tracker.passed(request, 0)
    assert len(engine.on_ranks) == 1
    engine.begin(tracker.take_step(has_tokens=True))
    assert engine.on_ranks == {}


def allocate_without_step(tracker: RequestTracker, engine: Engine, request: Request) -> None:
    """Scheduled and preempted in a pass without tokens. vLLM counts the rows as in its own cache then."""
    assert is_ready(tracker, engine, request)
    for index in range(len(request.mm_features)):
        tracker.allocated(request, index)
    assert tracker.take_step(has_tokens=False) == StepRows()


def test_p17_rows_that_no_step_has_handed_over_leave_with_a_flush(
    tracker: RequestTracker, engine: Engine
) -> None:
    """The next step with tokens is that of a request that waits for their room."""
    request, other = (request_of(*(new_image() for _ in range(4))) for _ in range(2))
    allocate_without_step(tracker, engine, request)
    tracker.finished(request)
    assert not is_ready(tracker, engine, other)
    tracker.flush()
    engine.end_all()
    assert (tracker.used_bytes, len(engine.on_ranks)) == (SETTINGS.max_resident_bytes, 4)
    assert tracker.ensure(other, 0)
    assert tracker.take_step(has_tokens=True) == StepRows()


@pytest.mark.parametrize("is_before_flush", [True, False])
def test_p32_rows_that_vllm_counts_as_in_its_cache_come_with_the_next_request_for_them(
    is_before_flush: bool, engine: Engine
) -> None:
    """vLLM does not allocate them for it. A later image of it fails in the pass that schedules it."""
    tracker = tracker_of(engine, step_tokens=8)
    image, later = new_image(), new_image()
    first, second = request_of(image), request_of(image, later)
    allocate_without_step(tracker, engine, first)
    tracker.finished(first)
    if is_before_flush:
        tracker.ensure(second, 0)
        engine.end(image.name)
    tracker.flush()
    if not is_before_flush:
        tracker.ensure(second, 0)
        engine.end(image.name)
    assert tracker.ensure(second, 0)
    engine.end(later.name, UNDECODABLE)
    tracker.ensure(request_of(new_image()), 0)
    assert list(engine.begin(tracker.take_step(has_tokens=True))) == [image.name]
    tracker.finished(second)
    tracker.flush()
    assert engine.on_ranks == {}
    assert is_ready(tracker, engine, request_of(image))
    assert tracker.take_step(has_tokens=True) == StepRows()  # vLLM has them


@pytest.mark.parametrize("is_scheduled", [True, False])
def test_p32_rows_that_vllm_frees_and_allocates_in_one_pass_are_handed_over_to_a_scheduled_request(
    is_scheduled: bool, tracker: RequestTracker, engine: Engine
) -> None:
    """Scheduled: a new image needed the room of these rows, and this request has them again; without them the
    rank would end the engine. Not scheduled: it was preempted, and vLLM would not free them again."""
    image = new_image()
    first, second = request_of(image), request_of(image)
    for request in (first, second):
        assert is_ready(tracker, engine, request)
    tracker.allocated(second, 0)
    tracker.freed([image.name], {second.request_id: 9} if is_scheduled else {})
    assert list(engine.begin(tracker.take_step(has_tokens=True))) == [image.name] * is_scheduled


def test_p32_images_that_come_later_end_their_request(tracker: RequestTracker, engine: Engine) -> None:
    """vLLM's streaming sessions add features to a request that was admitted."""
    request = request_of(new_image())
    assert is_ready(tracker, engine, request)
    tracker.passed(request, 0)
    assert tracker.ensure(request, request.num_tokens)
    request.mm_features = [*request.mm_features, *request_of(new_image()).mm_features]
    assert not tracker.ensure(request, request.num_tokens)
    assert_rejected(tracker, request)
    assert engine.reported[-1][2].reason == "INVALID_REQUEST"


def test_p32_a_step_without_rows_ends_its_requests(tracker: RequestTracker, engine: Engine) -> None:
    """vLLM would compute the image with a tower that is not there."""
    request, other = request_of(new_image()), request_of(new_image())
    assert is_ready(tracker, engine, request)
    assert is_ready(tracker, engine, other)
    tracker.check_step({request.request_id: [0]})
    assert_rejected(tracker, request)
    tracker.check_step({"unknown": [0]})
    assert tracker.take_unavailable() == {"unknown"}
    assert tracker.ensure(other, 0)


@pytest.mark.parametrize("num_waiting", [4, 5])
def test_p24_a_running_request_gets_the_room_of_those_that_wait_for_its_kv_blocks(
    engine: Engine, num_waiting: int
) -> None:
    """Its rows were in vLLM's cache when it began, and left it. The others have rows, or portions of them."""
    tracker = tracker_of(engine, step_tokens=1)
    begun, new = [new_image(), new_image()], request_of(new_image())
    waiting = request_of(*(new_image() for _ in range(num_waiting)))
    running = request_of(*begun)
    tracker.watch_cache({image.name for image in begun})
    assert tracker.ensure(running, 0)
    running.status = RequestStatus.RUNNING
    assert is_ready(tracker, engine, waiting)
    assert not tracker.ensure(new, 0)
    tracker.watch_cache(set())
    assert not tracker.ensure(running, 2)
    assert engine.under_way[:2] == [image.name for image in begun]
    assert not tracker.ensure(running, 2)
    assert not tracker.ensure(waiting, 0)
    engine.end_all()
    assert tracker.ensure(running, 2)
    tracker.finished(running)
    for request in (new, waiting):
        assert is_ready(tracker, engine, request)
        tracker.finished(request)
    assert (tracker.used_bytes, engine.on_ranks) == (0, {})


@pytest.mark.parametrize("num_images", [3, 5])
def test_p24_a_running_request_gets_the_room_of_one_that_lost_its_kv_blocks(
    engine: Engine, num_images: int
) -> None:
    """The other one ran, too, when the room was asked for, with rows or portions of them."""
    tracker = tracker_of(engine, step_tokens=1)
    begun = [new_image(), new_image()]
    running, other = request_of(*begun), request_of(*(new_image() for _ in range(num_images)))
    tracker.watch_cache({image.name for image in begun})
    assert tracker.ensure(running, 0)
    assert is_ready(tracker, engine, other)
    running.status = other.status = RequestStatus.RUNNING
    tracker.watch_cache(set())
    assert not tracker.ensure(running, 2)
    assert not engine.open
    other.status = RequestStatus.PREEMPTED
    assert not tracker.ensure(running, 2)
    assert engine.under_way[:2] == [image.name for image in begun]
    engine.end_all()
    assert tracker.ensure(running, 2)
    tracker.finished(running)
    assert is_ready(tracker, engine, other)
    tracker.finished(other)
    assert (tracker.used_bytes, engine.on_ranks) == (0, {})


@pytest.mark.parametrize(
    ("status", "num_computed"),
    [(RequestStatus.WAITING_FOR_REMOTE_KVS, 0), (RequestStatus.WAITING, 2), (RequestStatus.PREEMPTED, 2)],
)
def test_p24_blocks_of_a_kv_connector_are_blocks_too(
    tracker: RequestTracker, engine: Engine, status: RequestStatus, num_computed: int
) -> None:
    """vLLM's KV connectors load into blocks of requests that do not run yet."""
    loading, other = request_of(new_image()), request_of(*(new_image() for _ in range(4)))
    assert is_ready(tracker, engine, other)
    loading.status, loading.num_computed_tokens = status, num_computed
    assert is_ready(tracker, engine, loading)


def test_p33_any_number_of_queued_requests_can_fail_at_once(tracker: RequestTracker, engine: Engine) -> None:
    """None of them has rows when it comes, so that only their start finds the first to be another image."""
    blocker, right = request_of(*(new_image() for _ in range(4))), request_of(Image("x"))
    queued = [request_of(Image("x", TURNED)) for _ in range(2000)]
    for request in (blocker, right, *queued):
        assert not tracker.ensure(request, 0)
    assert is_ready(tracker, engine, blocker)
    assert tracker.take_unavailable() == set()
    tracker.finished(blocker)
    assert_rejected(tracker, *queued)
    assert is_ready(tracker, engine, right)


@pytest.mark.parametrize("has_arrival", [False, True])
def test_p33_an_encoder_that_hangs_fails_what_was_queued_before(engine: Engine, has_arrival: bool) -> None:
    """Else the queue would wait for ``timeout_s`` again and again. Rows that came since then keep it."""
    now_s = 1.0
    tracker = tracker_of(engine, clock=lambda: now_s)
    first, queued = request_of(*(new_image() for _ in range(4))), request_of(new_image())
    for request in (first, queued):
        assert not tracker.ensure(request, 0)
    now_s = 31.0
    if has_arrival:
        engine.end(engine.under_way[0])
    for name in engine.under_way:
        engine.end(name, DeadlineExceeded("no answer within 30 s"))
    assert_rejected(tracker, first, *(() if has_arrival else (queued,)))
    assert is_ready(tracker, engine, queued) is has_arrival


NO_FILE = "INVALID_REQUEST: a feature of modality image has no file"
UNREADABLE = "INTERNAL: the request cannot be read: "


@pytest.mark.parametrize(
    ("field_name", "value", "text"),
    [
        (FILE_FIELD, None, NO_FILE),
        (FILE_FIELD, [1, 0, 0, 0, ord("x")], UNREADABLE + "ValueError: the packed file cannot be read"),
        (FILE_FIELD, [1, 0, 0], UNREADABLE + "ValueError: the packed file cannot be read"),
        ("image_grid_thw", None, UNREADABLE + "ValueError: not enough values"),
        ("image_grid_thw", [1, 4], UNREADABLE + "TypeError"),
        ("grid_thws", GRID, UNREADABLE + "ValueError: too many values"),
        ("data", None, NO_FILE),
        ("mm_position", Position(10, 7), f"{list(GRID)} has 6 rows, the prompt has 7 placeholders"),
        ("mm_position", None, UNREADABLE + "AttributeError"),
    ],
)
def test_p33_a_malformed_request_is_rejected_alone(
    field_name: str,
    value: Any,
    text: str,
    tracker: RequestTracker,
    engine: Engine,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its last feature is."""
    image = new_image()
    fine, broken = request_of(image), request_of(image, new_image())
    feature: Any = broken.mm_features[-1]
    if hasattr(feature, field_name):
        setattr(feature, field_name, value)
    elif value is None:
        del feature.data[field_name]
    else:
        feature.data[field_name] = Element(torch.tensor(value, dtype=torch.uint8))
    tracker.ensure(fine, 0)
    with caplog.at_level("WARNING", "vllm.vision_encoder"):
        assert_rejected(tracker, broken)
    assert f"request {broken.request_id} is rejected" in caplog.text
    assert text in caplog.text
    tracker.finished(broken)
    assert is_ready(tracker, engine, fine)


# Identifiers and files ------------------------------------------------------------------------------------

X = Image("x")


@pytest.mark.parametrize("is_pending", [True, False])
@pytest.mark.parametrize(
    "other",
    [Image("x"), replace(X, grid=TURNED), replace(X, min_pixels=9), replace(X, modality=Modality.VIDEO)],
)
def test_p12_two_images_under_one_identifier_do_not_share_rows(
    other: Image, is_pending: bool, tracker: RequestTracker, engine: Engine
) -> None:
    first = request_of(X)
    tracker.ensure(first, 0)
    if not is_pending:
        engine.end_all()
    request = request_of(other, reply="socket")
    assert_rejected(tracker, request)
    ((reply, request_id, error),) = engine.reported
    assert (reply, request_id, error.reason) == ("socket", request.request_id, "IDENTIFIER_REUSED")
    for text in (X.digest.hex(), other.digest.hex(), str(list(X.grid)), str(list(other.grid))):
        assert text in error.message
    tracker.finished(request)
    assert is_ready(tracker, engine, first)
    tracker.finished(first)
    assert is_ready(tracker, engine, request_of(other))


def test_p12_two_images_of_one_request_under_one_identifier_are_rejected(tracker: RequestTracker) -> None:
    """Also one that is in vLLM's own cache, whose rows are not ordered."""
    tracker.watch_cache({"x"})
    assert_rejected(tracker, request_of(Image("x"), Image("x")))


def test_p02_files_leave_the_request_and_stay_with_what_its_other_samples_share(
    tracker: RequestTracker, engine: Engine
) -> None:
    image = new_image()
    first = request_of(image)
    shared = first.mm_features
    second = Request(shared)
    for request in (first, second):
        assert is_ready(tracker, engine, request)
        assert request.mm_features is not shared
        (feature,) = request.mm_features
        assert isinstance(feature.data, Fields)
        assert list(feature.data) == ["image_grid_thw"]
        assert (feature.identifier, feature.mm_position) == (image.name, shared[0].mm_position)
    assert shared[0].data is not None
    assert set(shared[0].data) == {"image_grid_thw", FILE_FIELD}
    assert engine.num_started == 1


# What is counted ------------------------------------------------------------------------------------------


def counts(tracker: RequestTracker) -> dict[str, Any]:
    stats = tracker.take_stats()
    return {} if stats is None else stats.data


def test_a_wait_ends_when_the_rows_come_whenever_vllm_asks_next(engine: Engine) -> None:
    """Twice as long as the request waits for them, vLLM has no room for it, and does not ask."""
    now_s = 100.0
    tracker = tracker_of(engine, clock=lambda: now_s)
    first, second = new_image(), new_image()
    request = request_of(first, second)
    assert not tracker.ensure(request, 0)
    assert counts(tracker) == {"queries": {"": 2}}
    engine.end(first.name)
    now_s += 1.0
    assert not tracker.ensure(request, 0)
    engine.end(second.name)
    now_s += 0.5
    tracker.take_unavailable()
    now_s += 3.0
    assert tracker.ensure(request, 0)
    assert counts(tracker) == {"bytes": {"host": 2 * ITEM_BYTES}, "waits_s": [1.5]}
    assert tracker.ensure(request, 0)
    assert tracker.take_stats() is None


def test_each_step_of_a_request_that_waits_is_counted(engine: Engine) -> None:
    """Of a request with more rows than there is room for."""
    now_s = 100.0
    tracker = tracker_of(engine, step_tokens=3, clock=lambda: now_s, max_resident_bytes=ITEM_BYTES)
    request = request_of(new_image(), new_image())
    for num_computed in (0, 8):
        assert not tracker.ensure(request, num_computed)
        now_s += 2.0
        engine.end_all()
        assert tracker.ensure(request, num_computed)
        tracker.passed(request, 0)
    assert counts(tracker)["waits_s"] == [2.0, 2.0]


def test_rows_that_two_requests_share_are_counted_once(tracker: RequestTracker, engine: Engine) -> None:
    image = new_image()
    assert not tracker.ensure(request_of(image), 0)
    assert is_ready(tracker, engine, request_of(image))
    found = counts(tracker)
    assert (found["queries"], found["bytes"]) == ({"": 2}, {"host": ITEM_BYTES})


def test_items_that_vllm_caches_are_hits_of_their_request_once(tracker: RequestTracker) -> None:
    cached, other = new_image(), new_image()
    tracker.watch_cache({cached.name})
    request = request_of(cached)
    for num_computed in (0, 1, 2):
        assert tracker.ensure(request, num_computed)
    assert counts(tracker) == {"queries": {"": 1}, "hits": {"": 1}}
    assert not tracker.ensure(request_of(cached, other), 0)
    assert counts(tracker) == {"queries": {"": 2}}


def test_a_rejected_request_is_counted_by_its_reason_and_waited_for_nothing(
    tracker: RequestTracker, engine: Engine
) -> None:
    image = new_image()
    requests = [request_of(image), request_of(image)]
    for request in requests:
        assert not tracker.ensure(request, 0)
    engine.end(image.name, UNDECODABLE)
    assert_rejected(tracker, *requests)
    assert counts(tracker) == {"queries": {"": 2}, "failures": {"UNDECODABLE_IMAGE": 2}}


def test_steps_in_which_nothing_happens_count_nothing(tracker: RequestTracker, engine: Engine) -> None:
    image = new_image()
    request = request_of(image)
    assert is_ready(tracker, engine, request)
    tracker.take_stats()
    tracker.allocated(request, 0)
    tracker.take_step(has_tokens=True)
    tracker.passed(request, 0)
    for num_computed in range(10, 20):
        assert tracker.ensure(request, num_computed)
    tracker.finished(request)
    assert tracker.take_stats() is None


# One call -------------------------------------------------------------------------------------------------


class Encoder:
    """A client and the ranks' link. Prefetches answer with statuses, reads with failures, in this order; each
    takes a second."""

    def __init__(self, statuses: list[Any], failures: list[ItemFailed | None]) -> None:
        self.statuses, self.failures = statuses, failures
        self.orders: list[RowsOrder] = []
        self.asked: list[tuple[str, float]] = []
        self.items: list[Any] = []
        self.now_s = 100.0
        self.key: bytes | None = None

    def monotonic(self) -> float:
        return self.now_s

    def _note(self, name: str, timeout_s: float) -> None:
        self.asked.append((name, timeout_s))
        self.now_s += 1

    async def known_key(self, item: Any, *, timeout_s: float) -> bytes | None:
        assert timeout_s == 30.0
        return self.key

    async def info(self, *, timeout_s: float) -> None:
        self._note("info", timeout_s)

    async def prefetch(self, items: list[Any], *, timeout_s: float, until_encoded: bool) -> list[Any]:
        self._note("encode" if until_encoded else "prefetch", timeout_s)
        self.items += items
        return [self.statuses.pop(0)]

    async def read(self, order: RowsOrder, timeout_s: float) -> RowsRead:
        self._note("read", timeout_s)
        self.orders.append(order)
        failure = self.failures.pop(0)
        if failure is not None:
            raise failure
        return RowsRead(order.number)


def status_of(grid: Grid | None = GRID, route: bytes = b"") -> PrefetchStatus:
    return PrefetchStatus(KEY, b"digest", KeyState.IN_FLIGHT, grid, routing_digest=route)


def gone() -> ItemFailed:
    return ItemFailed("no rows have this key", reason=GONE, status=5)


GONE_AGAIN = gone()
KNOWN, KEY = b"known", b"key"


def obtain(encoder: Encoder, image: Image = X) -> Any:
    """What the call that a tracker starts for the image returns, within 30 s."""
    calls: Any = Engine()
    anything: Any = encoder
    tracker = RequestTracker(calls, anything, GEOMETRY, SETTINGS, step_tokens=1000, clock=encoder.monotonic)
    tracker.ensure(request_of(image), 0)
    (call,) = calls.open.values()

    async def carry_out() -> Any:
        return await call(anything, 30.0)

    return asyncio.run(carry_out())


@pytest.mark.parametrize("route", [b"", b"route"])
def test_rows_are_ordered_by_key_and_route(route: bytes) -> None:
    encoder = Encoder([status_of(None, route)], [None])
    number = obtain(encoder, replace(X, min_pixels=9)).number
    assert encoder.orders == [RowsOrder(number, KEY, route or X.digest, GRID)]
    assert number > 0
    (item,) = encoder.items
    assert (item.data, item.digest, item.options.min_pixels) == (b"file", X.digest, 9)
    assert encoder.asked == [("prefetch", 30.0), ("read", 29.0)]


@pytest.mark.parametrize(
    ("announced_key", "statuses", "failures", "asked", "keys"),
    [
        (None, [status_of()] * 2, [gone(), None], "prefetch read encode read", [KEY, KEY]),
        (KNOWN, [], [None], "read", [KNOWN]),
        (KNOWN, [status_of()], [gone(), None], "read info prefetch read", [KNOWN, KEY]),
        pytest.param(b"", [status_of()], [None], "prefetch read", [KEY], id="no model is named, of several"),
    ],
)
def test_p32_rows_are_ordered_again_by_another_number_while_they_are_gone(
    announced_key: bytes | None,
    statuses: list[Any],
    failures: list[ItemFailed | None],
    asked: str,
    keys: list[bytes],
) -> None:
    """announced_key: of an item that was announced, which is ordered by its key alone as long as there are
    rows of it; None of another item."""
    encoder = Encoder(list(statuses), list(failures))
    encoder.key = announced_key or None
    number = obtain(encoder, replace(X, is_announced=announced_key is not None)).number
    assert encoder.asked == list(zip(asked.split(), [30.0, 29.0, 28.0, 27.0], strict=False))
    numbers = [order.number for order in encoder.orders]
    assert encoder.orders == [RowsOrder(*pair, X.digest, GRID) for pair in zip(numbers, keys, strict=True)]
    assert numbers[-1] == number
    assert len(set(numbers)) == len(numbers)


@pytest.mark.parametrize(
    ("announced_key", "statuses", "failures", "num_asked"),
    [
        (None, [UNDECODABLE], [], 1),
        (None, [status_of()], [UNDECODABLE], 2),
        (None, [status_of(), UNDECODABLE], [gone()], 3),
        (None, [status_of(), status_of()], [gone(), UNDECODABLE], 4),
        (None, [status_of(), status_of()], [gone(), GONE_AGAIN], 4),
        (KNOWN, [], [UNDECODABLE], 1),
    ],
)
def test_p32_the_last_failure_comes_through(
    announced_key: bytes | None,
    statuses: list[Any],
    failures: list[ItemFailed | None],
    num_asked: int,
) -> None:
    encoder = Encoder(list(statuses), list(failures))
    encoder.key = announced_key
    with pytest.raises(ItemFailed) as caught:
        obtain(encoder, replace(X, is_announced=announced_key is not None))
    assert caught.value is (GONE_AGAIN if GONE_AGAIN in failures else UNDECODABLE)
    assert len(encoder.asked) == num_asked


def test_a_clip_is_asked_for_as_one() -> None:
    encoder = Encoder([status_of(CLIP_GRID)], [None])
    clip = replace(X, grid=CLIP_GRID, modality=Modality.VIDEO)
    obtain(encoder, clip)
    assert encoder.items == [ClipItem(b"file", clip.digest)]


def test_p22_a_grid_of_the_encoder_that_is_not_the_prompts_fails() -> None:
    encoder = Encoder([status_of(TURNED)], [])
    with pytest.raises(InvalidRows) as caught:
        obtain(encoder)
    assert f"grid_thw is {list(TURNED)}, the prompt was made for {list(GRID)}" in str(caught.value)
    assert encoder.orders == []


# Any order of events --------------------------------------------------------------------------------------


@dataclass(eq=False)
class Running:
    """images: of its request. computed: tokens now; most: that were ever computed."""

    request: Request
    images: list[Image]
    computed: int = 0
    most: int = 0


def holds_blocks(one: Running) -> bool:
    request = one.request
    return request.status is RequestStatus.RUNNING or request.num_computed_tokens > 0


class Vllm:
    """Asks, computes, preempts and rejects at random, as vLLM's scheduler may, over few images. Some images
    cannot be decoded, and some come under an identifier of another."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.engine = Engine()
        self.step_tokens = self.random.choice([7, 12, 1000])
        self.eviction = self.random.choice([0.05, 0.5, 1.0])
        self.tracker = tracker_of(self.engine, self.step_tokens)
        self.running: list[Running] = []
        self.steps: deque[tuple[StepRows, dict[str, tuple[Grid, bytes]], set[str], set[str]]] = deque()
        self.in_cache: set[str] = set()
        self.tracker.watch_cache(self.in_cache)
        self.freed: set[str] = set()
        """What the workers are told with the next step."""
        self.on_workers: set[str] = set()
        self.kv_tokens = self.random.choice([80, 160, 1000])
        """At least those of one request."""
        self.images = [Image(f"image {n}", self.random.choice([GRID, DOUBLE])) for n in range(6)]
        self.undecodable = Image("undecodable")

    def arrive(self) -> None:
        images = []
        for image in self.random.choices(self.images, k=self.random.randint(1, 5)):
            alias = Image(image.name, self.random.choice([image.grid, Grid(1, 2, 4)]))
            choices = [image, self.undecodable, alias]
            images.append(self.random.choices(choices, weights=[16, 1, 1])[0])
        self.running.append(Running(request_of(*images), images))

    def step(self, one: Running) -> None:
        """One pass and the step that it makes. Other requests in it took the place of some cached rows."""
        evicted = {name for name in sorted(self.in_cache) if self.random.random() < self.eviction}
        self.in_cache -= evicted
        end = min(one.computed + self.step_tokens, one.request.num_tokens)
        if not self.tracker.ensure(one.request, one.computed) or not self.has_blocks(one, end):
            self.end_pass(evicted, {})
            return
        one.request.status = RequestStatus.RUNNING
        used, passed, cached = {}, [], set()
        for index, (image, feature) in enumerate(zip(one.images, one.request.mm_features, strict=True)):
            image_start = feature.mm_position.offset
            image_end = image_start + feature.mm_position.length
            if image_start < end and image_end > one.computed:
                if image.name in self.in_cache:
                    cached.add(image.name)
                else:
                    assert self.tracker.holds(image.name)
                    self.tracker.allocated(one.request, index)
                    used[image.name] = (image.grid, image.digest)
                if image_end <= end:
                    passed.append(index)
        self.in_cache |= used.keys()
        has_tokens = self.random.random() < 0.9
        self.end_pass(evicted - self.in_cache, {one.request.request_id: 1})
        step = self.tracker.take_step(has_tokens=has_tokens)
        if not has_tokens:
            return
        self.steps.append((step, used, cached, self.freed))
        self.freed = set()
        one.computed, one.most = end, max(one.most, end)
        one.request.num_computed_tokens = end
        for index in passed:
            if self.random.random() < 0.8:
                self.tracker.passed(one.request, index)
        if end == one.request.num_tokens:
            self.leave(one)

    def has_blocks(self, one: Running, end: int) -> bool:
        """Those of each step are taken when it is scheduled. A running request preempts others for them, the
        last first, and itself in the end. One that has none begins only where it fits in as a whole."""
        is_running = one.request.status is RequestStatus.RUNNING
        others = [other for other in self.running if other is not one and holds_blocks(other)]
        needed = end if holds_blocks(one) else one.request.num_tokens
        while sum(other.computed for other in others) + needed > self.kv_tokens:
            if not is_running:
                return False
            victims = [other for other in others if other.request.status is RequestStatus.RUNNING]
            self.preempt(victims[-1] if victims else one)
            if not victims:
                return False
            others.remove(victims[-1])
        return True

    def load(self, one: Running) -> None:
        """A KV connector gives a request that has not begun blocks, and what is in them."""
        others = [other for other in self.running if other is not one and holds_blocks(other)]
        num_tokens = sum(other.request.num_tokens for other in (*others, one))
        if not holds_blocks(one) and num_tokens <= self.kv_tokens:
            one.computed = self.random.randint(1, one.request.num_tokens - 1)
            one.request.num_computed_tokens = one.computed

    def end_pass(self, freed: set[str], scheduled: dict[str, int]) -> None:
        self.tracker.freed(freed, scheduled)
        self.freed |= freed

    def begin_step(self) -> None:
        """On the workers, which may be behind."""
        step, used, cached, freed = self.steps.popleft()
        self.on_workers -= freed
        found = self.engine.begin(step)
        assert used.items() <= {name: (one.grid, one.file.digest) for name, one in found.items()}.items()
        self.on_workers |= found.keys()
        assert cached <= self.on_workers

    def preempt(self, one: Running) -> None:
        """It starts anew, behind what vLLM's prefix cache still has of it."""
        if one.request.status is RequestStatus.RUNNING:
            one.request.status = RequestStatus.PREEMPTED
        one.request.num_computed_tokens = 0
        one.computed = self.random.choice([0, self.random.randint(0, one.most)])

    def leave(self, one: Running) -> None:
        self.running.remove(one)
        self.tracker.finished(one.request)

    def reject(self) -> None:
        """Sound ones only if a step is too large, or an identifier is in use for another image."""
        for request_id in self.tracker.take_unavailable():
            (failed,) = [one for one in self.running if one.request.request_id == request_id]
            (error,) = [error for _, name, error in self.engine.reported if name == request_id]
            if error is UNDECODABLE:
                assert self.undecodable in failed.images
            elif error.reason == "ROWS_TOO_LARGE":
                sizes = {image.name: GEOMETRY.num_bytes(image.grid) for image in failed.images}
                assert sum(sizes.values()) > SETTINGS.max_resident_bytes
            else:
                assert error.reason == "IDENTIFIER_REUSED"
            self.leave(failed)

    def end_call(self) -> None:
        name = self.random.choice(self.engine.under_way)
        self.engine.end(name, UNDECODABLE if name == self.undecodable.name else None)

    def storm(self) -> None:
        for _ in range(400):
            action = self.random.random()
            if action < 0.15 and len(self.running) < 10:
                self.arrive()
            elif action < 0.6 and self.running:
                self.step(self.random.choice(self.running))
            elif action < 0.68 and self.running:
                self.preempt(self.random.choice(self.running))
            elif action < 0.7 and self.running:
                self.load(self.random.choice(self.running))
            elif action < 0.95 and self.engine.open:
                self.end_call()
            elif action > 0.98 and self.running:
                self.leave(self.random.choice(self.running))
            while len(self.steps) > self.random.choice([0, 1, 2]):
                self.begin_step()
            if not self.steps and self.random.random() < 0.3:
                self.tracker.flush()
            self.reject()
            assert 0 <= self.tracker.used_bytes <= SETTINGS.max_resident_bytes
            on_ranks = sum(item.num_bytes for item in self.engine.on_ranks.values())
            waiting = [number for step, *_ in self.steps for number in step.drop]
            leaving = sum(self.engine.on_ranks[number].num_bytes for number in waiting)
            assert on_ranks - leaving <= self.tracker.used_bytes

    def calm_down(self) -> None:
        """Nothing new comes: all requests end."""
        for _ in range(400):
            while self.engine.open:
                self.end_call()
            for one in list(self.running):
                if one in self.running:
                    self.step(one)
            self.reject()
            while self.steps:
                self.begin_step()
            self.tracker.flush()


@pytest.mark.parametrize("seed", range(20))
def test_p17_p24_p32_every_request_ends_in_rows_or_a_rejection(seed: int) -> None:
    """Preemptions, prefix hits, failures and clients that leave, in any order."""
    vllm = Vllm(seed)
    vllm.storm()
    vllm.calm_down()
    assert vllm.running == []
    assert (vllm.tracker.used_bytes, vllm.engine.on_ranks) == (0, {})
    assert not any(vllm.tracker.holds(image.name) for image in vllm.images)
