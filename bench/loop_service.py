"""The service of the loop bench: all of it but the tower, with its threads' CPU time to be asked for.

Owns the stand-ins for what a GPU does. A batch takes a time that is told beforehand, on no core of this
machine; rows lie in an arena of host memory that is taken for a GPU's, so that they go the way they go there:
reserved, written by the device, leased. Everything else is what users run.
"""

from __future__ import annotations

import asyncio
import cProfile
import gc
import pstats
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from encoder_service.store.partitions import PartitionedStore, open_partitions
from transport_processes import serve_commands

from encoder_service.app import Service
from encoder_service.cli.serving import loop_factory
from encoder_service.config import Settings, parse_settings
from encoder_service.engine.device import DeviceEngine
from encoder_service.engine.rows import Destination
from encoder_service.ops.logs import configure_logs
from encoder_service.pipeline import ServedModel
from encoder_service.store.arena import PROBE_BYTES, Arena
from encoder_service.store.host_memory import HostMemory
from encoder_service.towers.synthetic import make_checkpoint
from encoder_service.towers.tower import Tower
from encoder_service.transport import shared_memory
from encoder_service.types import FrameItem, Grid, PreprocessOptions, TowerItem

START_S = 60.0
STOP_S = 20.0
MAX_SLOTS = 1 << 14
Result = TypeVar("Result")


class DeviceLikeMemory(HostMemory):
    kind = "device"
    device_uuid = "GPU-00000000-0000-0000-0000-000000000000"


class TimedBatch:
    """ends_s: when the device is done with it, by ``time.monotonic``."""

    def __init__(self, rows: list[torch.Tensor], begins_s: float, ends_s: float) -> None:
        self._rows = rows
        self._begins_s = begins_s
        self.ends_s = ends_s

    def wait(self) -> float:
        time.sleep(max(0.0, self.ends_s - time.monotonic()))
        return self.ends_s - self._begins_s

    def collect(self) -> Iterator[torch.Tensor]:
        yield from self._rows


class TimedLauncher:
    """One batch after the other: batch_ms each, and item_ms for each of its items."""

    def __init__(self, tower: Tower, batch_ms: float, item_ms: float) -> None:
        self.batch_ms, self.item_ms = batch_ms, item_ms
        self._tower = tower
        self._free_s = 0.0

    def launch(self, items: Sequence[TowerItem], destinations: Sequence[Destination] = ()) -> TimedBatch:
        tower, rows = self._tower, []
        for item, place in zip(items, destinations or [None] * len(items), strict=True):
            count = tower.num_rows(item.grid)
            rows.append(torch.zeros(count, tower.width, dtype=tower.dtype) if place is None else place)
        begins_s = max(self._free_s, time.monotonic())
        self._free_s = begins_s + (self.batch_ms + self.item_ms * len(items)) / 1e3
        return TimedBatch(rows, begins_s, self._free_s)

    def probe(self) -> None:
        pass

    def warm_up(self, grids: Sequence[Grid]) -> None:
        pass


class TimedService(Service):
    """The service with that launcher in its engine. decodes: else every image has the pixels of the first of
    its size, which costs nothing: two cores that decode would not keep the loop busy."""

    def __init__(self, settings: Settings, batch_ms: float, item_ms: float, *, decodes: bool) -> None:
        super().__init__(settings)
        self._times = batch_ms, item_ms
        self._decodes = decodes

    def _build_engine(  # type: ignore[override]
        self, model: ServedModel, graphs: None, resizing: None
    ) -> DeviceEngine:
        engine = super()._build_engine(model, graphs, resizing)
        engine._launcher = TimedLauncher(model.tower, *self._times)
        if not self._decodes:
            preprocessor, known = model.preprocessor, {}
            load_image = preprocessor.load_image

            def load_once(data: bytes, options: PreprocessOptions) -> tuple[FrameItem, float, float]:
                grid = preprocessor.glance_at_image(data, options)
                if grid not in known:
                    known[grid] = load_image(data, options)[0]
                return known[grid], 0.001, 0.001

            preprocessor.load_image = load_once  # type: ignore[method-assign]
        return engine


class ServiceSide:
    """Answers ``start``, then any number of ``begin`` and ``end``. The loop runs on a thread of its own."""

    def __init__(self) -> None:
        self._started = threading.Event()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._profile: cProfile.Profile | None = None
        self._before: dict[str, float] = {}
        self._service: TimedService
        self._loop: asyncio.AbstractEventLoop

    def start(
        self,
        folder: str,
        arena_bytes: int,
        batch_ms: float,
        item_ms: float,
        ingest_threads: int,
        event_loop: str,
        decodes: bool,
    ) -> dict[str, Any]:
        """folder: for sockets and the checkpoint. arena_bytes: of the memory that is taken for a GPU's."""
        place = Path(folder)
        make_checkpoint(place / "model", "qwen3_vl", "tiny", 0)
        configure_logs("text", "warning")
        torch.set_num_threads(1)
        shared_memory._open_device_partitions = lambda _: device_like(arena_bytes)
        settings = parse_settings(
            model=place / "model",
            device="cpu",
            listen=(f"unix:{place}/grpc.sock",),
            admin_listen="127.0.0.1:0",
            broker_path=f"{place}/broker.sock",
            arena_bytes=64 << 20,
            ingest_threads=ingest_threads,
            torch_threads=1,
            drain_grace_s=1,
            log_level="warning",
        )

        def main() -> None:
            with asyncio.Runner(loop_factory=loop_factory(event_loop)) as runner:
                runner.run(self._main(settings, batch_ms, item_ms, decodes))

        self._thread = threading.Thread(target=main, daemon=True)
        self._thread.start()
        if not self._started.wait(START_S):
            raise TimeoutError(f"the service did not start within {START_S:g} s")
        if self._error is not None:
            raise self._error
        return {
            "target": self._service.addresses[0],
            "broker": settings.broker_path,
            "loop": type(self._loop).__module__,
        }

    def begin(self, profile: bool) -> dict[str, Any]:
        """From here on time is counted. profile: of the loop's thread, by its own CPU time."""
        gc.collect()
        if profile:
            self._profile = cProfile.Profile(time.thread_time)
            self._on_loop(self._profile.enable)
        gc.freeze()  # as the service does before it says that it is ready
        self._before = self._seen()
        return {}

    def end(self) -> dict[str, Any]:
        """What was spent since ``begin``."""
        after = self._seen()
        spent = {name: after[name] - self._before.get(name, 0.0) for name in after}
        lines: list[dict[str, Any]] = []
        if self._profile is not None:
            profile, self._profile = self._profile, None
            self._on_loop(profile.disable)
            lines = functions_of(profile, spent["items"])
        return {"spent": spent, "profile": lines}

    def stop(self) -> None:
        if self._thread is not None and self._error is None:
            self._loop.call_soon_threadsafe(self._service.request_stop)
            self._thread.join(STOP_S)

    def _seen(self) -> dict[str, float]:
        """CPU seconds by kind of thread, wall seconds, items and batches so far."""
        pipeline = self._service.pipeline
        assert pipeline is not None
        found: dict[str, float] = {}
        for thread in threading.enumerate():
            kind = "loop" if thread is self._thread else thread.name.partition("_")[0].rstrip("0123456789-")
            if thread.ident is not None and thread is not threading.main_thread():
                clock = time.pthread_getcpuclockid(thread.ident)
                found[f"cpu_s.{kind}"] = found.get(f"cpu_s.{kind}", 0.0) + time.clock_gettime(clock)
        found["cpu_s.process"] = time.process_time()
        found["wall_s"] = time.monotonic()
        (tiers,) = pipeline.metrics.items.collect()
        found["items"] = sum(one.value for one in tiers.samples if one.name.endswith("_total"))
        counters = pipeline.engine.counters
        found["encoded"], found["batches"] = counters.items, counters.batches
        return found

    async def _main(self, settings: Settings, batch_ms: float, item_ms: float, decodes: bool) -> None:
        self._loop = asyncio.get_running_loop()
        self._service = TimedService(settings, batch_ms, item_ms, decodes=decodes)
        try:
            await self._service.start()
        except BaseException as error:
            self._error = error
            return
        finally:
            self._started.set()
        await self._service.wait()
        await self._service.stop()

    def _on_loop(self, function: Callable[[], Result]) -> Result:
        async def call() -> Result:
            return function()

        return asyncio.run_coroutine_threadsafe(call(), self._loop).result(START_S)


def device_like(arena_bytes: int) -> PartitionedStore:
    def arena(num_bytes: int) -> Arena:
        return Arena(DeviceLikeMemory(PROBE_BYTES + num_bytes), max_slots=MAX_SLOTS)

    return open_partitions(arena, arena_bytes, {})


def functions_of(profile: cProfile.Profile, items: float) -> list[dict[str, Any]]:
    """Functions by their own time, in microseconds and calls for each item."""
    stats: Any = pstats.Stats(profile)
    ordered = sorted(stats.stats.items(), key=lambda entry: -entry[1][2])[:80]
    return [
        {
            "function": f"{Path(file).parent.name}/{Path(file).name}:{line} {name}",
            "calls": round(calls / items, 2),
            "own_us": round(own_s * 1e6 / items, 2),
            "all_us": round(total_s * 1e6 / items, 2),
        }
        for (file, line, name), (_, calls, own_s, total_s, _) in ordered
    ]


def main() -> None:
    side = ServiceSide()
    serve_commands({"start": side.start, "begin": side.begin, "end": side.end})
    side.stop()


if __name__ == "__main__":
    main()
