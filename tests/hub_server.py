"""A model hub on loopback: the routes and headers that huggingface_hub uses, and faults on request.

Small files are answered by the hub, with git's digest as their ETag. Weights are redirected to a second
server, as to a CDN, with their SHA-256 and size in the redirect.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

RESOLVE = re.compile(r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<name>.+)")
RANGE = re.compile(r"bytes=(\d+)-(\d+)")


@dataclass
class Model:
    """files: content by name. token: is needed for them; gated: to the others the hub says so."""

    files: dict[str, bytes]
    commit: str
    token: str = ""
    gated: bool = False
    announced: dict[str, int] = field(default_factory=dict)
    """Sizes in the headers, where they are not the true ones."""


@dataclass(frozen=True)
class Request:
    server: str  # "hub" or "cdn"
    method: str
    path: str
    range: tuple[int, int] | None
    token: str | None


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, hub: FakeHub, name: str) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.hub, self.name = hub, name

    def handle_error(self, *_: object) -> None:
        """Of clients that have gone."""

    @property
    def url(self) -> str:
        # Names that differ: some versions of the library take one host on two ports for one server.
        return f"http://{'127.0.0.1' if self.name == 'hub' else 'localhost'}:{self.server_port}"


class FakeHub:
    """faults: what the next answers with weights do, in order: see ``Handler.send_weights``. requests: all so
    far. hanging: is set once an answer hangs, until ``go_on`` is."""

    def __init__(self) -> None:
        self.models: dict[str, Model] = {}
        self.faults: list[tuple[str, int]] = []
        self.requests: list[Request] = []
        self.hanging, self.go_on = threading.Event(), threading.Event()
        self.hub, self.cdn = Server(self, "hub"), Server(self, "cdn")

    @property
    def url(self) -> str:
        return self.hub.url

    def add(self, repo: str, folder: Path, **options: object) -> Model:
        """A model with the files of a folder. Its commit is their digest."""
        files = {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
        digest = hashlib.sha1()
        for name, content in files.items():
            digest.update(name.encode() + content)
        self.models[repo] = model = Model(files, digest.hexdigest(), **options)  # type: ignore[arg-type]
        return model

    def fetched(self) -> list[tuple[str, int]]:
        """The files whose weights were asked for, with the bytes of each range."""
        return [
            (request.path.partition("?")[0].rpartition("/")[2], request.range[1] - request.range[0] + 1)
            for request in self.requests
            if request.server == "cdn" and request.range is not None
        ]


@contextlib.contextmanager
def serving() -> Iterator[FakeHub]:
    fake = FakeHub()
    threads = [
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        for server in (fake.hub, fake.cdn)
    ]
    for thread in threads:
        thread.start()
    try:
        yield fake
    finally:
        fake.go_on.set()
        for server in (fake.hub, fake.cdn):
            server.shutdown()
            server.server_close()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        found = RANGE.fullmatch(self.headers.get("Range", ""))
        wanted = (int(found[1]), int(found[2])) if found else None
        token = self.headers.get("Authorization")
        fake = self.server.hub
        fake.requests.append(Request(self.server.name, self.command, self.path, wanted, token))
        parts = RESOLVE.fullmatch(self.path.partition("?")[0])
        if parts is None:
            return self.send(404, {"X-Error-Code": "RepoNotFound"})
        model = fake.models.get(parts["repo"])
        if self.server.name == "cdn":
            assert model is not None
            return self.send_weights(model.files[parts["name"]], wanted)
        if model is None:
            # The hub does not tell strangers whether there is such a model.
            return self.send(401, {"X-Error-Code": "RepoNotFound"})
        if model.token and token != f"Bearer {model.token}":
            code = "GatedRepo" if model.gated else "RepoNotFound"
            return self.send(401 if token is None else 403 if model.gated else 404, {"X-Error-Code": code})
        if unquote(parts["revision"]) not in ("main", model.commit):
            return self.send(404, {"X-Error-Code": "RevisionNotFound"})
        headers = {"X-Repo-Commit": model.commit, "Accept-Ranges": "bytes"}
        if parts["name"] not in model.files:
            return self.send(404, headers | {"X-Error-Code": "EntryNotFound"})
        return self.send_file(model, parts["name"], headers)

    def send_file(self, model: Model, name: str, headers: Mapping[str, str]) -> None:
        content = model.files[name]
        if not name.endswith(".safetensors"):
            etag = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
            return self.send(200, {**headers, "ETag": f'"{etag}"'}, content)
        linked = {
            "X-Linked-ETag": f'"{hashlib.sha256(content).hexdigest()}"',
            "X-Linked-Size": str(model.announced.get(name, len(content))),
            "Location": f"{self.server.hub.cdn.url}{self.path}?Signature=s3cret",
        }
        return self.send(302, {**headers, **linked})

    def send_weights(self, content: bytes, wanted: tuple[int, int] | None) -> None:
        """Faults of a range: ``cut`` ends the connection after so many bytes, ``status`` answers with that
        status, ``whole`` ignores the range, ``flip`` changes the byte at that position, ``hang`` sends
        nothing."""
        kind, amount = self.server.hub.faults.pop(0) if self.server.hub.faults else ("", 0)
        if kind == "status":
            return self.send(amount, {})
        if kind == "hang":
            self.server.hub.hanging.set()
            self.server.hub.go_on.wait(60)
            self.close_connection = True
            return None
        if wanted is None or kind == "whole":
            return self.send(200, {}, content)
        start, last = wanted
        body = bytearray(content[start : last + 1])
        if kind == "flip":
            body[amount] ^= 1
        headers = {"Content-Range": f"bytes {start}-{start + len(body) - 1}/{len(content)}"}
        return self.send(206, headers, bytes(body), cut=amount if kind == "cut" else None)

    def send(
        self, status: int, headers: Mapping[str, str], body: bytes = b"", cut: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:cut])
        if cut is not None:
            self.close_connection = True
