"""Requests as they come to the front before vLLM: their bytes, within a bound, and what a chat request says.

Owns the bound of all requests in progress together, and the thread that large ones are read on: the event
loop goes on meanwhile, but for single calls into the JSON parser. What a request's images are, and what it
turns into, is ``vllm_rewrite``'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from lm_adapter.engines.vllm_items import KeyedItem
from lm_adapter.engines.vllm_rewrite import (
    ChatImages,
    Choices,
    choices_of,
    images_of,
    rewritten,
    without_images,
)
from lm_adapter.errors import EncoderOverloaded, InvalidRequest

__all__ = ["DEFAULT_HELD_BYTES", "MAX_BODY_BYTES", "Chat", "ChatReader", "Held", "Room", "held_body"]

MAX_BODY_BYTES = 64 << 20
DEFAULT_HELD_BYTES = 1 << 30
OFF_LOOP_BYTES = 1 << 18
"""A request of this length takes a millisecond or two to be read."""
AGAIN_AFTER_MS = 1000

ResultT = TypeVar("ResultT")


class Room:
    """Bytes of requests in progress, all together. A request's count until vLLM begins its answer, since its
    images may have to be sent anew until then."""

    def __init__(self, max_bytes: int = DEFAULT_HELD_BYTES) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0

    def check(self, num_bytes: int) -> None:
        """Raises EncoderOverloaded where so many more do not fit now."""
        if self.num_bytes + num_bytes > self.max_bytes:
            raise EncoderOverloaded(
                f"requests in progress hold {self.num_bytes} of {self.max_bytes} bytes, which leaves no room "
                f"for {num_bytes} more",
                retry_after_ms=AGAIN_AFTER_MS,
            )

    def take(self, num_bytes: int) -> None:
        """Raises as ``check``; then nothing is taken."""
        self.check(num_bytes)
        self.num_bytes += num_bytes

    def give(self, num_bytes: int) -> None:
        self.num_bytes -= num_bytes


class Held:
    """A request's bytes, until they have been read."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def taken(self) -> bytes:
        """Once."""
        data, self._data = self._data, b""
        return data


@contextlib.asynccontextmanager
async def held_body(request: Any, room: Room) -> AsyncIterator[Held]:
    """What a request's body has; its room is kept until the end. Raises InvalidRequest as soon as there is
    too much of it, and EncoderOverloaded as soon as it does not fit beside the others: at once where it says
    how long it is. A length that was only announced takes no room from anybody."""
    taken = 0
    try:
        announced = request.headers.get("content-length", "")[:20]
        if announced.isdecimal():
            _check_length(int(announced))
            room.check(int(announced))
        chunks: list[bytes] = []
        async for chunk in request.stream():
            _check_length(taken + len(chunk))
            room.take(len(chunk))
            taken += len(chunk)
            chunks.append(chunk)
        held = Held(b"".join(chunks))
        del chunks
        yield held
    finally:
        room.give(taken)


def _check_length(num_bytes: int) -> None:
    if num_bytes > MAX_BODY_BYTES:
        raise InvalidRequest(f"the request has more than {MAX_BODY_BYTES} bytes")


@dataclass(frozen=True)
class Chat:
    """A chat request. body: without its images, where it has any; choices: that it asks for."""

    body: dict[str, Any]
    images: ChatImages
    choices: Choices
    is_large: bool


class ChatReader:
    """Reads chat requests and writes vLLM's, one large one at a time: more would only share the
    interpreter, and each takes several times its length while it is read."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def read(self, data: bytes) -> Chat:
        """Raises InvalidRequest."""
        return await self._run(lambda: _chat_of(data), is_large=len(data) >= OFF_LOOP_BYTES)

    async def write(self, chat: Chat, rows: Sequence[KeyedItem], family: str, reply: str) -> bytes:
        """The request that vLLM gets, see ``rewritten``. Raises InvalidRequest."""

        def written() -> bytes:
            return json.dumps(rewritten(chat.body, chat.images, rows, family, reply)).encode()

        return await self._run(written, is_large=chat.is_large)

    async def _run(self, work: Callable[[], ResultT], *, is_large: bool) -> ResultT:
        try:
            if not is_large:
                return work()
            async with self._turn:
                return await asyncio.to_thread(work)
        except RecursionError as error:
            raise InvalidRequest("the request is nested too deeply to be read") from error


def _chat_of(data: bytes) -> Chat:
    try:
        body = json.loads(data)
    except ValueError as error:
        raise InvalidRequest(f"the request is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise InvalidRequest(f"the request is a {type(body).__name__}, needs an object")
    images = images_of(body)
    is_large = len(data) >= OFF_LOOP_BYTES
    return Chat(without_images(body, images), images, choices_of(body), is_large)
