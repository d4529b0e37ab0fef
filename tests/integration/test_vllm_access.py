"""Both halves of the vLLM connector against a service with mutual TLS and a token."""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from lm_adapter import EncodedRows, ImageItem, VisionEncoderClient
from lm_adapter.engines.vllm.settings import Settings
from tests.certificates import Authority
from tests.integration.conftest import running, tokens_file
from tests.integration.images import photo
from tests.unit.lm_adapter.connector_rig import Engine, Image, engine_config

NAMESPACE = "tenant"
NAME = "encoders.models.svc"
RETRY_S = 0.4
HALVES = ("scheduler", "rank")


class Secured(NamedTuple):
    """A service that requires a client certificate of one authority and one token. access: settings that it
    accepts. rows: of an image that it holds."""

    target: str
    hf_config: dict[str, Any]
    access: dict[str, Any]
    image: Image
    rows: EncodedRows

    def engine(self, half: str, access: dict[str, Any]) -> Engine:
        """Of one rank. access: of one half, whose name is ``half``; the other has what is accepted."""
        own = {name: access if name == half else self.access for name in HALVES}
        config = engine_config(
            self.target,
            hf_config=self.hf_config,
            namespace=NAMESPACE,
            retry_s=RETRY_S,
            **own["scheduler"],
        )
        engine = Engine(config, num_workers=0)
        engine.start_worker(**own["rank"])
        return engine


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
        tokens_file=tokens_file(folder, f"{NAMESPACE}={token}"),
        open_namespaces=False,
    ) as service:
        data = photo()
        tls = Settings.read({"target": service.target, **access}).client_tls()
        with VisionEncoderClient(service.target, namespace=NAMESPACE, token=token, tls=tls) as client:
            rows = client.encode_one(ImageItem(data))
        hf_config = json.loads((checkpoints["qwen3_vl"] / "config.json").read_text())
        yield Secured(service.target, hf_config, access, Image(data, rows.grid_thw), rows)


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize(
    ("change", "reason", "text"),
    [
        ({"tls_server_name": "elsewhere.test"}, "UNAVAILABLE", "Hostname Verification Check failed"),
        ({"token_file": ""}, "UNAUTHENTICATED", "token"),
    ],
    ids=["another name", "no token"],
)
def test_p32_a_half_without_access_fails_its_images_with_the_reason(
    change: dict[str, str], reason: str, text: str, half: str, secured: Secured
) -> None:
    with secured.engine(half, secured.access | change) as engine:
        failure = engine.failure(engine.request(secured.image))
    assert failure.startswith(f"{reason}: ")
    assert text in failure


def test_files_that_are_half_replaced_when_the_first_image_comes_are_read_again(
    secured: Secured, tmp_path: Path
) -> None:
    """The first image may come hours after the start. A rank connects then, the scheduler at the start."""
    own = {name: shutil.copy(secured.access[name], tmp_path) for name in ("tls_cert", "tls_key")}
    with secured.engine("rank", {**secured.access, **own}) as engine:
        shutil.copy(Authority(tmp_path / "new").issue("reader").key, own["tls_key"])
        assert "are not a certificate and its key" in engine.failure(engine.request(secured.image))
        shutil.copy(secured.access["tls_key"], own["tls_key"])
        request = engine.request(secured.image)
        engine.fetch(request)
        engine.load(engine.schedule(request))
        (rows,) = engine.caches[0].values()
        assert torch.equal(rows, secured.rows.torch())
