"""Both halves of the vLLM connector, their link and several ranks, against a scripted encoder."""

from __future__ import annotations

import asyncio
import random
import re
import secrets
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import pytest

from bench.harness.ports import free_port
from bench.harness.waiting import wait_until
from lm_adapter.engines.shared.error_text import MAX_MESSAGE_CHARS, MAX_REASON_CHARS
from lm_adapter.engines.vllm.rank_socket import (
    LENGTH,
    MAX_FRAME_BYTES,
    RankSocket,
    RowsOrder,
    StepRows,
    connect,
    receive,
    send,
)
from lm_adapter.engines.vllm.worker.ranks import RankReader
from lm_adapter.errors import InvalidRequest, ItemFailed
from lm_adapter.items import Grid
from lm_adapter.testing import FakeEncoder, FakeScript, Fault, fake_model, fake_rows
from tests.unit.lm_adapter.connector_rig import BUSY, Engine, Image, Request, engine_config
from vision_encoder.v1 import encoder_pb2 as pb

BROKEN = "INTERNAL: the link to a worker of the engine broke"
GRID = Grid(1, 4, 6)
NUM_ROWS, WIDTH = 6, 128

NewEngine = Callable[..., Engine]


@pytest.fixture
def encoder() -> Iterator[FakeEncoder]:
    """Its port is free also while it is stopped."""
    with FakeEncoder(f"127.0.0.1:{free_port()}") as fake:
        yield fake


@pytest.fixture
def new_engine(encoder: FakeEncoder) -> Iterator[NewEngine]:
    """Engines of two ranks."""
    engines: list[Engine] = []

    def make(num_workers: int | None = None, **options: Any) -> Engine:
        options = {"num_ranks": 2, "timeout_s": 20.0, "retry_s": 10.0, **options}
        engines.append(Engine(engine_config(encoder.target, **options), num_workers=num_workers))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture
def engine(new_engine: NewEngine) -> Engine:
    return new_engine()


def new_image(encoder: FakeEncoder, fault: Fault | None = None) -> Image:
    """With GRID, which the encoder finds as well."""
    image = Image(secrets.token_bytes(16), GRID)
    encoder.script.grids[image.digest] = GRID
    if fault is not None:
        encoder.script.faults[image.digest] = fault
    return image


def started(engine: Engine, *images: Image) -> Request:
    request = engine.request(*images)
    assert not engine.is_ready(request)
    return request


def assert_rows(engine: Engine, *images: Image) -> None:
    """In every rank's encoder cache."""
    for cache in engine.caches:
        for image in images:
            assert (cache[image.identifier].numpy() == fake_rows(image.digest, NUM_ROWS, WIDTH)).all()


def complete(engine: Engine, request: Request, *images: Image) -> None:
    """The rest of a request; every rank's encoder cache has its rows, and the ranks hold none afterwards."""
    engine.fetch(request)
    engine.load(engine.schedule(request))
    assert_rows(engine, *images)
    engine.finish(request)
    engine.wait_empty()


def serve(engine: Engine, *images: Image) -> None:
    """A whole request."""
    complete(engine, engine.request(*images), *images)


class Hold:
    """Holds a rank's reads back until ``release``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, reader: RankReader) -> None:
        self._released = asyncio.Event()
        self._loop = reader._loop
        self._read = reader._rows_of
        monkeypatch.setattr(reader, "_rows_of", self._late)

    def release(self) -> None:
        self._loop.call_soon_threadsafe(self._released.set)

    async def _late(self, order: RowsOrder) -> Any:
        await self._released.wait()
        return await self._read(order)


# Rows -----------------------------------------------------------------------------------------------------


def test_a_request_is_ready_once_every_rank_has_its_rows(
    encoder: FakeEncoder, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold = Hold(monkeypatch, engine.readers[1])
    image = new_image(encoder)
    request = started(engine, image)
    wait_until(
        lambda: [len(order.missing) for order in engine.link._pending.values()] == [1], "the first rank"
    )
    assert not engine.is_ready(request)
    assert not engine.scheduler.has_cache_item(image.identifier)
    assert encoder.num_calls["Fetch"] == 1
    hold.release()
    engine.fetch(request)
    assert engine.scheduler.has_cache_item(image.identifier)
    assert encoder.num_calls["Fetch"] == 2
    assert encoder.num_calls["Encode"] == 0


def test_rows_are_handed_over_to_every_rank_without_a_copy(encoder: FakeEncoder, engine: Engine) -> None:
    images = [new_image(encoder) for _ in range(3)]
    request = started(engine, *images)
    engine.fetch(request)
    step = engine.schedule(request)
    assert [identifier for _, identifier in step.hand_over] == [image.identifier for image in images]
    assert engine.scheduler.build_connector_meta(BUSY) == StepRows()
    read = [dict(reader._rows) for reader in engine.readers]
    engine.load(step)
    for rows, cache in zip(read, engine.caches, strict=True):
        for number, identifier in step.hand_over:
            assert cache[identifier] is rows[number]
    assert_rows(engine, *images)
    engine.finish(request)
    engine.wait_empty()
    assert not any(engine.scheduler.has_cache_item(image.identifier) for image in images)


def test_p21_rows_stay_until_the_step_that_computes_with_them_has_begun(
    encoder: FakeEncoder, engine: Engine
) -> None:
    """The scheduler may be steps ahead of the workers, and its drops on another way."""
    image, other = new_image(encoder), new_image(encoder)
    request = engine.request(image)
    engine.fetch(request)
    step = engine.schedule(request)
    engine.finish(request)
    second = engine.request(other)
    engine.fetch(second)  # orders of rows overtake steps
    later = engine.schedule(second)
    engine.load(step)
    engine.load(later)
    assert_rows(engine, image, other)
    assert [list(reader._rows) for reader in engine.readers] == [[later.hand_over[0][0]]] * 2
    engine.finish(second)
    engine.wait_empty()


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (Fault.WRONG_WIDTH, "width is 132, expected 128|rows of .* 132 .* 128"),
        (Fault.WRONG_DTYPE, "dtype is uint8, expected .*float32"),
        (Fault.WRONG_NUM_ROWS, "7 rows, .* needs 6"),
        (Fault.WRONG_GRID, r"\[1, 5, 6\], expected .* multiples of 2"),
        (Fault.GARBAGE, "STREAM_VIOLATION"),
        (Fault.NON_FINITE, "2 of 768 elements are NaN or infinite, the first in row 5; expected 0"),
    ],
    ids=lambda value: value.name if isinstance(value, Fault) else "",
)
def test_p22_p33_wrong_rows_fail_their_image_alone(
    fault: Fault, text: str, encoder: FakeEncoder, new_engine: NewEngine
) -> None:
    engine = new_engine(finite=True)
    bad, good = new_image(encoder, fault), new_image(encoder)
    request = started(engine, good)
    assert re.search(text, engine.failure(engine.request(bad)))
    complete(engine, request, good)
    serve(engine, new_image(encoder))
    assert not any(bad.identifier in cache for cache in engine.caches)
    encoder.script.faults.clear()
    serve(engine, bad)


def test_p22_the_encoders_grid_decides(encoder: FakeEncoder, engine: Engine) -> None:
    image = new_image(encoder)
    encoder.script.grids[image.digest] = Grid(1, 6, 4)
    failure = engine.failure(engine.request(image))
    assert "grid_thw is [1, 6, 4], the prompt was made for [1, 4, 6]" in failure
    assert encoder.num_calls["Fetch"] == 0


def test_p22_rows_of_another_model_are_refused_and_a_new_encoders_are_compared_with_its_own(
    encoder: FakeEncoder, engine: Engine
) -> None:
    """The ranks' clients have compared rows with the model of the former encoder."""
    encoder.script.model = fake_model("qwen3_vl", out_width=64)
    assert "width is 256, expected 128" in engine.failure(engine.request(new_image(encoder)))
    encoder.stop()
    encoder.script = FakeScript()
    encoder.start()
    serve(engine, new_image(encoder))


# Encoders that fail ---------------------------------------------------------------------------------------


class ForgetfulEncoder(FakeEncoder):
    """Loses its rows after the next num_lost calls of Prefetch. failure: of every later call for the same
    images."""

    num_lost = 1
    failure: ItemFailed | None = None

    def _prefetch(self, request: Any, context: Any) -> bytes:
        answer = super()._prefetch(request, context)
        if self.num_lost:
            self.num_lost -= 1
            with self._lock:
                self._held.clear()
        if self.failure is not None:
            self.script.failures = {item.content_digest: self.failure for item in request.items}
        return answer


@pytest.fixture
def forgetful() -> Iterator[ForgetfulEncoder]:
    with ForgetfulEncoder() as fake:
        yield fake


def test_p32_rows_that_a_rank_finds_gone_are_encoded_once_and_read_again(
    forgetful: ForgetfulEncoder,
) -> None:
    with Engine(engine_config(forgetful.target, num_ranks=2)) as engine:
        serve(engine, new_image(forgetful))
        assert forgetful.num_calls["Prefetch"] == 2
        assert forgetful.num_calls["Fetch"] in (3, 4)
        forgetful.num_lost = 2
        assert engine.failure(engine.request(new_image(forgetful))).startswith("UNKNOWN_KEY: ")
        assert forgetful.num_calls["Prefetch"] == 4
        assert forgetful.num_calls["Encode"] == 0  # rows go to ranks alone
        engine.wait_empty()


def test_p32_an_image_whose_encode_failed_fails_with_the_encodes_reason(forgetful: ForgetfulEncoder) -> None:
    """Its rows are gone as well; only the encoder knows why."""
    forgetful.failure = ItemFailed("no image has 3 legs", reason="DECODE_FAILED", status=3)
    with Engine(engine_config(forgetful.target, num_ranks=2)) as engine:
        assert engine.failure(engine.request(new_image(forgetful))) == "DECODE_FAILED: no image has 3 legs"


def test_p32_an_encoder_that_restarts_between_prefetch_and_read_is_asked_again(
    encoder: FakeEncoder, engine: Engine
) -> None:
    image = new_image(encoder, Fault.HANG)
    request = started(engine, image)
    wait_until(lambda: encoder.num_calls["Fetch"] == 2, "the reads")
    encoder.script.faults.clear()
    encoder.restart()
    complete(engine, request, image)
    assert encoder.num_calls["Prefetch"] > 0


def test_p32_an_encoder_that_comes_back_is_waited_for(encoder: FakeEncoder, engine: Engine) -> None:
    image = new_image(encoder)
    encoder.stop()
    request = started(engine, image)
    engine.tracker.wait(0.3)
    assert not engine.is_ready(request)
    assert engine.scheduler.take_unavailable_requests() == set()
    encoder.start()
    complete(engine, request, image)


@pytest.mark.parametrize("method", ["Prefetch", "Fetch"])
def test_p32_passing_failures_are_repeated_for_retry_s(
    method: str, encoder: FakeEncoder, new_engine: NewEngine
) -> None:
    """Fetch is the ranks'."""
    failure = ItemFailed("the service stops", reason="DRAINING", status=14, retryable=True)
    encoder.script.call_failures[method] = (grpc.StatusCode.UNAVAILABLE, failure)
    engine = new_engine(retry_s=0.3)
    assert engine.failure(engine.request(new_image(encoder)), 15).startswith("DRAINING: ")
    engine = new_engine()
    image = new_image(encoder)
    request = started(engine, image)
    num_calls = encoder.num_calls[method]
    wait_until(lambda: encoder.num_calls[method] > num_calls + 4, "repeats")
    encoder.script.call_failures.clear()
    complete(engine, request, image)


def test_p32_a_requested_pause_longer_than_the_retries_is_not_waited_for(
    encoder: FakeEncoder, new_engine: NewEngine
) -> None:
    failure = ItemFailed("come back later", reason="BUSY", status=8, retryable=True, retry_after_ms=60_000)
    encoder.script.call_failures["Prefetch"] = (grpc.StatusCode.RESOURCE_EXHAUSTED, failure)
    engine = new_engine(timeout_s=600.0, retry_s=50.0)
    assert engine.failure(engine.request(new_image(encoder)), 30).startswith("BUSY: ")
    assert encoder.num_calls["Prefetch"] == 1


class TalkativeEncoder(FakeEncoder):
    """Says more than a frame of the link takes. failures: digest to that of reads. num_keys: so many of the
    next keys are too long."""

    def __init__(self) -> None:
        super().__init__()
        self.failures: dict[bytes, ItemFailed] = {}
        self.num_keys = 0

    def _find(self, key: bytes, namespace: str) -> Any:
        held = super()._find(key, namespace)
        if held is not None and held.digest in self.failures:
            raise self.failures[held.digest]
        return held

    def _prefetch(self, request: Any, context: Any) -> bytes:
        answer = pb.PrefetchResponse.FromString(super()._prefetch(request, context))
        if self.num_keys:
            self.num_keys -= 1
            for status in answer.statuses:
                status.key = bytes(MAX_FRAME_BYTES)
        return answer.SerializeToString()


def test_p17_p33_long_texts_and_keys_of_an_encoder_fail_their_image_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    long = "x" * MAX_FRAME_BYTES
    with TalkativeEncoder() as encoder, Engine(engine_config(encoder.target, num_ranks=2)) as engine:
        serve(engine, new_image(encoder))
        bad, good = new_image(encoder), new_image(encoder)
        request = started(engine, good)
        encoder.failures[bad.digest] = ItemFailed(long, reason=long)
        failure = engine.failure(engine.request(bad))
        assert failure == f"{long[:MAX_REASON_CHARS]}: {long[:MAX_MESSAGE_CHARS]}"
        encoder.num_keys = 1
        failure = engine.failure(engine.request(new_image(encoder)))
        assert failure == f"INVALID_ROWS: key has {MAX_FRAME_BYTES} bytes, expected 32"
        complete(engine, request, good)
        serve(engine, new_image(encoder))
    assert max(len(record.getMessage()) for record in caplog.records) < 2 * MAX_MESSAGE_CHARS


# Requests and workers that end ----------------------------------------------------------------------------


def test_p32_a_slow_rank_ends_in_its_deadline_with_both_figures(
    encoder: FakeEncoder, new_engine: NewEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = new_engine(timeout_s=3.0)
    hold = Hold(monkeypatch, engine.readers[1])
    failure = engine.failure(engine.request(new_image(encoder)))
    assert re.fullmatch(r"DEADLINE_EXCEEDED: 1 of 2 ranks have no rows after [2-9]\.\d s", failure)  # of 3 s
    engine.wait_empty()
    hold.release()
    serve(engine, new_image(encoder))


def test_a_request_that_ends_cancels_the_calls_of_its_reads(encoder: FakeEncoder, engine: Engine) -> None:
    request = started(engine, new_image(encoder, Fault.HANG))
    wait_until(lambda: encoder.num_calls["Fetch"] == 2, "the reads")
    engine.scheduler.request_finished(request)
    wait_until(lambda: encoder.num_cancelled["Fetch"] == 2, "the calls' ends")
    engine.wait_empty()
    assert not engine.encoder_thread.completed
    serve(engine, new_image(encoder))


def test_p17_rows_that_arrive_as_their_request_ends_are_dropped(
    encoder: FakeEncoder, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the scheduler's half has looked for what ended, and before it cancels."""
    hold, cancel = Hold(monkeypatch, engine.readers[0]), engine.encoder_thread.cancel

    def late_cancel(handle: object) -> None:
        hold.release()
        wait_until(lambda: engine.encoder_thread.completed)
        cancel(handle)

    monkeypatch.setattr(engine.encoder_thread, "cancel", late_cancel)
    engine.scheduler.request_finished(started(engine, new_image(encoder)))
    assert engine.encoder_thread.completed
    engine.wait_empty(timeout_s=5)


def test_p17_ranks_hold_nothing_after_many_requests_that_end_at_any_time(
    encoder: FakeEncoder, engine: Engine
) -> None:
    """Half of them are computed, the others end before. Drops overtake reads, and rows of one image are read
    again while they are dropped."""
    chance = random.Random(5)
    encoder.script.latency_s = 0.001
    images = [new_image(encoder) for _ in range(12)]
    # Request -> how often vLLM still asks for it, None for as often as it has to.
    running: dict[Request, int | None] = {}
    num_computed, num_left = 0, 200
    while running or num_left:
        while num_left and len(running) < 8:
            request = engine.request(*chance.sample(images, chance.randint(1, 3)))
            running[request] = chance.choice((None, chance.randrange(8)))
            num_left -= 1
        for request, num_asks in list(running.items()):
            if num_asks == 0:
                engine.scheduler.request_finished(request)
                del running[request]
            elif num_asks is not None:
                engine.is_ready(request)
                running[request] = num_asks - 1
            elif engine.is_ready(request):
                engine.load(engine.schedule(request))
                engine.finish(request)
                del running[request]
                num_computed += 1
        engine.tracker.wait(chance.choice((0, 0.001, 0.005)))
    assert num_computed > 50
    assert_rows(engine, *images)
    for _ in range(2):
        serve(engine, new_image(encoder))  # its orders come after all others


# The link -------------------------------------------------------------------------------------------------


@contextmanager
def connection(engine: Engine) -> Iterator[socket.socket]:
    """To the link, as a rank's or a stranger's."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as found:
        found.settimeout(30)
        found.connect(f"\0{engine.link._name}".encode())
        yield found


def test_p32_a_worker_that_goes_fails_what_waits_for_it(encoder: FakeEncoder, new_engine: NewEngine) -> None:
    engine = new_engine(num_workers=1, timeout_s=3.0)
    image = new_image(encoder, Fault.HANG)
    request = started(engine, image)
    with connection(engine) as rank:
        assert rank.recv(LENGTH.size)  # of an order
        wait_until(lambda: encoder.num_calls["Fetch"] == 1, "the other rank's read")
    assert engine.failure(request) == BROKEN
    wait_until(lambda: encoder.num_cancelled["Fetch"] == 1, "the other rank's end of the call")
    engine.wait_empty()
    later = engine.failure(engine.request(new_image(encoder)))
    assert later.startswith("DEADLINE_EXCEEDED: 1 of 2 ranks are away, or on another host, after")


def test_p32_a_rank_whose_link_breaks_connects_again(encoder: FakeEncoder, engine: Engine) -> None:
    """Rows that it has confirmed stay; those that are dropped meanwhile leave when it is back."""
    kept, ended, late = (new_image(encoder, fault) for fault in (None, None, Fault.HANG))
    of_kept, of_ended = engine.request(kept), engine.request(ended)
    engine.fetch(of_kept)
    engine.fetch(of_ended)
    step = engine.schedule(of_kept)
    of_late = started(engine, late)
    wait_until(lambda: encoder.num_calls["Fetch"] == 6, "the reads")
    before = set(engine.link._ranks)

    async def break_all() -> None:
        for writer in before:
            writer.close()

    engine.encoder_thread.run_coroutine(break_all())
    engine.scheduler.request_finished(of_ended)
    assert engine.failure(of_late) == BROKEN
    wait_until(lambda: encoder.num_cancelled["Fetch"] == 2, "the ends of the reads")
    wait_until(lambda: len(engine.link._ranks - before) == 2, "the ranks' return")
    engine.load(step)
    assert_rows(engine, kept)
    engine.finish(of_kept)
    engine.wait_empty()
    encoder.script.faults.clear()
    serve(engine, late)


@pytest.mark.parametrize("num_passes", range(8))
def test_p32_a_rank_that_comes_as_another_goes_confirms_nothing_alone(num_passes: int) -> None:
    """In any order of the event loop: an order counts as done with every rank's report, or fails."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            frame = await receive(reader)
            if "read" in frame:
                send(writer, {"done": frame["read"]})

    async def order() -> None:
        link = RankSocket(f"link-of-a-test-{secrets.token_hex(16)}", 2)
        await link.open()
        _, first = await connect(link._name)
        reading = asyncio.create_task(link.read(RowsOrder(1, b"key", b"digest", GRID), 0.3))
        while not link._ranks:  # noqa: ASYNC110 - the link has no event of its own for one rank
            await asyncio.sleep(0)
        with socket.socket(socket.AF_UNIX) as late:
            late.setblocking(False)
            late.connect(f"\0{link._name}")
            for _ in range(num_passes):
                await asyncio.sleep(0)
            first.transport.abort()
            reader, writer = await asyncio.open_unix_connection(sock=late)
            answering = asyncio.create_task(answer(reader, writer))
            try:
                with pytest.raises(ItemFailed, match=r"1 of 2 ranks are away|the link .* broke"):
                    await reading
            finally:
                answering.cancel()
                writer.close()
                await link.close()

    asyncio.run(order())


def test_p33_a_connection_beyond_the_ranks_disturbs_nothing(encoder: FakeEncoder, engine: Engine) -> None:
    image = new_image(encoder, Fault.HANG)
    request = started(engine, image)
    wait_until(lambda: encoder.num_calls["Fetch"] == 2, "the reads")
    for _ in range(3):
        with connection(engine) as stranger:
            assert stranger.recv(1) == b""
    encoder.resume()
    complete(engine, request, image)


@pytest.mark.parametrize(
    "content",
    [
        LENGTH.pack(4) + b"\xff{]}",
        LENGTH.pack(MAX_FRAME_BYTES + 1),
        LENGTH.pack(2) + b"[]",
        LENGTH.pack(2) + b"{}",
    ],
    ids=["no JSON", "no end", "no object", "no report"],
)
def test_p33_a_stranger_among_the_ranks_is_closed_at_its_first_wrong_frame(
    content: bytes, encoder: FakeEncoder, new_engine: NewEngine
) -> None:
    engine = new_engine(num_workers=1)
    wait_until(lambda: len(engine.link._ranks) == 1, "the first rank")
    with connection(engine) as stranger:
        stranger.sendall(content)
        assert stranger.recv(1) == b""
    engine.start_worker()
    serve(engine, new_image(encoder))


def test_a_producer_is_refused(new_engine: NewEngine) -> None:
    with pytest.raises(InvalidRequest, match="ec_both"):
        new_engine(role="ec_both")
