"""The checks before every call's handler: a permit, the token, the message.

Owns their order, cheapest first. Whether there is room for the call and whether the caller has any access is
decided before the message is received and parsed. For that, every method is registered as request-streaming,
which is the same on the wire, and the gate reads the single message. Health and reflection do not pass the
gate; both answer without a token.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from encoder_service.errors import DeadlineExceeded, InvalidRequest, TooManyCalls, VisionEncoderError
from encoder_service.ops.tokens import NamespaceTokens
from encoder_service.rpc import observed
from encoder_service.rpc.auth import bearer_token, check_caller, check_namespace
from encoder_service.scheduler.admission import Pace

Request = TypeVar("Request", bound=Message)
Response = TypeVar("Response")
Context = grpc.aio.ServicerContext[Any, Any]

# Limit of the time from a call's start to the arrival of its message.
RECEIVE_S = 30.0
# Of a message: each item is one. Parsed, an empty item of two bytes takes sixty.
MAX_FIELDS = 4096


class CallPermits:
    """The limit on calls in progress."""

    def __init__(self, max_calls: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_calls = max_calls
        self.num_calls = 0
        self._pace = Pace(clock)

    @contextmanager
    def call(self) -> Iterator[None]:
        """Counts one call while the block runs. Raises TooManyCalls with both numbers."""
        if self.num_calls >= self.max_calls:
            raise TooManyCalls(
                f"{self.num_calls} calls are in progress, at most {self.max_calls} may be",
                retry_after_ms=self._pace.retry_after_ms(1),
                num_calls=self.num_calls,
                max_calls=self.max_calls,
            )
        self.num_calls += 1
        try:
            yield
        finally:
            self.num_calls -= 1
            self._pace.note(1)


class CallGate:
    """The gate of one server. refused: number of calls refused before their handler, by reason."""

    def __init__(self, tokens: NamespaceTokens, permits: CallPermits) -> None:
        self.permits = permits
        self.refused: Counter[str] = Counter()
        self._tokens = tokens

    def passed(
        self, behaviour: Callable[[Request, Context], Awaitable[Response]], request_type: type[Request]
    ) -> Callable[[object, Context], Awaitable[Response]]:
        """A handler that runs ``behaviour`` once all checks have passed. The call counts as in progress until
        it ends. Raises TooManyCalls, Unauthenticated, PermissionDenied, InvalidRequest, DeadlineExceeded."""

        async def handle(_: object, context: Context) -> Response:
            request: Request | None = None
            try:
                with self.permits.call():
                    request = await self._admitted(context, request_type)
                    return await behaviour(request, context)
            except VisionEncoderError as error:
                if request is None:
                    self.refused[error.reason] += 1
                raise

        return handle

    async def _admitted(self, context: Context, request_type: type[Request]) -> Request:
        call = observed.this_call()
        token = bearer_token(call.metadata)
        check_caller(self._tokens, token)
        data = await self._receive(context)
        call.message_bytes = len(data)
        request = parsed(data, request_type)
        namespace = getattr(request, "namespace", None)
        if namespace is not None:
            check_namespace(self._tokens, token, namespace)
        return request

    async def _receive(self, context: Context) -> bytes:
        """Reads the call's only message."""
        try:
            async with asyncio.timeout(RECEIVE_S):
                data = await context.read()
        except TimeoutError:
            raise DeadlineExceeded(f"the request did not arrive within {RECEIVE_S} s") from None
        if not isinstance(data, bytes):
            raise InvalidRequest("the call ended before its request")
        return data


def parsed(data: bytes, request_type: type[Request]) -> Request:
    """Parses a message of at most MAX_FIELDS fields. Raises InvalidRequest."""
    try:
        num_fields = sum(1 for _ in islice(fields(data), MAX_FIELDS + 1))
        if num_fields > MAX_FIELDS:
            raise InvalidRequest(
                f"the message has {num_fields} or more fields, at most {MAX_FIELDS} are read"
            )
        return request_type.FromString(data)
    except (DecodeError, IndexError):
        raise InvalidRequest(
            f"{len(data)} bytes are no {request_type.DESCRIPTOR.full_name}", found_bytes=len(data)
        ) from None


def fields(data: bytes) -> Iterator[int]:
    """The tag of each field of a message, without those of messages inside it. Raises IndexError where the
    message is cut, DecodeError for a field of an unknown kind."""
    position = 0

    def varint() -> int:
        nonlocal position
        value = shift = 0
        while True:
            byte = data[position]
            position += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7
            if shift > 63:
                raise DecodeError("a number has more than ten bytes")

    while position < len(data):
        tag = varint()
        match tag & 7:
            case 0:
                varint()
            case 1:
                position += 8
            case 2:
                length = varint()
                position += length
            case 5:
                position += 4
            case kind:
                raise DecodeError(f"a field has kind {kind}")
        yield tag
