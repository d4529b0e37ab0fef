"""Files by HTTP."""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
from typing import Any


class Files(http.server.ThreadingHTTPServer):
    """Answers GET with files by path, and POST and DELETE with nothing. A context manager."""

    daemon_threads = True

    def __init__(self, files: dict[str, bytes] | None = None) -> None:
        self.files = files or {}
        self.requested: list[str] = []
        self.bodies: list[Any] = []
        super().__init__(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05})

    def __enter__(self) -> Files:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()

    @property
    def base(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Files

    def do_GET(self) -> None:
        self.answer(self.server.files.get(self.path))

    def do_POST(self) -> None:
        length = int(self.headers["Content-Length"])
        self.server.bodies.append(json.loads(self.rfile.read(length)))
        self.answer(b"OK")

    do_DELETE = do_POST

    def answer(self, data: bytes | None) -> None:
        self.server.requested.append(self.path)
        self.send_response(404 if data is None else 200)
        self.send_header("Content-Type", "image/png")
        self.send_header("Content-Length", str(len(data or b"")))
        self.end_headers()
        with contextlib.suppress(ConnectionError):
            self.wfile.write(data or b"")

    def log_message(self, *_: object) -> None:
        pass
