"""vLLM's own split as one server of ``epd.py``: an instance that encodes, and one with the language model.

Owns what a proxy does between them, as in vLLM's example (examples/disaggregated/disaggregated_encoder): all
images of a request and each clip go to the first instance without text; the second gets the request with
what the first says of each file in the file's place, so that it decodes and encodes none.

    python -m bench.epd_proxy PORT URL_OF_THE_ENCODER URL_OF_THE_SERVER
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import sys
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

EMBEDS = {"image_url": "image_embeds", "video_url": "video_embeds"}
"""The parts of a message that are files, and what stands for each of them afterwards."""
CHAT = "/v1/chat/completions"
LARGEST_REQUEST = 1 << 30


class NotEncoded(Exception):
    """The first instance failed, or does not have the rows of a file."""


class Proxy:
    """Handles requests while it is entered."""

    def __init__(self, encoder: str, server: str) -> None:
        """URLs of the two instances."""
        self._encoder, self._server = encoder, server

    async def enter(self, _: web.Application) -> AsyncIterator[None]:
        # vLLM closes a connection that was idle for five seconds.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2)
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as self._client:
            yield

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = msgspec.json.decode(await request.read())
        try:
            await self._encode(body)
        except (NotEncoded, aiohttp.ClientError) as error:
            return web.json_response({"error": str(error) or repr(error)}, status=502)
        async with self._post(self._server, body) as answer:
            response = web.StreamResponse(
                status=answer.status, headers={"content-type": answer.headers["content-type"]}
            )
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
        return response

    async def _encode(self, body: dict[str, Any]) -> None:
        """Changes the request into one without files. Raises NotEncoded."""
        contents = [one["content"] for one in body["messages"] if isinstance(one["content"], list)]
        files = [part for part in itertools.chain(*contents) if part["type"] in EMBEDS]
        for part in files:
            # By this name the instances agree on a file; the same file has the same one.
            part["uuid"] = hashlib.sha256(part[part["type"]]["url"].encode()).hexdigest()
        clips = [[part] for part in files if part["type"] == "video_url"]
        images = [part for part in files if part["type"] == "image_url"]
        groups = [group for group in (images, *clips) if group]
        answers = await asyncio.gather(*(self._ask(body["model"], group) for group in groups))
        for group, rows in zip(groups, answers, strict=True):
            found = {index: one["metadata"] for one in rows.values() for index in one["item_indices"]}
            for index, part in enumerate(group):
                if not found.get(index):
                    known = list(rows.values())
                    raise NotEncoded(f"the encoder has no rows of file {index + 1} of {len(group)}: {known}")
                kind = part.pop("type")
                del part[kind]
                part |= {"type": EMBEDS[kind], EMBEDS[kind]: found[index]}
        if files:
            body["ec_transfer_params"] = {name: one for rows in answers for name, one in rows.items()}

    async def _ask(self, model: str, files: list[dict[str, Any]]) -> dict[str, Any]:
        """Of each file, under the name of its rows, where they are and the metadata of its place."""
        body = {"model": model, "messages": [{"role": "user", "content": files}]}
        async with self._post(self._encoder, body) as answer:
            if answer.status != 200:
                raise NotEncoded((await answer.text())[:300])
            return (await answer.json()).get("ec_transfer_params") or {}

    def _post(self, url: str, body: dict[str, Any]) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        # As in vLLM's proxy: json would take 9 of the 12 ms that four large images spend here.
        headers = {"content-type": "application/json"}
        return self._client.post(f"{url}{CHAT}", data=msgspec.json.encode(body), headers=headers)


def application(encoder: str, server: str) -> web.Application:
    """Answers at /health and to chat requests."""

    async def health(_: web.Request) -> web.Response:
        return web.Response()

    proxy, made = Proxy(encoder, server), web.Application(client_max_size=LARGEST_REQUEST)
    made.cleanup_ctx.append(proxy.enter)
    made.add_routes([web.get("/health", health), web.post(CHAT, proxy.chat)])
    return made


if __name__ == "__main__":
    port, *urls = sys.argv[1:]
    web.run_app(application(*urls), host="127.0.0.1", port=int(port), print=None)
