"""What an asyncio client does beside its loop's own turns: large copies on a thread, releases as tasks.

Owns where such work runs: on which thread, on which CUDA streams, and what of it outlives a cancelled task.
What is copied, and whether it counts, is ``reading``'s.
"""

from __future__ import annotations

import asyncio
import contextvars
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, TypeAlias, TypeVar

import grpc
import grpc.aio

from lm_adapter.transport.channel import method_path
from vision_encoder.v1 import encoder_pb2 as pb

__all__ = ["LARGE_COPY_BYTES", "CallerStreams", "LoopReleases"]

LARGE_COPY_BYTES = 1 << 20
"""From here on a copy runs on a thread: below, a hop between threads takes about as long as the copy."""

ResultT = TypeVar("ResultT")
_Named: TypeAlias = tuple[int, int, int]
"""A stream's id, device and type of device."""


class CallerStreams:
    """The CUDA streams that were current where and when this was made, for work on any thread.

    torch keeps the current device and each device's current stream by thread: a copy that is handed to a
    thread of a pool would otherwise run on whatever stream is current there, behind none of the caller's
    work and seen by none of it.
    """

    def __init__(self) -> None:
        """Takes note of the calling thread's; starts no CUDA and touches no device that is not in use."""
        self._noted = _current()

    def are_here(self, num_bytes: int) -> bool:
        """Whether work that copies this much may just be done where its caller is: the work is small, and
        the streams are those of the calling thread."""
        return num_bytes < LARGE_COPY_BYTES and (self._noted is None or self._noted == _current())

    @contextmanager
    def entered(self) -> Iterator[None]:
        """They are current for this thread inside; what was current is so again afterwards."""
        if self._noted is None:
            yield
            return
        torch: Any = sys.modules["torch"]
        device, streams = self._noted
        with ExitStack() as stack:
            for index, (stream_id, device_index, device_type) in enumerate(streams):
                # A default stream is every thread's default; entering it would start a device nobody uses.
                if index == device or (stream_id, device_index, device_type) != _default(torch, index):
                    stream = torch.cuda.Stream(
                        stream_id=stream_id, device_index=device_index, device_type=device_type
                    )
                    stack.enter_context(torch.cuda.stream(stream))
            # Last: a stream that becomes current makes its device the current one.
            stack.enter_context(torch.cuda.device(device))
            yield

    async def run(self, num_bytes: int, work: Callable[[], ResultT]) -> ResultT:
        """work's result: on a thread where it copies this much, else on the loop's; on these streams.

        A task that is cancelled meanwhile ends when the thread has: a copy never goes on into a buffer that
        its owner believes to have back.
        """
        if self.are_here(num_bytes):
            return work()
        if num_bytes < LARGE_COPY_BYTES:
            return self._work(work)
        context = contextvars.copy_context()
        # A future and no task: it is not among those that a closing loop cancels.
        running = asyncio.get_running_loop().run_in_executor(None, context.run, self._work, work)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            while not running.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait((running,))
            if not running.cancelled():
                running.exception()  # seen: the cancellation is what the task ends with
            raise

    def _work(self, work: Callable[[], ResultT]) -> ResultT:
        with self.entered():
            return work()


def _current() -> tuple[int, list[_Named]] | None:
    """The calling thread's device, and every device's stream; None while CUDA is not in use. By torch's own
    names of streams: an object for each would take several times as long."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    name_of = torch._C._cuda_getCurrentStream
    return torch.cuda.current_device(), [name_of(index) for index in range(torch.cuda.device_count())]


def _default(torch: Any, index: int) -> _Named:
    found: _Named = torch._C._cuda_getDefaultStream(index)
    return found


class LoopReleases:
    """``Release`` calls as tasks of one loop, started from any thread; for ``LeaseReturns``."""

    def __init__(
        self,
        channel: Callable[[], grpc.aio.Channel],
        timeout_s: float,
        metadata: Callable[[], tuple[tuple[str, str], ...]] = tuple,
    ) -> None:
        """timeout_s: of one call; metadata: what each carries."""
        self.loop: asyncio.AbstractEventLoop | None = None
        """Of the client's calls; set by the first of them."""
        self._channel, self._timeout_s, self._metadata = channel, timeout_s, metadata
        self._tasks: set[asyncio.Task[None]] = set()

    def send(self, request: pb.ReleaseRequest, done: Callable[[], None]) -> None:
        """From any thread: rows may be confirmed on one that has no loop. Raises RuntimeError without a
        loop."""
        if self.loop is None:
            raise RuntimeError("no loop has made a call yet")

        def start() -> None:
            task = asyncio.ensure_future(self._release(request))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            task.add_done_callback(lambda _: done())

        self.loop.call_soon_threadsafe(start)

    def soon(self, work: Callable[[], None]) -> bool:
        """On the loop's thread, work with the loop's next turn, which comes also when the loop is about to
        end; False on any other."""
        loop = self.loop
        if loop is None or asyncio._get_running_loop() is not loop:
            return False
        loop.call_soon(work)
        return True

    def cancel(self) -> None:
        """Those on their way; what is not given back expires, or ends with its session."""
        for task in list(self._tasks):
            task.cancel()

    async def _release(self, request: pb.ReleaseRequest) -> None:
        start: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = self._channel().unary_unary(
            method_path("Release")
        )
        with suppress(grpc.RpcError, grpc.aio.UsageError):  # what is not given back expires
            await start(request.SerializeToString(), timeout=self._timeout_s, metadata=self._metadata())
