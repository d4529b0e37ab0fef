"""The connector's methods, a rank's thread and the thread of calls, without vLLM and without an encoder."""

from __future__ import annotations

import asyncio
import gc
import secrets
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
import torch

from bench.harness.waiting import wait_until
from lm_adapter.engines.shared.agreement import Agreement
from lm_adapter.engines.shared.encoder_thread import EncoderThread
from lm_adapter.engines.shared.geometry import Geometry
from lm_adapter.engines.vllm import connector as connector_module
from lm_adapter.engines.vllm.connector import MAX_IDLE_S, MIN_IDLE_S
from lm_adapter.engines.vllm.settings import Settings
from lm_adapter.engines.vllm.step_rows import StepRows
from lm_adapter.engines.vllm.worker.ranks import RankReader
from lm_adapter.errors import (
    DeadlineExceeded,
    EncoderError,
    EncoderOverloaded,
    EncoderUnavailable,
    InvalidRows,
    ItemFailed,
    RequestRefused,
)
from lm_adapter.items import Grid
from tests.unit.lm_adapter.connector_rig import BUSY, Connector, Engine, Image, engine_config

PATIENCE_S = 30.0
NOWHERE = "127.0.0.1:1"
GEOMETRY = Geometry("qwen3_5", width=12, dtype="float32", num_levels=0, merge_size=2, merges_time=False)


@pytest.fixture(autouse=True)
def _any_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connector_module, "check_model", lambda _: None)


# The scheduler's methods ----------------------------------------------------------------------------------


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


@pytest.fixture
def tracker() -> Tracker:
    return Tracker()


@pytest.fixture
def new_scheduler(tracker: Tracker, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Makes the scheduler's half, on this tracker."""
    made: list[Connector] = []
    monkeypatch.setattr(connector_module, "RequestTracker", lambda *_, **__: tracker)

    def make(num_in_flight: int = 0, num_engines: int = 1) -> Any:
        config = engine_config(NOWHERE)
        config.max_concurrent_batches = num_in_flight
        config.parallel_config.data_parallel_size = num_engines
        made.append(Connector(config, SimpleNamespace(name="SCHEDULER")))
        return made[-1]

    yield make
    for connector in made:
        connector.shutdown()


def scheduled(num_tokens: int) -> Any:
    """What vLLM's scheduler made of a pass."""
    return SimpleNamespace(
        total_num_scheduled_tokens=num_tokens,
        scheduled_encoder_inputs={"x": [0]} if num_tokens else {},
        free_encoder_mm_hashes=["freed"],
        num_scheduled_tokens={"r": 7},
    )


@pytest.mark.parametrize("num_engines", [1, 2])
def test_only_steps_with_none_in_flight_wait(
    num_engines: int, tracker: Tracker, new_scheduler: Callable[..., Any]
) -> None:
    """Two steps may be in flight. What leaves with steps leaves then at the latest. The wait is the last
    before vLLM schedules again; with data parallelism other engines would wait as well."""
    connector = new_scheduler(num_in_flight=2, num_engines=num_engines)
    busy, empty = ["x", "step", "end"], ["empty", "end"]
    idle = ["flush", "empty", *["wait"] * (num_engines == 1), "end"]
    for num_tokens, calls in ((0, empty), (0, empty), (0, idle), (7, busy), (0, empty)):
        step = connector.build_connector_meta(scheduled(num_tokens))
        assert step.hand_over == ([(1, "kept")] if num_tokens else [])
        assert connector.take_unavailable_requests() == {"rejected"}
        assert tracker.calls == calls
        tracker.calls.clear()


def test_the_longer_nothing_runs_the_longer_a_step_waits(
    tracker: Tracker, new_scheduler: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that comes meanwhile waits for half of that time at most."""
    connector = new_scheduler()
    now_s = 100.0
    monkeypatch.setattr(connector_module, "time", SimpleNamespace(monotonic=lambda: now_s))
    for seconds in (0.0, 0.004, 0.02, 0.03, 10.0):
        now_s = 100.0 + seconds
        connector.build_connector_meta(scheduled(0))
        connector.take_unavailable_requests()
    assert tracker.waits_s == pytest.approx([MIN_IDLE_S, MIN_IDLE_S, 0.01, 0.015, MAX_IDLE_S])


def test_a_scheduler_that_goes_on_after_shutdown_is_not_stopped() -> None:
    """vLLM ends its requests, and may make another step, after it has closed the connector."""
    engine = Engine(engine_config(NOWHERE), num_workers=0)
    data = {name: Image(name.encode(), Grid(1, 4, 4)) for name in ("known", "new")}
    known, new = (engine.request(image) for image in data.values())
    scheduler = engine.scheduler
    assert not scheduler.ensure_cache_available(known, 0)
    for _ in range(2):
        scheduler.shutdown()
    assert not any(scheduler.ensure_cache_available(request, 0) for request in (known, new))
    assert not scheduler.has_cache_item(data["new"].identifier)
    for request in (known, new):
        scheduler.update_state_after_alloc(request, 0)
        scheduler.update_state_after_free(request, 0)
        assert scheduler.request_finished(request) == (False, None)
    assert scheduler.build_connector_meta(BUSY) == StepRows()
    assert scheduler.take_unavailable_requests() == set()
    assert scheduler.tracker.used_bytes == 0


# A rank ---------------------------------------------------------------------------------------------------


def test_a_rank_without_metadata_loads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in vLLM's steps for warming up, and after ``clear_connector_metadata``."""
    monkeypatch.setattr(connector_module, "computes_embeddings", lambda: True)
    worker = Connector(engine_config(NOWHERE), SimpleNamespace(name="WORKER"))
    cache = dict[str, Any]()
    try:
        worker.bind_connector_metadata(None)
        worker.start_load_caches(cache)
    finally:
        worker.shutdown()
    assert not cache


@pytest.mark.parametrize("is_first", [True, False])
def test_only_the_first_pipeline_stage_reads(is_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    state = SimpleNamespace(get_pp_group=lambda: SimpleNamespace(is_first_rank=is_first))
    for name in ("vllm", "vllm.distributed"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "vllm.distributed.parallel_state", cast("Any", state))
    worker = Connector(engine_config(NOWHERE), SimpleNamespace(name="WORKER"))
    cache = dict[str, Any]()
    try:
        worker.start_worker_services()
        assert (worker.reader is not None) == is_first
        if worker.reader is not None:
            worker.reader.rows[1] = torch.zeros(1, 12)
        worker.bind_connector_metadata(StepRows([(1, "image")]))
        worker.start_load_caches(cache)
    finally:
        worker.shutdown()
    assert list(cache) == ["image"] * is_first


@pytest.mark.parametrize(("device", "index"), [("cuda", 3), ("cuda:1", 1)])
def test_p39_a_device_without_an_index_is_the_workers_current_one(
    monkeypatch: pytest.MonkeyPatch, device: str, index: int
) -> None:
    """vLLM's ``device_config.device`` is ``cuda``, which ``torch.cuda.set_device`` refuses; the reader's
    thread begins with device 0."""
    worker = threading.current_thread()
    chosen: list[tuple[threading.Thread, Any]] = []

    def choose(value: Any) -> None:
        chosen.append((threading.current_thread(), value))

    monkeypatch.setattr(
        torch.cuda, "current_device", lambda: 3 if threading.current_thread() is worker else 0
    )
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(device=device))
    monkeypatch.setattr(torch.cuda, "set_device", choose)
    monkeypatch.setattr(torch.cuda, "set_stream", choose)
    reader = RankReader(Settings(target=NOWHERE), GEOMETRY, torch.device(device), secrets.token_hex(8))
    try:
        wait_until(lambda: len(chosen) == 2, "the choice of device and stream")
        (first, chosen_device), (second, stream) = chosen
        assert first is second is not worker
        assert chosen_device == stream.device == torch.device("cuda", index)
    finally:
        for _ in range(2):
            reader.close()
    assert not first.is_alive()


# Calls ----------------------------------------------------------------------------------------------------

NewCalls = Callable[..., EncoderThread]


@pytest.fixture
def new_calls() -> Iterator[NewCalls]:
    made: list[EncoderThread] = []

    def make(**settings: Any) -> EncoderThread:
        agreement = Agreement(Settings(target=NOWHERE, **settings), GEOMETRY)
        made.append(EncoderThread(agreement, name="test"))
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
    started_s = time.monotonic()
    while not calls.completed and time.monotonic() - started_s < PATIENCE_S:
        calls.wait(PATIENCE_S)
    ended = calls.completed.popleft()
    assert ended.handle is handle
    assert not calls.completed
    return ended.outcome


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
    calls, call = new_calls(), Answers(failure, 7)
    assert outcome_of(calls, call) is failure
    assert len(call.left_s) == 1

    async def returns_it(client: object, left_s: float) -> object:
        return failure

    assert outcome_of(calls, returns_it) is failure


def test_p33_a_call_without_time_or_with_another_exception_fails_alone(new_calls: NewCalls) -> None:
    calls, call = new_calls(), Answers(7)
    outcome = outcome_of(calls, Answers(KeyError("grid")))
    assert isinstance(outcome, ItemFailed)
    assert (outcome.message, outcome.retryable) == ("the call to the encoder failed: KeyError: 'grid'", False)
    assert outcome_of(calls, Answers(7)) == 7
    assert isinstance(outcome_of(new_calls(timeout_s=0), call), DeadlineExceeded)
    assert call.left_s == []


def test_a_client_that_cannot_be_made_fails_its_call_and_is_made_for_the_next(
    new_calls: NewCalls, tmp_path: Path
) -> None:
    """The first image may come hours after the start, and while files are being replaced."""
    token = tmp_path / "token"
    calls = new_calls(token_file=str(token))
    failure = outcome_of(calls, Answers(7))
    assert f"cannot read {token}" in failure.message
    token.write_text("4f2c9b")
    assert outcome_of(calls, Answers(7)) == 7


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

    async def pause() -> None:
        for _ in range(5):  # all that was begun before has had its turn
            await asyncio.sleep(0)

    calls.run_coroutine(pause())
    assert call.has_begun.is_set() == call.was_cancelled.is_set() == has_begun
    assert not calls.completed
    assert calls.num_pending == 0
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
