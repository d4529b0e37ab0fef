"""The processes of the serving bench: a caller, and the tower alone.

Owns the open loop: a request's time counts from when it was due, so late sending counts as latency.
``lag_ms`` is the lateness of sending; it shows whether the callers were the bottleneck. Also owns the 100 %
line: the service's own launcher and planner on a backlog of decoded photographs in pinned memory, with two
batches in flight, and rows left on the device.
"""

from __future__ import annotations

import asyncio
import gc
import random
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.harness.children import serve_commands
from bench.traffic import Load, Request, photos_in_turn, read_photos, with_comment

CONNECT_S = 60.0
STAGES = (
    "identify_ms", "admit_ms", "decode_ms", "resize_ms", "queue_ms", "tower_ms", "store_ms", "total_ms",
    "delivery_ms",
)  # fmt: skip
# The columns of a result row.
COLUMNS = ("at_s", "lag_ms", "latency_ms", "status", "tier", "patches", "bytes", *STAGES)
OK, UNFINISHED = "ok", "unfinished"
# The end of a wait is spent polling, because a core that slept wakes up late.
AWAKE_S = 0.002
BACKLOG = 256
MAX_IN_FLIGHT = 2
WARM_UP_SHARE = 0.2


# -- a caller --------------------------------------------------------------------------------------------


class Client:
    """A caller. Commands: ``photos`` and ``connect``, then any number of ``run``."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._photos: dict[str, list[bytes]] = {}
        self._clients: list[Any] = []

    def photos(self, mix: str, folder: str) -> None:
        self._photos[mix] = read_photos(Path(folder))

    def connect(self, targets: list[str], transport: str) -> dict[str, Any]:
        """Connects to the replicas, and waits for the transport. Raises ValueError if rows come by another
        transport, and the client's errors."""
        on_gpu = transport == "device"
        if on_gpu:
            import torch

            torch.zeros(1, device="cuda")
        reasons = [self._runner.run(self._connect(target, transport, on_gpu)) for target in targets]
        return {"reason": reasons[0]}

    async def _connect(self, target: str, transport: str, on_gpu: bool) -> str:
        from lm_adapter import AsyncVisionEncoderClient

        client = AsyncVisionEncoderClient(
            target,
            timeout_s=CONNECT_S,
            transports=(transport,),
            device="cuda:0" if on_gpu else None,
            # What the service refuses is a result, and all that is due is sent.
            waits=False,
            max_in_flight=1_000_000,
        )
        self._clients.append(client)
        await client.info()
        choice = await client.wait_transport()
        if choice.name != transport:
            raise ValueError(f"rows come by {choice.name}: {choice.reason}")
        return str(choice.reason)

    def run(
        self,
        mix: str,
        load: dict[str, Any],
        number: int,
        num_clients: int,
        start_s: float,
        timeout_s: float,
        grace_s: float,
    ) -> dict[str, Any]:
        """Sends every ``num_clients``-th request of the load, starting with request ``number``. start_s: on
        the monotonic clock, which all processes share. Requests that have not ended ``grace_s`` after the
        load are cancelled and counted as unfinished."""
        requests = Load(**load).requests()[number::num_clients]
        gc.collect()
        gc.freeze()  # keeps garbage collection from traversing the photographs during a load
        sending = self._send_all(self._photos[mix], load, requests, start_s, timeout_s, grace_s)
        return {"columns": COLUMNS, "rows": self._runner.run(sending)}

    def close(self) -> None:
        for client in self._clients:
            self._runner.run(client.close())
        self._runner.close()

    async def _send_all(
        self,
        photos: list[bytes],
        load: dict[str, Any],
        requests: list[Request],
        start_s: float,
        timeout_s: float,
        grace_s: float,
    ) -> list[list[Any]]:
        loop = asyncio.get_running_loop()
        tasks: dict[asyncio.Task[list[Any]], Request] = {}
        for request in requests:
            await until(start_s + request.at_s)
            sending = self._send(photos[request.photo], load["seed"], request, start_s, timeout_s)
            tasks[loop.create_task(sending)] = request
        ends_s = start_s + load["duration_s"] + grace_s
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=max(0.0, ends_s - loop.time()))
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        return [
            task.result() if not task.cancelled() else failed(request, UNFINISHED)
            for task, request in tasks.items()
        ]

    async def _send(
        self, photo: bytes, seed: int, request: Request, start_s: float, timeout_s: float
    ) -> list[Any]:
        """Sends one request. Returns its result row."""
        from lm_adapter import EncoderError, ImageItem

        loop = asyncio.get_running_loop()
        due_s = start_s + request.at_s
        item = ImageItem(with_comment(photo, seed, request.content))
        lag_ms = (loop.time() - due_s) * 1e3
        try:
            client = self._clients[request.content % len(self._clients)]
            rows = await client.encode_one(item, timeout_s=timeout_s)
        except EncoderError as error:
            return failed(request, error.reason, lag_ms, (loop.time() - due_s) * 1e3)
        latency_ms = (loop.time() - due_s) * 1e3
        stages = [round(getattr(rows.timings, stage), 4) for stage in STAGES]
        delivery = [rows.tier.value, rows.grid_thw.num_patches, rows.num_bytes]
        return [request.at_s, lag_ms, latency_ms, OK, *delivery, *stages]


async def until(due_s: float) -> None:
    """Sleeps until ``due_s`` on the loop's clock, as precisely as the loop's other work allows."""
    loop = asyncio.get_running_loop()
    while (left_s := due_s - loop.time()) > 0:  # noqa: ASYNC110 - only the clock ends this wait
        await asyncio.sleep(max(0.0, left_s - AWAKE_S))


def failed(request: Request, status: str, lag_ms: float = 0.0, latency_ms: float = 0.0) -> list[Any]:
    return [request.at_s, lag_ms, latency_ms, status, "", 0, 0, *(0.0 for _ in STAGES)]


# -- the tower alone -------------------------------------------------------------------------------------


class TowerAlone:
    """The tower without the service. Commands: ``load``, then ``measure`` for each mix."""

    def load(self, settings: dict[str, Any]) -> dict[str, Any]:
        import torch

        from encoder_service.config import parse_settings
        from encoder_service.engine.launch import TowerLauncher
        from encoder_service.ops.logs import configure_logs
        from encoder_service.startup import capture_graphs, load_model, warm_up_grids

        configure_logs("text", "warning", sys.stderr)
        self._settings = parse_settings(**settings)
        begun_s = time.perf_counter()
        self._model = load_model(self._settings)
        if self._settings.torch_threads:
            torch.set_num_threads(self._settings.torch_threads)
        self._graphs = capture_graphs(self._model, self._settings)
        if self._model.tower.device.type == "cuda":
            torch.cuda.set_device(self._model.tower.device)
        self._launcher = TowerLauncher(
            self._model.tower, self._model.preprocessor, self._graphs, clock=time.monotonic
        )
        self._launcher.warm_up(warm_up_grids(self._model, self._settings))
        return {"seconds": time.perf_counter() - begun_s}

    def measure(self, folder: str, budget_s: float, seed: int) -> dict[str, Any]:
        """Images, patches and padding of the batches that end within the budget, after a warm-up."""
        import torch

        with torch.inference_mode():
            return self._measure([self._item(data) for data in read_photos(Path(folder))], budget_s, seed)

    def _measure(self, items: list[Any], budget_s: float, seed: int) -> dict[str, Any]:
        from encoder_service.scheduler.planner import MAX_ITEMS_PER_BATCH, Planner, Ticket

        photos = photos_in_turn(len(items), random.Random(seed))
        ladder = None if self._graphs is None else self._graphs.ladder
        planner = Planner(self._settings.max_patches_per_batch, MAX_ITEMS_PER_BATCH, ladder)
        waiting: dict[Any, Any] = {}
        in_flight: deque[tuple[Any, list[Any]]] = deque()
        outputs = self._outputs()
        images = patches = batches = 0
        busy_s = 0.0
        begun_s = started_s = time.perf_counter()
        padded_before = self._padded()
        warm = False
        while (now_s := time.perf_counter()) - begun_s <= budget_s or not batches:
            if not warm and now_s - begun_s > budget_s * WARM_UP_SHARE:
                warm, started_s, padded_before = True, now_s, self._padded()
                images = patches = batches = 0
                busy_s = 0.0
            while len(waiting) < BACKLOG:
                item = items[next(photos)]
                ticket = Ticket(item.grid.num_patches)
                waiting[ticket] = item
                planner.add(ticket)
            batch = [waiting.pop(ticket) for ticket in planner.next_batch(time.monotonic()).batch]
            in_flight.append((self._launcher.launch(batch, self._destinations(outputs, batch)), batch))
            if len(in_flight) < MAX_IN_FLIGHT:
                continue
            launched, done = in_flight.popleft()
            busy_s += launched.wait()
            list(launched.collect())
            batches += 1
            images += len(done)
            patches += sum(item.grid.num_patches for item in done)
        seconds = time.perf_counter() - started_s
        padded = self._padded() - padded_before
        for launched, _ in in_flight:
            launched.wait()
            list(launched.collect())
        return {
            "images_per_s": images / seconds,
            "patches_per_s": patches / seconds,
            "batches": batches,
            "images_per_batch": images / batches,
            "busy_share": busy_s / seconds,
            "padding_share": padded / max(1, padded + patches),
            "ms_per_image": seconds * 1e3 / images,
            "seconds": seconds,
            "mean_patches": sum(item.grid.num_patches for item in items) / len(items),
        }

    def _item(self, data: bytes) -> Any:
        from encoder_service.ingest.pinned import pinned
        from encoder_service.types import PreprocessOptions

        tower = self._model.tower
        frames, _, _ = self._model.preprocessor.open_image(data, PreprocessOptions()).load()
        return pinned(frames, tower.device, tower.dtype)

    def _padded(self) -> int:
        return 0 if self._graphs is None else int(self._graphs.counters.padded_patches)

    def _outputs(self) -> deque[Any]:
        """Device memory for the rows of each batch in flight, used in rotation; empty on a CPU."""
        import torch

        tower = self._model.tower
        if tower.device.type != "cuda":
            return deque()
        max_patches = max(self._settings.max_patches_per_batch, self._settings.max_patches_per_item)
        shape = max_patches // tower.merge_size**2, tower.width
        return deque(
            torch.empty(shape, dtype=tower.dtype, device=tower.device) for _ in range(MAX_IN_FLIGHT + 1)
        )

    def _destinations(self, outputs: deque[Any], batch: list[Any]) -> list[Any]:
        if not outputs:
            return [None] * len(batch)
        outputs.rotate()
        counts = [self._model.tower.num_rows(item.grid) for item in batch]
        return list(outputs[0][: sum(counts)].split(counts))


ROLES: dict[str, Callable[[], Any]] = {"client": Client, "tower": TowerAlone}
COMMANDS = {"client": ("photos", "connect", "run"), "tower": ("load", "measure")}


def main() -> None:
    role = sys.argv[1]
    peer = ROLES[role]()
    serve_commands({name: getattr(peer, name) for name in COMMANDS[role]})
    if role == "client":
        peer.close()


if __name__ == "__main__":
    main()
