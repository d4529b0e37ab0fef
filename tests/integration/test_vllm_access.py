"""vLLM's connector and the front against services with mutual TLS and tokens; vLLM itself is pretended."""

from __future__ import annotations

import asyncio
import base64
import json
import secrets
import shutil
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import httpx
import pytest
import torch
from lm_adapter.fleet import endpoints

from lm_adapter import ImageItem, VisionEncoderClient
from lm_adapter.engines import vllm_connector, vllm_front
from lm_adapter.engines.vllm_access import Access
from lm_adapter.engines.vllm_connector import ConnectorMethods
from lm_adapter.engines.vllm_fetch import Fetched, Fetcher, FetchSettings
from lm_adapter.engines.vllm_front import create_app
from lm_adapter.engines.vllm_items import Geometry, WantedRows, read_params
from lm_adapter.items import Grid
from lm_adapter.types import EncodedRows
from tests.certificates import Authority
from tests.integration.conftest import running
from tests.integration.images import photo

pytestmark = pytest.mark.anyio

NAMESPACE = "tenant"
NAME = "encoders.models.svc"
HOSTS = ("127.0.0.2", "127.0.0.3")
WITHIN_S = 30
RETRY_S = 0.4


class Closed(NamedTuple):
    """Two services that open to certificates of one authority and to one token, and whose own certificate is
    for a name and not for their addresses. access: settings that get in."""

    checkpoint: Path
    addresses: tuple[str, str]
    access: dict[str, str]
    folder: Path

    def target(self, kind: str) -> str:
        port = self.addresses[0].rpartition(":")[2]
        return {
            "one": self.addresses[0],
            "two": ",".join(self.addresses),
            "service": f"dns:///{NAME}:{port}",
        }[kind]

    def broken(self, how: str) -> dict[str, str]:
        """Settings that are in order, and open nothing here."""
        if how == "clear":
            return {}
        if how == "no certificate":
            return {name: self.access[name] for name in ("token_file", "tls_ca", "tls_server_name")}
        if how == "no token":
            return {name: path for name, path in self.access.items() if name != "token_file"}
        if how == "other name":
            return {**self.access, "tls_server_name": "elsewhere.test"}
        stranger = Authority(self.folder / secrets.token_hex(4))
        if how == "wrong ca":
            return {**self.access, "tls_ca": str(stranger.ca)}
        own = stranger.issue("reader")
        return {**self.access, "tls_cert": str(own.cert), "tls_key": str(own.key)}

    def client(self) -> VisionEncoderClient:
        token, tls = Access(**self.access).token_and_tls()
        return VisionEncoderClient(self.addresses[0], namespace=NAMESPACE, token=token, tls=tls, timeout_s=20)


@pytest.fixture(scope="module")
def closed(
    checkpoints: dict[str, Path], device: torch.device, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Closed]:
    folder = tmp_path_factory.mktemp("closed")
    authority = Authority(folder)
    files, own = authority.issue("encoder", host=NAME), authority.issue("reader")
    token = secrets.token_hex(16)
    (folder / "token").write_text(f"{token}\n")
    settings: dict[str, Any] = {
        "tls_cert": files.cert,
        "tls_key": files.key,
        "tls_client_ca": authority.ca,
        "tokens": f"{NAMESPACE}={token}",
        "open_namespaces": False,
    }
    access = {
        "token_file": str(folder / "token"),
        "tls_ca": str(authority.ca),
        "tls_cert": str(own.cert),
        "tls_key": str(own.key),
        "tls_server_name": NAME,
    }
    with ExitStack() as stack:
        model = checkpoints["qwen3_vl"]
        first = stack.enter_context(running(model, device, listen=(f"{HOSTS[0]}:0",), **settings))
        port = first.target.rpartition(":")[2]
        second = stack.enter_context(running(model, device, listen=(f"{HOSTS[1]}:{port}",), **settings))
        yield Closed(model, (first.target, second.target), access, folder)


class Base:
    """As much of vLLM's connector base class as its methods rely on."""

    def __init__(self, vllm_config: Any, role: Any) -> None:
        self._vllm_config = vllm_config


class PretendedVllm:
    """Asks the connector's scheduler side for a request's rows, as vLLM does; keeps what came."""

    def __init__(self, checkpoint: Path, extra_config: dict[str, Any]) -> None:
        config = json.loads((checkpoint / "config.json").read_text())
        text = SimpleNamespace(hidden_size=config["text_config"]["hidden_size"])
        hf_config = SimpleNamespace(to_dict=lambda: config, get_text_config=lambda: text)
        kind: Any = type("Connector", (ConnectorMethods, Base), {})
        self.connector = kind(
            SimpleNamespace(
                ec_transfer_config=SimpleNamespace(
                    is_ec_producer=False, ec_role="ec_consumer", ec_connector_extra_config=extra_config
                ),
                model_config=SimpleNamespace(hf_config=hf_config, dtype="torch.float32"),
                device_config=SimpleNamespace(device=torch.device("cpu")),
                parallel_config=SimpleNamespace(distributed_executor_backend="uni"),
            ),
            SimpleNamespace(name="SCHEDULER"),
        )
        self.num_requests = 0
        self.rows: list[torch.Tensor] = []

    def rows_of(self, body: dict[str, Any]) -> bool:
        """Whether all of the request's rows came."""
        self.num_requests += 1
        items, _ = read_params(body.get("ec_transfer_params"))
        geometry: Geometry = self.connector._geometry
        features = []
        for number, item in enumerate(items):
            length = geometry.num_rows(item.grid)
            position = SimpleNamespace(offset=0, length=length, get_num_embeds=lambda length=length: length)
            name = f"{self.num_requests}.{number}"
            features.append(SimpleNamespace(identifier=name, mm_position=position, data=None))
        request = SimpleNamespace(
            request_id=str(self.num_requests),
            mm_features=features,
            ec_transfer_params=body.get("ec_transfer_params"),
        )
        try:
            while not self.connector.ensure_cache_available(request, 0):
                if request.request_id in self.connector.take_unavailable_requests():
                    return False
                self.connector._fetcher.wait(0.05)
            for index in range(len(features)):
                self.connector.update_state_after_alloc(request, index)
            step = self.connector.build_connector_meta(SimpleNamespace(total_num_scheduled_tokens=1))
            self.rows += [step.rows[feature.identifier] for feature in features]
            return True
        finally:
            self.connector.request_finished(request)


@contextmanager
def vllm_at(vllm: PretendedVllm) -> Iterator[str]:
    """Its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            status = 200 if vllm.rows_of(body) else 500
            self.send_response(status)
            self.send_header("content-length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
            vllm.connector.shutdown()


@asynccontextmanager
async def engine(
    closed: Closed, kind: str, connector: dict[str, str], front: dict[str, str]
) -> AsyncIterator[tuple[httpx.AsyncClient, PretendedVllm]]:
    """A front, by this access, before a vLLM that has its connector by that one."""
    with tempfile.TemporaryDirectory(prefix="ve-access-") as folder:
        given = {
            "target": closed.target(kind),
            "namespace": NAMESPACE,
            "retry_s": RETRY_S,
            "failures_path": f"{folder}/f",
        }
        vllm = PretendedVllm(closed.checkpoint, {**given, **connector})
        with vllm_at(vllm) as url:
            token, tls = Access(**front).token_and_tls()
            app = create_app(
                vllm=url,
                encoder=given["target"],
                failures_path=given["failures_path"],
                namespace=NAMESPACE,
                token=token,
                tls=tls,
                timeout_s=20,
            )
            transport = httpx.ASGITransport(app)
            async with (
                app.router.lifespan_context(app),
                httpx.AsyncClient(transport=transport, base_url="http://front") as client,
                asyncio.timeout(WITHIN_S),
            ):
                yield client, vllm


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_connector, "check_model", lambda _: False)
    monkeypatch.setattr(vllm_front, "RETRY_S", RETRY_S)


def chat(*images: bytes) -> dict[str, Any]:
    parts: list[dict[str, Any]] = [{"type": "text", "text": "What?"}]
    for image in images:
        url = "data:image/png;base64," + base64.b64encode(image).decode()
        parts.append({"type": "image_url", "image_url": {"url": url}})
    return {"model": "m", "messages": [{"role": "user", "content": parts}]}


@pytest.mark.parametrize("kind", ["one", "two", "service"])
async def test_rows_come_from_encoders_behind_tls_and_tokens(
    kind: str, closed: Closed, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those behind a name need not be told what their certificate is made out to."""
    monkeypatch.setattr(endpoints, "system_lookup", lambda host, port: list(HOSTS))
    access = {**closed.access, "tls_server_name": "" if kind == "service" else NAME}
    images = [photo(width, 64) for width in (64, 96, 128)]
    async with engine(closed, kind, access, access) as (client, vllm):
        response = await client.post("/v1/chat/completions", json=chat(*images))
        assert response.status_code == 200, response.text
    with closed.client() as direct:
        for image, rows in zip(images, vllm.rows, strict=True):
            same = direct.encode_one(ImageItem(image)).torch()
            # On a GPU another encoder may have chosen other kernels.
            is_near = device.type == "cuda" and bool((rows - same).norm() < 1e-4 * same.norm())
            assert torch.equal(rows, same) or is_near


# How an access is broken, and the status, code and reason that a request's caller reads.
CLOSED_DOORS = {
    "wrong ca": (503, "UNAVAILABLE", "CERTIFICATE_VERIFY_FAILED"),
    "other name": (503, "UNAVAILABLE", "Hostname Verification Check failed"),
    # The encoder ends the handshake without a word of why.
    "no certificate": (503, "UNAVAILABLE", "Socket closed"),
    "stranger's certificate": (503, "UNAVAILABLE", "Socket closed"),
    "clear": (503, "UNAVAILABLE", "Socket closed"),
    "no token": (502, "UNAUTHENTICATED", "token"),
}


@pytest.mark.parametrize("how", CLOSED_DOORS)
@pytest.mark.parametrize("kind", ["one", "two"])
async def test_p32_a_connector_that_is_not_let_in_rejects_the_request_and_says_why(
    kind: str, how: str, closed: Closed
) -> None:
    async with engine(closed, kind, closed.broken(how), closed.access) as (client, vllm):
        refused = await client.post("/v1/chat/completions", json=chat(photo()))
        assert_says_why(refused, how)
        assert vllm.rows == []
        assert (await client.post("/v1/chat/completions", json=chat())).status_code == 200


@pytest.mark.parametrize("how", CLOSED_DOORS)
@pytest.mark.parametrize("kind", ["one", "two"])
async def test_p32_a_front_that_is_not_let_in_refuses_images_and_says_why(
    kind: str, how: str, closed: Closed
) -> None:
    async with engine(closed, kind, closed.access, closed.broken(how)) as (client, vllm):
        refused = await client.post("/v1/chat/completions", json=chat(photo()))
        assert_says_why(refused, how)
        assert vllm.num_requests == 0
        assert (await client.post("/v1/chat/completions", json=chat())).status_code == 200


def assert_says_why(response: httpx.Response, how: str) -> None:
    status, code, reason = CLOSED_DOORS[how]
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (status, code), error
    assert reason in error["message"]


def test_files_that_are_half_replaced_when_the_first_image_comes_do_not_stay(
    closed: Closed, tmp_path: Path
) -> None:
    """The start is hours before the first image, and a client is made once."""
    own = {name: shutil.copy(closed.access[name], tmp_path) for name in ("tls_cert", "tls_key")}
    settings = FetchSettings.read(
        {"target": closed.target("one"), "namespace": NAMESPACE, **closed.access, **own}
    )
    with closed.client() as direct:
        rows = direct.encode_one(ImageItem(photo()))
        model = direct.info().model()
    geometry = Geometry(rows.width, rows.dtype, model.num_deepstack_levels, model.spatial_merge_size, False)
    fetcher = Fetcher(settings, geometry)
    try:
        shutil.copy(Authority(tmp_path / "new").issue("reader").key, own["tls_key"])
        early = fetched(fetcher, rows)
        assert not isinstance(early.outcome, EncodedRows)
        assert "are no certificate and its key" in early.outcome.message
        shutil.copy(closed.access["tls_key"], own["tls_key"])
        late = fetched(fetcher, rows)
        assert isinstance(late.outcome, EncodedRows)
        assert late.outcome.numpy().tobytes() == rows.numpy().tobytes()
    finally:
        fetcher.close()


def fetched(fetcher: Fetcher, rows: EncodedRows) -> Fetched:
    grid = Grid(*rows.grid_thw)
    num_bytes = rows.num_rows * rows.width * 4
    fetcher.start("item", WantedRows("name", rows.num_rows, rows.key, grid, num_bytes))
    fetcher.wait(WITHIN_S)
    return fetcher.ended.popleft()
