"""What a lease storm's encoder adds to the product: delivery by lease behind the fake's gRPC service, and the
defects that a storm has to find.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import torch

from encoder_service.errors import TransportUnavailable, VisionEncoderError
from encoder_service.store.arena import Arena
from encoder_service.transport.shared_memory import LeasedRows, LeaseTerms, SharedMemory, host_id
from encoder_service.types import Grid
from lm_adapter.errors import ItemFailed
from tests.chaos.lease_storm_board import LINE_BYTES
from vision_encoder.v1 import encoder_pb2 as pb

if TYPE_CHECKING:
    from tests.chaos.lease_storm_encoder import StormEncoder


class StormSharing:
    """Delivery by lease for the fake's gRPC service, whose threads ask the event loop."""

    def __init__(self, encoder: StormEncoder, loop: asyncio.AbstractEventLoop) -> None:
        self._encoder = encoder
        self._loop = loop

    def transports(self) -> list[pb.TransportInfo]:
        plan, geometry = self._encoder.plan, self._encoder.arena.geometry
        delivery = pb.DELIVERY_HOST_SHM if plan.kind == "host" else pb.DELIVERY_DEVICE_LEASE
        return [
            pb.TransportInfo(
                delivery=delivery,
                broker_path=plan.broker_path,
                host_id=host_id(),
                device_uuid=geometry.device_uuid,
            )
        ]

    def place(
        self, delivery: pb.Delivery.ValueType, lease: pb.LeaseOptions, result: pb.ItemResult, rows: bytes
    ) -> None:
        terms = LeaseTerms(lease.owner_id.decode(), lease.num_readers or 1)
        try:
            placing = asyncio.run_coroutine_threadsafe(self._place(result, rows, terms), self._loop)
            leased = placing.result(10)
        except TransportUnavailable as error:
            raise ItemFailed(error.message, reason="TRANSPORT_UNAVAILABLE", status=9) from error
        if leased is None:
            return  # no room: inline
        place = result.host if delivery == pb.DELIVERY_HOST_SHM else result.lease
        place.arena_id, place.slot_index = leased.arena.arena_id, leased.slot_index
        place.offset_bytes, place.generation = leased.offset_bytes, leased.generation
        place.lease_id, place.expires_at_unix_ms = leased.lease_id, leased.expires_at_unix_ms
        if delivery == pb.DELIVERY_DEVICE_LEASE:
            result.lease.shape.extend((result.num_rows, result.width))
            result.lease.dtype = result.dtype
            result.lease.device_uuid = leased.arena.device_uuid

    async def _place(self, result: pb.ItemResult, rows: bytes, terms: LeaseTerms) -> LeasedRows | None:
        encoder, key, grid = self._encoder, result.key, result.grid_thw
        held = encoder.store.hold("", key)
        if held is None:
            writing = encoder._begin_write(
                key, result.content_digest, len(rows) // LINE_BYTES, Grid(grid.t, grid.h, grid.w)
            )
            if writing is None:
                return None
            flat = torch.frombuffer(bytearray(rows), dtype=torch.uint8).view(-1, LINE_BYTES)
            target, half = writing.target.view(torch.uint8), len(flat) // 2
            target[:half].copy_(flat[:half])
            await asyncio.sleep(0)
            target[half:].copy_(flat[half:])
            encoder.memory.synchronize()
            encoder.store.finish_put(writing)
            held = encoder.store.hold("", key)
        try:
            return None if held is None else encoder.shared.lease(held, "", terms)
        finally:
            if held is not None:
                held.drop()

    def release(self, lease_id: bytes, reader: int | None) -> bool:
        async def release() -> bool:
            try:
                return self._encoder.shared.release(lease_id, reader)
            except VisionEncoderError:
                return False

        return asyncio.run_coroutine_threadsafe(release(), self._loop).result(10)


def sabotage(defect: str, arena: Arena, shared: SharedMemory) -> None:
    """``returns``: a slot's generation is that of the tenant before once it is published again. ``late``: it
    changes when the next rows are complete, not before their first byte. ``keeps``: the leases of connections
    that ended live on."""
    page = arena.page
    match defect:
        case "":
            return
        case "returns":
            page.retire = lambda index: (  # type: ignore[method-assign]
                page._store(index, page.generation(index) - 1) if page.generation(index) % 2 else None
            )
            page.revoke = page.generation  # type: ignore[method-assign]
        case "late":
            page.retire = lambda index: None  # type: ignore[method-assign]
            page.publish = lambda index: page._store(  # type: ignore[method-assign]
                index, page.generation(index) + 1 + page.generation(index) % 2
            )
        case "keeps":
            shared.broker._on_disconnect = lambda owner_id: None
        case _:
            raise ValueError(f"no sabotage is called {defect!r}")
