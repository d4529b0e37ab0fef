"""Copies rows out of the forward pass's memory, which the next batch overwrites, into each item's own memory.

Owns the copies and the check of destinations. Rows with a destination on the device are copied there in the
compute stream. All other rows are first copied to a device buffer in the compute stream, and from there to
the host in the download stream, while the next batch runs. The store decides who owns the destinations and
when they are reused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from encoder_service.engine.streams import Event, Streams
from encoder_service.errors import InternalError


class RowCopier:
    """Opens batches of rows. width, dtype, device: those of the tower's rows."""

    def __init__(self, width: int, dtype: torch.dtype, device: torch.device, streams: Streams) -> None:
        self.width = width
        self.dtype = dtype
        self.device = device
        self.streams = streams

    def open(self, counts: Sequence[int], destinations: Sequence[torch.Tensor | None]) -> BatchRows:
        """Opens a batch. counts: rows per item. destinations: one per item, [R, W], contiguous, on the
        tower's device or in host memory (pinned if the tower is on a GPU); None for a new host tensor. Raises
        InternalError for a destination that does not match its item's rows."""
        for count, destination in zip(counts, destinations, strict=True):
            if destination is not None:
                self._check(count, destination)
        return BatchRows(self, counts, destinations)

    def _check(self, count: int, destination: torch.Tensor) -> None:
        if (
            destination.shape != (count, self.width)
            or destination.dtype != self.dtype
            or not destination.is_contiguous()
            or destination.device.type not in ("cpu", self.device.type)
        ):
            raise InternalError(
                f"the destination is {destination.dtype} {tuple(destination.shape)} with strides "
                f"{destination.stride()} on {destination.device}, the item's rows are {self.dtype} "
                f"{(count, self.width)}, contiguous, on {self.device}"
            )


class BatchRows:
    """The rows of one batch. Call the public methods in the order in which they are defined."""

    def __init__(
        self, copier: RowCopier, counts: Sequence[int], destinations: Sequence[torch.Tensor | None]
    ) -> None:
        self._copier = copier
        self._counts = counts
        self._destinations = destinations
        # Indices of the items by where their rows go.
        self._on_device: list[int] = []
        self._on_host: list[int] = []
        self._without: list[int] = []
        for index, destination in enumerate(destinations):
            if destination is None:
                self._without.append(index)
            elif destination.device.type == copier.device.type:
                self._on_device.append(index)
            else:
                self._on_host.append(index)
        # Device buffer of the rows for the host, those with a destination first; host copy of the others.
        self._aside: torch.Tensor | None = None
        self._arrived: torch.Tensor | None = None
        self._done: Event | None = None

    def write(self, rows: torch.Tensor) -> None:
        """Copies the batch's rows [R, W] out. Called in the compute stream; work that is queued there later
        may overwrite them. Raises InternalError for another shape."""
        expected = (sum(self._counts), self._copier.width)
        if rows.shape != expected:
            raise InternalError(f"the tower gave {tuple(rows.shape)} rows, grids need {expected}")
        parts = rows.split(list(self._counts))  # type: ignore[no-untyped-call]
        if self._on_device:
            targets = [self._destination(index) for index in self._on_device]
            torch._foreach_copy_(targets, [parts[index] for index in self._on_device])
        if self._on_host or self._without:
            self._aside = torch.cat([parts[index] for index in (*self._on_host, *self._without)])

    def send(self, ended: Event) -> None:
        """Queues the copies to the host. They wait for ``ended``, an event recorded after ``write``."""
        self._done = ended
        if not self._on_host and not self._without:
            return
        streams = self._copier.streams
        self._done = streams.make_event()
        streams.download.wait(ended)
        streams.download.run(self._download)
        streams.download.record(self._done)

    def wait(self) -> None:
        """Blocks until all rows have arrived. Raises the device's failure."""
        assert self._done is not None
        self._done.synchronize()
        self._aside = None

    def collect(self) -> Iterator[torch.Tensor]:
        """Yields each item's rows: its destination, or its own host tensor. Call once, after ``wait``."""
        first = 0
        for count, destination in zip(self._counts, self._destinations, strict=True):
            if destination is not None:
                yield destination
            else:
                assert self._arrived is not None
                yield self._arrived[first : first + count].clone()
                first += count

    def _download(self) -> None:
        aside, first = self._aside, 0
        assert aside is not None
        for index in self._on_host:
            count = self._counts[index]
            self._destination(index).copy_(aside[first : first + count], non_blocking=True)
            first += count
        if self._without:
            shape = (len(aside) - first, self._copier.width)
            self._arrived = torch.empty(shape, dtype=aside.dtype, pin_memory=aside.is_cuda)
            self._arrived.copy_(aside[first:], non_blocking=True)

    def _destination(self, index: int) -> torch.Tensor:
        destination = self._destinations[index]
        assert destination is not None
        return destination
