"""The 100 % line of the serving bench: the tower alone on the same photographs, decoded beforehand.

Owns a loop over the service's own launcher and planner with no service around them: a backlog of photographs
in pinned memory, two batches in flight, rows left on the device. Loads and captures as the service does.
"""

from __future__ import annotations

import random
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from serve_traffic import photos_in_turn, read_photos
from transport_processes import serve_commands

from encoder_service.app import capture_graphs, load_model, warm_up_grids
from encoder_service.config import parse_settings
from encoder_service.engine.launch import Launched, TowerLauncher
from encoder_service.engine.patches import looked_through
from encoder_service.ingest.pinned import pinned
from encoder_service.ops.logs import configure_logs
from encoder_service.scheduler.planner import Planner, Ticket
from encoder_service.types import PreprocessOptions, TowerItem

BACKLOG = 256
MAX_IN_FLIGHT = 2
WARM_UP_SHARE = 0.2


class TowerAlone:
    """Answers ``load``, then ``measure`` for each mix."""

    def load(self, settings: dict[str, Any]) -> dict[str, Any]:
        configure_logs("text", "warning")
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
        return {"seconds": time.perf_counter() - begun_s, "graphs": self._graphs is not None}

    @torch.inference_mode()
    def measure(self, folder: str, budget_s: float, seed: int) -> dict[str, Any]:
        """Images, patches and padding of whole batches within the budget, after warm-up."""
        items = [self._item(data) for data in read_photos(Path(folder))]
        photos = photos_in_turn(len(items), random.Random(seed))
        ladder = None if self._graphs is None else self._graphs.ladder
        planner = Planner(self._settings.max_patches_per_batch, self._settings.max_items_per_batch, ladder)
        waiting: dict[Ticket, TowerItem] = {}
        in_flight: deque[tuple[Launched, list[TowerItem]]] = deque()
        places = self._places()
        images = patches = batches = 0
        busy_s = 0.0
        begun_s = started_s = time.perf_counter()
        padded_before = self._padded()
        warm = False
        while True:
            now_s = time.perf_counter()
            if not warm and now_s - begun_s > budget_s * WARM_UP_SHARE:
                warm, started_s, padded_before = True, now_s, self._padded()
                images = patches = batches = 0
                busy_s = 0.0
            if now_s - begun_s > budget_s and batches:
                break
            while len(waiting) < BACKLOG:
                item = items[next(photos)]
                ticket = Ticket(item.grid.num_patches)
                waiting[ticket] = item
                planner.add(ticket)
            batch = [waiting.pop(ticket) for ticket in planner.next_batch(time.monotonic()).batch]
            destinations = self._destinations(places, batch)
            in_flight.append((self._launcher.launch(batch, destinations), batch))
            if len(in_flight) < MAX_IN_FLIGHT:
                continue
            launched, done = in_flight.popleft()
            busy_s += launched.wait()
            for _ in launched.collect():
                pass
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

    def _item(self, data: bytes) -> TowerItem:
        tower = self._model.tower
        frames, _, _ = self._model.preprocessor.load_image(data, PreprocessOptions())
        return looked_through(pinned(frames, tower.device, tower.dtype), tower)

    def _padded(self) -> int:
        return 0 if self._graphs is None else int(self._graphs.counters.padded_patches)

    def _places(self) -> deque[torch.Tensor]:
        """Memory for the rows of each batch in flight, taken in turns, on the device; none on a CPU."""
        tower = self._model.tower
        if tower.device.type != "cuda":
            return deque()
        max_rows = max(self._settings.max_patches_per_batch, self._settings.max_patches_per_item)
        shape = max_rows // tower.merge_size**2, tower.width
        return deque(
            torch.empty(shape, dtype=tower.dtype, device=tower.device) for _ in range(MAX_IN_FLIGHT + 1)
        )

    def _destinations(self, places: deque[torch.Tensor], batch: list[TowerItem]) -> list[torch.Tensor | None]:
        if not places:
            return [None] * len(batch)
        places.rotate()
        counts = [self._model.tower.num_rows(item.grid) for item in batch]
        return list(places[0][: sum(counts)].split(counts))


def main() -> None:
    tower = TowerAlone()
    serve_commands({"load": tower.load, "measure": tower.measure})


if __name__ == "__main__":
    main()
