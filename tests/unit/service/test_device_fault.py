"""How the service leaves after a device fault."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
import torch

from bench.harness.waiting import PATIENCE_S
from encoder_service.config import parse_settings
from encoder_service.errors import DeviceFault
from encoder_service.pipeline import ServedModel
from encoder_service.serve import Service, serve
from encoder_service.startup import build_engine
from tests.fakes import FakePreprocessor, FakeTower
from tests.unit.service.rig import memory_store
from tests.unit.store.arenas import expected, land

pytestmark = pytest.mark.anyio


async def test_a_device_fault_freezes_the_store_before_the_service_stops() -> None:
    service = Service(parse_settings(model=Path("/m")))
    service.store = store = memory_store()
    model = ServedModel("fake", "fake", b"m" * 32, FakeTower(), FakePreprocessor(), Path("/m"))
    engine = build_engine(service.settings, model, None, service.metrics, service.on_device_fault)
    service.engine = engine
    assert land(store, 1)
    error = torch.AcceleratorError("CUDA error: unspecified launch failure")
    engine_thread = threading.Thread(target=engine.report, args=(error,))
    engine_thread.start()
    engine_thread.join()
    assert service.is_alive(), "the service's state changes on its own loop only"
    assert await asyncio.wait_for(service.wait(), PATIENCE_S) is engine.fault
    assert store.reserve("", expected(2)) is None, "the device may still write to a slot"
    await service.stop()


async def test_a_device_fault_during_the_start_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process manager restarts what failed."""

    async def start(service: Service) -> None:
        service.on_device_fault(DeviceFault("the device failed"))
        await asyncio.sleep(PATIENCE_S)

    monkeypatch.setattr(Service, "start", start)
    assert await asyncio.wait_for(serve(parse_settings(model=Path("/m"))), PATIENCE_S) == 1
