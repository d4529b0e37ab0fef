"""The HTTP front before a vLLM that consumes image rows: ordinary OpenAI chat requests in, its answers out.

Owns the server and the two conversations behind it: ``Prefetch`` with the encoder as soon as a request is
read, so that images are encoded while vLLM tokenises and queues; and vLLM's answer, passed on as it comes.
Why a request was rejected reaches it from the connector as a datagram, since vLLM itself answers "Internal
server error". What a request turns into is ``vllm_rewrite``'s. Needs fastapi, httpx and uvicorn, imported
where it runs.

    python -m lm_adapter.engines.vllm_front --vllm http://127.0.0.1:8000 --encoder 127.0.0.1:50051 \\
        --listen 127.0.0.1:8080 --failures-path /run/vision-encoder/failures.sock
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import secrets
import socket
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from lm_adapter import AsyncVisionEncoderClient, ItemFailed
from lm_adapter.engines.vllm_fetch import RECONNECT
from lm_adapter.engines.vllm_rewrite import ChatImages, Failure, failure_of, images_of, rewritten
from lm_adapter.errors import EncoderError, EncoderUnavailable, InvalidRequest, MissingDependency
from lm_adapter.types import Grid, KeyState, PrefetchStatus

__all__ = ["Failures", "Front", "create_app", "main"]

MAX_ACCOUNT_BYTES = 1 << 14
MAX_ACCOUNTS = 4096
MAX_BODY_BYTES = 64 << 20
ACCOUNT_POLL_S = 0.01
ACCOUNT_POLLS = 20
GRID_POLL_S = 0.01
RETRY_S = 3.0
"""How long an encoder that is away is asked again."""
RETRY_POLL_S = 0.1
DROPPED_HEADERS = {"host", "content-length", "connection", "transfer-encoding", "accept-encoding"}


class Failures:
    """Accounts of rejected requests, by reply name: a datagram socket that the connector writes to."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._accounts: OrderedDict[str, Mapping[str, Any]] = OrderedDict()
        self._socket: socket.socket | None = None

    def open(self) -> None:
        """On the running loop. A socket file that a former front left is replaced."""
        Path(self.path).unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.bind(self.path)
        Path(self.path).chmod(0o600)
        asyncio.get_running_loop().add_reader(self._socket.fileno(), self._read)

    def close(self) -> None:
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket.fileno())
            self._socket.close()
            Path(self.path).unlink(missing_ok=True)

    def _read(self) -> None:
        assert self._socket is not None
        with contextlib.suppress(BlockingIOError):
            while True:
                data = self._socket.recv(MAX_ACCOUNT_BYTES)
                with contextlib.suppress(ValueError, AttributeError):
                    account = json.loads(data)
                    self._accounts[str(account.get("reply"))] = account
                    if len(self._accounts) > MAX_ACCOUNTS:
                        self._accounts.popitem(last=False)

    async def take(self, reply: str) -> Failure | None:
        """The account of this request, sent before vLLM answers; None where there is none."""
        for _ in range(ACCOUNT_POLLS):
            if reply in self._accounts:
                break
            await asyncio.sleep(ACCOUNT_POLL_S)
        account = self._accounts.pop(reply, None)
        return Failure.of_account(account) if account is not None else None


class Front:
    """One vLLM server and one encoder. http: an ``httpx.AsyncClient`` with vLLM's base URL."""

    def __init__(
        self, client: AsyncVisionEncoderClient, http: Any, failures: Failures | None, *, timeout_s: float
    ) -> None:
        self._client = client
        self._http = http
        self._failures = failures
        self._timeout_s = timeout_s

    async def chat(self, request: Any) -> Any:
        """POST /v1/chat/completions."""
        from fastapi.responses import JSONResponse

        try:
            body = await self._body(request)
            images = images_of(body)
        except EncoderError as error:
            return _refused(failure_of(error))
        if not images.items:
            return await self._passed_on(request, json.dumps(body).encode())
        failure = Failure(502, "INTERNAL", "image rows could not be had")
        for attempt in range(2):
            reply = secrets.token_hex(12)
            try:
                rows, family = await self._encode(images)
            except EncoderError as error:
                return _refused(failure_of(error))
            answer = await self._ask(request, rewritten(body, images, rows, family, reply))
            found = await self._failure_in(answer, reply)
            if found is None:
                return answer.response()
            await answer.close()
            failure = found
            if not failure.may_help_again or attempt == 1:
                break
        return JSONResponse(failure.body(), failure.status, failure.headers())

    async def other(self, request: Any) -> Any:
        """Everything else is vLLM's."""
        return await self._passed_on(request, await request.body())

    async def _body(self, request: Any) -> dict[str, Any]:
        data = await request.body()
        if len(data) > MAX_BODY_BYTES:
            raise InvalidRequest(f"the request has {len(data)} bytes, {MAX_BODY_BYTES} are taken")
        try:
            body = json.loads(data)
        except ValueError as error:
            raise InvalidRequest(f"the request is no JSON: {error}") from error
        if not isinstance(body, dict):
            raise InvalidRequest(f"the request is a {type(body).__name__}, needs an object")
        return body

    async def _encode(self, images: ChatImages) -> tuple[list[tuple[bytes, Grid]], str]:
        """Key and grid of each image; encodes run on. Raises EncoderError of the first that failed."""
        statuses, family = await self._prefetch(images)
        rows = []
        for status in statuses:
            if isinstance(status, ItemFailed):
                raise status
            grid = status.grid_thw or await self._grid_of(status.key)
            rows.append((status.key, grid))
        return rows, family

    async def _prefetch(self, images: ChatImages) -> tuple[list[PrefetchStatus | ItemFailed], str]:
        """What the encoder says of the images. One that restarts is waited for."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + min(RETRY_S, self._timeout_s)
        while True:
            try:
                info = await self._client.info(timeout_s=self._timeout_s)
                statuses = await self._client.prefetch(images.items, timeout_s=self._timeout_s)
                return statuses, info.model().family
            except EncoderUnavailable:
                if loop.time() >= deadline:
                    raise
            await asyncio.sleep(RETRY_POLL_S)

    async def _grid_of(self, key: bytes) -> Grid:
        """Of an image whose header does not tell: known when it is encoded."""
        async with asyncio.timeout(self._timeout_s):
            while True:
                (status,) = await self._client.lookup([key])
                if status.grid_thw is not None:
                    return status.grid_thw
                if status.state is KeyState.ABSENT:
                    raise ItemFailed("the image could not be encoded", reason="UNKNOWN_KEY", status=5)
                await asyncio.sleep(GRID_POLL_S)

    async def _passed_on(self, request: Any, content: bytes) -> Any:
        answer = await self._ask(request, content)
        return answer.response() if isinstance(answer, Answer) else answer

    async def _ask(self, request: Any, content: bytes | dict[str, Any]) -> Answer:
        headers = {name: value for name, value in request.headers.items() if name not in DROPPED_HEADERS}
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        outgoing = self._http.build_request(
            request.method,
            request.url.path,
            params=request.query_params,
            headers=headers,
            content=data,
        )
        return Answer(await self._http.send(outgoing, stream=True))

    async def _failure_in(self, answer: Answer, reply: str) -> Failure | None:
        """The account of a request that vLLM rejected, at its beginning; None for any other answer."""
        if self._failures is None or not (answer.status >= 500 or await answer.starts_with_error()):
            return None
        return await self._failures.take(reply)


class Answer:
    """vLLM's answer on its way. A streamed one is looked at up to its second event, the first with text."""

    def __init__(self, upstream: Any) -> None:
        self.status: int = upstream.status_code
        self._upstream = upstream
        self._chunks: AsyncIterator[bytes] = upstream.aiter_raw()
        self._first = b""

    async def starts_with_error(self) -> bool:
        if "text/event-stream" not in self._upstream.headers.get("content-type", ""):
            return False
        # vLLM names the role before it looks at what became of the request.
        while self._first.count(b"\n\n") < 2:
            try:
                self._first += await anext(self._chunks)
            except StopAsyncIteration:
                break
        return any(event.startswith(b'data: {"error"') for event in self._first.split(b"\n\n"))

    def response(self) -> Any:
        from fastapi.responses import StreamingResponse

        kept = {"content-type", "content-encoding", "x-request-id", "retry-after"}
        headers = {name: value for name, value in self._upstream.headers.items() if name in kept}
        return StreamingResponse(self._stream(), self.status, headers)

    async def close(self) -> None:
        await self._upstream.aclose()

    async def _stream(self) -> AsyncIterator[bytes]:
        try:
            if self._first:
                yield self._first
            async for chunk in self._chunks:
                yield chunk
        finally:
            await self._upstream.aclose()


def _refused(failure: Failure) -> Any:
    from fastapi.responses import JSONResponse

    return JSONResponse(failure.body(), failure.status, failure.headers())


def create_app(
    *,
    vllm: str,
    encoder: str,
    failures_path: str = "",
    namespace: str = "",
    token: str = "",
    timeout_s: float = 30.0,
) -> Any:
    """The FastAPI application. vllm: base URL; encoder: gRPC target; failures_path: the connector's setting
    of the same name. Raises MissingDependency."""
    try:
        import httpx
        from fastapi import FastAPI
    except ImportError as error:
        raise MissingDependency(error.name or "fastapi", "lm_adapter.engines.vllm_front") from error

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
            token=token,
            timeout_s=timeout_s,
            transports=("inline",),
            options=RECONNECT,
        )
        held["front"] = Front(client, http, failures, timeout_s=timeout_s)
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


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m lm_adapter.engines.vllm_front", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--vllm", required=True, help="base URL of the vLLM server")
    parser.add_argument("--encoder", required=True, help="gRPC target of the encoder")
    parser.add_argument("--listen", default="127.0.0.1:8080")
    parser.add_argument("--failures-path", default="", help="the connector's failures_path")
    parser.add_argument("--namespace", default="")
    parser.add_argument("--token-file", default="", help="a file with the namespace's token")
    parser.add_argument("--timeout-s", type=float, default=30.0)
    options = parser.parse_args(arguments)
    import uvicorn

    host, _, port = options.listen.rpartition(":")
    token = Path(options.token_file).read_text().strip() if options.token_file else ""
    app = create_app(
        vllm=options.vllm,
        encoder=options.encoder,
        failures_path=options.failures_path,
        namespace=options.namespace,
        token=token,
        timeout_s=options.timeout_s,
    )
    uvicorn.run(app, host=host, port=int(port), log_level="warning")


if __name__ == "__main__":
    main()
