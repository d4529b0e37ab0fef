"""A launcher whose batches end when the test ends them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import torch

from encoder_service.engine.device import MAX_IN_FLIGHT
from encoder_service.types import Grid, PatchItem, TowerItem

POISON = -1.0


def value_of(item: TowerItem) -> float:
    assert isinstance(item, PatchItem)
    return float(item.pixel_values[0, 0])


class HeldBatch:
    """device_s: what ``wait`` gives. error: what it raises instead."""

    def __init__(self, launcher: HeldLauncher, items: Sequence[TowerItem]) -> None:
        self.launcher = launcher
        self.values = [value_of(item) for item in items]
        self.ended = threading.Event()
        self.error: Exception | None = None
        self.error_at_collect: Exception | None = None
        self.device_s = 0.25

    def end(self, error: Exception | None = None) -> None:
        self.error = error
        self.ended.set()

    def wait(self) -> float:
        assert self.ended.wait(30)
        self.launcher.leave()
        if self.error is not None:
            raise self.error
        return self.device_s

    def collect(self) -> Iterator[torch.Tensor]:
        for index, value in enumerate(self.values):
            if index and self.error_at_collect is not None:
                raise self.error_at_collect
            yield torch.full((4, 8), value)


class HeldLauncher:
    """Refuses batches with a poisoned item. ends_at_once: batches end as soon as they are launched."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.launched: list[HeldBatch] = []
        self.num_in_flight = 0
        self.most_in_flight = 0
        self.num_failures = 0
        self.ends_at_once = False
        self.fails_with: Exception | None = None
        self.lost_with: Exception | None = None

    def launch(
        self, items: Sequence[TowerItem], destinations: Sequence[torch.Tensor | None] = ()
    ) -> HeldBatch:
        if self.fails_with is not None:
            raise self.fails_with
        batch = HeldBatch(self, items)
        if POISON in batch.values:
            with self.lock:
                self.num_failures += 1
            raise RuntimeError("poisoned")
        with self.lock:
            self.num_in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.num_in_flight)
            assert self.num_in_flight <= MAX_IN_FLIGHT
            self.launched.append(batch)
            if self.ends_at_once:
                batch.end()
        return batch

    def leave(self) -> None:
        with self.lock:
            self.num_in_flight -= 1

    def warm_up(self, grids: Sequence[Grid]) -> None:
        pass

    def probe(self) -> None:
        if self.lost_with is not None:
            raise self.lost_with

    def end_all(self) -> None:
        with self.lock:
            self.ends_at_once = True
            for batch in self.launched:
                batch.ended.set()
