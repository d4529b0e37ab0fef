"""The encoder of the transport bench: a whole service whose rows are there from the start.

Owns what is resident. The service is the real one, from the listening sockets to the lease; only its tower
is the smallest there is and is never asked, since delivery is what is measured.
"""

from __future__ import annotations

import asyncio
import hashlib
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from transport_cases import key_of, num_resident
from transport_processes import serve_commands

from encoder_service.app import Service
from encoder_service.config import Settings, parse_settings
from encoder_service.ops.logs import configure_logs
from encoder_service.towers.synthetic import make_checkpoint
from encoder_service.types import EncodedItem, Grid

START_S = 60.0
FILL_S = 60.0
HOST_TIER_BYTES = 64 << 20
GPU = torch.device("cuda:0")


def arenas_for(kind: str, num_bytes: int) -> dict[str, int]:
    """Settings under which a service keeps so many bytes of rows in memory of this kind, ``host`` or
    ``device``."""
    # Rounding by the allocator and the probe's slot come on top.
    arena_bytes = num_bytes + num_bytes // 64 + (16 << 20)
    if kind == "host":
        return {"arena_bytes": arena_bytes}
    # Half as much again: a device tier that is fuller copies rows to the host meanwhile.
    return {"device_arena_bytes": arena_bytes * 3 // 2, "arena_bytes": HOST_TIER_BYTES}


class Encoder:
    """A service on an event loop of its own thread."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._started = threading.Event()
        self._error: BaseException | None = None
        self._kind = ""
        self._service: Service
        self._loop: asyncio.AbstractEventLoop

    def start(self, kind: str, folder: str, num_bytes: int) -> dict[str, Any]:
        """kind: ``host`` or ``device``, where rows live. folder: for sockets and the checkpoint, this
        encoder's alone. num_bytes: all rows that it will be given."""
        place = Path(folder)
        make_checkpoint(place / "model", "qwen3_5", "tiny", 0)
        self._kind = kind
        configure_logs("text", "warning")
        settings = parse_settings(
            model=place / "model",
            device=str(GPU) if kind == "device" else "cpu",
            dtype="float32",
            tower="plain",
            listen=(f"unix:{place}/grpc.sock", "127.0.0.1:0"),
            admin_listen="",
            broker_path=f"{place}/broker.sock",
            torch_threads=1,
            drain_grace_s=1,
            **arenas_for(kind, num_bytes),
        )
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main(settings)), daemon=True)
        self._thread.start()
        if not self._started.wait(START_S):
            raise TimeoutError(f"the service did not start within {START_S:g} s")
        if self._error is not None:
            raise self._error
        uds, tcp = self._service.addresses
        return {"uds": uds, "tcp": tcp, "chunk_bytes": settings.chunk_bytes}

    def fill(self, num_bytes: int, resident_bytes: int) -> dict[str, Any]:
        """Makes items of this size resident: random bytes, each its own, whose SHA-256 the content digest
        is. Their keys follow from the size."""
        random = np.random.default_rng()
        count = num_resident(num_bytes, resident_bytes)
        for index in range(count):
            data = random.integers(0, 1 << 64, num_bytes // 8, dtype=np.uint64).view(np.uint8)
            self._on_loop(self._keep, key_of(num_bytes, index), data)
        return {"count": count}

    def counters(self) -> dict[str, Any]:
        """How many items went out by lease so far, how many were to and did not, and how many were read
        without one, as far as their readers have told."""
        shared = self._service.shared
        assert shared is not None
        counts, told = shared.counters, shared.broker.counters
        return {
            "shared": counts.shared,
            "missed": counts.not_held + counts.too_many + counts.no_owner + told.read_stale,
            "read": told.read_unasked,
        }

    def stop(self) -> None:
        if self._thread is not None and self._error is None:
            self._loop.call_soon_threadsafe(self._service.request_stop)
            self._thread.join(10)

    async def _main(self, settings: Settings) -> None:
        self._loop = asyncio.get_running_loop()
        self._service = Service(settings)
        try:
            await self._service.start()
        except BaseException as error:
            self._error = error
            return
        finally:
            self._started.set()
        await self._service.wait()
        await self._service.stop()

    def _keep(self, key: bytes, data: np.ndarray[Any, Any]) -> None:
        pipeline = self._service.pipeline
        assert pipeline is not None
        tower = pipeline.model.tower
        rows = torch.from_numpy(data).view(tower.dtype).view(-1, tower.width)
        grid = Grid(1, tower.merge_size * len(rows), tower.merge_size)
        digest = hashlib.sha256(data).digest()
        item = EncodedItem(key, digest, grid, rows, tower.num_deepstack_levels)
        store = pipeline.store
        # The device's tier is the engine's to write, which asks for the room beforehand.
        writing = (store.reserve if self._kind == "device" else store.begin_put)("", item)
        if writing is None:
            raise MemoryError(f"the arena has no room for {data.nbytes} bytes more")
        writing.copy()
        if writing.target.device.type == "cuda":
            torch.cuda.synchronize(writing.target.device)
        store.finish_put(writing)

    def _on_loop(self, function: Callable[..., None], *arguments: object) -> None:
        async def call() -> None:
            function(*arguments)

        asyncio.run_coroutine_threadsafe(call(), self._loop).result(FILL_S)


def main() -> None:
    encoder = Encoder()
    serve_commands({"start": encoder.start, "fill": encoder.fill, "counters": encoder.counters})
    encoder.stop()


if __name__ == "__main__":
    main()
