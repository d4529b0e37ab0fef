"""vLLM's answers on their way through the front: whatever becomes of one, its connection is let go."""

from __future__ import annotations

import json
import socket
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import httpx
import pytest

from lm_adapter.engines.vllm_upstream import Answer, Failures
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


def role(index: int) -> bytes:
    choice = {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
    return f"data: {json.dumps({'choices': [choice]})}\n\n".encode()


def text(index: int, content: str = "Once") -> bytes:
    choice = {"index": index, "delta": {"content": content}, "finish_reason": None}
    return f"data: {json.dumps({'choices': [choice]})}\n\n".encode()


ERROR = b'data: {"error": {"message": "Internal server error"}}\n\n'


@pytest.mark.parametrize("num_choices", [1, 2, 5, 300])
@pytest.mark.parametrize("echoed", [False, True])
@pytest.mark.parametrize("cut", [0, 1, 7])
async def test_a_rejection_is_found_behind_the_roles_of_all_choices(
    num_choices: int, echoed: bool, cut: int
) -> None:
    """However the events are cut into chunks; what vLLM echoes of the prompt comes before it too."""
    events = [role(index) for index in range(num_choices)]
    events += [text(index, "and then") for index in range(num_choices) if echoed]
    stream = b"".join([*events, ERROR])
    chunks = [*events, ERROR]
    if cut:
        chunks = [stream[at : at + cut] for at in range(0, len(stream), cut)]
    assert await Answer(Upstream(*chunks)).starts_with_error(num_choices, echoes=echoed)


async def test_no_more_of_a_stream_is_held_back_than_may_come_before_a_rejection() -> None:
    """The first text of an answer goes out when it comes, and so does what only looks like another role."""
    late = httpx.ReadError("read too far")
    for events in (
        [role(0), role(1), role(2), text(0), late],
        [role(0), text(0), late],
        [role(0), role(1), role(2), role(0), late],
        [b"data: [DONE]\n\n", b"data: {\n\n", late],
        [b": a comment\n\n", b"data: [1]\n\n", late],
    ):
        assert not await Answer(Upstream(*events)).starts_with_error(3)


async def test_an_error_in_the_midst_of_an_answer_is_its_own() -> None:
    assert not await Answer(Upstream(role(0), role(1), text(1), ERROR)).starts_with_error(2)


async def test_what_is_no_stream_is_not_looked_into() -> None:
    answer = Answer(Upstream(httpx.ReadError("not read"), content_type="application/json"))
    assert not await answer.starts_with_error()


async def test_a_front_that_ends_leaves_its_successors_socket() -> None:
    """A rolling restart: the next front takes the path over before the last one has ended."""
    with tempfile.TemporaryDirectory(prefix="ve-front-") as folder:
        path = Path(folder) / "failures.sock"
        before, after = Failures(str(path)), Failures(str(path))
        before.open()
        after.open()
        before.close()
        assert path.is_socket()
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as connector:
            connector.sendto(b'{"reply": "r", "reason": "UNKNOWN_KEY"}', str(path))
        failure = await after.take("r")
        assert failure is not None
        assert failure.reason == "UNKNOWN_KEY"
        after.close()
        assert not path.exists()
        after.close()
