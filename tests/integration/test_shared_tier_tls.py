"""The shared tier through TLS: a real server with a certificate, and one that wants the client's."""

from __future__ import annotations

import secrets
import socket
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from pydantic import SecretStr

from encoder_service.store.shared_tier_server import PIECE_BYTES, ServerFailed, ValkeyServer
from lm_adapter import CacheTier, ImageItem, VisionEncoderClient
from tests.certificates import Authority
from tests.integration.conftest import RunningService, running
from tests.integration.images import photo
from tests.valkey_server import ValkeyProcess

PASSWORD = secrets.token_hex(16)


class Secured(NamedTuple):
    """A server that speaks TLS only, but for the socket of the test's own questions."""

    process: ValkeyProcess
    port: int
    authority: Authority
    folder: Path

    def url(self, *, host: str = "127.0.0.1", ca: Path | None = None, client: str = "") -> str:
        files = f"ssl_ca_certs={ca or self.authority.ca}"
        if client:
            own = self.authority.issue(client)
            files += f"&ssl_certfile={own.cert}&ssl_keyfile={own.key}"
        return f"rediss://:{PASSWORD}@{host}:{self.port}/0?{files}"


@contextmanager
def secured(*, clients_need_certificates: bool) -> Iterator[Secured]:
    with tempfile.TemporaryDirectory(prefix="ve-tls-") as name:
        folder = Path(name)
        authority = Authority(folder / "authority")
        files = authority.issue("valkey", host="valkey.internal")
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            port = taken.getsockname()[1]
        process = ValkeyProcess(
            folder, "--tls-port", str(port), "--tls-cert-file", str(files.cert),
            "--tls-key-file", str(files.key), "--tls-ca-cert-file", str(authority.ca),
            "--tls-auth-clients", "yes" if clients_need_certificates else "no",
        )  # fmt: skip
        process.call("CONFIG", "SET", "requirepass", PASSWORD)
        try:
            yield Secured(process, port, authority, folder)
        finally:
            process.kill()


@contextmanager
def replica(
    checkpoints: dict[str, Path], device: torch.device, url: str, secret: str
) -> Iterator[tuple[RunningService, VisionEncoderClient]]:
    with (
        running(
            checkpoints["qwen3_vl"],
            device,
            shared_url=url,
            shared_secret=secret,
            shared_timeout_ms=10_000,
            store_bytes=0,
        ) as service,
        VisionEncoderClient(service.target, timeout_s=60) as client,
    ):
        yield service, client


def figure(service: RunningService, name: str, **labels: str) -> float:
    return service.service.metrics.registry.get_sample_value(name, labels) or 0.0


def until_written(service: RunningService, number: int) -> None:
    ends_s = time.monotonic() + 30
    while figure(service, "ve_shared_tier_writes_total", outcome="stored") < number:
        assert time.monotonic() < ends_s, "nothing was written"
        time.sleep(0.01)


@pytest.mark.parametrize("clients_need_certificates", [False, True])
def test_replicas_share_rows_through_tls(
    checkpoints: dict[str, Path], device: torch.device, clients_need_certificates: bool
) -> None:
    image, secret = ImageItem(photo(90, 70)), secrets.token_hex(16)
    with secured(clients_need_certificates=clients_need_certificates) as server:
        own = "client" if clients_need_certificates else ""
        url = server.url(client=own)
        with replica(checkpoints, device, url, secret) as (service, client):
            written = client.encode_one(image)
            assert written.tier is CacheTier.MISS
            until_written(service, 1)
        with replica(checkpoints, device, url, secret) as (service, client):
            read = client.encode_one(image)
            assert read.tier is CacheTier.SHARED
            assert (read.numpy() == written.numpy()).all()


@pytest.mark.parametrize("wrong", ["authority", "host", "certificate", "clear"])
def test_a_server_that_cannot_be_trusted_is_not_used(
    checkpoints: dict[str, Path], device: torch.device, wrong: str
) -> None:
    """Or that does not trust us: callers get their rows, and nothing goes there."""
    with secured(clients_need_certificates=wrong == "certificate") as server:
        stranger = Authority(server.folder / "stranger")
        url = {
            "authority": server.url(ca=stranger.ca),
            "host": server.url(host="localhost"),  # the certificate is for 127.0.0.1
            "certificate": server.url(),
            "clear": server.url().replace("rediss://", "redis://").partition("?")[0],
        }[wrong]
        with replica(checkpoints, device, url, secrets.token_hex(16)) as (service, client):
            for _ in range(3):
                assert client.encode_one(ImageItem(photo(50, 50))).tier is CacheTier.MISS
            assert figure(service, "ve_shared_tier_looks_total", outcome="failed") > 0
            assert figure(service, "ve_shared_tier_writes_total", outcome="stored") == 0
            assert PASSWORD not in service.service.metrics.exposition().decode()
        assert b"NOAUTH" in server.process.call("KEYS", "*")


@pytest.mark.anyio
async def test_values_in_pieces_go_through_tls_whole() -> None:
    value = secrets.token_bytes(5 * PIECE_BYTES + 1234)
    with secured(clients_need_certificates=True) as server, ThreadPoolExecutor(1):
        tier = ValkeyServer(SecretStr(server.url(client="client")), prefix="t", max_connections=4)
        await tier.write(b"name", [value[:1000], memoryview(value)[1000:]], 60_000)
        assert b"".join(await tier.read(b"name", 0, len(value))) == value
        await tier.delete(b"name")
        assert b"".join(await tier.read(b"name", 0, len(value))) == b""
        await tier.close()
        stranger = ValkeyServer(SecretStr(server.url()), prefix="t", max_connections=1)
        with pytest.raises(ServerFailed) as failure:
            await stranger.read(b"name", 0, 10)
        assert PASSWORD not in str(failure.value)
        await stranger.close()
