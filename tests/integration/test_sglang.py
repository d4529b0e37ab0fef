"""SGLang's encoder protocol over real sockets: HTTP requests in, ZMQ messages out."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import http.client
import http.server
import io
import json
import re
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import zmq
from PIL import Image

from encoder_service.config import parse_settings
from encoder_service.errors import ConfigurationError, InvalidRequest
from encoder_service.ops.metrics import Metrics
from encoder_service.protocols.sglang.server import AwaitedReceivers, SglangServer
from lm_adapter import CacheTier, ClipItem, EncodedRows, EncoderError, ImageItem, VisionEncoderClient
from tests.engines.pictures import clip, data_url
from tests.integration.conftest import RunningService, running, tokens_file
from tests.integration.held import wait_until_free
from tests.integration.images import photo
from tests.sglang.frames import message_of
from tests.waiting import PATIENCE_S, wait_until

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


class Served:
    """A service with the protocol, and an HTTP client of it."""

    def __init__(self, service: RunningService) -> None:
        self.service = service
        self.http = httpx.Client(base_url=f"http://{service.service.addresses['sglang']}", timeout=PATIENCE_S)

    def encode(self, items: list[Any], port: int | None, **fields: Any) -> httpx.Response:
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

    @property
    def server(self) -> SglangServer:
        server = self.service.service.protocols["sglang"].server
        assert isinstance(server, SglangServer)
        return server

    def is_free(self) -> bool:
        """Whether the protocol holds no request, no bytes and no receivers."""
        server = self.server
        figures = (server._permits.num_calls, server._admission.num_bytes, len(server._awaited))
        return not any(figures)

    def metric(self, line: str) -> float:
        """The value of a metric with its labels."""
        text = self.service.service.metrics.exposition().decode()
        return sum(float(found.rpartition(" ")[2]) for found in text.splitlines() if found.startswith(line))


@contextlib.contextmanager
def serving(model: Path, device: torch.device, **settings: object) -> Iterator[Served]:
    with running(model, device, serve_sglang="127.0.0.1:0", **settings) as service:
        found = Served(service)
        with found.http:
            yield found


@pytest.fixture(scope="module")
def shared(checkpoints: dict[str, Path], device: torch.device) -> Iterator[Served]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("encoder_service.protocols.sglang.server.SEND_TIMEOUT_S", SEND_TIMEOUT_S)
        with serving(checkpoints["qwen3_vl"], device) as found:
            yield found


@pytest.fixture
def served(shared: Served) -> Iterator[Served]:
    """Holds nothing at a test's end."""
    yield shared
    wait_until(shared.is_free, "the protocol's end of work")
    wait_until_free(shared.service)
    assert shared.http.get("/health").status_code == 200


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as found:
        yield found


def message(response: httpx.Response, status: int) -> str:
    """The words of an answer in the form that SGLang reads."""
    assert response.status_code == status, response.text
    answer = response.json()
    assert set(answer) == {"status", "message", "req_id"}
    assert answer["status"] == "error"
    text: str = answer["message"]
    return text


def stated(image: bytes, digest: bytes) -> dict[str, str]:
    return {"url": data_url(image), "content_hash": f"sha256:{digest.hex()}"}


# -- rows ----------------------------------------------------------------------------------------------


def test_rows_are_those_of_the_service(served: Served, receiver: Receiver) -> None:
    images = [photo(96, 64), photo(64, 160)]
    answered = served.encode(
        [data_url(images[0]), {"url": data_url(images[1]), "detail": "low"}], receiver.port
    )
    assert (answered.status_code, answered.json()) == (200, None)
    fields, rows = receiver.message()
    with VisionEncoderClient(served.service.target) as client:
        expected = client.encode([ImageItem(image) for image in images])
    assert all(isinstance(one, EncodedRows) for one in expected)
    # p18, p46: a namespace of its own; another does not see what SGLang's requests have encoded
    assert [one.tier for one in expected] == [CacheTier.MISS, CacheTier.MISS]
    # Rows' last bits depend on the batch that they were encoded in.
    torch.testing.assert_close(rows, torch.cat([one.torch() for one in expected]), rtol=1e-4, atol=1e-5)
    assert fields["grid_dim"] == [list(one.grid_thw) for one in expected]
    assert fields["req_id"] == "request_local_part_0"
    assert fields["video_timestamps"] is None
    assert served.metric('ve_deliveries_total{transport="zmq"}') >= 2
    assert served.metric('ve_requests_total{method="sglang/encode",status="OK"}') >= 1


def test_parts_of_a_request_come_one_by_one(served: Served, receiver: Receiver) -> None:
    images = [photo() for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        answers = list(
            pool.map(
                lambda index: served.encode(
                    [data_url(images[index])],
                    receiver.port,
                    num_parts=4,
                    part_idx=index,
                    req_id=f"r_local_part_{index}",
                ),
                range(4),
            )
        )
    assert [answer.status_code for answer in answers] == [200] * 4
    found = sorted((receiver.message()[0] for _ in range(4)), key=lambda fields: fields["part_idx"])
    assert [fields["part_idx"] for fields in found] == [0, 1, 2, 3]
    assert [fields["req_id"] for fields in found] == [f"r_local_part_{index}" for index in range(4)]


def test_p15_equal_images_are_encoded_once(served: Served, receiver: Receiver) -> None:
    before = served.metric("ve_encoded_items_total"), served.metric('ve_items_total{tier="host"}')
    image = data_url(photo())
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: served.encode([image, image], receiver.port), range(4)))
    assert served.metric("ve_encoded_items_total") == before[0] + 1
    rows = [receiver.message()[1] for _ in range(4)]
    assert all(torch.equal(rows[0], other) for other in rows[1:])
    assert torch.equal(*rows[0].chunk(2))


def test_clips_come_with_the_times_of_their_steps(served: Served, receiver: Receiver) -> None:
    data = clip(3, num_frames=30, fps=6)
    url = data_url(data, "video/mp4")
    assert served.encode([url], receiver.port, modality="VIDEO").status_code == 200
    fields, rows = receiver.message()
    with VisionEncoderClient(served.service.target) as client:
        (expected,) = client.encode([ClipItem(data)])
    assert isinstance(expected, EncodedRows)
    assert torch.equal(rows, expected.torch())
    (times_s,) = fields["video_timestamps"]
    frames_s = expected.timestamps_s
    assert fields["grid_dim"] == [list(expected.grid_thw)]
    assert times_s == [(first + last) / 2 for first, last in zip(frames_s[::2], frames_s[1::2], strict=True)]
    assert len(times_s) == expected.grid_thw[0]


def test_kimi_takes_images_and_no_clips(
    checkpoints: dict[str, Path], device: torch.device, receiver: Receiver
) -> None:
    with serving(checkpoints["kimi_k25"], device) as served:
        url = data_url(clip(4), "video/mp4")
        assert "no clips" in message(served.encode([url], receiver.port, modality="VIDEO"), 400)
        assert served.encode([data_url(photo())], receiver.port).status_code == 200
        fields, rows = receiver.message()
        assert list(rows.shape) == fields["shape"]


# -- identity ------------------------------------------------------------------------------------------


def test_p48_a_stated_hash_is_verified_before_anything_is_stored_under_it(
    served: Served, receiver: Receiver
) -> None:
    image, other = photo(), photo()
    digest = hashlib.sha256(image).digest()
    for _ in range(2):
        assert digest.hex() in message(served.encode([stated(other, digest)], receiver.port), 400)
    encoded = served.metric("ve_encoded_items_total")
    assert served.encode([stated(image, digest)], receiver.port).status_code == 200
    assert served.encode([stated(image, digest)], receiver.port).status_code == 200
    assert served.metric("ve_encoded_items_total") == encoded + 1
    assert digest.hex() in message(served.encode([stated(other, digest)], receiver.port), 400)
    first, second = receiver.message()[1], receiver.message()[1]
    assert torch.equal(first, second)
    assert receiver.is_empty()


def test_urls_follow_the_services_address_rules(
    checkpoints: dict[str, Path], device: torch.device, receiver: Receiver, served: Served
) -> None:
    assert "no URLs" in message(served.encode(["https://example.invalid/a.png"], receiver.port), 400)
    image, wrong = photo(), photo()
    digest = hashlib.sha256(image).digest()
    with Files({"/a.png": image, "/wrong.png": wrong}) as files:
        settings = {"url_allow": (files.base,), "url_networks": ("127.0.0.0/8",)}
        with serving(checkpoints["qwen3_vl"], device, **settings) as fetching:
            hashed = {"url": f"{files.base}/a.png", "content_hash": f"sha256:{digest.hex()}"}
            for item in (f"{files.base}/a.png", hashed, hashed, data_url(image)):
                assert fetching.encode([item], receiver.port).status_code == 200
            rows = [receiver.message()[1] for _ in range(4)]
            assert all(torch.equal(rows[0], one) for one in rows[1:])
            assert files.asked == ["/a.png", "/a.png"]  # not for rows that are held under its hash
            for url, text in (
                ("http://169.254.169.254/latest", "not among those"),
                (f"{files.base}/none.png", "404"),
            ):
                assert text in message(fetching.encode([url], receiver.port), 400)
            other = {"url": f"{files.base}/wrong.png", "content_hash": f"sha256:{'11' * 32}"}
            assert "11" * 32 in message(fetching.encode([other], receiver.port), 400)
    assert receiver.is_empty()


def test_a_clips_url_follows_the_same_rules(
    checkpoints: dict[str, Path], device: torch.device, receiver: Receiver
) -> None:
    """Within the clip's limit of bytes, which is not the image's."""
    data = clip(11, num_frames=8, fps=4)
    files = {"/a.mp4": data, "/large.mp4": bytes(len(data) + 1), "/broken.mp4": data[: len(data) // 2]}
    with Files(files, "video/mp4") as server:
        settings = {
            "url_allow": (server.base,),
            "url_networks": ("127.0.0.0/8",),
            "max_clip_bytes": len(data),
            "max_encoded_bytes": 1024,
        }
        with serving(checkpoints["qwen3_vl"], device, **settings) as served:
            digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
            hashed = {"url": f"{server.base}/a.mp4", "content_hash": digest}
            for item in (f"{server.base}/a.mp4", hashed, hashed, data_url(data, "video/mp4")):
                answered = served.encode([item], receiver.port, modality="VIDEO")
                assert answered.status_code == 200, answered.text
            messages = [receiver.message() for _ in range(4)]
            assert all(torch.equal(messages[0][1], rows) for _, rows in messages[1:])
            assert all(fields == messages[0][0] for fields, _ in messages[1:])
            assert server.asked == ["/a.mp4"] * 2  # not for rows that are held under its hash
            for path, modality, text in (
                ("/large.mp4", "VIDEO", f"{len(data) + 1} bytes, the limit is {len(data)}"),
                ("/broken.mp4", "VIDEO", "the MP4 file is truncated"),
                ("/none.mp4", "VIDEO", "404"),
                ("/a.mp4", "IMAGE", f"{len(data)} bytes, the limit is 1024"),
            ):
                refused = served.encode([server.base + path], receiver.port, modality=modality)
                assert text in message(refused, 400)
    assert receiver.is_empty()


# -- what is refused -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"mm_items": []}, "mm_items is []: List should have at least 1 item"),
        ({"mm_items": None}, "mm_items is None"),
        ({"mm_items": ["x"] * 257}, "257 items, at most 256"),
        ({"mm_items": [7]}, "mm_items.0 is 7"),
        ({"mm_items": [{"format": "processor_output"}]}, "mm_items.0.url is"),
        ({"mm_items": ["/etc/passwd"]}, "cannot be decoded"),
        ({"mm_items": ["file:///etc/passwd"]}, "cannot be decoded"),
        ({"mm_items": ["data:image/png,abc"]}, "data URI in base64"),
        ({"mm_items": ["data:image/png;base64,!"]}, "the data URI cannot be decoded"),
        ({"mm_items": ["data:image/png;base64,aGVsbG8="]}, "image"),
        ({"mm_items": [{"url": "x", "content_hash": "md5:00"}]}, "content_hash is 'md5:00'"),
        ({"mm_items": [{"url": "x", "content_hash": 3}]}, "content_hash is 3"),
        ({"modality": "AUDIO"}, "modality is 'AUDIO': Input should be 'IMAGE' or 'VIDEO'"),
        ({"modality": None}, "modality"),
        ({"num_parts": 0}, "num_parts is 0: Input should be greater than or equal to 1"),
        ({"num_parts": 1 << 40}, "num_parts is 1099511627776"),
        ({"part_idx": 1}, "part_idx is 1, num_parts is 1"),
        ({"part_idx": True}, "part_idx is True"),
        ({"req_id": ""}, "req_id"),
        ({"req_id": 5}, "req_id"),
        ({"embedding_port": 70_000}, "embedding_port is 70000"),
        ({"embedding_port": "1"}, "embedding_port is '1'"),
        ({"embedding_port": True}, "embedding_port is True"),
        ({"prefill_host": None}, "'' is not an IP address"),
        ({"prefill_host": 5}, "prefill_host is 5"),
        ({"prefill_host": "localhost"}, "'localhost' is not an IP address"),
    ],
    ids=str,
)
def test_a_wrong_body_is_refused_with_words(served: Served, fields: dict[str, Any], text: str) -> None:
    port = fields.pop("embedding_port", 9)
    items = fields.pop("mm_items", [data_url(photo())])
    assert text in message(served.encode(items, port, **fields), 400)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "0 bytes are no JSON"),
        (b"\xff\x00", "2 bytes are no JSON"),
        (b"[1]", "the body is a list"),
        (b"[" * 70_000, "70000 commas and brackets, at most 65536"),
        (b"[" * 60_000, "no JSON"),
        (b'{"a":' * 60_000, "no JSON"),
    ],
    ids=lambda value: str(value)[:12],
)
@pytest.mark.parametrize("path", ["/encode", "/scheduler_receive_url"])
def test_a_body_that_is_no_object(served: Served, path: str, content: bytes, text: str) -> None:
    assert text in message(served.http.post(path, content=content), 400)


def test_p46_rows_go_to_no_host_that_is_not_the_callers(served: Served) -> None:
    """Whatever the request's headers say about its origin."""
    before = served.metric("ve_encoded_items_total")
    for headers in ({}, {"X-Forwarded-For": FOREIGN, "Forwarded": f"for={FOREIGN}"}):
        served.http.headers.update(headers)
        try:
            refused = message(served.encode([data_url(photo())], 9, prefill_host=FOREIGN), 403)
            url = {"req_id": "x", "receive_count": 1, "receive_url": f"{FOREIGN}:9"}
            named = message(served.http.post("/scheduler_receive_url", json=url), 403)
        finally:
            for name in headers:
                del served.http.headers[name]
        assert FOREIGN in refused
        assert FOREIGN in named
    assert served.metric("ve_encoded_items_total") == before


# -- peers that are gone -------------------------------------------------------------------------------


def test_a_dead_receiver_costs_its_own_request(served: Served, receiver: Receiver) -> None:
    with Receiver() as gone:
        port = gone.port
    assert "did not take" in message(served.encode([data_url(photo())], port), 504)
    assert served.encode([data_url(photo())], receiver.port).status_code == 200
    receiver.message()


def test_a_caller_that_hangs_up_ends_its_encode(served: Served) -> None:
    """While its content waits for a worker: all are kept busy until the caller has left."""
    service = served.service.service
    assert service.pipeline is not None
    inflight, release = service.pipeline.inflight, threading.Event()
    threads = service._workers.executor
    busy = [threads.submit(release.wait) for _ in range(threads._max_workers)]
    try:
        url = served.http.base_url
        body = {"req_id": "x", "modality": "IMAGE", "num_parts": 1, "part_idx": 0}
        to = {"prefill_host": "127.0.0.1", "embedding_port": 9, "mm_items": [data_url(photo())]}
        caller = http.client.HTTPConnection(url.host, url.port, timeout=PATIENCE_S)
        with contextlib.closing(caller):
            caller.request("POST", "/encode", json.dumps(body | to), {"Content-Type": "application/json"})
            wait_until(lambda: len(inflight) == 1, "the encode")
        wait_until(lambda: len(inflight) == 0, "the encode's end")
        wait_until(served.is_free, "the protocol's end of work")
        cancelled = 've_requests_total{method="sglang/encode",status="CANCELLED"}'
        wait_until(lambda: served.metric(cancelled) == 1, "the count of the request")
    finally:
        release.set()
        for one in busy:
            one.result(PATIENCE_S)


def test_p69_connections_over_the_bound_displace_those_without_a_request(
    checkpoints: dict[str, Path], device: torch.device, receiver: Receiver
) -> None:
    with serving(checkpoints["qwen3_vl"], device, max_connections=2) as served:
        host, _, port = served.service.service.addresses["sglang"].rpartition(":")
        with socket.create_connection((host, int(port)), PATIENCE_S) as idle:
            with socket.create_connection((host, int(port)), PATIENCE_S):
                assert served.encode([data_url(photo())], receiver.port).status_code == 200
            assert idle.recv(1) == b""


# -- bounds --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shared_bounded(checkpoints: dict[str, Path], device: torch.device) -> Iterator[Served]:
    """Takes the rows of one ``plain_picture`` at a time, two requests, and receivers in FOREIGN's network."""
    settings = {"max_queued_bytes": QUEUED_BYTES, "max_message_bytes": QUEUED_BYTES, "max_calls": 2}
    with serving(checkpoints["qwen3_vl"], device, sglang_receivers=(f"{FOREIGN}/32",), **settings) as found:
        yield found


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
        pending = pool.submit(served.encode, items, None, req_id=req_id)
        wait_until(lambda: req_id in served.server._awaited, "the request")
        try:
            yield
        finally:
            assert name_receiver(served, req_id, 1, receiver.port).status_code == 200
        assert pending.result(PATIENCE_S).status_code == 200
        assert receiver.message()[0]["req_id"] == req_id


def test_rows_that_have_not_left_hold_the_queue(bounded: Served, receiver: Receiver) -> None:
    """A request that others leave no room may come again; one that has too many rows itself may not."""
    picture = plain_picture()
    with encoding(bounded, [picture], receiver, "held"):
        wait_until(lambda: bounded.server._admission.num_bytes > QUEUED_BYTES // 2, "the rows")
        assert f"of {QUEUED_BYTES}" in message(bounded.encode([picture], receiver.port), 503)
    assert bounded.encode([picture], receiver.port).status_code == 200
    refused = message(bounded.encode([picture, picture], receiver.port), 400)
    assert (found := re.search(r"has at least (\d+) bytes with its rows, at most (\d+) are", refused))
    assert int(found[1]) > int(found[2]) == QUEUED_BYTES


def test_a_body_above_the_limit_is_not_read_to_its_end(bounded: Served) -> None:
    """Nor does it hold the queue, whose limit is the same here: the caller need not come again."""
    assert f"at most {QUEUED_BYTES} are taken" in message(bounded.encode(["A" * (4 << 20)], 9), 413)


@contextlib.contextmanager
def half_sent(served: Served) -> Iterator[http.client.HTTPConnection]:
    """An ``/encode`` of whose body only a part has been sent."""
    url = served.http.base_url
    caller = http.client.HTTPConnection(url.host, url.port, timeout=PATIENCE_S)
    with contextlib.closing(caller):
        caller.request("POST", "/encode", "{", {"Content-Length": "2"})
        yield caller


def test_requests_over_the_bound_are_answered_503(bounded: Served, receiver: Receiver) -> None:
    items = [data_url(photo())]
    with encoding(bounded, items, receiver, "first"):
        with half_sent(bounded):
            wait_until(lambda: bounded.server._permits.num_calls == 2, "both requests")
            refused = message(bounded.encode(items, receiver.port), 503)
            assert refused.startswith("2 calls are in progress, 2 of them of this caller; at most 2")
        wait_until(lambda: bounded.server._permits.num_calls == 1, "the end of one")
    assert receiver.is_empty()


def test_p17_more_patches_than_the_queue_takes_are_answered_503_each_time(
    checkpoints: dict[str, Path], device: torch.device, receiver: Receiver
) -> None:
    limits = {"max_queued_patches": 256, "max_patches_per_item": 256, "max_clip_patches": 256}
    with serving(checkpoints["qwen3_vl"], device, **limits) as served:
        images = [data_url(photo(128, 128)) for _ in range(2)]
        for _ in range(2):
            refused = message(served.encode(images, receiver.port), 503)
            assert refused == "queue holds 256 patches of 256, the item needs 256, 0 are left to this caller"
        assert receiver.is_empty()
        assert served.encode(images[:1], receiver.port).status_code == 200
        wait_until(served.is_free, "the protocol's end of work")


def test_a_token_for_the_protocols_namespace_keeps_grpc_callers_out(
    checkpoints: dict[str, Path], device: torch.device, receiver: Receiver, tmp_path: Path
) -> None:
    """The protocol has none, and goes on."""
    tokens = tokens_file(tmp_path, "sglang=a-secret")
    with serving(checkpoints["qwen3_vl"], device, tokens_file=tokens) as served:
        target, image = served.service.target, photo()
        assert served.encode([data_url(image)], receiver.port).status_code == 200
        with (
            VisionEncoderClient(target, namespace="sglang", timeout_s=PATIENCE_S) as stranger,
            pytest.raises(EncoderError) as caught,
        ):
            stranger.encode([ImageItem(image)])
        assert caught.value.reason == "UNAUTHENTICATED"
        with VisionEncoderClient(target, namespace="sglang", token="a-secret", timeout_s=PATIENCE_S) as known:
            (result,) = known.encode([ImageItem(image)])
            assert result.tier is not CacheTier.MISS


def test_a_body_that_does_not_arrive_is_answered_504(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("encoder_service.ops.http_server.RECEIVE_S", 0.1)
    with half_sent(served) as caller, caller.getresponse() as refused:
        assert refused.status == 504
        assert "did not arrive within 0.1 s: 1 bytes of 2 did" in json.loads(refused.read())["message"]


def test_p46_an_allowed_network_receives_and_no_other(
    bounded: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("encoder_service.protocols.sglang.server.AWAIT_S", 0.05)
    assert name_receiver(bounded, "allowed", 2, 9, FOREIGN).status_code == 200
    assert "sglang_receivers" in message(name_receiver(bounded, "other", 2, 9, "198.51.100.1"), 403)


# -- receivers that the scheduler's processes name -----------------------------------------------------


def name_receiver(
    served: Served, req_id: str, count: int, port: int, host: str = "127.0.0.1"
) -> httpx.Response:
    url = {"req_id": req_id, "receive_count": count, "receive_url": f"{host}:{port}", "modality": "IMAGE"}
    return served.http.post("/scheduler_receive_url", json=url)


@pytest.mark.parametrize("is_named_first", [True, False])
def test_every_process_that_names_itself_gets_the_rows(served: Served, is_named_first: bool) -> None:
    req_id = f"tp_{is_named_first}_local_part_0"
    with Receiver() as first, Receiver() as second, ThreadPoolExecutor(1) as pool:

        def name_all() -> None:
            for port in (first.port, first.port, second.port):
                assert name_receiver(served, req_id, 2, port).json() is None

        if is_named_first:
            name_all()
        pending = pool.submit(served.encode, [data_url(photo())], None, req_id=req_id)
        if not is_named_first:
            wait_until(lambda: served.server._awaited, "the request")
            name_all()
        assert pending.result(PATIENCE_S).status_code == 200
        assert torch.equal(first.message()[1], second.message()[1])
        assert first.is_empty()


def test_receivers_that_nobody_names(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("encoder_service.protocols.sglang.server.AWAIT_S", 0.2)
    refused = served.encode([data_url(photo())], None, req_id="nobody")
    assert "0 of an unknown number of receivers" in message(refused, 504)


def test_a_receiver_whose_request_never_comes_is_forgotten(
    served: Served, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("encoder_service.protocols.sglang.server.AWAIT_S", 0.05)
    assert name_receiver(served, "never", 1, receiver.port).status_code == 200
    wait_until(served.is_free, "the receiver's end")


def test_an_id_is_encoded_once_at_a_time(served: Served, receiver: Receiver) -> None:
    items = [data_url(photo())]
    with encoding(served, items, receiver, "twice"):
        assert "'twice' is being encoded" in message(served.encode(items, None, req_id="twice"), 400)
    assert receiver.is_empty()


def test_p46_receivers_without_a_request_have_a_bound_and_keep_no_encode_out(
    served: Served, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("encoder_service.protocols.sglang.server.MAX_AWAITED", 1)
    monkeypatch.setattr("encoder_service.protocols.sglang.server.AWAIT_S", 1.0)
    assert name_receiver(served, "first", 1, receiver.port).status_code == 200
    refused = name_receiver(served, "second", 1, receiver.port)
    assert "receivers of 1 requests are awaited, at most 1 may be" in message(refused, 503)
    with encoding(served, [data_url(photo())], receiver, "second"):
        pass


def test_encodes_that_hold_every_place_get_their_receivers(bounded: Served, receiver: Receiver) -> None:
    """Naming them takes no place: else both would wait until their time was over, and keep others out."""
    items = [data_url(photo())]
    with encoding(bounded, items, receiver, "first"), encoding(bounded, items, receiver, "second"):
        wait_until(lambda: bounded.server._permits.num_calls == 2, "both requests")


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


def test_processes_of_a_request_state_one_number() -> None:
    awaited = AwaitedReceivers()
    awaited.add("198.51.100.66:9", 2)
    with pytest.raises(InvalidRequest, match="receive_count is 1, another process stated 2"):
        awaited.add("198.51.100.67:9", 1)
    awaited.add("198.51.100.67:9", 2)
    awaited.add("198.51.100.68:9", 2)
    assert awaited.urls == ["198.51.100.66:9", "198.51.100.67:9"]


def test_an_id_with_lone_surrogates_and_pages_of_browsers_are_refused_with_words(served: Served) -> None:
    refused = served.http.post("/encode", content=rb'{"req_id": "\ud800", "modality": "IMAGE"}')
    assert "req_id" in message(refused, 400)
    page = served.http.post("/encode", content=b"{}", headers={"Origin": "http://evil"})
    assert "browsers" in message(page, 403)


# -- the service's life --------------------------------------------------------------------------------


def test_a_taken_port_fails_the_start(
    checkpoints: dict[str, Path], device: torch.device, served: Served
) -> None:
    address = served.service.service.addresses["sglang"]
    with (
        pytest.raises(ConfigurationError, match=address),
        running(checkpoints["qwen3_vl"], device, serve_sglang=address),
    ):
        pass


def test_a_drain_is_answered_503(
    checkpoints: dict[str, Path], device: torch.device, receiver: Receiver
) -> None:
    """Requests in progress end as ever."""
    with serving(checkpoints["qwen3_vl"], device) as served, Receiver() as other:

        def another() -> httpx.Response:
            return served.encode([data_url(photo())], other.port)

        assert served.http.get("/health_generate").status_code == 200
        with encoding(served, [data_url(photo())], receiver, "last"):
            served.service.loop.call_soon_threadsafe(served.service.service.request_stop)
            wait_until(lambda: served.http.get("/health").status_code == 503, "a service that is not ready")
            wait_until(lambda: another().status_code == 503, "the drain")
            assert "stopping" in message(another(), 503)
            assert served.http.get("/health_generate").status_code == 503


def test_health_says_that_the_service_starts() -> None:
    async def ask() -> int:
        settings = parse_settings(model=Path("/m"), serve_sglang="127.0.0.1:0")
        server = SglangServer(settings, Metrics(), lambda: None)
        transport = httpx.ASGITransport(server.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://encoder") as client:
            found = await client.get("/health")
        await server.stop()
        return found.status_code

    assert asyncio.run(ask()) == 503


def test_the_end_of_the_process_waits_for_no_socket() -> None:
    """A stop that is cut short while sockets are being closed."""
    go_on, is_closed = threading.Event(), threading.Event()

    def close() -> None:
        go_on.wait(PATIENCE_S / 10)
        is_closed.set()

    async def stop() -> None:
        settings = parse_settings(model=Path("/m"), serve_sglang="127.0.0.1:0")
        server = SglangServer(settings, Metrics(), lambda: None)
        close_sockets = server._sender.close
        server._sender.close = close  # type: ignore[method-assign]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(server.stop(), 0.05)
        close_sockets()

    asyncio.run(stop())
    assert not is_closed.is_set()
    go_on.set()


def test_the_service_lists_itself_and_leaves_the_list(
    checkpoints: dict[str, Path], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bootstrap server that was away gets it again. One that is there is left to its own probes, of which
    tests/sglang/test_bootstrap.py has more."""
    monkeypatch.setattr("encoder_service.protocols.sglang.server.WATCH_EVERY_S", 0.05)
    with Files({"/health": b""}) as bootstrap:
        settings = {"sglang_register": (bootstrap.base,), "sglang_url": "http://encoder:31000"}
        with serving(checkpoints["qwen3_vl"], device, **settings):
            wait_until(lambda: bootstrap.asked.count("/health") >= 3, "looks at the server")
            assert len(bootstrap.bodies) == 1
            bootstrap.files.clear()
            wait_until(lambda: bootstrap.asked.count("/register_encoder_url") >= 2, "another registration")
    assert set(bootstrap.asked[:-1]) == {"/register_encoder_url", "/health"}
    assert bootstrap.asked[-1] == "/unregister_encoder_url"
    assert all(body == {"url": "http://encoder:31000"} for body in bootstrap.bodies)


class Files(http.server.ThreadingHTTPServer):
    """Answers GET with files by path, and POST and DELETE with nothing."""

    daemon_threads = True

    def __init__(self, files: dict[str, bytes], kind: str = "image/png") -> None:
        self.files = files
        self.kind = kind
        self.asked: list[str] = []
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
        self.server.asked.append(self.path)
        self.send_response(404 if data is None else 200)
        self.send_header("Content-Type", self.server.kind)
        self.send_header("Content-Length", str(len(data or b"")))
        self.end_headers()
        with contextlib.suppress(ConnectionError):
            self.wfile.write(data or b"")

    def log_message(self, *_: object) -> None:
        pass
