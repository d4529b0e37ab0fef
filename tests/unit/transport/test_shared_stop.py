"""The end of shared memory whose device is busy, or gone."""

from __future__ import annotations

import asyncio
import threading

import pytest

from encoder_service.transport import shared_memory
from encoder_service.transport.broker_options import BrokerOptions
from encoder_service.transport.shared_memory import SharedMemory
from tests.unit.store.device_like import DeviceLikeMemory, tiered
from tests.unit.transport.broker_rig import OPEN, socket_folder

pytestmark = pytest.mark.anyio


async def test_p37_a_device_that_hangs_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop answers meanwhile, and the process does not outlive its grace."""
    may_end, asked = threading.Event(), threading.Event()

    def hang(self: DeviceLikeMemory) -> None:
        asked.set()
        assert may_end.wait(10)

    monkeypatch.setattr(shared_memory, "DEVICE_STOP_S", 0.05)
    with socket_folder() as folder:
        store = tiered(1 << 16, 1 << 16)
        options = BrokerOptions(str(folder / "broker.sock"), "instance", "host", access=OPEN)
        shared = SharedMemory(store, options, default_lease_s=1, max_lease_s=1, max_leases_per_client=1)
        shared.start()
        monkeypatch.setattr(DeviceLikeMemory, "synchronize", hang)
        await asyncio.wait_for(shared.stop(), 5)
        assert asked.is_set()
        assert not any(part.arena.closed for part in store.parts())
        may_end.set()
        await shared.stop()
        assert all(part.arena.closed for part in store.parts())


async def test_p36_a_device_that_failed_is_closed_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: DeviceLikeMemory) -> None:
        raise RuntimeError("the device failed")

    with socket_folder() as folder:
        store = tiered(1 << 16, 1 << 16)
        options = BrokerOptions(str(folder / "broker.sock"), "instance", "host", access=OPEN)
        shared = SharedMemory(store, options, default_lease_s=1, max_lease_s=1, max_leases_per_client=1)
        shared.start()
        monkeypatch.setattr(DeviceLikeMemory, "synchronize", fail)
        await shared.stop()
        assert all(part.arena.closed for part in store.parts())
