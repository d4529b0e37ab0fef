"""A rank of the vLLM connector without vLLM and without a GPU."""

from __future__ import annotations

import secrets
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench.harness.waiting import wait_until
from lm_adapter.engines.shared.geometry import Geometry
from lm_adapter.engines.vllm.settings import Settings
from lm_adapter.engines.vllm.worker.ranks import RankReader

GEOMETRY = Geometry(width=12, dtype="float32", num_levels=0, merge_size=2, merges_time=False)
SETTINGS = Settings(target="127.0.0.1:1")


@pytest.mark.parametrize(("device", "index"), [("cuda", 3), ("cuda:1", 1)])
def test_p39_a_device_without_an_index_is_the_workers_current_one(
    monkeypatch: pytest.MonkeyPatch, device: str, index: int
) -> None:
    """vLLM's ``device_config.device`` is ``cuda``, which ``torch.cuda.set_device`` refuses; the reader's
    thread begins with device 0."""
    worker = threading.current_thread()
    chosen: list[tuple[threading.Thread, Any]] = []

    def choose(value: Any) -> None:
        chosen.append((threading.current_thread(), value))

    monkeypatch.setattr(
        torch.cuda, "current_device", lambda: 3 if threading.current_thread() is worker else 0
    )
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(device=device))
    monkeypatch.setattr(torch.cuda, "set_device", choose)
    monkeypatch.setattr(torch.cuda, "set_stream", choose)
    reader = RankReader(SETTINGS, GEOMETRY, torch.device(device), secrets.token_hex(8))
    try:
        wait_until(lambda: len(chosen) == 2, "the choice of device and stream")
        expected = torch.device("cuda", index)
        (first, chosen_device), (second, stream) = chosen
        assert first is second is reader._thread
        assert chosen_device == stream.device == reader._device == expected
    finally:
        for _ in range(2):
            reader.close()
    assert not reader._thread.is_alive()
