"""URL items through the whole service: off by default, fetched once, hashed as files are."""

from __future__ import annotations

import contextlib
import http.server
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import torch
from blake3 import blake3

from lm_adapter import (
    AsyncVisionEncoderClient,
    CacheTier,
    EncodedRows,
    ImageItem,
    Item,
    ItemFailed,
    Outcome,
    PrefetchStatus,
    PreprocessOptions,
    UrlItem,
    VisionEncoderClient,
)
from tests.integration.conftest import RunningService, running
from tests.integration.held import wait_until_free
from tests.integration.images import photo
from vision_encoder.v1 import encoder_pb2 as pb
from vision_encoder.v1 import encoder_pb2_grpc

pytestmark = pytest.mark.without_device


class Images(http.server.ThreadingHTTPServer):
    """Files by path; counts what was asked for."""

    daemon_threads = True

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.asked: Counter[str] = Counter()
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def base(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Images

    def do_GET(self) -> None:
        self.server.asked[self.path] += 1
        data = self.server.files.get(self.path)
        self.send_response(200 if data is not None else 404)
        self.send_header("Content-Type", "image/jpeg")
        self.send_header("Content-Length", str(len(data or b"")))
        self.end_headers()
        with contextlib.suppress(ConnectionError):
            self.wfile.write(data or b"")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def images() -> Iterator[Images]:
    with Images() as found:
        thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield found
        found.shutdown()
        thread.join()


def url(text: str, digest: bytes = b"", **more: object) -> pb.Item:
    return pb.Item(modality=pb.MODALITY_IMAGE, url=text, content_digest=digest, **more)  # type: ignore[arg-type]


def encode(found: RunningService, *items: pb.Item) -> dict[int, pb.ItemResult | str]:
    """Results, or reasons of failure, by index; nothing stays behind."""
    with grpc.insecure_channel(found.target) as channel:
        stub = encoder_pb2_grpc.VisionEncoderStub(channel)
        answers: dict[int, pb.ItemResult | str] = {}
        for event in stub.Encode(pb.EncodeRequest(items=items), timeout=60):
            if event.WhichOneof("event") == "result":
                answers[event.item_index] = event.result
            elif event.WhichOneof("event") == "failure":
                answers[event.item_index] = event.failure.reason
    wait_until_free(found)
    return answers


def test_urls_are_off_unless_allowed(service: RunningService, images: Images) -> None:
    assert encode(service, url(f"{images.base}/a"))[0] == "UNSUPPORTED_CONTENT"
    assert not images.asked


def test_a_list_without_a_network_reaches_nothing_inside(
    checkpoints: dict[str, Path], device: torch.device, images: Images
) -> None:
    with running(checkpoints["qwen3_vl"], device, url_allow=images.base) as found:
        assert encode(found, url(f"{images.base}/a"))[0] == "URL_REFUSED"
    assert not images.asked


def test_urls_are_the_files_that_lie_there(
    checkpoints: dict[str, Path], device: torch.device, images: Images
) -> None:
    first, second = photo(160, 120), photo(120, 160)
    images.files = {"/a": first, "/b": second, "/large": bytes(400_000), "/broken": first[:300]}
    with running(
        checkpoints["qwen3_vl"],
        device,
        url_allow=images.base,
        url_networks="127.0.0.1/32",
        max_encoded_bytes=300_000,
    ) as found:
        answers = encode(
            found,
            url(f"{images.base}/a"),
            pb.Item(modality=pb.MODALITY_IMAGE, encoded=first),
            url(f"{images.base}/gone"),
            url(f"{images.base}/large"),
            url(f"{images.base}/broken"),
            url("http://127.0.0.2/a"),
            url(f"{images.base}/b", digest=b"short"),
            pb.Item(modality=pb.MODALITY_VIDEO, url=f"{images.base}/a"),
        )
        by_url, by_file = answers[0], answers[1]
        assert isinstance(by_url, pb.ItemResult)
        assert isinstance(by_file, pb.ItemResult)
        assert by_url.key == by_file.key
        assert by_url.content_digest == blake3(first).digest()
        assert [answers[index] for index in range(2, 8)] == [
            "URL_CONTENT",
            "IMAGE_TOO_LARGE",
            "UNDECODABLE_IMAGE",
            "URL_REFUSED",
            "INVALID_DIGEST",
            "UNSUPPORTED_CONTENT",
        ]
        assert images.asked == {"/a": 1, "/gone": 1, "/large": 1, "/broken": 1}

        digest = b"d" * 32  # the caller's word counts in its namespace
        miss, hit = (encode(found, url(f"{images.base}/b", digest=digest))[0] for _ in range(2))
        assert isinstance(miss, pb.ItemResult)
        assert isinstance(hit, pb.ItemResult)
        assert miss.content_digest == hit.content_digest == digest
        assert (miss.tier, hit.tier) == (pb.CACHE_TIER_MISS, pb.CACHE_TIER_HOST)
        assert images.asked["/b"] == 1

        with grpc.insecure_channel(found.target) as channel:
            stub = encoder_pb2_grpc.VisionEncoderStub(channel)
            images.files["/c"] = photo(80, 80)
            prefetch = pb.PrefetchRequest(items=[url(f"{images.base}/c"), url(f"{images.base}/gone")])
            started, failed = stub.Prefetch(prefetch, timeout=30).statuses
            assert started.num_rows > 0
            assert failed.failure.reason == "URL_CONTENT"
            rows = list(stub.Fetch(pb.FetchRequest(keys=[started.key]), timeout=30))
            assert rows[0].result.num_rows == started.num_rows
        wait_until_free(found)


def reason(outcome: Outcome | PrefetchStatus) -> str:
    assert isinstance(outcome, ItemFailed)
    return outcome.reason


def rows(outcome: Outcome) -> EncodedRows:
    assert isinstance(outcome, EncodedRows), outcome
    return outcome


@pytest.mark.anyio
async def test_both_clients_send_urls(
    checkpoints: dict[str, Path], device: torch.device, images: Images
) -> None:
    """What the adapter makes of a URL, through a service with a list, and through its answers."""
    first, second = photo(160, 120), photo(120, 160)
    images.files = {"/a": first, "/b": second}
    allowed, secret = f"{images.base}/a", b"d" * 32
    items: list[Item] = [
        UrlItem(allowed),
        ImageItem(first),
        UrlItem(f"{images.base}/gone"),
        UrlItem("http://127.0.0.2/a"),
        UrlItem("ftp://127.0.0.1/a"),  # never sent
        UrlItem(allowed, options=PreprocessOptions(min_pixels=1024, max_pixels=4096)),
        UrlItem(f"{images.base}/b", digest=secret),
    ]
    with (
        running(checkpoints["qwen3_vl"], device, url_allow=images.base, url_networks="127.0.0.1/32") as found,
        VisionEncoderClient(found.target, timeout_s=60) as client,
    ):
        by_url, by_file, gone, outside, unsent, smaller, named = client.encode(items)
        assert rows(by_url).key == rows(by_file).key
        assert (rows(by_url).numpy() == rows(by_file).numpy()).all()
        assert [reason(each) for each in (gone, outside, unsent)] == [
            "URL_CONTENT",
            "URL_REFUSED",
            "URL_REFUSED",
        ]
        assert rows(smaller).num_rows < rows(by_url).num_rows
        assert rows(named).content_digest == secret
        asked = images.asked.total()
        again = client.encode_one(UrlItem("http://127.0.0.1/whatever", digest=secret))
        assert (again.tier, images.asked.total()) == (CacheTier.HOST, asked)

        async with AsyncVisionEncoderClient(found.target, timeout_s=60) as other:
            fetched = await other.encode_one(UrlItem(f"{images.base}/b"))
            assert fetched.content_digest == blake3(second).digest()
            started, refused = await other.prefetch([UrlItem(allowed), UrlItem("http://127.0.0.2/a")])
            assert isinstance(started, PrefetchStatus)
            assert started.key == rows(by_url).key
            assert reason(refused) == "URL_REFUSED"
        wait_until_free(found)


def test_a_service_without_a_list_fails_the_item_alone(service: RunningService, images: Images) -> None:
    with VisionEncoderClient(service.target, timeout_s=60) as client:
        refused, encoded = client.encode([UrlItem(f"{images.base}/a"), ImageItem(photo(40, 40))])
    assert reason(refused) == "UNSUPPORTED_CONTENT"
    assert rows(encoded).num_rows
    assert not images.asked
