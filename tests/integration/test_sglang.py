"""SGLang's encoder protocol over real sockets: HTTP requests in, ZMQ messages out.

What is wrong with a body, and receivers by request, are tested in tests/unit/protocols.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import http.server
import io
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import torch
import zmq
from PIL import Image

from bench.harness.waiting import PATIENCE_S, wait_until
from encoder_service.config import parse_settings
from encoder_service.ops.metrics import Metrics
from encoder_service.protocols.base import Backend
from encoder_service.protocols.sglang.server import SglangServer
from encoder_service.protocols.zmq_push import Sender
from encoder_service.scheduler.admission import Admission
from lm_adapter import CacheTier, EncodedRows, ImageItem, VisionEncoderClient
from tests.engines.pictures import data_url
from tests.integration.conftest import RunningService, Serve
from tests.integration.held import wait_until_free
from tests.integration.images import photo
from tests.integration.web import Files
from tests.sglang.frames import message_of

pytestmark = pytest.mark.without_device

SEND_TIMEOUT_S = 2.0
FOREIGN = "192.0.2.1"
QUEUED_BYTES = 1_100_000


class Receiver:
    """A ZMQ PULL socket as SGLang's tokenizer binds one."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVTIMEO, int(PATIENCE_S * 1e3))
        self.port = self._socket.bind_to_random_port("tcp://127.0.0.1")

    def __enter__(self) -> Receiver:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close(linger=0)
        self._context.term()

    def message(self) -> tuple[dict[str, Any], torch.Tensor]:
        return message_of(self._socket.recv_multipart())

    def is_empty(self) -> bool:
        return not self._socket.poll(0)


class Served(NamedTuple):
    """A service with the protocol, and an HTTP client of it."""

    service: RunningService
    server: SglangServer
    http: httpx.Client

    def encode(self, items: list[Any], port: int | None, **fields: Any) -> httpx.Response:
        """port: of the receiver; None for receivers that name themselves."""
        body = {
            "encoder_idx": 0,
            "encoder_url": "http://encoder",
            "mm_items": items,
            "num_parts": 1,
            "part_idx": 0,
            "req_id": "request_local_part_0",
            "modality": "IMAGE",
            "prefill_host": "127.0.0.1",
            "embedding_port": port,
            "time_stats_json": None,
            **fields,
        }
        return self.http.post("/encode", json=body)

    def name_receiver(self, req_id: str, count: int, port: int, host: str = "127.0.0.1") -> httpx.Response:
        receiver = {"req_id": req_id, "receive_count": count, "receive_url": f"{host}:{port}"}
        return self.http.post("/scheduler_receive_url", json=receiver)

    def is_free(self) -> bool:
        """Whether the protocol holds no request, no bytes and no receivers."""
        server = self.server
        return not (
            server.permits.num_calls or self.service.service.admission.num_bytes or len(server.awaited)
        )


@contextlib.contextmanager
def serving(serve: Serve, **settings: object) -> Iterator[Served]:
    servers: list[SglangServer] = []
    attach = SglangServer.attach

    async def record(server: SglangServer, backend: Backend) -> None:
        servers.append(server)
        await attach(server, backend)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SglangServer, "attach", record)
        with (
            serve(serve_sglang="127.0.0.1:0", **settings) as service,
            httpx.Client(
                base_url=f"http://{service.service.addresses['sglang']}", timeout=PATIENCE_S
            ) as http_client,
        ):
            yield Served(service, servers[0], http_client)


@pytest.fixture(scope="module")
def shared(serve: Serve) -> Iterator[Served]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("encoder_service.protocols.sglang.server.SEND_TIMEOUT_S", SEND_TIMEOUT_S)
        with serving(serve) as served:
            yield served


@pytest.fixture
def served(shared: Served) -> Iterator[Served]:
    """Holds nothing at a test's end."""
    yield shared
    wait_until(shared.is_free, "the protocol's end of work")
    wait_until_free(shared.service)
    assert shared.http.get("/health").status_code == 200


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as receiver:
        yield receiver


def message(response: httpx.Response, status: int) -> str:
    """The message of an answer in the form that SGLang reads."""
    assert response.status_code == status, response.text
    answer = response.json()
    assert set(answer) == {"status", "message", "req_id"}
    assert answer["status"] == "error"
    text: str = answer["message"]
    return text


def encoded(served: Served, images: list[bytes], namespace: str) -> list[EncodedRows]:
    """By gRPC."""
    with VisionEncoderClient(served.service.target, namespace=namespace) as client:
        outcomes = client.encode([ImageItem(image) for image in images])
    return [outcome for outcome in outcomes if isinstance(outcome, EncodedRows)]


# -- rows ----------------------------------------------------------------------------------------------


def test_rows_are_those_of_the_service(served: Served, receiver: Receiver) -> None:
    """Also of an image that comes twice. It is encoded once."""
    images = [photo(96, 64), photo(64, 160)]
    items = [data_url(images[0]), {"url": data_url(images[1]), "detail": "low"}, data_url(images[0])]
    num_encoded = served.service.metric("ve_encoded_items_total")
    answer = served.encode(items, receiver.port, num_parts=4, part_idx=2)
    assert (answer.status_code, answer.json()) == (200, None)
    fields, rows = receiver.message()
    assert served.service.metric("ve_encoded_items_total") == num_encoded + 2
    images.append(images[0])
    own, other = (encoded(served, images, namespace) for namespace in ("sglang", "default"))
    assert torch.equal(rows, torch.cat([item.torch() for item in own]))
    assert fields["grid_dim"] == [list(item.grid_thw) for item in own]
    # Callers of another namespace do not see what SGLang's requests have encoded.
    assert CacheTier.MISS not in {item.tier for item in own}
    assert [item.tier for item in other[:2]] == [CacheTier.MISS] * 2
    # Rows' last bits depend on the batch that they were encoded in.
    torch.testing.assert_close(rows, torch.cat([item.torch() for item in other]), rtol=1e-4, atol=1e-5)
    assert (fields["req_id"], fields["num_parts"], fields["part_idx"]) == ("request_local_part_0", 4, 2)
    assert fields["video_timestamps"] is None
    assert served.service.metric('ve_deliveries_total{transport="zmq"}') >= 2
    assert served.service.metric('ve_requests_total{method="sglang/encode",status="OK"}') >= 1


# -- what is refused -----------------------------------------------------------------------------------


def test_a_refusal_has_the_form_that_sglang_reads(served: Served) -> None:
    for path in ("/encode", "/scheduler_receive_url"):
        assert "the body is a list" in message(served.http.post(path, content=b"[1]"), 400)
    refused = served.encode([data_url(photo())], 9, req_id="mine", part_idx=1)
    assert message(refused, 400) == "part_idx is 1, num_parts is 1"
    assert refused.json()["req_id"] == "mine"
    damaged = served.encode([data_url(b"no image")], 9)
    assert "image" in message(damaged, 400)
    # An id that UTF-8 cannot encode.
    surrogates = served.http.post("/encode", content=rb'{"req_id": "\ud800", "modality": "IMAGE"}')
    assert "mm_items" in message(surrogates, 400)
    page = served.http.post("/encode", content=b"{}", headers={"Origin": "http://evil"})
    assert "browsers" in message(page, 403)


def test_p46_rows_go_to_no_host_that_is_not_the_callers(served: Served) -> None:
    """Whatever the request's headers say about its origin."""
    before = served.service.metric("ve_encoded_items_total")
    body = {"req_id": "x", "modality": "IMAGE", "mm_items": [data_url(photo())], "num_parts": 1}
    requests = {
        "/encode": {**body, "part_idx": 0, "prefill_host": FOREIGN, "embedding_port": 9},
        "/scheduler_receive_url": {"req_id": "x", "receive_count": 1, "receive_url": f"{FOREIGN}:9"},
    }
    for headers in ({}, {"X-Forwarded-For": FOREIGN, "Forwarded": f"for={FOREIGN}"}):
        for path, content in requests.items():
            assert FOREIGN in message(served.http.post(path, json=content, headers=headers), 403)
    assert served.service.metric("ve_encoded_items_total") == before


# -- limits --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shared_bounded(serve: Serve) -> Iterator[Served]:
    """Takes the rows of one ``plain_picture`` at a time, two requests, and receivers in FOREIGN's network."""
    settings = {"max_queued_bytes": QUEUED_BYTES, "max_message_bytes": QUEUED_BYTES, "max_calls": 2}
    with serving(serve, sglang_receivers=(f"{FOREIGN}/32",), **settings) as served:
        yield served


@pytest.fixture
def bounded(shared_bounded: Served) -> Iterator[Served]:
    yield shared_bounded
    wait_until(shared_bounded.is_free, "the protocol's end of work")


def plain_picture() -> str:
    """A small file with many rows."""
    out = io.BytesIO()
    Image.new("RGB", (1024, 1024), "grey").save(out, "PNG")
    return data_url(out.getvalue())


@contextlib.contextmanager
def encoding(served: Served, items: list[Any], receiver: Receiver, req_id: str) -> Iterator[None]:
    """An ``/encode`` whose rows are held for a receiver that is named at the end, and gets them."""
    with ThreadPoolExecutor(1) as pool:
        num_before = len(served.server.awaited)
        pending = pool.submit(served.encode, items, None, req_id=req_id)
        wait_until(lambda: len(served.server.awaited) > num_before, "the request")
        try:
            yield
        finally:
            assert served.name_receiver(req_id, 1, receiver.port).status_code == 200
        assert pending.result(PATIENCE_S).status_code == 200
        assert receiver.message()[0]["req_id"] == req_id


def test_rows_that_have_not_left_hold_the_queue(bounded: Served, receiver: Receiver) -> None:
    """A request that others leave no room may come again; one that has too many rows itself may not."""
    picture = plain_picture()
    with encoding(bounded, [picture], receiver, "held"):
        wait_until(lambda: bounded.service.service.admission.num_bytes > QUEUED_BYTES // 2, "the rows")
        assert f"of {QUEUED_BYTES}" in message(bounded.encode([picture], receiver.port), 503)
    assert bounded.encode([picture], receiver.port).status_code == 200
    refused = message(bounded.encode([picture, picture], receiver.port), 400)
    assert (match := re.search(r"has at least (\d+) bytes with its rows, at most (\d+) are", refused))
    assert int(match[1]) > int(match[2]) == QUEUED_BYTES


def test_a_body_above_the_limit_is_not_read_to_its_end(bounded: Served) -> None:
    """Nor does it hold the queue, whose limit is the same here: the caller need not come again."""
    assert f"at most {QUEUED_BYTES} are taken" in message(bounded.encode(["A" * (4 << 20)], 9), 413)


def test_requests_over_the_limit_are_answered_503(bounded: Served, receiver: Receiver) -> None:
    """The second one sends a part of its body."""
    items, url = [data_url(photo())], bounded.http.base_url
    caller = http.client.HTTPConnection(url.host, url.port, timeout=PATIENCE_S)
    with encoding(bounded, items, receiver, "first"):
        with contextlib.closing(caller):
            caller.request("POST", "/encode", "{", {"Content-Length": "2"})
            wait_until(lambda: bounded.server.permits.num_calls == 2, "both requests")
            refused = message(bounded.encode(items, receiver.port), 503)
            assert refused.startswith("2 calls are in progress, 2 of them of this caller; at most 2")
        wait_until(lambda: bounded.server.permits.num_calls == 1, "the end of one")
    assert receiver.is_empty()


# -- receivers that the scheduler's processes name -----------------------------------------------------


@pytest.mark.parametrize("is_named_first", [True, False])
def test_every_process_that_names_itself_gets_the_rows(served: Served, is_named_first: bool) -> None:
    req_id = f"tp_{is_named_first}_local_part_0"
    with Receiver() as first, Receiver() as second, ThreadPoolExecutor(1) as pool:

        def name_all() -> None:
            for port in (first.port, first.port, second.port):
                assert served.name_receiver(req_id, 2, port).json() is None

        if is_named_first:
            name_all()
        pending = pool.submit(served.encode, [data_url(photo())], None, req_id=req_id)
        if not is_named_first:
            wait_until(lambda: len(served.server.awaited), "the request")
            name_all()
        assert pending.result(PATIENCE_S).status_code == 200
        assert torch.equal(first.message()[1], second.message()[1])
        assert first.is_empty()


def test_encodes_that_hold_every_permit_get_their_receivers(bounded: Served, receiver: Receiver) -> None:
    """Naming them takes no permit: else both would wait until their time was over, and keep others out."""
    items = [data_url(photo())]
    with encoding(bounded, items, receiver, "first"), encoding(bounded, items, receiver, "second"):
        assert bounded.server.permits.num_calls == 2


def test_p46_an_allowed_network_receives_and_no_other(bounded: Served, receiver: Receiver) -> None:
    """The receivers are forgotten with their ``/encode``."""
    assert "sglang_receivers" in message(bounded.name_receiver("allowed", 2, 9, "198.51.100.1"), 403)
    assert bounded.name_receiver("allowed", 2, 9, FOREIGN).status_code == 200
    assert "another process stated 2" in message(bounded.name_receiver("allowed", 3, receiver.port), 400)
    refused = bounded.encode([data_url(b"no image")], None, req_id="allowed")
    assert "image" in message(refused, 400)


def test_p46_another_peers_rows_are_not_sent_to_who_names_itself_for_them(
    served: Served, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two loopback addresses stand for two hosts."""
    monkeypatch.setattr("encoder_service.protocols.zmq_push.is_of_this_machine", lambda _: False)
    url = {"req_id": "foreign", "receive_count": 1, "receive_url": f"127.0.0.2:{receiver.port}"}
    transport = httpx.HTTPTransport(local_address="127.0.0.2")
    with httpx.Client(base_url=served.http.base_url, transport=transport) as other:
        assert other.post("/scheduler_receive_url", json=url).status_code == 200
    refused = message(served.encode([data_url(photo())], None, req_id="foreign"), 403)
    assert "rows may not be sent to 127.0.0.2: the request comes from 127.0.0.1" in refused


# -- the service's life --------------------------------------------------------------------------------


def test_before_the_model_and_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Health is answered 503 until the model is there. A stop that is cut short while sockets are being
    closed holds up neither the loop nor the end of the process."""
    go_on, is_closed, close = threading.Event(), threading.Event(), Sender.close

    def close_later(sender: Sender) -> None:
        go_on.wait(PATIENCE_S / 10)
        close(sender)
        is_closed.set()

    async def run() -> None:
        settings = parse_settings(model=Path("/m"), serve_sglang="127.0.0.1:0")
        server = SglangServer(settings, Metrics(), lambda: None, Admission(0, 1 << 20))
        transport = httpx.ASGITransport(server.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://encoder") as client:
            assert (await client.get("/health")).status_code == 503
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(server.stop(), 0.05)

    monkeypatch.setattr(Sender, "close", close_later)
    asyncio.run(run())
    assert not is_closed.is_set()
    go_on.set()
    wait_until(is_closed.is_set, "the end of the sockets")


def test_the_service_lists_itself_and_leaves_the_list(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bootstrap server that was away gets it again. One that is there is left to its own probes, of which
    tests/sglang/test_bootstrap.py has more."""
    monkeypatch.setattr("encoder_service.protocols.sglang.registration.CHECK_EVERY_S", 0.05)
    with Files({"/health": b""}) as bootstrap:
        settings = {"sglang_register": (bootstrap.base,), "sglang_url": "http://encoder:31000"}
        with serving(serve, **settings):
            wait_until(lambda: bootstrap.requested.count("/health") >= 3, "checks of the server")
            assert len(bootstrap.bodies) == 1
            bootstrap.files.clear()
            wait_until(
                lambda: bootstrap.requested.count("/register_encoder_url") >= 2, "another registration"
            )
    assert set(bootstrap.requested[:-1]) == {"/register_encoder_url", "/health"}
    assert bootstrap.requested[-1] == "/unregister_encoder_url"
    assert all(body == {"url": "http://encoder:31000"} for body in bootstrap.bodies)
