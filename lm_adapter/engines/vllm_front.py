"""The HTTP front before a vLLM that consumes image rows: ordinary OpenAI chat requests in, its answers out.

Owns the server and the two conversations behind it: ``Prefetch`` with the encoder as soon as a request is
read, so that images are encoded while vLLM tokenises and queues; and vLLM's answer, passed on as it comes.
Why a request was rejected reaches it from the connector as a datagram, since vLLM itself answers "Internal
server error"; with rows that were lost it is sent anew once. What a request turns into is ``vllm_rewrite``'s.
Needs fastapi, httpx and uvicorn, imported where it runs.

    python -m lm_adapter.engines.vllm_front --vllm http://127.0.0.1:8000 --encoder 127.0.0.1:50051 \\
        --listen 127.0.0.1:8080 --failures-path /run/vision-encoder/failures.sock
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import fields
from typing import Any

from lm_adapter.channel import ClientTls
from lm_adapter.client import AsyncVisionEncoderClient
from lm_adapter.engines.vllm_front_images import FrontImages
from lm_adapter.engines.vllm_front_requests import (
    DEFAULT_HELD_BYTES,
    MAX_BODY_BYTES,
    ChatReader,
    Held,
    Room,
    held_body,
)
from lm_adapter.engines.vllm_rewrite import ChatImages, Choices, Failure, failure_of
from lm_adapter.engines.vllm_settings import Access
from lm_adapter.engines.vllm_upstream import Answer, Failures, vllm_away
from lm_adapter.errors import EncoderError, InvalidRequest, MissingDependency

__all__ = ["Front", "create_app", "main"]

RETRY_S = 3.0
"""How long an encoder that is away is asked again."""
CLIENT_LEFT = 499
DROPPED_HEADERS = {"host", "content-length", "connection", "transfer-encoding", "accept-encoding"}


class Front:
    """One vLLM server and its encoder. http: an ``httpx.AsyncClient`` with vLLM's base URL. room: for
    requests in progress."""

    def __init__(
        self,
        client: AsyncVisionEncoderClient,
        http: Any,
        failures: Failures | None,
        *,
        timeout_s: float,
        room: Room | None = None,
    ) -> None:
        self._images = FrontImages(client, timeout_s=timeout_s)
        self._reader = ChatReader()
        self._room = room or Room()
        self._http = http
        self._failures = failures

    async def chat(self, request: Any) -> Any:
        """POST /v1/chat/completions."""
        return await _answered(request, self._room, self._chat)

    async def other(self, request: Any) -> Any:
        """Everything else is vLLM's."""
        return await _answered(request, self._room, self._other)

    async def _other(self, request: Any, held: Held) -> Answer:
        return await self._ask(request, held.taken())

    async def _chat(self, request: Any, held: Held) -> Answer | Failure:
        data = held.taken()
        chat = await self._reader.read(data)
        if not chat.images.items:
            return await self._ask(request, data)
        del data
        images = chat.images
        for is_last in (False, True):
            reply = secrets.token_hex(12)
            try:
                rows, family = await self._images.keyed(images, again=is_last, wait_s=RETRY_S)
            except EncoderError as error:
                if is_last or error.reason != "UNKNOWN_KEY" or not self._may_go_again(images):
                    raise
                continue
            sent = await self._reader.write(chat, rows, family, reply)
            answer = await self._ask(request, sent)
            try:
                failure = await self._failure_in(answer, reply, chat.choices)
            except BaseException:
                await answer.close()
                raise
            if failure is None:
                return answer
            await answer.close()
            if is_last or not failure.may_help_again or not self._may_go_again(images):
                return failure
        raise AssertionError("the last attempt has an answer")

    def _may_go_again(self, images: ChatImages) -> bool:
        return self._images.may_ask_again(len(images.items))

    async def _ask(self, request: Any, data: bytes) -> Answer:
        headers = {name: value for name, value in request.headers.items() if name not in DROPPED_HEADERS}
        outgoing = self._http.build_request(
            request.method, request.url.path, params=request.query_params, headers=headers, content=data
        )
        with vllm_away():
            return Answer(await self._http.send(outgoing, stream=True))

    async def _failure_in(self, answer: Answer, reply: str, choices: Choices) -> Failure | None:
        """The account of a request that vLLM rejected, at its beginning; None for any other answer."""
        if self._failures is None:
            return None
        is_rejection = answer.status >= 500 or await answer.starts_with_error(
            choices.number, echoes=choices.are_echoed
        )
        if not is_rejection:
            return None
        return await self._failures.take(reply)


async def _answered(
    request: Any, room: Room, work: Callable[[Any, Held], Awaitable[Answer | Failure]]
) -> Any:
    """The response to a request. A caller that leaves before there is one takes the work along."""
    from fastapi.responses import Response

    try:
        async with held_body(request, room) as held:
            working = asyncio.ensure_future(work(request, held))
            leaving = asyncio.ensure_future(_until_left(request))
            try:
                await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
                if not working.done():
                    return Response(status_code=CLIENT_LEFT)
                answer = working.result()
            finally:
                working.cancel()
                leaving.cancel()
                await asyncio.wait({working, leaving})
    except EncoderError as error:
        return _refused(failure_of(error))
    return answer.response() if isinstance(answer, Answer) else _refused(answer)


async def _until_left(request: Any) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _refused(failure: Failure) -> Any:
    from fastapi.responses import JSONResponse

    return JSONResponse(failure.body(), failure.status, failure.headers())


def _room(max_held_bytes: int) -> Room:
    if max_held_bytes < MAX_BODY_BYTES:
        raise InvalidRequest(f"max_held_bytes is {max_held_bytes}, a request may have {MAX_BODY_BYTES}")
    return Room(max_held_bytes)


def create_app(
    *,
    vllm: str,
    encoder: str,
    failures_path: str = "",
    namespace: str = "",
    token_file: str = "",
    tls: ClientTls | None = None,
    timeout_s: float = 30.0,
    max_held_bytes: int = DEFAULT_HELD_BYTES,
) -> Any:
    """The FastAPI application. vllm: base URL; encoder: its host:port; failures_path: the
    connector's setting of the same name; tls: to the encoder, its files are read when the application starts;
    max_held_bytes: of requests in progress. Raises
    MissingDependency, InvalidRequest."""
    try:
        import httpx
        from fastapi import FastAPI
    except ImportError as error:
        raise MissingDependency(error.name or "fastapi", "lm_adapter.engines.vllm_front") from error

    room = _room(max_held_bytes)
    held: dict[str, Front] = {}

    @contextlib.asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        failures = Failures(failures_path) if failures_path else None
        if failures is not None:
            failures.open()
        # An answer takes as long as it takes; connections are vLLM's to refuse.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        http = httpx.AsyncClient(base_url=vllm, timeout=None, limits=limits)  # noqa: S113
        client = AsyncVisionEncoderClient(
            encoder,
            namespace=namespace,
            token_file=token_file,
            tls=tls,
            timeout_s=timeout_s,
            transports=("inline",),
        )
        held["front"] = Front(client, http, failures, timeout_s=timeout_s, room=room)
        try:
            yield
        finally:
            await client.close()
            await http.aclose()
            if failures is not None:
                failures.close()

    async def chat(request: Any) -> Any:
        return await held["front"].chat(request)

    async def other(request: Any) -> Any:
        return await held["front"].other(request)

    app = FastAPI(
        title="vision encoder front for vLLM",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
    )
    app.add_route("/v1/chat/completions", chat, methods=["POST"])
    app.add_route("/{path:path}", other, methods=["GET", "POST", "PUT", "DELETE"])
    return app


ENCODER_HELP = "host:port of the encoder"
ACCESS_HELP = {
    "token_file": "a file whose only word is the namespace's token",
    "tls_ca": "PEM authorities of the encoder's certificate; this or the next two make it TLS",
    "tls_cert": "PEM certificate of this front, where the encoder asks for one",
    "tls_key": "PEM key of --tls-cert",
    "tls_server_name": "what the encoder's certificate is made out to; default: the host of --encoder",
}

HELD_HELP = "of all requests in progress together; those that do not fit are told when to come again"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m lm_adapter.engines.vllm_front", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--vllm", required=True, help="base URL of the vLLM server")
    parser.add_argument("--encoder", required=True, help=ENCODER_HELP)
    parser.add_argument("--listen", default="127.0.0.1:8080")
    parser.add_argument("--failures-path", default="", help="the connector's failures_path")
    parser.add_argument("--namespace", default="")
    for name, text in ACCESS_HELP.items():
        parser.add_argument(_option(name), default="", help=text)
    parser.add_argument("--timeout-s", type=float, default=30.0)
    parser.add_argument("--max-held-bytes", type=int, default=DEFAULT_HELD_BYTES, help=HELD_HELP)
    options = parser.parse_args(arguments)
    import uvicorn

    try:
        access = Access(**{field.name: getattr(options, field.name) for field in fields(Access)})
        tls = access.client_tls()
        _room(options.max_held_bytes)
    except InvalidRequest as error:
        parser.error(error.message)
    host, _, port = options.listen.rpartition(":")
    app = create_app(
        vllm=options.vllm,
        encoder=options.encoder,
        failures_path=options.failures_path,
        namespace=options.namespace,
        token_file=options.token_file,
        tls=tls,
        timeout_s=options.timeout_s,
        max_held_bytes=options.max_held_bytes,
    )
    uvicorn.run(app, host=host, port=int(port), log_level="warning")


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


if __name__ == "__main__":
    main()
