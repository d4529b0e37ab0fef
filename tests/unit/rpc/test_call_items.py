"""Items that name segments: read, counted, and ended once, wherever their call stops."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from encoder_service.errors import InvalidRequest, PixelTensorMismatch, QueueFull, TransportUnavailable
from encoder_service.ingest.identity import content_digest
from encoder_service.rpc import convert
from encoder_service.rpc.call_items import CallItems
from encoder_service.scheduler.admission import Admission
from encoder_service.transport import pixel_input, pixel_segments
from encoder_service.transport.pixel_input import PixelInput
from encoder_service.transport.pixel_layout import PixelLayout
from encoder_service.types import Item, PixelValues
from tests.unit.transport.broker_rig import num_descriptors
from tests.unit.transport.pixel_rig import floats, memfd, put, source
from vision_encoder.v1 import encoder_pb2 as pb

pytestmark = pytest.mark.anyio

OWNER, NAMESPACE = "owner", "tenant"
ARRAY_BYTES = 4 * 6 * 4


class ManualWorkers(Executor):
    """Runs nothing until it is told to."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.waiting.append((future, lambda: function(*arguments, **named)))
        return future

    def run(self) -> None:
        while self.waiting:
            future, function = self.waiting.pop(0)
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)


class Rig:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.source: PixelInput = source(folder, book_bytes=1 << 20)
        self.admission = Admission(0, 1000)
        self.workers = ManualWorkers()

    def publish(self, data: bytes, kind: str) -> dict[str, Any]:
        """A segment; what a request calls it."""
        if kind == "named":
            return {"name": put(self.folder, data)}
        assert self.source.book is not None
        segment_id = self.source.book.add(OWNER, NAMESPACE, memfd(data), len(data))
        return {"segment_id": segment_id, "owner_id": OWNER.encode()}

    def num_left(self) -> int:
        assert self.source.book is not None
        return len(list(self.folder.iterdir())) + len(self.source.book)

    def items(self, *messages: pb.Item, workers: Executor | None = None) -> CallItems:
        return CallItems(
            messages,
            NAMESPACE,
            source=self.source,
            admission=self.admission,
            workers=self.workers if workers is None else workers,
        )


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    before = num_descriptors()
    found = Rig(tmp_path)
    yield found
    assert found.admission.num_bytes == 0
    assert found.source.book is not None
    assert found.source.folder is not None
    found.source.book.close()
    found.source.folder.close()
    assert num_descriptors() == before


def message(array: np.ndarray[Any, Any], *, ends: bool = True, **place: Any) -> pb.Item:
    shm = {"dtype": pb.DTYPE_FLOAT32, "shape": array.shape, "unlink_after_read": ends, **place}
    grid = pb.GridTHW(t=1, h=2, w=2)
    return pb.Item(modality=pb.MODALITY_IMAGE, pixels=pb.PixelTensor(grid_thw=grid, shm=pb.ShmTensor(**shm)))


async def read(items: CallItems, index: int = 0) -> Item:
    async with items[index].read() as item:
        return item


@pytest.mark.parametrize("kind", ["named", "memfd"])
@pytest.mark.parametrize("is_large", [False, True])
async def test_p19_the_item_is_the_one_that_comes_inline(
    rig: Rig, kind: str, is_large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also to its digest: the same key, whichever way the pixels took, strided or not."""
    if is_large:
        monkeypatch.setattr(pixel_input, "COPY_INLINE_BYTES", 0)
    whole = floats(8, 12)
    view = whole[1:5, 2:8]
    place = rig.publish(whole.tobytes(), kind)
    place.update(offset_bytes=4 * 14, stride_bytes=view.strides)
    with ThreadPoolExecutor(1) as workers, rig.items(message(view, **place), workers=workers) as items:
        async with items[0].read() as item:
            assert rig.admission.num_bytes == view.nbytes
            assert rig.num_left() == 0
    data = np.ascontiguousarray(view).tobytes()
    inline = pb.InlineTensor(dtype=pb.DTYPE_FLOAT32, shape=view.shape, data=data)
    grid = pb.GridTHW(t=1, h=2, w=2)
    other = convert.item_from_proto(
        pb.Item(modality=pb.MODALITY_IMAGE, pixels=pb.PixelTensor(grid_thw=grid, inline=inline))
    )
    assert isinstance(item.content, PixelValues)
    assert torch.equal(item.content.pixel_values, torch.from_numpy(view.copy()))
    assert content_digest(item) == content_digest(other)


@pytest.mark.parametrize("kind", ["named", "memfd"])
async def test_a_publisher_that_stays_owner_may_send_it_again(rig: Rig, kind: str) -> None:
    array = floats(4, 6)
    place = rig.publish(array.tobytes(), kind)
    for _ in range(2):
        with rig.items(message(array, ends=False, **place)) as items:
            await read(items)
    assert rig.num_left() == 1
    assert rig.source.counters.consumed == 2


@pytest.mark.parametrize("kind", ["named", "memfd"])
@pytest.mark.parametrize("num_steps", range(8))
@pytest.mark.parametrize("copies_first", [False, True])
async def test_p19_cancelled_at_any_await_the_segment_ends_once_and_its_bytes_are_given_back(
    rig: Rig, kind: str, num_steps: int, copies_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From before the first step, when no code of the item ever runs, to after the copy."""
    monkeypatch.setattr(pixel_input, "COPY_INLINE_BYTES", 0)
    array = floats(4, 6)
    place = rig.publish(array.tobytes(), kind)
    forever = asyncio.Event()

    async def one(items: CallItems) -> None:
        async with items[0].read():
            await forever.wait()

    with rig.items(message(array, **place)) as items:
        task = asyncio.ensure_future(one(items))
        for step in range(num_steps):
            await asyncio.sleep(0)
            if step == 3 and copies_first:
                rig.workers.run()
        task.cancel()
        if num_steps % 2:  # the call is over before the task learns of it, or after
            with pytest.raises(asyncio.CancelledError):
                await task
    assert rig.num_left() == 0
    with pytest.raises(asyncio.CancelledError):
        await task
    rig.workers.run()
    assert rig.source.counters.unlinked == (kind == "named")
    await asyncio.sleep(0)


async def test_p17_bytes_are_counted_until_the_worker_has_stopped_writing(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pixel_input, "COPY_INLINE_BYTES", 0)
    reading, go_on = threading.Event(), threading.Event()
    copy = pixel_segments.read_tensor

    def slowly(descriptor: int, layout: PixelLayout) -> torch.Tensor:
        reading.set()
        assert go_on.wait(20)
        return copy(descriptor, layout)

    monkeypatch.setattr(pixel_segments, "read_tensor", slowly)
    array = floats(4, 6)
    with ThreadPoolExecutor(1) as workers:
        with rig.items(message(array, **rig.publish(array.tobytes(), "named")), workers=workers) as items:
            task = asyncio.ensure_future(read(items))
            await asyncio.to_thread(reading.wait, 20)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert rig.num_left() == 0
        assert rig.admission.num_bytes == array.nbytes
        go_on.set()
    await asyncio.sleep(0)  # the worker has told the loop by now


@pytest.mark.parametrize("kind", ["named", "memfd"])
async def test_p19_items_that_are_never_read_end_with_their_call(rig: Rig, kind: str) -> None:
    array = floats(4, 6)
    messages = [message(array, **rig.publish(array.tobytes(), kind)) for _ in range(3)]
    kept = message(array, ends=False, **rig.publish(array.tobytes(), kind))
    with rig.items(*messages, kept) as items:
        await read(items, 1)
    assert rig.num_left() == 1


async def test_p19_a_service_that_stops_ends_the_segments_of_calls_that_it_cuts_off(tmp_path: Path) -> None:
    rig, array = Rig(tmp_path), floats(4, 6)
    for kind in ("named", "memfd"):
        rig.items(message(array, **rig.publish(array.tobytes(), kind)))
    await rig.source.start()
    await rig.source.stop()
    await rig.source.stop()
    assert rig.num_left() == 0


@pytest.mark.parametrize("kind", ["named", "memfd"])
@pytest.mark.parametrize(
    ("changed", "error", "text"),
    [
        ({"dtype": 99}, PixelTensorMismatch, "dtype 99 is unknown"),
        ({"shape": [4, 7]}, PixelTensorMismatch, f"has {ARRAY_BYTES} bytes, .* needs 112"),
        ({"stride_bytes": [24]}, PixelTensorMismatch, "1 strides for 2 dimensions"),
        ({"shape": [2**20, 2**20]}, PixelTensorMismatch, "at most 67108864 are taken"),
        ({"offset_bytes": 1}, PixelTensorMismatch, f"needs {ARRAY_BYTES + 1}"),
    ],
)
async def test_p19_what_fails_ends_too(
    rig: Rig, kind: str, changed: dict[str, Any], error: type[Exception], text: str
) -> None:
    array = floats(4, 6)
    wrong = message(array, **{**rig.publish(array.tobytes(), kind), **changed})
    with rig.items(wrong) as items:
        with pytest.raises(error, match=text):
            await read(items)
        assert rig.num_left() == 0


async def test_p17_shared_bytes_are_bounded_as_inline_bytes_are(rig: Rig) -> None:
    array = floats(4, 6)
    messages = [message(array, **rig.publish(array.tobytes(), "named")) for _ in range(2)]
    other = rig.admission.acquire(1000 - ARRAY_BYTES)
    with rig.items(*messages) as items:
        async with items[0].read():
            with pytest.raises(QueueFull, match=f"holds 1000 content bytes of 1000, .* needs {ARRAY_BYTES}"):
                await read(items, 1)
        assert rig.num_left() == 0
    other.release()


async def test_p18_p19_a_segment_is_good_for_its_connection_in_its_namespace_alone(rig: Rig) -> None:
    array = floats(4, 6)
    place = rig.publish(array.tobytes(), "memfd")
    guesses = [{"owner_id": b"other"}, {"segment_id": b"\0" * 16}, {"owner_id": b"\xff"}]
    for changed in guesses:
        items = rig.items(message(array, **{**place, **changed}))
        with items, pytest.raises(TransportUnavailable, match="no segment") as raised:
            await read(items)
        assert raised.value.details["pixels"] == "NOT_PUBLISHED"
    strangers = CallItems(
        [message(array, **place)], "", source=rig.source, admission=rig.admission, workers=rig.workers
    )
    with strangers, pytest.raises(TransportUnavailable):
        await read(strangers)
    assert rig.num_left() == 1
    with rig.items(message(array, **place)) as items:
        await read(items)
    # Consumed: nobody has it any more.
    with rig.items(message(array, **place)) as items, pytest.raises(TransportUnavailable):
        await read(items)


@pytest.mark.parametrize("place", [{}, {"name": "a", "segment_id": b"b"}])
async def test_a_segment_has_one_name(rig: Rig, place: dict[str, Any]) -> None:
    items = rig.items(message(floats(4, 6), **place))
    with items, pytest.raises(InvalidRequest, match="either a name or a segment_id"):
        await read(items)


@pytest.mark.parametrize("place", [{"name": "ve-test-1"}, {"segment_id": b"x"}])
async def test_a_server_that_takes_none_says_so(place: dict[str, Any]) -> None:
    items = CallItems(
        [message(floats(4, 6), **place)],
        "",
        source=PixelInput(),
        admission=Admission(0, 1000),
        workers=ManualWorkers(),
    )
    with items, pytest.raises(TransportUnavailable, match="not taken here; send the pixels inline") as raised:
        await read(items)
    assert raised.value.details["pixels"] == "NOT_OFFERED"
