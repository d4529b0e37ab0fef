"""The checks before the handler of every call: the token, a permit, the message.

Owns their order, cheapest first. Token and permit are checked before the message is received. The bytes of
the message are counted before it is parsed, and until the call ends. To receive the message itself, the gate
registers every method as request-streaming, which is the same on the wire.

Health checks, reflection and the probes of other protocols take no permit, so that they are answered while
all permits are in use. Their messages are small, and they have limits of their own.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message

from encoder_service.errors import InvalidRequest, TooManyCalls, VisionEncoderError
from encoder_service.ingest.workers import MAX_COPIED_ON_LOOP_BYTES
from encoder_service.ops.shares import Holder, Shares, WaitingShares
from encoder_service.ops.tokens import NamespaceTokens
from encoder_service.rpc import messages, observed
from encoder_service.rpc.arrivals import Arrivals
from encoder_service.rpc.auth import (
    SHOWN_CHARS,
    bearer_token,
    check_caller,
    check_namespace,
    holder_of_caller,
    host_of,
)
from encoder_service.rpc.status import status_of, status_text, trailing_metadata
from encoder_service.scheduler.admission import Admission, Pace, Permit

Request = TypeVar("Request", bound=Message)
Response = TypeVar("Response")
Result = TypeVar("Result")
Context = grpc.aio.ServicerContext[Any, Any]

# Longest time from the start of a call until its message is complete.
RECEIVE_S = 30.0
# A message with more parts, or above MAX_COPIED_ON_LOOP_BYTES, is parsed on a worker thread, one at a time.
MAX_PARTS_ON_LOOP = 1024
# Limits on calls without a permit: their messages; health checks and probes; Watch and reflection streams.
MAX_SMALL_BYTES = 4096
MAX_SHORT_CALLS = 1024
MAX_STREAMS = 1024
NO_MESSAGE = "the call ended before its request"


class CallPermits:
    """The limit on calls in progress, with a share for each holder."""

    def __init__(self, max_calls: int) -> None:
        self._shares = Shares(max_calls)
        self._pace = Pace(time.monotonic)

    @property
    def num_calls(self) -> int:
        return self._shares.num_used

    @contextmanager
    def call(self, holder: Holder = ()) -> Iterator[None]:
        """Counts one call while the block runs. holder: () has no share, only the limit applies. Raises
        TooManyCalls."""
        shares = self._shares
        if not shares.take(holder):
            own = f", {shares.held_by(holder)} of them of this caller" if holder else ""
            raise TooManyCalls(
                f"{shares.num_used} calls are in progress{own}; at most {shares.limit} may be, and the last "
                "quarter is left to other callers",
                retry_after_ms=self._pace.retry_after_ms(1),
                num_calls=shares.num_used,
                num_own_calls=shares.held_by(holder),
                max_calls=shares.limit,
            )
        try:
            yield
        finally:
            shares.give_back(holder)
            self._pace.note(1)


@dataclass
class Entry:
    """A call within the gate. permit: counts the bytes of its message until it ends. is_passed: all checks
    are made, and what fails from now on is no refusal."""

    call: observed.Call
    token: str
    permit: Permit
    tokens: NamespaceTokens
    is_passed: bool = False

    def pass_to(self, namespace: str | None) -> None:
        """The last check. namespace: None for a call that has none. Raises Unauthenticated,
        PermissionDenied."""
        if namespace is not None:
            self.call.namespace = namespace[:SHOWN_CHARS]
            check_namespace(self.tokens, self.token, namespace)
        self.is_passed = True


class CallGate:
    """The gate of one server. admission: counts the complete messages of calls in progress, with the content
    that items take from them. refused: number of calls that were refused before their handler, by reason.
    streams: counts Watch and reflection."""

    def __init__(
        self,
        tokens: NamespaceTokens,
        permits: CallPermits,
        admission: Admission,
        max_message_bytes: int,
    ) -> None:
        """``arrivals`` counts incomplete messages, with limits of the size of the admission's."""
        self.permits = permits
        self.refused: Counter[str] = Counter()
        self.tokens = tokens
        self.admission = admission
        self.arrivals = Arrivals(admission.max_bytes, max_message_bytes)
        self._short_calls = CallPermits(MAX_SHORT_CALLS)
        self.streams = CallPermits(MAX_STREAMS)
        self._large = WaitingShares(1)

    @contextmanager
    def enter(self, call: observed.Call) -> Iterator[Entry]:
        """A call of any protocol from its start to its end. Checks its token and holds its permit. The caller
        reads the message, counts its bytes in the entry's permit, and calls ``pass_to``.
        Raises Unauthenticated, TooManyCalls."""
        entry = None
        try:
            token = bearer_token(call.metadata)
            names = check_caller(self.tokens, token)
            call.tokens = self.tokens
            call.holder = holder_of_caller(names, call.host)
            with self.permits.call(call.holder):
                call.permit = self.admission.acquire(0, call.holder)
                entry = Entry(call, token, call.permit, self.tokens)
                yield entry
        except VisionEncoderError as error:
            if entry is None or not entry.is_passed:
                self.refused[error.reason] += 1
            raise
        finally:
            if entry is not None:
                entry.permit.release()

    def passed(
        self, behaviour: Callable[[Request, Context], Awaitable[Response]], request_type: type[Request]
    ) -> Callable[[object, Context], Awaitable[Response]]:
        """A handler that makes all checks and then runs ``behaviour``. The call holds its permit and the
        bytes of its message until it ends. The handler raises Unauthenticated, TooManyCalls, QueueFull,
        PermissionDenied, InvalidRequest, DeadlineExceeded."""

        async def handle(_: object, context: Context) -> Response:
            call = observed.this_call()
            with self.enter(call) as entry:
                data = await self.arrivals.read(context, call.holder, RECEIVE_S)
                if data is None:
                    raise InvalidRequest(NO_MESSAGE)
                entry.permit.add_bytes(len(data))
                request = await self._parsed(data, request_type, entry.permit, call.holder)
                del data
                entry.pass_to(getattr(request, "namespace", None))
                return await behaviour(request, context)

        return handle

    def passed_aside(
        self,
        behaviour: Callable[[AsyncIterator[Request], Context], Awaitable[Response]],
        request_type: type[Request],
        *,
        needs_token: bool = False,
        stays: bool = False,
    ) -> Callable[[object, Context], Awaitable[Response]]:
        """A handler of calls with limits of their own: it runs ``behaviour`` with the call's messages, each
        of at most MAX_SMALL_BYTES, and turns an exception into the call's status. needs_token: the caller
        needs a token where calls of the service do. stays: the call lasts until its caller ends it."""
        permits = self.streams if stays else self._short_calls

        async def requests(context: Context, holder: Holder) -> AsyncIterator[Request]:
            is_first = True
            while (data := await self.arrivals.read(context, holder, RECEIVE_S)) is not None:
                is_first = False
                if len(data) > MAX_SMALL_BYTES:
                    raise InvalidRequest(
                        f"the message has {len(data)} bytes, at most {MAX_SMALL_BYTES} are taken here",
                        found_bytes=len(data),
                        max_bytes=MAX_SMALL_BYTES,
                    )
                yield messages.parsed(data, request_type)
            if is_first:
                raise InvalidRequest(NO_MESSAGE)

        async def handle(_: object, context: Context) -> Response:
            try:
                names: tuple[str, ...] = ()
                if needs_token:
                    token = bearer_token(tuple(context.invocation_metadata() or ()))
                    names = check_caller(self.tokens, token)
                holder = holder_of_caller(names, host_of(context.peer()))
                with permits.call(holder):
                    return await behaviour(requests(context, holder), context)
            except VisionEncoderError as error:
                self.refused[error.reason] += 1
                answer = status_of(error), status_text(error), trailing_metadata(error)
            await context.abort(*answer)
            raise AssertionError("abort returned")

        return handle

    async def _parsed(
        self, data: bytes, request_type: type[Request], permit: Permit, holder: Holder
    ) -> Request:
        """Counts the memory that the parsed message will take, and parses it. Raises InvalidRequest,
        QueueFull."""
        num_parts = MAX_PARTS_ON_LOOP + 1
        if len(data) <= MAX_COPIED_ON_LOOP_BYTES:
            num_parts = messages.num_parts(data, request_type, MAX_PARTS_ON_LOOP)
        if num_parts <= MAX_PARTS_ON_LOOP:
            permit.add_bytes(num_parts * messages.PART_BYTES)
            return messages.parsed(data, request_type)
        async with self._large.hold(holder):
            num_parts = await on_worker(messages.num_parts, data, request_type)
            messages.check_parts(num_parts)
            permit.add_bytes(num_parts * messages.PART_BYTES)
            return await on_worker(messages.parsed, data, request_type)


async def on_worker(function: Callable[..., Result], *arguments: object) -> Result:
    """Runs a function on a worker thread. If cancelled, waits for the function's end and then raises: its
    arguments are in memory until then and must stay counted."""
    running = asyncio.get_running_loop().run_in_executor(None, function, *arguments)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.gather(running, return_exceptions=True)
        raise
    finally:
        del running  # with a failure, it would keep the arguments until a garbage collection
