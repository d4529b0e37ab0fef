"""Content of items and calls that failed: nobody counts it any more, so nothing may hold it. The garbage
collector is off, because it may not run for long."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import pytest

from encoder_service.errors import (
    DeadlineExceeded,
    ImageTooLarge,
    InvalidRequest,
    QueueFull,
    UndecodableImage,
    forget_traceback,
)
from encoder_service.ops.tokens import NamespaceTokens
from encoder_service.rpc import response
from encoder_service.rpc.gate import CallGate, CallPermits
from encoder_service.scheduler.admission import Admission
from encoder_service.types import EncodedFile, Item, Modality
from tests.unit.rpc.test_item_stream import SlowContext, stream_of
from tests.unit.service.rig import Rig, image, running, until
from vision_encoder.layout.keys import ROUTING_KEY
from vision_encoder.v1 import encoder_pb2 as pb

pytestmark = pytest.mark.anyio


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with running(Rig()) as rig:
        yield rig


@pytest.fixture(autouse=True)
def _no_collections() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


async def encode(rig: Rig, item: Item) -> None:
    (await rig.pipeline.encode(item)).release()


async def leave(rig: Rig, item: Item) -> None:
    rig.tower.gate.clear()
    waiting = asyncio.ensure_future(rig.pipeline.encode(item))
    await until(lambda: rig.fake.num_loads == 1)
    waiting.cancel()
    await asyncio.sleep(0)
    rig.tower.gate.set()
    try:
        await waiting
    finally:
        del waiting


async def miss_the_deadline(rig: Rig, item: Item) -> None:
    rig.tower.gate.clear()
    try:
        await rig.pipeline.encode(item, deadline_s=time.monotonic() + 0.05)
    finally:
        rig.tower.gate.set()


async def join_a_failure(rig: Rig, item: Item) -> None:
    """Two callers get one failure."""
    outcomes = await asyncio.gather(
        rig.pipeline.encode(item), rig.pipeline.encode(item), return_exceptions=True
    )
    assert [type(outcome) for outcome in outcomes] == [UndecodableImage] * 2
    assert rig.pipeline.inflight.num_joined == 1
    del outcomes
    raise UndecodableImage("both")


def a_file(num_bytes: int) -> Item:
    return Item(Modality.IMAGE, EncodedFile(b"x" * num_bytes))


@pytest.mark.parametrize(
    ("make", "ask", "error"),
    [
        (lambda: a_file(400), encode, UndecodableImage),
        (lambda: a_file(400), join_a_failure, UndecodableImage),
        (lambda: image(2, side=64), encode, ImageTooLarge),
        (lambda: a_file(5000), encode, QueueFull),
        (lambda: image(3), leave, asyncio.CancelledError),
        (lambda: image(4), miss_the_deadline, DeadlineExceeded),
    ],
)
async def test_p17_a_failed_items_content_is_freed(
    rig: Rig, make: Callable[[], Item], ask: Callable[[Rig, Item], Awaitable[None]], error: type[Exception]
) -> None:
    item = make()
    content = weakref.ref(item.content)
    try:
        await ask(rig, item)
    except error:
        pass
    else:
        pytest.fail(f"no {error.__name__}")
    del item
    await until(lambda: content() is None)
    assert rig.pipeline.admission.num_bytes == 0


class Request:
    """Something that can be referred to weakly."""


@pytest.mark.parametrize("is_read", [True, False], ids=["refused by a replica", "not read"])
async def test_p17_a_failed_calls_requests_are_freed(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, *, is_read: bool
) -> None:
    monkeypatch.setattr(response, "UNREAD_S", 0.05)
    context = SlowContext()
    stream = stream_of(rig, context)
    stream._call.metadata = ((ROUTING_KEY, "digest"),)

    async def run(_request: Request) -> object:
        if is_read:
            raise QueueFull("full")
        return await rig.pipeline.encode(image(2))

    if not is_read:
        context.gate.clear()
    request = Request()
    freed = weakref.ref(request)
    try:
        await stream.run(run, [request])  # type: ignore[arg-type]
    except (QueueFull, DeadlineExceeded):
        pass
    else:
        pytest.fail("no failure")
    del request
    await until(lambda: freed() is None)


async def test_p17_a_malformed_messages_bytes_are_freed() -> None:
    admission = Admission(100, 1 << 30)
    gate = CallGate(NamespaceTokens(), CallPermits(4), admission, 1 << 28)
    data = b"\xff" * (2 << 20)
    before = sys.getrefcount(data)
    permit = admission.acquire(len(data))
    try:
        await gate._parsed(data, pb.EncodeRequest, permit, ())
    except InvalidRequest:
        permit.release()
    await until(lambda: sys.getrefcount(data) == before)


def test_causes_may_be_a_circle() -> None:
    errors = [InvalidRequest("a"), InvalidRequest("b")]
    for error in errors:
        with contextlib.suppress(InvalidRequest):
            raise error
    errors[0].__cause__, errors[1].__cause__ = errors[1], errors[0]
    forget_traceback(errors[0])
    assert [error.__traceback__ for error in errors] == [None, None]
