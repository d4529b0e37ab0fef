"""``POST /v1/encode`` over real sockets: rows, access, limits, ends. Bodies are tested in tests/unit/http."""

from __future__ import annotations

import contextlib
import http.client
import json
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from blake3 import blake3
from safetensors.torch import load

from bench.harness.waiting import PATIENCE_S
from lm_adapter import ClipItem, EncodedRows, ImageItem, PreprocessOptions, UrlItem, VisionEncoderClient
from tests.certificates import Authority
from tests.engines.pictures import clip, data_url
from tests.integration.browser import browsing, find_browser
from tests.integration.conftest import RunningService, Serve, tokens_file
from tests.integration.held import wait_until_free
from tests.integration.images import photo
from tests.integration.web import Files
from tests.programs import ARE_REQUIRED

pytestmark = pytest.mark.without_device
ROUTE = "/v1/encode"
JSON = {"accept": "application/json"}
MAX_BODY_BYTES = 1 << 20


def address(service: RunningService) -> str:
    return f"http://{service.service.addresses['http']}"


def web(service: RunningService, **options: Any) -> httpx.Client:
    return httpx.Client(**{"base_url": address(service), "timeout": PATIENCE_S, **options})


@pytest.fixture(scope="module")
def images() -> Iterator[Files]:
    with Files() as found:
        yield found


@pytest.fixture(scope="module")
def shared(serve: Serve, images: Files) -> Iterator[RunningService]:
    settings: dict[str, Any] = {
        "http_listen": "127.0.0.1:0",
        "max_message_bytes": MAX_BODY_BYTES,
        "url_allow": images.base,
        "url_networks": "127.0.0.1/32",
    }
    with serve(**settings) as found:
        yield found


@pytest.fixture
def service(shared: RunningService) -> Iterator[RunningService]:
    """Holds nothing at a test's end."""
    yield shared
    wait_until_free(shared)


@pytest.fixture
def client(service: RunningService) -> Iterator[httpx.Client]:
    with web(service) as found:
        yield found


def reason(answer: httpx.Response, status: int) -> str:
    assert answer.status_code == status, answer.text
    text: str = answer.json()["error"]["reason"]
    return text


def same(answer: httpx.Response, others: list[Any]) -> bool:
    """Whether the rows of an answer are bit-equal to those of the adapter's outcomes."""
    assert answer.status_code == 200, answer.text
    rows = load(answer.content)
    assert len(rows) == len(others)
    for index, other in enumerate(others):
        assert isinstance(other, EncodedRows), other
        if not torch.equal(rows[f"rows.{index}"], other.torch()):
            return False
    return True


# -- rows ----------------------------------------------------------------------------------------------


def test_rows_are_bit_equal_to_those_of_grpc(
    service: RunningService, client: httpx.Client, images: Files
) -> None:
    """Of files, data URIs, a URL, clips and digests, with options; one cache for both protocols."""
    first, second, video = photo(96, 64), photo(64, 160), clip(1, 8)
    images.files["/a.jpg"] = first
    url, options = f"{images.base}/a.jpg", {"max_pixels": 64 * 64}
    form: list[Any] = [("image", ("a.jpg", first)), ("image", second), ("video", video)]
    stated = json.dumps([{"options": options}, {}, {}])
    answer = client.post(ROUTE, files=form, data={"items": stated})
    with VisionEncoderClient(service.target, timeout_s=60) as grpc:
        image = ImageItem(first, options=PreprocessOptions(**options))
        others = grpc.encode([image, ImageItem(second), ClipItem(video)])
        assert same(answer, others)
        items = [
            {"url": data_url(first), "options": options},
            {"content_digest": blake3(second).hexdigest()},
            {"url": data_url(video), "modality": "video"},
            {"url": url},
        ]
        answer = client.post(ROUTE, json={"items": items})
        others.append(grpc.encode_one(UrlItem(url)))
        assert same(answer, others)
    answered = client.post(ROUTE, json={"items": items}, headers=JSON).json()["items"]
    for item, other in zip(answered, others, strict=True):
        assert isinstance(other, EncodedRows)
        assert item["key"] == other.key.hex()
        assert item["grid_thw"] == list(other.grid_thw)
        assert item["tier"] == "host"
        assert item.get("timestamps_s", []) == list(other.timestamps_s)
    assert len(answered[2]["timestamps_s"]) > 1


def test_bfloat16_rows(serve: Serve) -> None:
    image = photo(96, 64)
    settings: dict[str, Any] = {"http_listen": "127.0.0.1:0", "dtype": "bfloat16"}
    with (
        serve(**settings) as service,
        web(service) as client,
        VisionEncoderClient(service.target, timeout_s=60) as grpc,
    ):
        answer = client.post(ROUTE, files={"image": image})
        assert load(answer.content)["rows.0"].dtype == torch.bfloat16
        assert same(answer, grpc.encode([ImageItem(image)]))


def test_info_health_and_the_reference(service: RunningService, client: httpx.Client) -> None:
    assert client.get("/health").json() == {"status": "ready"}
    info = client.get("/v1/info").json()
    assert info["limits"]["max_message_bytes"] == MAX_BODY_BYTES
    assert client.get("/").headers["location"] == "docs"
    described = client.get("/openapi.json").json()
    content = described["paths"][ROUTE]["post"]["requestBody"]["content"]
    assert set(content) == {"multipart/form-data", "application/json"}
    schemas = described["components"]["schemas"]
    assert "min_pixels" in schemas["Options"]["properties"]
    assert "grid_thw" in schemas["AnsweredItem"]["properties"]


def test_the_reference_loads_without_the_internet(service: RunningService) -> None:
    browser = find_browser()
    if browser is None:
        (pytest.fail if ARE_REQUIRED else pytest.skip)("chromium is not installed")
    with browsing(browser) as page:
        page.go(f"{address(service)}/docs")
        page.until(f"document.body.innerText.includes('{ROUTE}')")
        allowed = (address(service), "data:", "blob:", "about:")
        assert [url for url in page.requests if not url.startswith(allowed)] == []
        assert page.problems == []


# -- access --------------------------------------------------------------------------------------------


def test_tokens_are_those_of_grpc(serve: Serve, tmp_path: Path) -> None:
    """A wrong token is refused before the body is read, and rows of another namespace are not found."""
    image = photo(96, 64)
    file = tokens_file(tmp_path, "mine=secret", "theirs=other")
    digest = {"items": [{"content_digest": blake3(image).hexdigest()}]}
    settings: dict[str, Any] = {"http_listen": "127.0.0.1:0", "tokens_file": file, "open_namespaces": False}
    with (
        serve(**settings) as service,
        web(service) as client,
    ):
        mine, theirs, wrong = (
            {"authorization": f"Bearer {token}"} for token in ("secret", "other", "nonsense")
        )
        form: dict[str, Any] = {"files": {"image": image}, "data": {"namespace": "mine"}}
        assert client.post(ROUTE, **form, headers=mine).status_code == 200
        refused = client.post(ROUTE, **form)
        assert reason(refused, 401) == "UNAUTHENTICATED"
        assert refused.headers["www-authenticate"] == "Bearer"
        assert reason(client.post(ROUTE, content=b"no call", headers=wrong), 401) == "UNAUTHENTICATED"
        assert reason(client.post(ROUTE, **form, headers=theirs), 403) == "PERMISSION_DENIED"
        own = client.post(ROUTE, json={**digest, "namespace": "theirs"}, headers=theirs)
        assert reason(own, 404) == "UNKNOWN_KEY"
        assert client.post(ROUTE, json={**digest, "namespace": "mine"}, headers=mine).status_code == 200
        assert client.get("/v1/info").status_code == 401
        assert client.get("/v1/info", headers=theirs).status_code == 200
        assert client.get("/health").status_code == 200
        assert service.service.gate.refused["UNAUTHENTICATED"] == 2


def test_tls_and_client_certificates_are_those_of_grpc(serve: Serve, tmp_path: Path) -> None:
    authority, foreign = Authority(tmp_path / "ours"), Authority(tmp_path / "foreign")
    files, caller, stranger = authority.issue("encoder"), authority.issue("caller"), foreign.issue("stranger")
    settings: dict[str, Any] = {"tls_cert": files.cert, "tls_key": files.key, "tls_client_ca": authority.ca}
    with serve(http_listen="127.0.0.1:0", **settings) as service:
        url = f"https://{service.service.addresses['http']}/health"

        def context(cert: Any = None) -> ssl.SSLContext:
            made = ssl.create_default_context(cafile=authority.ca)
            if cert is not None:
                made.load_cert_chain(cert.cert, cert.key)
            return made

        assert httpx.get(url, verify=context(caller)).status_code == 200
        for refused in (context(), context(stranger)):
            with pytest.raises(httpx.TransportError):
                httpx.get(url, verify=refused)
        with pytest.raises(httpx.TransportError):
            httpx.get(url.replace("https", "http"))


def test_a_page_that_has_let_its_own_name_point_here_is_refused(client: httpx.Client) -> None:
    """DNS rebinding: to the browser its origin is this server. Other clients may use any name."""
    for host, status in (("evil.example", 403), ("encoder.internal", 200), ("127.0.0.1:9", 200)):
        headers = {"host": host, "origin": f"http://{host}"}
        answer = client.post(ROUTE, files={"image": photo(64, 64)}, headers=headers)
        assert answer.status_code == status, answer.text
    answer = client.post(ROUTE, files={"image": photo(64, 64)}, headers={"host": "encoder.example"})
    assert answer.status_code == 200


def test_what_is_not_served_is_answered_as_other_errors_are(client: httpx.Client) -> None:
    assert reason(client.post("/v1/encod"), 404) == "NOT_FOUND"
    answer = client.get(ROUTE)
    assert reason(answer, 405) == "METHOD_NOT_ALLOWED"
    assert answer.headers["allow"] == "POST"
    assert "is not served, only POST" in answer.json()["error"]["message"]


# -- limits and ends -----------------------------------------------------------------------------------


@contextlib.contextmanager
def upload(service: RunningService, num_bytes: int, stated: int) -> Iterator[http.client.HTTPConnection]:
    """A POST of ``stated`` bytes, of which ``num_bytes`` are sent."""
    connection = http.client.HTTPConnection(service.service.addresses["http"], timeout=PATIENCE_S)
    try:
        connection.putrequest("POST", ROUTE)
        connection.putheader("Content-Type", "application/json")
        connection.putheader("Content-Length", str(stated))
        connection.endheaders(bytes(num_bytes))
        yield connection
    finally:
        connection.close()


def test_a_body_above_the_limit_is_refused_before_it_is_sent(service: RunningService) -> None:
    with upload(service, 0, MAX_BODY_BYTES + 1) as connection:
        assert connection.getresponse().status == 413


def test_a_caller_that_leaves_is_not_answered(service: RunningService) -> None:
    """Before its body has come, and while it is encoded; the fixture sees that nothing stays held."""
    with upload(service, 10, 20):
        time.sleep(0.05)
    body = httpx.Request("POST", address(service), files={"image": photo(500, 500)})
    with contextlib.closing(http.client.HTTPConnection(service.service.addresses["http"])) as connection:
        connection.putrequest("POST", ROUTE)
        for name, value in body.headers.items():
            connection.putheader(name, value)
        connection.endheaders(body.read())
        time.sleep(0.05)


def test_what_is_in_progress_at_a_stop_is_answered(serve: Serve) -> None:
    with serve(http_listen="127.0.0.1:0") as service:
        answers: list[httpx.Response] = []

        def ask() -> None:
            with web(service) as client:
                answers.append(client.post(ROUTE, files={"image": photo(900, 900)}))

        asking = threading.Thread(target=ask)
        asking.start()
        pipeline = service.service.pipeline
        assert pipeline is not None
        ends_s = time.monotonic() + PATIENCE_S
        while not service.on_loop(lambda: len(pipeline.inflight)):
            assert time.monotonic() < ends_s
        service.stop()
        asking.join(PATIENCE_S)
    assert list(load(answers[0].content)) == ["rows.0"]


def test_calls_are_in_metrics_and_logs_as_others_are(service: RunningService, client: httpx.Client) -> None:
    answer = client.post(ROUTE, files={"image": b"bad"}, headers={"x-request-id": "mine"})
    assert answer.headers["x-request-id"] == "mine"
    text = service.service.metrics.exposition().decode()
    assert 've_requests_total{method="http/encode",status="OK"}' in text
    assert 've_item_failures_total{reason="UNDECODABLE_IMAGE"}' in text
