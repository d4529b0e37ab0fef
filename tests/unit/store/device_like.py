"""Memory of the host that an arena takes for a GPU's, so that two tiers can be had without one."""

from __future__ import annotations

from encoder_service.store.arena import PROBE_BYTES, Arena
from encoder_service.store.arena_store import ArenaStore
from encoder_service.store.host_memory import HostMemory
from encoder_service.store.partitions import PartitionedStore
from encoder_service.store.tiers import TieredStore


class DeviceLikeMemory(HostMemory):
    kind = "device"
    device_uuid = "GPU-00000000-0000-0000-0000-000000000000"


def device_like_arena(num_bytes: int, max_slots: int = 64) -> Arena:
    """With room for num_bytes beside the probe; whole pages."""
    return Arena(DeviceLikeMemory(PROBE_BYTES + num_bytes), max_slots=max_slots)


def tiered(
    device_bytes: int,
    host_bytes: int,
    isolated: tuple[str, ...] = (),
    *,
    isolated_on_device: bool = False,
    max_unkept_bytes: int = 1 << 30,
) -> TieredStore:
    """isolated: namespaces with a host arena of their own, of host_bytes, and where they are to be, with one
    on the device of device_bytes."""

    def host() -> ArenaStore:
        return ArenaStore(Arena(HostMemory(PROBE_BYTES + host_bytes), max_slots=64))

    def on_device() -> ArenaStore:
        return ArenaStore(device_like_arena(device_bytes))

    return TieredStore(
        PartitionedStore(host(), {name: host() for name in isolated}),
        PartitionedStore(on_device(), {name: on_device() for name in isolated if isolated_on_device}),
        max_unkept_bytes=max_unkept_bytes,
    )
