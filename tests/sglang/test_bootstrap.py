"""SGLang's own bootstrap server, `--encoder-bootstrap-port`: when an encoder is in its list."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from bench.harness.ports import free_port
from bench.harness.processes import answers
from bench.harness.waiting import PATIENCE_S, wait_until
from encoder_service.protocols.sglang.registration import Registration

if TYPE_CHECKING:
    from sglang.srt.disaggregation.encoder.receiver import EncoderBootstrapServer

# Of what SGLang imports.
pytestmark = [pytest.mark.anyio, pytest.mark.filterwarnings("ignore")]
MODULE = "encoder_service.protocols.sglang.registration"


class Encoder(http.server.ThreadingHTTPServer):
    """Answers SGLang's probes. status: of ``/health``."""

    daemon_threads = True
    status = 200

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Health(http.server.BaseHTTPRequestHandler):
    server: Encoder

    def do_GET(self) -> None:
        self.send_response(self.server.status)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def encoder() -> Iterator[Encoder]:
    with Encoder(("127.0.0.1", 0), Health) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@contextlib.contextmanager
def bootstrap(listed: list[str], evicted_ttl_s: float) -> Iterator[tuple[EncoderBootstrapServer, str]]:
    """A bootstrap server with its list, and its URL. evicted_ttl_s: for so long it probes an evicted
    encoder."""
    from sglang.srt.disaggregation.encoder.receiver import EncoderBootstrapServer

    port = free_port()
    server = EncoderBootstrapServer("127.0.0.1", port, listed, 0.1, 1.0, evicted_ttl=evicted_ttl_s)
    try:
        wait_until(lambda: answers(f"http://127.0.0.1:{port}/health"), "the bootstrap server")
        yield server, f"http://127.0.0.1:{port}"
    finally:
        server.close()


async def until(condition: Callable[[], object], what: str) -> None:
    await asyncio.to_thread(wait_until, condition, what)


async def test_an_encoder_that_cannot_be_reached_is_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """By SGLang's probes, between two registrations: the service checks the server more often than SGLang
    probes."""
    monkeypatch.setattr(f"{MODULE}.CHECK_EVERY_S", 0.05)
    listed: list[str] = []
    with bootstrap(listed, PATIENCE_S) as (server, url):
        registration = Registration([url], f"http://127.0.0.1:{free_port()}")
        registration.start()
        await until(lambda: server._evicted_urls, "the eviction")
        assert listed == []
        await registration.leave()
        assert not server._evicted_urls


async def test_an_encoder_that_was_dropped_for_good_is_listed_again(
    encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the repeated registration: SGLang probes it no more."""
    monkeypatch.setattr(f"{MODULE}.CHECK_EVERY_S", 0.05)
    listed: list[str] = []
    with bootstrap(listed, 0.5) as (server, url):
        registration = Registration([url], encoder.url)
        registration.start()
        await until(lambda: listed == [encoder.url], "the registration")
        encoder.status = 503
        await until(lambda: server._evicted_urls, "the eviction")
        await until(lambda: not server._evicted_urls, "the end of the probes")
        assert listed == []
        encoder.status = 200
        monkeypatch.setattr(f"{MODULE}.REGISTER_AGAIN_S", 0.0)
        await until(lambda: listed == [encoder.url], "the registration after the drop")
        await registration.leave()
        assert listed == []


@pytest.mark.parametrize(("evicted_ttl_s", "comes_back"), [(PATIENCE_S, True), (0.5, False)])
def test_an_encoder_that_does_not_register_comes_back_only_while_it_is_probed(
    encoder: Encoder, evicted_ttl_s: float, comes_back: bool
) -> None:
    listed = [encoder.url]
    with bootstrap(listed, evicted_ttl_s) as (server, _):
        encoder.status = 503
        wait_until(lambda: server._evicted_urls, "the eviction")
        assert listed == []
        if not comes_back:
            wait_until(lambda: not server._evicted_urls, "the end of the probes")
        encoder.status = 200
        if comes_back:
            wait_until(lambda: listed == [encoder.url], "the probe that succeeds")
        else:
            time.sleep(1.0)  # ten intervals
            assert listed == []
