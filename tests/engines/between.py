"""A stop on the way from the front to vLLM: what is done there is done between encode and fetch."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx


class _Server(ThreadingHTTPServer):
    request_queue_size = 64


class Between:
    """A server until ``stop``. bodies: of the requests, in order; before: called in turn, each with one of
    them, before it is passed on."""

    def __init__(self, beyond: str) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.before: list[Callable[[dict[str, Any]], None]] = []
        self._server = _Server(("127.0.0.1", 0), self._handler(beyond))
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def stop(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _handler(self, beyond: str) -> type[BaseHTTPRequestHandler]:
        between = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._pass_on(httpx.get(f"{beyond}{self.path}", timeout=60))

            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers["content-length"]))
                between.bodies.append(json.loads(data))
                if between.before:
                    between.before.pop(0)(between.bodies[-1])
                headers = {"content-type": "application/json"}
                self._pass_on(httpx.post(f"{beyond}{self.path}", content=data, headers=headers, timeout=120))

            def _pass_on(self, response: httpx.Response) -> None:
                self.send_response(response.status_code)
                self.send_header("content-type", response.headers.get("content-type", "text/plain"))
                self.send_header("content-length", str(len(response.content)))
                self.end_headers()
                self.wfile.write(response.content)

            def log_message(self, *_: object) -> None:
                pass

        return Handler
