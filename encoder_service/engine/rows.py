"""Where finished rows go: out of the memory that the next batch overwrites, to each item's own storage.

Owns the seam between a forward pass and the destination of its rows (``RowSink``), and the two destinations:
places on the device that were reserved for the items, and host memory. The engine opens one target per batch,
writes the batch's rows in the compute stream, closes it with ``send``, and later, from any thread, waits for
the target and collects from it. Whose the reserved places are, and when they may be reused, is the store's.

Rows that lie where they are known to lie are copied by address, which torch's allocators are not told of.
Slots, on the device and pinned ones, are kept for good, so that nothing is given away under a copy; reserved
places stay reserved until ``wait`` or ``abandon`` has returned; a captured graph's memory is the runner's.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Protocol, TypeAlias

import torch

from encoder_service.engine.copies import Copies, CopyList, Memory, copies_of
from encoder_service.engine.streams import Event, Stream, Streams
from encoder_service.errors import InternalError

# Batches in flight, and so device slots; one more on the host, whose rows are being handed out meanwhile.
NUM_DEVICE_SLOTS = 2
NUM_HOST_SLOTS = 3

# Where an item's rows [R, W] go, contiguous, in the tower's dtype on its device; None: to host memory.
Destination: TypeAlias = torch.Tensor | None


class RowTarget(Protocol):
    """One batch's rows on their way. Calls come in the order below, ``abandon`` instead of ``send`` when the
    batch failed before it was all handed to the device."""

    def write(self, rows: torch.Tensor) -> None:
        """Takes rows [R, W] on the device, in the compute stream's order; after it they may be overwritten.
        Raises InternalError for another shape."""

    def write_memory(self, rows: Memory, num_rows: int) -> None:
        """``write`` of the first ``num_rows`` of rows that begin a memory which is there for good, in the
        tower's dtype. They may be overwritten after ``written`` and, where ``send`` gives one, its event."""

    def send(self, written: Event) -> Event | None:
        """Starts what remains to be done once ``written``, an event behind ``write``, has passed. Gives an
        event behind what still reads the rows in another stream than compute, if anything does: the next
        forward pass waits for it."""

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
        all. Never waits. Raises InternalError for a destination that is not what its item's rows are."""


class PlacedRows:
    """The sink of items that know where their rows go: one call copies a batch's rows out of the forward
    pass's memory to all of them. Items without a destination go the way of ``others``."""

    def __init__(self, others: HostRows) -> None:
        self._others = others
        self._pieces = CopyList.of_capacity(0)

    def open(self, counts: Sequence[int], destinations: Sequence[Destination] = ()) -> RowTarget:
        for destination in destinations:
            if destination is not None:
                return PlacedTarget(self, self._others, counts, destinations)
        return self._others.open(counts)

    def pieces(self, count: int) -> CopyList:
        """For as many copies, until the next call."""
        if count > len(self._pieces.sizes):
            self._pieces = CopyList.of_capacity(2 * count)
        return self._pieces


class PlacedTarget:
    """One batch's way to the places reserved for it. A batch of both kinds is rare: all of it goes to the
    host as well, and what was placed is not looked at there.

    Rows of a graph are placed in a stream of their own, behind the forward pass: the stream that the engine
    computes in refuses the driver's call for many copies. The next forward pass waits for it, as it would
    behind a copy in its own stream.
    """

    def __init__(
        self,
        sink: PlacedRows,
        others: HostRows,
        counts: Sequence[int],
        destinations: Sequence[Destination],
    ) -> None:
        self._sink = sink
        self._host = others
        self._counts = counts
        self._destinations = destinations
        # Runs of rows that are next to each other on both sides: address, first byte of the rows, bytes.
        self._addresses: list[int] = []
        self._firsts: list[int] = []
        self._sizes: list[int] = []
        missing = self._find_runs()
        self._others = others.open(counts) if missing else None
        self._done = others.take_event()
        self._rows: Memory | None = None
        # What is writing to the places by now.
        self._writer: Stream | None = None

    def _find_runs(self) -> bool:
        """Whether some item has no place."""
        host, addresses, firsts, sizes = self._host, self._addresses, self._firsts, self._sizes
        width, dtype, row_bytes = host.width, host.dtype, host.row_bytes
        first, end, missing = 0, -1, False
        for count, place in zip(self._counts, self._destinations, strict=True):
            num_bytes = count * row_bytes
            if place is None:
                missing, end = True, -1
            else:
                if place.shape != (count, width) or place.dtype != dtype or not place.is_contiguous():
                    raise InternalError(
                        f"a place for {place.dtype} {tuple(place.shape)} with strides {place.stride()} was "
                        f"reserved, the item's rows are {dtype} {(count, width)}, contiguous"
                    )
                address = place.data_ptr()
                if address == end:
                    sizes[-1] += num_bytes
                else:
                    addresses.append(address)
                    firsts.append(first)
                    sizes.append(num_bytes)
                end = address + num_bytes
            first += num_bytes
        self._num_rows = first // row_bytes
        return missing

    def write(self, rows: torch.Tensor) -> None:
        check_rows(rows.shape, self._num_rows, self._host.width)
        parts = rows.split(list(self._counts))  # type: ignore[no-untyped-call]
        pairs = zip(self._destinations, parts, strict=True)
        placed = [(place, part) for place, part in pairs if place is not None]
        self._writer = self._host.streams.compute
        torch._foreach_copy_([place for place, _ in placed], [part for _, part in placed])
        if self._others is not None:
            self._others.write(rows)

    def write_memory(self, rows: Memory, num_rows: int) -> None:
        check_rows((num_rows, self._host.width), self._num_rows, self._host.width)
        if not self._host.copies.by_address:
            self._host.streams.compute.run(lambda: self.write(self._host.rows_in(rows, num_rows)))
            return
        self._rows = rows
        if self._others is not None:
            self._others.write_memory(rows, num_rows)

    def send(self, written: Event) -> Event | None:
        if self._others is not None:
            self._others.send(written)
        place, rows = self._host.streams.place, self._rows
        place.wait(written)
        if rows is not None:
            count = len(self._sizes)
            pieces = self._sink.pieces(count)
            pieces.destinations[:count] = self._addresses
            pieces.sources[:count] = self._firsts
            pieces.sources[:count] += rows.address
            pieces.sizes[:count] = self._sizes
            self._writer = place
            place.copy_many(self._host.copies, pieces, count)
        place.record(self._done)
        return None if rows is None else self._done

    def abandon(self) -> None:
        # The places will be given to others, whose writers know nothing of what is under way here.
        if self._writer is not None:
            with contextlib.suppress(Exception):  # a device that failed is found by whoever asks it next
                self._writer.record(self._done)
                self._done.synchronize()
        if self._others is not None:
            self._others.abandon()

    def wait(self) -> None:
        self._done.synchronize()
        if self._others is not None:
            self._others.wait()

    def collect(self) -> Iterator[torch.Tensor]:
        self._host.events.append(self._done)
        others: Iterator[Destination] = (
            iter([None] * len(self._counts)) if self._others is None else self._others.collect()
        )
        for place, arrived in zip(self._destinations, others, strict=True):
            rows = arrived if place is None else place
            assert rows is not None
            yield rows


class RowSlot:
    """Memory for a batch's rows. tensor: [max_rows, W]."""

    __slots__ = ("memory", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.memory = Memory(tensor)


class HostRows:
    """The sink that is host memory: a device slot, from which the download stream fills pinned memory while
    the next batch computes, and a copy of each item's part of it.

    max_rows: of a slot, the most that come from memory which the next batch overwrites. Larger batches, and
    all of them where it is 0, are kept where they are until they have been transferred. A batch that finds
    every slot taken gets a new one, which stays.
    """

    def __init__(
        self,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
        streams: Streams,
        max_rows: int,
        copies: Copies | None = None,
    ) -> None:
        self.width = width
        self.dtype = dtype
        self.row_bytes = width * dtype.itemsize
        self.max_rows = max_rows
        self.streams = streams
        self.device = device
        self.copies = copies or copies_of(device)
        self.device_slots: deque[RowSlot] = deque()
        self.host_slots: deque[RowSlot] = deque()
        # Blocking events behind transfers, given back where rows are collected: the next batch records them
        # again. Making one costs more than recording it.
        self.events: deque[Event] = deque()
        # Every slot there ever was. One that a failed batch lost may have a copy under way for good.
        self._all: list[RowSlot] = []
        if max_rows:
            self.device_slots.extend(self._device_slot() for _ in range(NUM_DEVICE_SLOTS))
            self.host_slots.extend(self._host_slot() for _ in range(NUM_HOST_SLOTS))

    def open(self, counts: Sequence[int], destinations: Sequence[Destination] = ()) -> HostTarget:
        assert not destinations, "host memory is where items without a destination go"
        num_rows = sum(counts)
        if num_rows > self.max_rows:
            return HostTarget(self, counts, num_rows, None, None)
        # Only ``open`` takes slots: what is there stays there until it is taken.
        host_slot = self.host_slots.popleft() if self.host_slots else self._host_slot()
        device_slot = self.device_slots.popleft() if self.device_slots else self._device_slot()
        return HostTarget(self, counts, num_rows, device_slot, host_slot)

    def take_event(self) -> Event:
        return self.events.popleft() if self.events else self.streams.make_blocking_event()

    def rows_in(self, memory: Memory, num_rows: int) -> torch.Tensor:
        """The first rows [num_rows, W] of a memory."""
        return memory.tensor[: num_rows * self.row_bytes].view(self.dtype).view(num_rows, self.width)

    def host_memory(self, num_rows: int) -> torch.Tensor:
        with torch.inference_mode(False):  # an ordinary tensor, written in and out of it
            return torch.empty(num_rows, self.width, dtype=self.dtype, pin_memory=self.device.type == "cuda")

    def _host_slot(self) -> RowSlot:
        return self._keep(self.host_memory(self.max_rows))

    def _device_slot(self) -> RowSlot:
        with torch.inference_mode(False):
            return self._keep(torch.empty(self.max_rows, self.width, dtype=self.dtype, device=self.device))

    def _keep(self, tensor: torch.Tensor) -> RowSlot:
        with torch.inference_mode(False):
            self._all.append(RowSlot(tensor))
        return self._all[-1]


class HostTarget:
    """One batch's way to the host. Without slots it keeps the rows it was given, which nothing else may
    overwrite until they have been transferred."""

    __slots__ = (
        "_arrived",
        "_counts",
        "_device_slot",
        "_done",
        "_host_slot",
        "_num_rows",
        "_sending",
        "_sink",
        "_unslotted",
    )

    def __init__(
        self,
        sink: HostRows,
        counts: Sequence[int],
        num_rows: int,
        device_slot: RowSlot | None,
        host_slot: RowSlot | None,
    ) -> None:
        self._sink = sink
        self._counts = counts
        self._num_rows = num_rows
        self._device_slot = device_slot
        self._host_slot = host_slot
        self._unslotted: torch.Tensor | None = None
        self._arrived: torch.Tensor | None = None
        self._done = sink.take_event()
        self._sending = False

    def write(self, rows: torch.Tensor) -> None:
        check_rows(rows.shape, self._num_rows, self._sink.width)
        if self._device_slot is not None:
            self._device_slot.tensor[: self._num_rows].copy_(rows)
        else:
            self._unslotted = rows

    def write_memory(self, rows: Memory, num_rows: int) -> None:
        sink, slot = self._sink, self._device_slot
        check_rows((num_rows, sink.width), self._num_rows, sink.width)
        assert slot is not None, "a graph's rows fit a slot"
        sink.streams.compute.copy(sink.copies, slot.memory, rows, num_rows * sink.row_bytes)

    def send(self, written: Event) -> None:
        sink, download = self._sink, self._sink.streams.download
        self._sending = True
        download.wait(written)
        if self._device_slot is not None and self._host_slot is not None:
            num_bytes = self._num_rows * sink.row_bytes
            download.copy(sink.copies, self._host_slot.memory, self._device_slot.memory, num_bytes)
        else:
            download.run(self._download)
        download.record(self._done)

    def abandon(self) -> None:
        # What a transfer under way may touch is not used again; later batches bring their own.
        if not self._sending:
            self._give_back_device()
            self._give_back_host()
            self._sink.events.append(self._done)
        self._device_slot = self._host_slot = self._unslotted = self._arrived = None

    def wait(self) -> None:
        self._done.synchronize()
        self._unslotted = None
        self._give_back_device()

    def collect(self) -> Iterator[torch.Tensor]:
        rows = self._arrived if self._host_slot is None else self._host_slot.tensor[: self._num_rows]
        assert rows is not None
        self._sink.events.append(self._done)
        try:
            for item_rows in rows.split(list(self._counts)):  # type: ignore[no-untyped-call]
                yield item_rows.clone()
        finally:
            self._arrived = None
            self._give_back_host()

    def _download(self) -> None:
        rows = self._unslotted
        assert rows is not None
        self._arrived = rows
        if rows.is_cuda:
            self._arrived = self._sink.host_memory(self._num_rows)
            self._arrived.copy_(rows, non_blocking=True)

    def _give_back_device(self) -> None:
        if self._device_slot is not None:
            self._sink.device_slots.append(self._device_slot)
            self._device_slot = None

    def _give_back_host(self) -> None:
        if self._host_slot is not None:
            self._sink.host_slots.append(self._host_slot)
            self._host_slot = None


def check_rows(found: Sequence[int], num_rows: int, width: int) -> None:
    """Raises InternalError for another shape than [num_rows, width]."""
    if tuple(found) != (num_rows, width):
        raise InternalError(f"the tower gave {tuple(found)} rows, grids need {(num_rows, width)}")
