"""The init container that fetches weights, against a server with faults: cuts, errors, redirects, hangs."""

from __future__ import annotations

import hashlib
import importlib.util
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.chart import CHART

PROGRAM = CHART / "files" / "fetch_weights.py"
SPEC = importlib.util.spec_from_file_location("fetch_weights", PROGRAM)
assert SPEC is not None
assert SPEC.loader is not None
fetch_weights = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(fetch_weights)
FetchFailed = fetch_weights.FetchFailed


class Server(ThreadingHTTPServer):
    """Files by path. ``next`` holds faults of the coming requests: a status, a redirect, a cut, a hang."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.next: list[tuple[str, Any]] = []
        self.seen: list[tuple[str, str | None, str | None]] = []
        self.hanging, self.go_on = threading.Event(), threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.0"
    server: Server

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        wanted = self.headers.get("Range")
        self.server.seen.append((self.path, wanted, self.headers.get("Authorization")))
        nothing: tuple[str, Any] = ("", None)
        kind, fault = self.server.next.pop(0) if self.server.next else nothing
        if kind == "hang":
            self.server.hanging.set()
            self.server.go_on.wait(60)
            return
        if kind == "nonsense":
            self.wfile.write(fault)
            return
        if kind == "redirect":
            self.send_response(302)
            self.send_header("Location", fault)
            self.end_headers()
            return
        content = self.server.files.get(self.path)
        if content is None or kind == "status":
            self.send_error(404 if content is None else fault)
            return
        start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted else 0
        if start >= len(content) > 0:
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        self.wfile.write(content[start : start + fault if kind == "cut" else None])


@pytest.fixture
def server() -> Iterator[Server]:
    found = Server()
    thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield found
    found.shutdown()
    found.server_close()
    thread.join()


@pytest.fixture
def files(server: Server) -> dict[str, bytes]:
    """A checkpoint of random bytes, with a folder in it."""
    given = {
        name: random.randbytes(random.randrange(5_000, 50_000)) for name in ("config.json", "a/b.safetensors")
    }
    server.files = {f"/c/{name}": content for name, content in given.items()}
    return given


def sums_of(files: dict[str, bytes]) -> dict[str, str]:
    return {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}


def fetch(server: Server, files: dict[str, bytes], folder: Path, **more: Any) -> tuple[int, list[float]]:
    pauses: list[float] = []
    moved = fetch_weights.fetch_all(f"{server.url}/c", sums_of(files), folder, pause=pauses.append, **more)
    return moved, pauses


def test_files_are_fetched_once(server: Server, files: dict[str, bytes], tmp_path: Path) -> None:
    assert fetch(server, files, tmp_path) == (sum(map(len, files.values())), [])
    for name, content in files.items():
        assert (tmp_path / name).read_bytes() == content
    assert fetch(server, files, tmp_path) == (0, [])
    assert len(server.seen) == len(files)
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == {"config.json", "b.safetensors"}


def test_a_cut_download_resumes_where_it_ended(
    server: Server, files: dict[str, bytes], tmp_path: Path
) -> None:
    cut = random.randrange(1, 4_000)
    server.next = [("cut", cut), ("status", 503), ("nonsense", b"SMTP ready\r\n")]
    moved, pauses = fetch(server, files, tmp_path)
    assert (tmp_path / "config.json").read_bytes() == files["config.json"]
    assert moved == sum(map(len, files.values())) - cut
    assert [wanted for _, wanted, _ in server.seen[:4]] == [None, *[f"bytes={cut}-"] * 3]
    assert pauses == [2.0, 4.0, 8.0]


def test_a_wrong_digest_is_refused_and_leaves_nothing(
    server: Server, files: dict[str, bytes], tmp_path: Path
) -> None:
    sent = bytearray(files["config.json"])
    sent[-1] ^= 1
    server.files["/c/config.json"] = bytes(sent)
    with pytest.raises(FetchFailed, match=r"config\.json has SHA-256 .* SHA256SUMS says"):
        fetch(server, files, tmp_path)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize(("status", "tries"), [(404, 1), (403, 1), (500, 3), (429, 3)])
def test_only_transient_errors_are_retried(
    server: Server, files: dict[str, bytes], tmp_path: Path, status: int, tries: int
) -> None:
    server.next = [("status", status)] * 3
    with pytest.raises(FetchFailed, match=rf"HTTP Error {status}.*attempt {tries} of 3"):
        fetch(server, files, tmp_path, attempts=3)
    assert len(server.seen) == tries


def test_the_token_goes_to_its_host_alone(server: Server, files: dict[str, bytes], tmp_path: Path) -> None:
    elsewhere = Server()
    elsewhere.files = server.files
    thread = threading.Thread(target=elsewhere.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        server.next = [("redirect", f"{elsewhere.url}/c/config.json")]
        fetch(server, files, tmp_path, token="sesame")
    finally:
        elsewhere.shutdown()
        elsewhere.server_close()
        thread.join()
    assert [token for _, _, token in server.seen] == ["Bearer sesame"] * 2
    assert [token for _, _, token in elsewhere.seen] == [None]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("# only words\n", "names no file"),
        ("abc  config.json", "line 1 is no SHA-256"),
        (f"{64 * 'a'}  ../config.json", "leads out of the folder"),
        (f"{64 * 'a'}  /config.json", "leads out of the folder"),
        (f"{64 * 'a'}  a\n{64 * 'b'} *a", "line 2: 'a' is listed twice"),
    ],
)
def test_malformed_checksum_files_are_refused(line: str, message: str) -> None:
    with pytest.raises(FetchFailed, match=message):
        fetch_weights.read_sums(line)


@pytest.mark.parametrize(
    ("url", "token", "message"),
    [
        ("https://w/c", "sesame open", "the token has white space"),
        ("https://me:sesame@w.example.com/c", "", "the URL has a"),
        ("https://w.example.com/c?sig=sesame", "", "the URL has a"),
        ("ftp://w/c", "", "is no http"),
        ("file:///etc", "", "is no http"),
    ],
)
def test_addresses_and_tokens_are_checked_and_secrets_not_repeated(
    url: str, token: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(FetchFailed, match=message) as raised:
        fetch_weights.fetch_all(url, {"a": 64 * "0"}, tmp_path, token=token)
    assert "sesame" not in str(raised.value)


def test_a_full_disk_fails_at_once(server: Server, files: dict[str, bytes], tmp_path: Path) -> None:
    (tmp_path / "config.json.partial").symlink_to("/dev/full")
    with pytest.raises(FetchFailed, match=r"config\.json: .*No space left.*the volume is too small"):
        fetch(server, files, tmp_path)
    assert len(server.seen) == 1


def program(server: Server, files: dict[str, bytes], folder: Path) -> list[str]:
    sums = folder / "SHA256SUMS"
    sums.write_text("".join(f"{digest}  {name}\n" for name, digest in sums_of(files).items()))
    return [sys.executable, str(PROGRAM), "--sums", str(sums), "--into", str(folder / "models")]


def test_a_pod_that_is_deleted_while_it_fetches_is_gone_at_once(
    server: Server, files: dict[str, bytes], tmp_path: Path
) -> None:
    """As the first process of its container, which SIGTERM ends only where it is handled."""
    server.next = [("hang", None)]
    process = subprocess.Popen(
        program(server, files, tmp_path), env={"WEIGHTS_URL": f"{server.url}/c"}, stderr=subprocess.DEVNULL
    )
    try:
        assert server.hanging.wait(30)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 128 + signal.SIGTERM
    finally:
        server.go_on.set()
        process.kill()
        process.wait()


def test_the_program_fetches_with_a_token_that_ends_in_a_line_feed(
    server: Server, files: dict[str, bytes], tmp_path: Path
) -> None:
    environment = {"WEIGHTS_URL": f"{server.url}/c", "WEIGHTS_TOKEN": "sesame\n"}
    command = program(server, files, tmp_path)
    subprocess.run(command, env=environment, check=True, capture_output=True, timeout=60)
    assert {token for _, _, token in server.seen} == {"Bearer sesame"}
    assert (tmp_path / "models" / "a" / "b.safetensors").read_bytes() == files["a/b.safetensors"]
