"""SGLang's own bootstrap server, `--encoder-bootstrap-port`: the service in its list of encoders."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from tests.engines.processes import answers, free_port
from tests.integration.conftest import running
from tests.waiting import PATIENCE_S, wait_until

# Of what SGLang imports.
pytestmark = pytest.mark.filterwarnings("ignore")


def test_an_encoder_that_was_dropped_is_listed_again(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the server has dropped it for good, and after a start of the server that no call has noticed."""
    from sglang.srt.disaggregation.encoder.receiver import EncoderBootstrapServer

    monkeypatch.setattr("encoder_service.rpc.sglang.REGISTER_EVERY_S", 0.1)
    address = f"127.0.0.1:{free_port()}"
    port, url = free_port(), f"http://{address}"
    listed: list[str] = []
    bootstrap = EncoderBootstrapServer("127.0.0.1", port, listed, 0.1, 0.1, evicted_ttl=0.5)
    settings = {"sglang_register": (f"http://127.0.0.1:{port}",), "sglang_url": url, "serve_sglang": address}
    try:
        wait_until(lambda: answers(f"http://127.0.0.1:{port}/health"), "the bootstrap server")
        with running(checkpoints["qwen3_vl"], torch.device("cpu"), **settings) as service:
            wait_until(lambda: listed == [url], "the registration")

            stands_still = threading.Event()
            service.loop.call_soon_threadsafe(stands_still.wait, PATIENCE_S)
            wait_until(lambda: bootstrap._evicted_urls, "the eviction")
            wait_until(lambda: not bootstrap._evicted_urls, "the end of the probes")
            assert listed == []
            stands_still.set()
            wait_until(lambda: listed == [url], "the registration after the drop")

            listed.clear()  # as of a server that has just started
            wait_until(lambda: listed == [url], "the registration at a new server")
        assert listed == []
    finally:
        bootstrap.close()
