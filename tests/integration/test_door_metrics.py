"""What operators see of the call gate and of URL items."""

from __future__ import annotations

import secrets
import threading
import time
from pathlib import Path

import grpc
import pytest
import torch

from lm_adapter import EncodedRows, ItemFailed, RequestRefused, UrlItem, VisionEncoderClient
from tests.integration.conftest import RunningService, running
from tests.integration.images import photo
from tests.integration.test_url_items import Images, images

pytestmark = pytest.mark.without_device

__all__ = ["images"]  # the fixture


def sample(found: RunningService, name: str, **labels: str) -> float:
    return found.service.metrics.registry.get_sample_value(name, labels) or 0.0


def test_refused_and_open_calls_are_seen(checkpoints: dict[str, Path], device: torch.device) -> None:
    token = secrets.token_hex(16)
    with running(
        checkpoints["qwen3_vl"], device, tokens=f"tenant={token}", open_namespaces=False, max_calls=1
    ) as found:
        with VisionEncoderClient(found.target, timeout_s=20) as client, pytest.raises(RequestRefused):
            client.info()
        with VisionEncoderClient(found.target, timeout_s=20, token=token) as client:
            client.info()
            with pytest.raises(RequestRefused):
                client.lookup([bytes(32)])  # of the default namespace, which is another
        let_go = threading.Event()
        with grpc.insecure_channel(found.target) as channel:
            # A call whose message does not come has its place in the gate, and there is just one.
            lookup = channel.stream_unary("/vision_encoder.v1.VisionEncoder/Lookup")
            bearer = (("authorization", f"Bearer {token}"),)
            held = lookup.future(iter(lambda: let_go.wait(30), True), timeout=30, metadata=bearer)
            ends_s = time.monotonic() + 20
            while sample(found, "ve_open_calls") != 1:
                assert time.monotonic() < ends_s
                time.sleep(0.01)
            with pytest.raises(grpc.RpcError, match="at most 1"):
                lookup(iter([b""]), timeout=20, metadata=bearer)
            let_go.set()
            with pytest.raises(grpc.RpcError, match="ended before its request"):
                held.result()
        refused = {
            reason: sample(found, "ve_refused_calls_total", reason=reason)
            for reason in ("UNAUTHENTICATED", "PERMISSION_DENIED", "TOO_MANY_CALLS", "INVALID_REQUEST")
        }
        assert set(refused.values()) == {1}, refused
        while sample(found, "ve_open_calls"):
            assert time.monotonic() < ends_s
            time.sleep(0.01)


def test_url_items_are_seen(checkpoints: dict[str, Path], device: torch.device, images: Images) -> None:
    images.files = {"/a": photo(60, 60)}
    with (
        running(checkpoints["qwen3_vl"], device, url_allow=images.base, url_networks="127.0.0.1/32") as found,
        VisionEncoderClient(found.target, timeout_s=60) as client,
    ):
        taken, gone, outside = client.encode(
            [UrlItem(f"{images.base}/a"), UrlItem(f"{images.base}/gone"), UrlItem("http://127.0.0.2/")]
        )
        assert isinstance(taken, EncodedRows)
        assert isinstance(gone, ItemFailed)
        assert isinstance(outside, ItemFailed)
        for outcome in ("OK", gone.reason, outside.reason):
            assert sample(found, "ve_url_fetch_seconds_count", outcome=outcome) == 1, outcome


def test_without_a_list_there_is_nothing_of_urls_to_see(service: RunningService) -> None:
    assert b"ve_url_" not in service.service.metrics.exposition()
