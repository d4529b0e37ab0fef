"""Where finished rows go: out of the memory that the next batch overwrites, to each item's own storage.

Owns the seam between a forward pass and the destination of its rows (``RowSink``), and the two destinations:
places on the device that were reserved for the items, and host memory. The engine opens one target per batch,
writes the batch's rows in the compute stream, closes it with ``send``, and later, from any thread, waits for
the target and collects from it. Whose the reserved places are, and when they may be reused, is the store's.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Protocol, TypeAlias

import torch

from encoder_service.engine.streams import Event, Streams
from encoder_service.errors import InternalError

# Batches in flight, and so device slots; one more on the host, whose rows are being handed out meanwhile.
NUM_DEVICE_SLOTS = 2
NUM_HOST_SLOTS = 3

# Where an item's rows [R, W] go, in the tower's dtype on its device; None: to host memory.
Destination: TypeAlias = torch.Tensor | None


class RowTarget(Protocol):
    """One batch's rows on their way. Calls come in the order below, ``abandon`` instead of ``send`` when the
    batch failed before it was all handed to the device."""

    def write(self, rows: torch.Tensor) -> None:
        """Takes rows [R, W] on the device, in the compute stream's order; after it they may be overwritten.
        Raises InternalError for another shape."""

    def send(self, written: Event) -> None:
        """Starts what remains to be done once ``written``, an event behind ``write``, has passed."""

    def abandon(self) -> None:
        """Gives everything back: the batch will not run."""

    def wait(self) -> None:
        """Blocks until the rows have arrived; raises what the device failed with."""

    def collect(self) -> Iterator[torch.Tensor]:
        """Each item's rows in turn, in their destination or owning their storage. After ``wait``; to be read
        to its end."""


class RowSink(Protocol):
    def open(self, counts: Sequence[int], destinations: Sequence[Destination] = ()) -> RowTarget:
        """A target for a batch whose items have these numbers of rows; one destination for each, or none at
        all. Never waits."""


class PlacedRows:
    """The sink of items that know where their rows go: one launch copies a batch's rows out of the forward
    pass's memory to all of them. Items without a destination go the way of ``others``."""

    def __init__(self, others: HostRows) -> None:
        self._others = others

    def open(self, counts: Sequence[int], destinations: Sequence[Destination] = ()) -> RowTarget:
        if not any(destination is not None for destination in destinations):
            return self._others.open(counts)
        # A batch of both kinds is rare: all of it is transferred, and what was placed is not looked at.
        missing = any(destination is None for destination in destinations)
        return PlacedTarget(
            self._others, counts, destinations, self._others.open(counts) if missing else None
        )


class PlacedTarget:
    """One batch's way to the places reserved for it. others: takes the rows of items without one."""

    def __init__(
        self,
        sink: HostRows,
        counts: Sequence[int],
        destinations: Sequence[Destination],
        others: RowTarget | None,
    ) -> None:
        self._streams = sink.streams
        self._width = sink.width
        self._counts = list(counts)
        self._destinations = list(destinations)
        self._others = others
        self._done = self._streams.make_blocking_event()
        self._written = False

    def write(self, rows: torch.Tensor) -> None:
        needed = (sum(self._counts), self._width)
        if rows.shape != needed:
            raise InternalError(f"the tower gave {tuple(rows.shape)} rows, grids need {needed}")
        parts = rows.split(self._counts)  # type: ignore[no-untyped-call]
        places, given = [], []
        for count, part, place in zip(self._counts, parts, self._destinations, strict=True):
            if place is None:
                continue
            if place.shape != (count, self._width) or place.dtype != rows.dtype:
                raise InternalError(
                    f"a place for {place.dtype} {tuple(place.shape)} was reserved, the item's rows are "
                    f"{rows.dtype} {(count, self._width)}"
                )
            places.append(place)
            given.append(part)
        self._written = True
        torch._foreach_copy_(places, given)
        if self._others is not None:
            self._others.write(rows)

    def send(self, written: Event) -> None:
        if self._others is not None:
            self._others.send(written)
        download = self._streams.download
        download.wait(written)
        download.record(self._done)

    def abandon(self) -> None:
        # The places will be given to others, whose writers know nothing of what is under way here.
        if self._written:
            with contextlib.suppress(Exception):  # a device that failed is found by whoever asks it next
                self._streams.compute.record(self._done)
                self._done.synchronize()
        if self._others is not None:
            self._others.abandon()

    def wait(self) -> None:
        self._done.synchronize()
        if self._others is not None:
            self._others.wait()

    def collect(self) -> Iterator[torch.Tensor]:
        others: Iterator[Destination] = (
            iter([None] * len(self._counts)) if self._others is None else self._others.collect()
        )
        for place, arrived in zip(self._destinations, others, strict=True):
            rows = arrived if place is None else place
            assert rows is not None
            yield rows


class HostRows:
    """The sink that is host memory: a device slot, from which the download stream fills pinned memory while
    the next batch computes, and a copy of each item's part of it.

    max_rows: of a slot, the most that come from memory which the next batch overwrites. Larger batches, and
    all of them where it is 0, are kept where they are until they have been transferred. A batch that finds
    every slot taken gets a new one, which stays.
    """

    def __init__(
        self, width: int, dtype: torch.dtype, device: torch.device, streams: Streams, max_rows: int
    ) -> None:
        self.width = width
        self.dtype = dtype
        self.max_rows = max_rows
        self.streams = streams
        self.device = device
        self.pinned = device.type == "cuda"
        self.device_slots: deque[torch.Tensor] = deque()
        self.host_slots: deque[torch.Tensor] = deque()
        if max_rows:
            self.device_slots.extend(self.device_memory() for _ in range(NUM_DEVICE_SLOTS))
            self.host_slots.extend(self.host_memory(max_rows) for _ in range(NUM_HOST_SLOTS))

    def open(self, counts: Sequence[int], destinations: Sequence[Destination] = ()) -> HostTarget:
        assert not destinations, "host memory is where items without a destination go"
        if sum(counts) > self.max_rows:
            return HostTarget(self, counts, None, None)
        # Only ``open`` takes slots: what is there stays there until it is taken.
        host_slot = self.host_slots.popleft() if self.host_slots else self.host_memory(self.max_rows)
        device_slot = self.device_slots.popleft() if self.device_slots else self.device_memory()
        return HostTarget(self, counts, device_slot, host_slot)

    def device_memory(self) -> torch.Tensor:
        with torch.inference_mode(False):  # an ordinary tensor, written in and out of it
            return torch.empty(self.max_rows, self.width, dtype=self.dtype, device=self.device)

    def host_memory(self, num_rows: int) -> torch.Tensor:
        with torch.inference_mode(False):
            return torch.empty(num_rows, self.width, dtype=self.dtype, pin_memory=self.pinned)


class HostTarget:
    """One batch's way to the host. Without slots it keeps the rows it was given, which nothing else may
    overwrite until they have been transferred."""

    def __init__(
        self,
        sink: HostRows,
        counts: Sequence[int],
        device_slot: torch.Tensor | None,
        host_slot: torch.Tensor | None,
    ) -> None:
        self._sink = sink
        self._counts = list(counts)
        self._num_rows = sum(counts)
        self._device_slot = device_slot
        self._host_slot = host_slot
        self._rows: torch.Tensor | None = None
        self._arrived: torch.Tensor | None = None
        self._done = sink.streams.make_blocking_event()
        self._sending = False

    def write(self, rows: torch.Tensor) -> None:
        needed = (self._num_rows, self._sink.width)
        if rows.shape != needed:
            raise InternalError(f"the tower gave {tuple(rows.shape)} rows, grids need {needed}")
        if self._device_slot is not None:
            self._rows = self._device_slot[: self._num_rows]
            self._rows.copy_(rows)
        else:
            self._rows = rows

    def send(self, written: Event) -> None:
        download = self._sink.streams.download
        self._sending = True
        download.wait(written)
        download.run(self._download)
        download.record(self._done)

    def abandon(self) -> None:
        # What a transfer under way may touch is lost to the pool; later batches bring their own.
        if not self._sending:
            self._give_back_device()
            if self._host_slot is not None:
                self._sink.host_slots.append(self._host_slot)
        self._host_slot = self._rows = self._arrived = None

    def wait(self) -> None:
        self._done.synchronize()
        self._rows = None
        self._give_back_device()

    def collect(self) -> Iterator[torch.Tensor]:
        assert self._arrived is not None
        try:
            for item_rows in self._arrived.split(self._counts):  # type: ignore[no-untyped-call]
                yield item_rows.clone()
        finally:
            self._arrived = None
            if self._host_slot is not None:
                self._sink.host_slots.append(self._host_slot)
                self._host_slot = None

    def _download(self) -> None:
        rows = self._rows
        assert rows is not None
        if self._host_slot is not None:
            self._arrived = self._host_slot[: self._num_rows]
        elif rows.is_cuda:
            self._arrived = self._sink.host_memory(self._num_rows)
        else:
            self._arrived = rows
            return
        self._arrived.copy_(rows, non_blocking=True)

    def _give_back_device(self) -> None:
        if self._device_slot is not None:
            self._sink.device_slots.append(self._device_slot)
            self._device_slot = None
