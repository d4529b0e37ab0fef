"""The connector's methods and its thread of calls, without vLLM and without an encoder."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
import torch

from lm_adapter.engines.shared.encoder_thread import Completed, EncoderThread
from lm_adapter.engines.vllm import connector as connector_module
from lm_adapter.engines.vllm.connector import MAX_IDLE_S, MIN_IDLE_S, ConnectorMethods
from lm_adapter.engines.vllm.rank_socket import StepRows
from lm_adapter.engines.vllm.settings import Settings
from lm_adapter.errors import (
    DeadlineExceeded,
    EncoderError,
    EncoderOverloaded,
    EncoderUnavailable,
    InvalidRows,
    ItemFailed,
    RequestRefused,
)
from tests.unit.lm_adapter.connector_rig import Connector, engine_config

PATIENCE_S = 30.0


class Tracker:
    """Of a connector: the order of its calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.waits_s: list[float] = []

    def wait(self, timeout_s: float) -> None:
        self.waits_s.append(timeout_s)
        self.calls.append("wait")

    def take_unavailable(self) -> set[str]:
        self.calls.append("end")
        return {"rejected"}

    def flush(self) -> None:
        self.calls.append("flush")

    def check_step(self, computed: Any) -> None:
        self.calls += computed

    def take_step(self, *, has_tokens: bool) -> StepRows:
        self.calls.append("step" if has_tokens else "empty")
        return StepRows([(1, "kept")] if has_tokens else [])

    def freed(self, identifiers: Any, scheduled: Any) -> None:
        assert (identifiers, scheduled) == (["freed"], {"r": 7})


def connector_of(tracker: Tracker, *, num_in_flight: int = 0, may_wait: bool = True) -> Any:
    """The methods, as they are after a start."""
    connector: Any = object.__new__(ConnectorMethods)
    connector._num_idle, connector._num_in_flight, connector._may_wait = 0, num_in_flight, may_wait
    connector._idle_since_s, connector._tracker = 0.0, tracker
    return connector


def scheduled(num_tokens: int) -> Any:
    """What vLLM's scheduler made of a pass."""
    return SimpleNamespace(
        total_num_scheduled_tokens=num_tokens,
        scheduled_encoder_inputs={"x": [0]} if num_tokens else {},
        free_encoder_mm_hashes=["freed"],
        num_scheduled_tokens={"r": 7},
    )


@pytest.mark.parametrize("may_wait", [True, False])
def test_only_steps_with_none_in_flight_wait(may_wait: bool) -> None:
    """Two steps may be in flight. What leaves with steps leaves then at the latest. The wait is the last
    before vLLM schedules again."""
    tracker = Tracker()
    connector = connector_of(tracker, num_in_flight=2, may_wait=may_wait)
    busy, empty, idle = (
        ["x", "step", "end"],
        ["empty", "end"],
        ["flush", "empty", *["wait"] * may_wait, "end"],
    )
    for num_tokens, calls in ((0, empty), (0, empty), (0, idle), (7, busy), (0, empty)):
        step = connector.build_connector_meta(scheduled(num_tokens))
        assert step.hand_over == ([(1, "kept")] if num_tokens else [])
        assert connector.take_unavailable_requests() == {"rejected"}
        assert tracker.calls == calls
        tracker.calls.clear()


def test_the_longer_nothing_runs_the_longer_a_step_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that comes meanwhile waits for half of that time at most."""
    tracker = Tracker()
    connector = connector_of(tracker)
    now_s = 100.0
    monkeypatch.setattr(connector_module, "time", SimpleNamespace(monotonic=lambda: now_s))
    for seconds in (0.0, 0.004, 0.02, 0.03, 10.0):
        now_s = 100.0 + seconds
        connector.build_connector_meta(scheduled(0))
        connector.take_unavailable_requests()
    assert tracker.waits_s == pytest.approx([MIN_IDLE_S, MIN_IDLE_S, 0.01, 0.015, MAX_IDLE_S])


@pytest.mark.parametrize("is_first", [True, False])
def test_only_the_first_pipeline_stage_reads(is_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    state = SimpleNamespace(get_pp_group=lambda: SimpleNamespace(is_first_rank=is_first))
    for name in ("vllm", "vllm.distributed"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "vllm.distributed.parallel_state", cast("Any", state))
    monkeypatch.setattr(connector_module, "check_model", lambda _: None)
    worker = Connector(engine_config("127.0.0.1:1"), SimpleNamespace(name="WORKER"))
    cache = dict[str, Any]()
    try:
        worker.start_worker_services()
        if is_first:
            assert worker._reader is not None
            worker._reader._rows[1] = torch.zeros(1, 12)
        worker._connector_metadata = StepRows([(1, "image")])
        worker.start_load_caches(cache)
    finally:
        worker.shutdown()
    assert list(cache) == ["image"] * is_first


# Calls ----------------------------------------------------------------------------------------------------

NewCalls = Callable[..., EncoderThread]


@pytest.fixture
def new_calls() -> Iterator[NewCalls]:
    made: list[EncoderThread] = []

    def make(**settings: Any) -> EncoderThread:
        made.append(EncoderThread(Settings(target="127.0.0.1:1", **settings), name="test"))
        return made[-1]

    yield make
    for calls in made:
        calls.close()


class Answers:
    """A call that raises or returns these, one at a time; the last one again and again."""

    def __init__(self, *answers: object) -> None:
        self.answers = answers
        self.left_s: list[float] = []

    async def __call__(self, client: object, left_s: float) -> object:
        self.left_s.append(left_s)
        answer = self.answers[min(len(self.left_s), len(self.answers)) - 1]
        if isinstance(answer, Exception):
            raise answer
        return answer


def outcome_of(calls: EncoderThread, call: Any) -> Any:
    handle = object()
    calls.submit(handle, call)
    ended = next_ended(calls)
    assert ended.handle is handle
    assert not calls.completed
    return ended.outcome


def next_ended(calls: EncoderThread) -> Completed:
    started_s = time.monotonic()
    while not calls.completed and time.monotonic() - started_s < PATIENCE_S:
        calls.wait(PATIENCE_S)
    return calls.completed.popleft()


def pass_time_on_loop(calls: EncoderThread) -> None:
    """All that was begun before has had its turn."""

    async def pause() -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    calls.run_coroutine(pause())


def test_an_ended_call_wakes_the_engine_at_once(new_calls: NewCalls) -> None:
    calls = new_calls()
    started_s = time.monotonic()
    calls.wait(0.05)
    assert time.monotonic() - started_s >= 0.05
    threading.Timer(0.05, calls.submit, ("image", Answers(7))).start()
    calls.wait(2 * PATIENCE_S)
    assert [(ended.handle, ended.outcome) for ended in calls.completed] == [("image", 7)]
    calls.wait(2 * PATIENCE_S)  # not popped yet
    assert time.monotonic() - started_s < PATIENCE_S


@pytest.mark.parametrize("failure", [EncoderUnavailable("gone"), EncoderOverloaded("full", retry_after_ms=1)])
def test_p32_what_can_pass_is_tried_again(failure: EncoderError, new_calls: NewCalls) -> None:
    call = Answers(failure, failure, 7)
    assert outcome_of(new_calls(timeout_s=60), call) == 7
    assert len(call.left_s) == 3
    assert 60 >= call.left_s[0] > call.left_s[1] > call.left_s[2] > 0


def test_p32_what_does_not_pass_is_tried_for_retry_s(new_calls: NewCalls) -> None:
    failure = EncoderUnavailable("gone")
    call = Answers(failure)
    started_s = time.monotonic()
    assert outcome_of(new_calls(retry_s=0.1), call) is failure
    assert time.monotonic() - started_s < PATIENCE_S / 2
    assert len(call.left_s) >= 2
    later = Answers(EncoderOverloaded("full", retry_after_ms=60_000))
    assert outcome_of(new_calls(), later) is later.answers[0]
    assert len(later.left_s) == 1


@pytest.mark.parametrize(
    "failure",
    [
        RequestRefused("no"),
        ItemFailed("no image", reason="UNDECODABLE_IMAGE", status=3),
        InvalidRows("width", "width is 9, expected 12", found=9, expected=12),
    ],
)
def test_p32_what_would_fail_again_is_not_tried_again(failure: EncoderError, new_calls: NewCalls) -> None:
    calls = new_calls()
    call = Answers(failure, 7)
    assert outcome_of(calls, call) is failure
    assert len(call.left_s) == 1

    async def returns_it(client: object, left_s: float) -> object:
        return failure

    assert outcome_of(calls, returns_it) is failure


def test_p33_an_exception_of_another_kind_fails_its_call_alone(new_calls: NewCalls) -> None:
    calls = new_calls()
    outcome = outcome_of(calls, Answers(KeyError("grid")))
    assert isinstance(outcome, ItemFailed)
    assert (outcome.message, outcome.retryable) == ("asking the encoder failed: KeyError: 'grid'", False)
    assert outcome_of(calls, Answers(7)) == 7


def test_no_call_is_made_without_time(new_calls: NewCalls) -> None:
    call = Answers(7)
    outcome = outcome_of(new_calls(timeout_s=0), call)
    assert isinstance(outcome, DeadlineExceeded)
    assert call.left_s == []


class Handle:
    """Of one call; holds an image's file in real life."""


class Endless:
    """A call that goes on until it is cancelled."""

    def __init__(self) -> None:
        self.has_begun, self.was_cancelled = threading.Event(), threading.Event()

    async def __call__(self, client: object, left_s: float) -> None:
        self.has_begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.was_cancelled.set()


@pytest.mark.parametrize("has_begun", [True, False])
def test_p17_a_cancelled_call_ends_without_an_entry_and_leaves_nothing(
    has_begun: bool, new_calls: NewCalls
) -> None:
    calls, call, handle, may_go_on = new_calls(), Endless(), Handle(), threading.Event()
    if not has_begun:
        calls.call_soon(may_go_on.wait, PATIENCE_S)
    calls.submit(handle, call)
    if has_begun:
        assert call.has_begun.wait(PATIENCE_S)
    calls.cancel(Handle())  # of no call
    calls.cancel(handle)
    may_go_on.set()
    pass_time_on_loop(calls)
    assert call.has_begun.is_set() == call.was_cancelled.is_set() == has_begun
    assert not calls.completed
    gone = weakref.ref(handle)
    del handle
    gc.collect()
    assert gone() is None
    assert outcome_of(calls, Answers(7)) == 7


def test_a_call_may_be_waited_for_by_its_caller_alone(new_calls: NewCalls) -> None:
    calls = new_calls(timeout_s=0.5)
    assert calls.submit_future(Answers(EncoderUnavailable("it is away"), 7)).result(PATIENCE_S) == 7
    late = calls.submit_future(Answers(EncoderUnavailable("it is away"))).result(PATIENCE_S)
    assert isinstance(late, EncoderUnavailable)
    call = Endless()
    asked = calls.submit_future(call)
    assert call.has_begun.wait(PATIENCE_S)
    assert asked.cancel()
    assert call.was_cancelled.wait(PATIENCE_S)
    assert not calls.completed


def test_closing_cancels_calls_and_is_harmless_when_repeated(new_calls: NewCalls) -> None:
    calls, started, waited_for = new_calls(), Endless(), Endless()
    assert outcome_of(calls, Answers(7)) == 7  # now there is a client to close
    calls.submit("image", started)
    asked = calls.submit_future(waited_for)
    for call in (started, waited_for):
        assert call.has_begun.wait(PATIENCE_S)
    for _ in range(2):
        calls.close()
    assert started.was_cancelled.is_set()
    assert not calls.completed
    with pytest.raises(CancelledError):
        asked.result(PATIENCE_S)
