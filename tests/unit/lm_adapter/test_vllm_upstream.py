"""vLLM's answers on their way through the front: whatever becomes of one, its connection is let go."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import anyio
import anyio.lowlevel
import httpx
import pytest

from lm_adapter.engines.vllm_upstream import Answer
from lm_adapter.errors import EncoderUnavailable

pytestmark = pytest.mark.anyio

SCOPE = {"type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "method": "GET", "path": "/"}


class Upstream:
    """As much of httpx's response as an answer reads."""

    def __init__(self, *chunks: bytes | Exception, content_type: str = "text/event-stream") -> None:
        self.status_code = 200
        self.headers = {"content-type": content_type}
        self.chunks = chunks
        self.num_closed = 0

    async def aiter_raw(self) -> AsyncIterator[bytes]:
        for chunk in self.chunks:
            if isinstance(chunk, Exception):
                raise chunk
            yield chunk

    async def aclose(self) -> None:
        self.num_closed += 1


async def forever() -> Any:
    await anyio.sleep_forever()


async def left() -> Any:
    return {"type": "http.disconnect"}


async def test_an_answer_is_passed_on_and_closed() -> None:
    upstream, sent = Upstream(b"data: 1\n\n", b"data: 2\n\n", b"data: 3\n\n"), []

    async def send(message: Any) -> None:
        sent.append(message)

    answer = Answer(upstream)
    assert not await answer.starts_with_error()
    await answer.response()(SCOPE, forever, send)
    assert b"".join(message.get("body", b"") for message in sent) == b"".join(upstream.chunks)  # type: ignore[arg-type]
    assert upstream.num_closed == 1


async def test_an_answer_whose_caller_left_before_it_began_is_closed() -> None:
    """vLLM would write to nobody, and its connection stay taken."""
    upstream, sent = Upstream(b"data: 1\n\n"), []

    async def send(message: Any) -> None:
        await anyio.lowlevel.checkpoint()
        sent.append(message)

    await Answer(upstream).response()(SCOPE, left, send)
    assert sent == []
    assert upstream.num_closed == 1


async def test_an_answer_whose_caller_cannot_be_written_to_is_closed() -> None:
    upstream = Upstream(b"data: 1\n\n")

    async def send(message: Any) -> None:
        raise RuntimeError("the connection is gone")

    with pytest.raises(BaseException, match=r"the connection is gone|unhandled errors"):
        await Answer(upstream).response()(SCOPE, forever, send)
    assert upstream.num_closed == 1


async def test_a_stream_that_breaks_off_before_its_first_event_says_so() -> None:
    answer = Answer(Upstream(b"data: 1\n\n", httpx.ReadError("reset")))
    with pytest.raises(EncoderUnavailable, match="vLLM does not answer: ReadError: reset"):
        await answer.starts_with_error()


async def test_what_is_no_stream_is_not_looked_into() -> None:
    answer = Answer(Upstream(httpx.ReadError("not read"), content_type="application/json"))
    assert not await answer.starts_with_error()
