"""The vLLM connector's socket and its ranks, against a scripted encoder: rows, drops, connections.

Which requests wait for which rows is the scheduler's: ``tests/unit/lm_adapter/test_vllm_scheduler.py``. Whole
servers of vLLM are in ``tests/engines``."""

from __future__ import annotations

import asyncio
import json
import random
import re
import secrets
import socket
from collections.abc import Callable, Iterator
from typing import Any, Self

import grpc
import pytest

from bench.harness.ports import free_port
from bench.harness.waiting import wait_until
from lm_adapter.engines.shared.error_text import MAX_MESSAGE_CHARS, MAX_REASON_CHARS
from lm_adapter.engines.shared.rank_socket import (
    LENGTH,
    MAX_FRAME_BYTES,
    RankSocket,
    RowsOrder,
    RowsRead,
    connect,
    failure_frame,
    receive,
    send,
)
from lm_adapter.engines.vllm.step_rows import StepRows
from lm_adapter.errors import InvalidRequest, ItemFailed
from lm_adapter.items import Grid
from lm_adapter.testing import FakeEncoder, Fault, fake_rows
from tests.unit.lm_adapter.connector_rig import BUSY, Engine, Image, Request, engine_config

BROKEN = "ENGINE_UNAVAILABLE: the connection to a worker of the engine broke"
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


class Rank:
    """A connection to the scheduler's socket, as that of a rank or of a stranger. A context manager."""

    def __init__(self, engine: Engine) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(30)
        self.socket.connect(f"\0{engine.scheduler.rank_socket.name}".encode())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.socket.close()

    def receive(self) -> Any:
        (length,) = LENGTH.unpack(self.socket.recv(LENGTH.size, socket.MSG_WAITALL))
        return json.loads(self.socket.recv(length, socket.MSG_WAITALL))

    def report(self, rows: RowsRead) -> None:
        body = json.dumps(rows.frame()).encode()
        self.socket.sendall(LENGTH.pack(len(body)) + body)


# Rows -----------------------------------------------------------------------------------------------------


def test_a_request_is_ready_once_every_rank_has_its_rows(encoder: FakeEncoder, new_engine: NewEngine) -> None:
    engine = new_engine(num_workers=1)
    image = new_image(encoder)
    request = started(engine, image)
    with Rank(engine) as second:
        number = second.receive()["read"]
        wait_until(lambda: number in engine.readers[0].rows, "the first rank's rows")
        engine.scheduler.tracker.wait(0.1)
        assert not engine.is_ready(request)
        assert not engine.scheduler.has_cache_item(image.identifier)
        second.report(RowsRead(number, "host", was_lost=True))
        engine.fetch(request)
    assert engine.scheduler.has_cache_item(image.identifier)
    assert encoder.num_calls == {"GetServerInfo": 2, "Prefetch": 1, "Fetch": 1}
    # Once for both ranks: the first read inline, the second had lost them before.
    found = engine.scheduler.get_ec_connector_stats().data
    num_bytes = engine.geometry.num_bytes(GRID)
    assert (found["bytes"], found["lost_reads"]) == ({"inline": num_bytes}, {"": 1})
    assert all(worker.get_ec_connector_stats() is None for worker in engine.workers)


def test_p21_rows_are_handed_over_without_a_copy_and_stay_until_their_step_has_begun(
    encoder: FakeEncoder, engine: Engine
) -> None:
    """The scheduler may be steps ahead of the workers, and orders of rows overtake steps."""
    images, other = [new_image(encoder) for _ in range(3)], new_image(encoder)
    first, second = engine.request(*images), engine.request(other)
    engine.fetch(first)
    step = engine.schedule(first)
    assert [identifier for _, identifier in step.hand_over] == [image.identifier for image in images]
    assert engine.scheduler.build_connector_meta(BUSY) == StepRows()
    engine.finish(first)
    engine.fetch(second)
    later = engine.schedule(second)
    read = [dict(reader.rows) for reader in engine.readers]
    engine.load(step)
    engine.load(later)
    for rows, cache, reader in zip(read, engine.caches, engine.readers, strict=True):
        for number, identifier in step.hand_over + later.hand_over:
            assert cache[identifier] is rows[number]
        assert list(reader.rows) == [number for number, _ in later.hand_over]
    assert_rows(engine, *images, other)
    engine.finish(second)
    engine.wait_empty()


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (Fault.WRONG_WIDTH, "width is 132, expected 128|rows of .* 132 .* 128"),
        (Fault.NON_FINITE, "2 of 768 elements are NaN or infinite, the first in row 5; expected 0"),
    ],
)
def test_p22_p33_wrong_rows_fail_their_image_alone(
    fault: Fault, text: str, encoder: FakeEncoder, new_engine: NewEngine
) -> None:
    engine = new_engine(finite=True)
    bad, good = new_image(encoder, fault), new_image(encoder)
    request = started(engine, good)
    assert re.search(text, engine.failure(engine.request(bad)))
    complete(engine, request, good)
    assert not any(bad.identifier in cache for cache in engine.caches)
    encoder.script.faults.clear()
    serve(engine, bad)


# Encoders that fail ---------------------------------------------------------------------------------------


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


def engine_failure(engine: Engine, encoder: FakeEncoder) -> str:
    return engine.failure(engine.request(new_image(encoder)), 15)


def test_p17_p33_a_failure_of_any_length_fails_its_image_alone_with_all_that_it_states(
    encoder: FakeEncoder, new_engine: NewEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """A frame above the limit would end the connection."""
    engine, long = new_engine(num_workers=1, num_ranks=1, retry_s=5.0), "x" * MAX_FRAME_BYTES
    serve(engine, new_image(encoder))
    encoder.script.call_failures["Fetch"] = (
        grpc.StatusCode.INVALID_ARGUMENT,
        ItemFailed(long[:2500], reason=long[:200], status=3),
    )
    failure = engine_failure(engine, encoder)
    assert failure.startswith(f"{long[:MAX_REASON_CHARS]}: ")
    assert len(failure) == MAX_REASON_CHARS + 2 + MAX_MESSAGE_CHARS
    frame = failure_frame(1, ItemFailed(long, reason=long))
    assert len(json.dumps(frame)) < MAX_FRAME_BYTES
    encoder.script.call_failures.clear()
    serve(engine, new_image(encoder))
    assert max(len(record.getMessage()) for record in caplog.records) < 2 * MAX_MESSAGE_CHARS


# Requests and workers that end ----------------------------------------------------------------------------


def test_p32_a_slow_rank_ends_in_its_deadline_with_both_figures(
    encoder: FakeEncoder, new_engine: NewEngine
) -> None:
    engine = new_engine(num_workers=1, timeout_s=1.0)
    with Rank(engine) as slow:
        failure = engine_failure(engine, encoder)
        number = slow.receive()["read"]
        assert slow.receive() == {"drop": number}
    assert re.fullmatch(r"DEADLINE_EXCEEDED: 1 of 2 ranks have no rows after [01]\.\d s", failure)  # of 1 s
    engine.wait_empty()
    wait_until(lambda: engine.scheduler.rank_socket.num_connected == 1, "the slow rank's end")
    engine.start_worker()
    serve(engine, new_image(encoder))


def test_a_request_that_ends_cancels_the_calls_of_its_reads(encoder: FakeEncoder, engine: Engine) -> None:
    request = started(engine, new_image(encoder, Fault.HANG))
    wait_until(lambda: encoder.num_calls["Fetch"] == 2, "the reads")
    engine.scheduler.request_finished(request)
    wait_until(lambda: encoder.num_cancelled["Fetch"] == 2, "the calls' ends")
    engine.wait_empty()
    assert not engine.scheduler.encoder_thread.completed
    serve(engine, new_image(encoder))


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
        engine.scheduler.tracker.wait(chance.choice((0, 0.001, 0.005)))
    assert num_computed > 50
    assert_rows(engine, *images)
    for _ in range(2):
        serve(engine, new_image(encoder))  # its orders come after all others


# Connections ----------------------------------------------------------------------------------------------


def test_p32_a_worker_that_goes_fails_what_waits_for_it(encoder: FakeEncoder, new_engine: NewEngine) -> None:
    engine = new_engine(num_workers=1, timeout_s=1.5)
    request = started(engine, new_image(encoder, Fault.HANG))
    with Rank(engine) as rank:
        assert "read" in rank.receive()
        wait_until(lambda: encoder.num_calls["Fetch"] == 1, "the other rank's read")
    assert engine.failure(request) == BROKEN
    wait_until(lambda: encoder.num_cancelled["Fetch"] == 1, "the other rank's end of the call")
    engine.wait_empty()
    failure = engine_failure(engine, encoder)
    assert failure.startswith("DEADLINE_EXCEEDED: 1 of 2 ranks are away, or on another host, after")


def test_p32_a_rank_whose_connection_breaks_connects_again(encoder: FakeEncoder, engine: Engine) -> None:
    """Rows that it has confirmed stay; those that are dropped meanwhile leave when it is back."""
    kept, ended, late = (new_image(encoder, fault) for fault in (None, None, Fault.HANG))
    of_kept, of_ended = engine.request(kept), engine.request(ended)
    engine.fetch(of_kept)
    engine.fetch(of_ended)
    step = engine.schedule(of_kept)
    of_late = started(engine, late)
    wait_until(lambda: encoder.num_calls["Fetch"] == 6, "the reads")
    ranks, scheduler = engine.scheduler.rank_socket, engine.scheduler.encoder_thread
    scheduler.run_coroutine(ranks.close())
    wait_until(lambda: ranks.num_connected == 0, "the ends of the connections")
    engine.scheduler.request_finished(of_ended)
    assert engine.failure(of_late) == BROKEN
    wait_until(lambda: encoder.num_cancelled["Fetch"] == 2, "the ends of the reads")
    scheduler.run_coroutine(ranks.open())
    wait_until(lambda: ranks.num_connected == 2, "the ranks' return")
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
                send(writer, RowsRead(frame["read"]).frame())

    async def order() -> None:
        ranks = RankSocket(f"socket-of-a-test-{secrets.token_hex(16)}", 2)
        await ranks.open()
        _, first = await connect(ranks.name)
        reading = asyncio.create_task(ranks.read(RowsOrder(1, b"key", b"digest", GRID), 0.3))
        while not ranks.num_connected:  # noqa: ASYNC110 - there is no event of one rank's arrival
            await asyncio.sleep(0)
        with socket.socket(socket.AF_UNIX) as late:
            late.setblocking(False)
            late.connect(f"\0{ranks.name}")
            for _ in range(num_passes):
                await asyncio.sleep(0)
            first.transport.abort()
            reader, writer = await asyncio.open_unix_connection(sock=late)
            answering = asyncio.create_task(answer(reader, writer))
            try:
                with pytest.raises(ItemFailed, match=r"1 of 2 ranks are away|the connection .* broke"):
                    await reading
            finally:
                answering.cancel()
                writer.close()
                await ranks.close()

    asyncio.run(order())


def test_p33_a_connection_beyond_the_ranks_disturbs_nothing(encoder: FakeEncoder, engine: Engine) -> None:
    image = new_image(encoder, Fault.HANG)
    request = started(engine, image)
    wait_until(lambda: encoder.num_calls["Fetch"] == 2, "the reads")
    for _ in range(3):
        with Rank(engine) as stranger:
            assert stranger.socket.recv(1) == b""
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
    wait_until(lambda: engine.scheduler.rank_socket.num_connected == 1, "the first rank")
    with Rank(engine) as stranger:
        stranger.socket.sendall(content)
        assert stranger.socket.recv(1) == b""
    engine.start_worker()
    serve(engine, new_image(encoder))


def test_a_producer_is_refused(new_engine: NewEngine) -> None:
    with pytest.raises(InvalidRequest, match="ec_both"):
        new_engine(role="ec_both")
