"""The vLLM connector's fetching thread against a service with mutual TLS and a token."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from lm_adapter import ImageItem, VisionEncoderClient
from lm_adapter.engines.vllm_fetch import Fetcher
from lm_adapter.engines.vllm_items import Geometry, WantedRows
from lm_adapter.engines.vllm_settings import FetchSettings
from lm_adapter.errors import EncoderError
from lm_adapter.types import EncodedRows
from tests.certificates import Authority
from tests.integration.conftest import running
from tests.integration.images import photo

NAMESPACE = "tenant"
NAME = "encoders.models.svc"
WITHIN_S = 30
RETRY_S = 0.4


class Secured(NamedTuple):
    """A service that requires a client certificate of one authority and one token. access: settings that it
    accepts. rows: of an image that it holds."""

    target: str
    access: dict[str, str]
    rows: EncodedRows
    geometry: Geometry

    def fetcher(self, access: dict[str, str]) -> Fetcher:
        config = {"target": self.target, "namespace": NAMESPACE, "retry_s": RETRY_S, **access}
        return Fetcher(FetchSettings.read(config), self.geometry)


@pytest.fixture(scope="module")
def secured(
    checkpoints: dict[str, Path], device: torch.device, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Secured]:
    folder = tmp_path_factory.mktemp("secured")
    authority = Authority(folder)
    files, own = authority.issue("encoder", host=NAME), authority.issue("reader")
    token = secrets.token_hex(16)
    (folder / "token").write_text(f"{token}\n")
    access = {
        "token_file": str(folder / "token"),
        "tls_ca": str(authority.ca),
        "tls_cert": str(own.cert),
        "tls_key": str(own.key),
        "tls_server_name": NAME,
    }
    with running(
        checkpoints["qwen3_vl"],
        device,
        listen=("127.0.0.1:0",),
        tls_cert=files.cert,
        tls_key=files.key,
        tls_client_ca=authority.ca,
        tokens=f"{NAMESPACE}={token}",
        open_namespaces=False,
    ) as service:
        tls = FetchSettings.read({"target": service.target, **access}).client_tls()
        with VisionEncoderClient(service.target, namespace=NAMESPACE, token=token, tls=tls) as client:
            rows = client.encode_one(ImageItem(photo()))
            model = client.info().model()
        geometry = Geometry(
            rows.width, rows.dtype, model.num_deepstack_levels, model.spatial_merge_size, False
        )
        yield Secured(service.target, access, rows, geometry)


def fetched(fetcher: Fetcher, rows: EncodedRows) -> EncodedRows | EncoderError:
    fetcher.start("item", WantedRows("name", rows.num_rows, rows.key, rows.grid_thw, rows.num_bytes))
    fetcher.wait(WITHIN_S)
    return fetcher.ended.popleft().outcome


@pytest.mark.parametrize(
    ("change", "reason", "text"),
    [
        ({"tls_server_name": "elsewhere.test"}, "UNAVAILABLE", "Hostname Verification Check failed"),
        ({"token_file": ""}, "UNAUTHENTICATED", "token"),
    ],
    ids=["another name", "no token"],
)
def test_p32_a_connector_without_access_fails_its_items_with_the_reason(
    change: dict[str, str], reason: str, text: str, secured: Secured
) -> None:
    fetcher = secured.fetcher(secured.access | change)
    outcome = fetched(fetcher, secured.rows)
    fetcher.close()
    assert isinstance(outcome, EncoderError)
    assert outcome.reason == reason
    assert text in outcome.message


def test_files_that_are_half_replaced_when_the_first_image_comes_are_read_again(
    secured: Secured, tmp_path: Path
) -> None:
    """The first image may come hours after the start."""
    own = {name: shutil.copy(secured.access[name], tmp_path) for name in ("tls_cert", "tls_key")}
    fetcher = secured.fetcher({**secured.access, **own})
    try:
        shutil.copy(Authority(tmp_path / "new").issue("reader").key, own["tls_key"])
        early = fetched(fetcher, secured.rows)
        assert isinstance(early, EncoderError)
        assert "are no certificate and its key" in early.message
        shutil.copy(secured.access["tls_key"], own["tls_key"])
        late = fetched(fetcher, secured.rows)
        assert isinstance(late, EncodedRows)
        assert late.numpy().tobytes() == secured.rows.numpy().tobytes()
    finally:
        fetcher.close()
