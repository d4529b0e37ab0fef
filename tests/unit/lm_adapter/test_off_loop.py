"""Large copies beside the event loop: on which thread and streams, and what a cancelled task waits for."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
import pytest

from encoder_service.store.host_memory import HostMemory
from lm_adapter import AsyncVisionEncoderClient, Grid
from lm_adapter.testing import fake_model
from lm_adapter.transport.host_shm import HostArena
from lm_adapter.transport.off_loop import LARGE_COPY_BYTES, CallerStreams
from tests.unit.lm_adapter.shared_rig import sharing_fake
from tests.unit.lm_adapter.test_client import assert_rows_of, digest_of, image

pytestmark = pytest.mark.anyio

PATIENCE_S = 20.0


async def test_small_work_stays_and_large_work_leaves_the_loops_thread() -> None:
    here = threading.get_ident()
    assert await CallerStreams().run(LARGE_COPY_BYTES - 1, threading.get_ident) == here
    assert await CallerStreams().run(LARGE_COPY_BYTES, threading.get_ident) != here
    with pytest.raises(ZeroDivisionError):
        await CallerStreams().run(LARGE_COPY_BYTES, lambda: 1 // 0)


@pytest.mark.parametrize("fails", [False, True])
async def test_p21_a_cancelled_task_ends_when_its_copy_has(fails: bool) -> None:
    begun, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def copy() -> None:
        begun.set()
        assert go_on.wait(PATIENCE_S)
        ended.set()
        if fails:
            raise RuntimeError("nobody asks any more")

    task = asyncio.ensure_future(CallerStreams().run(LARGE_COPY_BYTES, copy))
    assert await asyncio.to_thread(begun.wait, PATIENCE_S)
    for _ in range(3):  # also when it is asked more than once
        task.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert not task.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


# The client


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Bytes and thread of every copy out of an arena."""
    seen: list[tuple[int, int]] = []
    real = HostArena.copy

    def copy(self: HostArena, offset_bytes: int, num_bytes: int, out: Any) -> Any:
        seen.append((num_bytes, threading.get_ident()))
        return real(self, offset_bytes, num_bytes, out)

    monkeypatch.setattr(HostArena, "copy", copy)
    return seen


@contextmanager
def large_and_small() -> Iterator[Any]:
    """Image 0 has rows of two MiB, image 1 of 32 KiB."""
    with sharing_fake(new_memory=lambda: HostMemory(8 << 20)) as encoder:
        encoder.fake.script.model = fake_model(out_width=512)
        encoder.fake.script.grids = {digest_of(0): Grid(1, 32, 32), digest_of(1): Grid(1, 4, 4)}
        yield encoder


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("condition never came true")


async def test_p34_large_rows_are_copied_on_a_thread_and_small_ones_are_not(
    copies: list[tuple[int, int]],
) -> None:
    here = threading.get_ident()
    with large_and_small() as encoder:
        async with AsyncVisionEncoderClient(encoder.target, timeout_s=20.0) as client:
            await client.wait_transport()
            outs = [np.zeros(2 << 20, np.uint8), None]
            outcomes = await client.encode([image(0), image(1)], out=outs)
            for index, outcome in enumerate(outcomes):
                assert_rows_of(outcome, digest_of(index))
            assert outcomes[0].payload.ctypes.data == outs[0].ctypes.data  # type: ignore[union-attr]
            shared = (await client.encode_one(image(0), num_readers=2)).shared
            assert shared is not None
            assert_rows_of(await client.read_shared(shared, reader=1), digest_of(0))
            found = [(num_bytes, thread == here) for num_bytes, thread in copies]
            assert found == [(2 << 20, False), (32 << 10, True), (2 << 20, False), (2 << 20, False)]
            copies.clear()
            with await client.encode_one(image(0), borrow=True) as rows:
                assert_rows_of(rows, digest_of(0))
            del rows  # a view of the arena
            assert copies == []
            await until(lambda: len(encoder.leases) == 0)


async def test_p34_the_loop_goes_on_while_rows_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()
    real = HostArena.copy

    def copy(self: HostArena, *args: Any) -> Any:
        begun.set()
        assert go_on.wait(PATIENCE_S), "only the loop's next turns let it go on"
        return real(self, *args)

    with large_and_small() as encoder:
        async with AsyncVisionEncoderClient(encoder.target, timeout_s=60.0) as client:
            await client.wait_transport()
            monkeypatch.setattr(HostArena, "copy", copy)
            task = asyncio.ensure_future(client.encode_one(image(0)))
            await until(begun.is_set)
            assert await client.lookup([digest_of(0)])
            go_on.set()
            assert_rows_of(await task, digest_of(0))
            await until(lambda: len(encoder.leases) == 0)


async def test_p21_a_cancelled_call_does_not_write_to_its_buffer_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    real = HostArena.copy

    def copy(self: HostArena, *args: Any) -> Any:
        begun.set()
        assert go_on.wait(PATIENCE_S)
        return real(self, *args)

    with large_and_small() as encoder:
        async with AsyncVisionEncoderClient(encoder.target, timeout_s=60.0) as client:
            await client.wait_transport()
            monkeypatch.setattr(HostArena, "copy", copy)
            out = np.zeros(2 << 20, np.uint8)
            task = asyncio.ensure_future(client.encode_one(image(0), out=[out]))
            await until(begun.is_set)
            task.cancel()
            await asyncio.sleep(0)
            assert not task.done()
            go_on.set()
            with pytest.raises(asyncio.CancelledError):
                await task
            out[:] = 7
            monkeypatch.setattr(HostArena, "copy", real)
            assert_rows_of(await client.encode_one(image(0)), digest_of(0))
            assert (out == 7).all()
            await until(lambda: len(encoder.leases) == 0)


# Streams, on a CUDA that is only said to be there


class Stream:
    """Its name is torch's: an id, a device, a type of device."""

    made: ClassVar[dict[tuple[int, int, int], Stream]] = {}

    def __init__(self, device: int, stream_id: int | None = None) -> None:
        self.device = device
        self.name = (len(self.made) + 1 if stream_id is None else stream_id, device, 1)
        self.made[self.name] = self


class Cuda:
    """Current device and streams by thread, as torch keeps them."""

    def __init__(self, num_devices: int) -> None:
        self.defaults = [Stream(index, 0) for index in range(num_devices)]
        self.touched: set[int] = set()
        self._local = threading.local()

    @property
    def state(self) -> dict[Any, Any]:
        if not hasattr(self._local, "state"):
            self._local.state = {"device": 0, **dict(enumerate(self.defaults))}
        found: dict[Any, Any] = self._local.state
        return found

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return len(self.defaults)

    def current_device(self) -> int:
        return int(self.state["device"])

    def current_stream(self, index: int) -> Any:
        return self.state[index]

    def Stream(self, *, stream_id: int, device_index: int, device_type: int) -> Stream:
        return Stream.made[stream_id, device_index, device_type]

    @contextmanager
    def device(self, index: int) -> Iterator[None]:
        self.touched.add(index)
        before, self.state["device"] = self.state["device"], index
        yield
        self.state["device"] = before

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        with self.device(stream.device):
            before, self.state[stream.device] = self.state[stream.device], stream
        current, self.state["device"] = self.state["device"], stream.device
        yield
        self.state["device"] = current
        self.state[stream.device] = before


class Torch:
    def __init__(self, cuda: Cuda) -> None:
        self.cuda = cuda
        self._C = self

    def _cuda_getCurrentStream(self, index: int) -> tuple[int, int, int]:
        found: Stream = self.cuda.state[index]
        return found.name

    def _cuda_getDefaultStream(self, index: int) -> tuple[int, int, int]:
        return self.cuda.defaults[index].name


async def test_p20_a_copy_on_a_thread_runs_on_the_callers_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(4)
    monkeypatch.setitem(sys.modules, "torch", Torch(cuda))  # type: ignore[arg-type]
    mine, other = Stream(1), Stream(2)
    with cuda.device(1), cuda.stream(mine):
        with cuda.stream(other):
            pass
        cuda.state[2] = other
        streams = CallerStreams()
    cuda.touched.clear()
    assert cuda.current_device() == 0, "what is current later does not count"

    def seen() -> tuple[int, list[Any], int]:
        return (
            cuda.current_device(),
            [cuda.current_stream(index) for index in range(4)],
            threading.get_ident(),
        )

    for num_bytes in (0, LARGE_COPY_BYTES):
        device, current, thread = await streams.run(num_bytes, seen)
        assert current == [cuda.defaults[0], mine, other, cuda.defaults[3]]
        assert (thread == threading.get_ident()) == (num_bytes == 0)
        assert device == 1
    assert cuda.touched == {1, 2}, "no device is started that the caller did not use"
    cuda.state[2] = cuda.defaults[2]
    plain = CallerStreams()
    for _ in range(3):
        device, current, thread = await plain.run(LARGE_COPY_BYTES, seen)
        assert (device, current) == (0, cuda.defaults), "a thread is left as it was found"


async def test_nothing_is_entered_where_the_callers_streams_are_current(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = Cuda(2)
    monkeypatch.setitem(sys.modules, "torch", Torch(cuda))  # type: ignore[arg-type]
    mine, other = Stream(1), Stream(1)
    with cuda.device(1), cuda.stream(mine):
        streams = CallerStreams()
        cuda.touched.clear()
        assert streams.are_here(LARGE_COPY_BYTES - 1)
        assert await streams.run(0, lambda: cuda.current_stream(1)) is mine
        assert cuda.touched == set()
        assert not streams.are_here(LARGE_COPY_BYTES), "that is for a thread"
        with cuda.stream(other):  # of another task of this loop
            assert not streams.are_here(0)
            assert await streams.run(0, lambda: cuda.current_stream(1)) is mine
            assert cuda.current_stream(1) is other
    assert not streams.are_here(0), "another device"


async def test_streams_are_here_where_cuda_is_not_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(1)
    monkeypatch.setattr(cuda, "is_initialized", lambda: False)
    monkeypatch.setitem(sys.modules, "torch", Torch(cuda))  # type: ignore[arg-type]
    assert CallerStreams().are_here(0)
    monkeypatch.delitem(sys.modules, "torch")
    assert CallerStreams().are_here(0)


# Leases that go back


async def test_leases_confirmed_on_the_loop_go_back_with_its_next_turn_in_one_message() -> None:
    posted: list[list[bytes]] = []
    with large_and_small() as encoder:
        async with AsyncVisionEncoderClient(encoder.target, timeout_s=20.0) as client:
            await client.wait_transport()
            outcomes = await client.encode([image(0), image(1)], borrow=True)
            returns = client._session.returns
            real = returns.post

            def post(request: Any) -> bool:
                posted.append(list(request.lease_ids))
                return real(request)

            returns.post = post
            for rows in outcomes:
                rows.confirm()  # type: ignore[union-attr]
            assert posted == []
            await asyncio.sleep(0)
            assert [len(each) for each in posted] == [2]
            await until(lambda: len(encoder.leases) == 0)
            rows = await client.encode_one(image(1), borrow=True)
            await asyncio.to_thread(rows.confirm)
            assert [len(each) for each in posted] == [2, 1], "on another thread at once"
            rows = await client.encode_one(image(1), borrow=True)
            rows.confirm()
            await client.close()
            assert [len(each) for each in posted] == [2, 1, 1]
            del rows, outcomes


def test_a_lease_confirmed_in_a_loops_last_turn_goes_back() -> None:
    with large_and_small() as encoder:
        loop = asyncio.new_event_loop()

        async def run() -> AsyncVisionEncoderClient:
            client = AsyncVisionEncoderClient(encoder.target, timeout_s=20.0)
            await client.wait_transport()
            (await client.encode_one(image(1), borrow=True)).confirm()
            return client

        client = loop.run_until_complete(run())
        assert not client._session.returns._pending
        loop.run_until_complete(client.close())
        loop.close()
