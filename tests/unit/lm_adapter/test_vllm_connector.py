"""The connector's methods without vLLM: waits of an idle engine, and the device of the fetching thread."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lm_adapter.engines.vllm_connector import IDLE_S, ConnectorMethods, StepRows
from lm_adapter.engines.vllm_fetch import Fetcher
from lm_adapter.engines.vllm_items import Geometry, WantedRows
from lm_adapter.engines.vllm_settings import FetchSettings
from lm_adapter.items import Grid

GEOMETRY = Geometry(width=12, dtype="float32", num_levels=0, merge_size=2, merges_time=False)


def connector(waits: list[float]) -> Any:
    found: Any = object.__new__(ConnectorMethods)
    found._step, found._was_idle = StepRows(), False
    found._tracker = SimpleNamespace(wait=waits.append)
    return found


def test_only_a_second_empty_step_in_a_row_waits() -> None:
    """The step before it may have been scheduled while another one runs."""
    waits: list[float] = []
    holds = connector(waits)
    counts = []
    for num_tokens in (0, 0, 0, 7, 0, 5, 0, 0):
        holds.build_connector_meta(SimpleNamespace(total_num_scheduled_tokens=num_tokens))
        counts.append(len(waits))
    assert counts == [0, 1, 2, 2, 2, 2, 2, 3]
    assert set(waits) == {IDLE_S}


@pytest.mark.parametrize(("device", "index"), [("cuda", 3), ("cuda:1", 1)])
def test_p39_a_device_without_an_index_is_the_current_one(
    monkeypatch: pytest.MonkeyPatch, device: str, index: int
) -> None:
    """vLLM's ``device_config.device`` is ``cuda``, which ``torch.cuda.set_device`` refuses."""
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    monkeypatch.setattr(torch._C, "_cuda_setDevice", chosen.append, raising=False)
    monkeypatch.setattr(torch.cuda, "Stream", object)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: None)
    holds = connector([])
    holds._device, holds._in_process = torch.device(device), True
    holds._use_own_stream()
    assert chosen == [index]


def test_an_ended_fetch_wakes_the_engine_at_once() -> None:
    fetcher = Fetcher(FetchSettings(target="127.0.0.1:1", retry_s=0.05), GEOMETRY)
    try:
        started_s = time.monotonic()
        fetcher.wait(0.05)
        assert time.monotonic() - started_s >= 0.05
        wanted = WantedRows("name", 3, bytes(32), Grid(1, 2, 2), 48)
        threading.Timer(0.05, fetcher.start, ("item", wanted)).start()
        while not fetcher.ended:
            fetcher.wait(60)
        assert time.monotonic() - started_s < 30
        fetcher.wait(60)  # not popped yet
        assert time.monotonic() - started_s < 30
    finally:
        fetcher.close()
