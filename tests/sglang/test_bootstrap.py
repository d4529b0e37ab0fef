"""SGLang's own bootstrap server, `--encoder-bootstrap-port`: the service in its list of encoders."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from tests.engines.processes import answers
from tests.integration.conftest import RunningService, running
from tests.ports import free_port
from tests.waiting import PATIENCE_S, wait_until

if TYPE_CHECKING:
    from sglang.srt.disaggregation.encoder.receiver import EncoderBootstrapServer

# Of what SGLang imports.
pytestmark = pytest.mark.filterwarnings("ignore")


@contextlib.contextmanager
def registered(
    model: Path, address: str, url: str, evicted_ttl_s: float, *, registers: bool = True
) -> Iterator[tuple[RunningService, EncoderBootstrapServer, list[str]]]:
    """A service at ``address``, a bootstrap server at which it has registered ``url`` once, and the server's
    list. evicted_ttl_s: for so long the server probes an evicted encoder. registers: False where the server
    has ``url`` from SGLang's command line."""
    from sglang.srt.disaggregation.encoder.receiver import EncoderBootstrapServer

    port, listed = free_port(), [] if registers else [url]
    bootstrap = EncoderBootstrapServer("127.0.0.1", port, listed, 0.1, 1.0, evicted_ttl=evicted_ttl_s)
    settings: dict[str, object] = {"serve_sglang": address}
    if registers:
        settings |= {"sglang_register": (f"http://127.0.0.1:{port}",), "sglang_url": url}
    try:
        wait_until(lambda: answers(f"http://127.0.0.1:{port}/health"), "the bootstrap server")
        with running(model, torch.device("cpu"), **settings) as service:
            wait_until(lambda: listed or bootstrap._evicted_urls, "the registration")
            yield service, bootstrap, listed
        if registers:
            assert listed == []
    finally:
        bootstrap.close()


def test_an_encoder_that_cannot_be_reached_is_evicted(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By SGLang's probes, between two registrations: the service looks at the server more often than SGLang
    probes."""
    monkeypatch.setattr("encoder_service.protocols.sglang.server.WATCH_EVERY_S", 0.05)
    url = f"http://127.0.0.1:{free_port()}"
    with registered(checkpoints["qwen3_vl"], "127.0.0.1:0", url, PATIENCE_S) as (_, bootstrap, listed):
        wait_until(lambda: bootstrap._evicted_urls, "the eviction")
        assert listed == []


def test_an_encoder_that_was_dropped_for_good_is_listed_again(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the repeated registration: SGLang probes it no more."""
    monkeypatch.setattr("encoder_service.protocols.sglang.server.WATCH_EVERY_S", 0.05)
    address = f"127.0.0.1:{free_port()}"
    url = f"http://{address}"
    with registered(checkpoints["qwen3_vl"], address, url, 0.5) as (service, bootstrap, listed):
        service.service.not_ready = "a reason of this test"  # /health answers 503
        wait_until(lambda: bootstrap._evicted_urls, "the eviction")
        wait_until(lambda: not bootstrap._evicted_urls, "the end of the probes")
        assert listed == []
        service.service.not_ready = None
        monkeypatch.setattr("encoder_service.protocols.sglang.server.REGISTER_AGAIN_S", 0.0)
        wait_until(lambda: listed == [url], "the registration after the drop")


@pytest.mark.parametrize(("evicted_ttl_s", "comes_back"), [(PATIENCE_S, True), (0.5, False)])
def test_an_encoder_that_does_not_register_comes_back_only_while_it_is_probed(
    checkpoints: dict[str, Path], evicted_ttl_s: float, comes_back: bool
) -> None:
    address = f"127.0.0.1:{free_port()}"
    url = f"http://{address}"
    model = checkpoints["qwen3_vl"]
    with registered(model, address, url, evicted_ttl_s, registers=False) as (service, bootstrap, listed):
        assert answers(f"{url}/health")
        assert listed == [url]
        service.service.not_ready = "a reason of this test"  # /health answers 503
        wait_until(lambda: bootstrap._evicted_urls, "the eviction")
        assert listed == []
        if not comes_back:
            wait_until(lambda: not bootstrap._evicted_urls, "the end of the probes")
        service.service.not_ready = None
        assert answers(f"{url}/health")
        if comes_back:
            wait_until(lambda: listed == [url], "the probe that succeeds")
        else:
            time.sleep(1.0)  # ten intervals
            assert listed == []
