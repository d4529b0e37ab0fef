"""Images that the device resizes: which ones, how they are packed, and their way through its memory.

Owns what is decided of an image before it is decoded, the memory in which it waits, and the device memory
that packed images pass through. The arithmetic is the kernel's (``towers.kernels.resize``), bit for bit what
ingest's is on the host, so that rows and their keys are the same either way; that they are the same on this
machine is tried out before anything is served.

Everything here happens in the upload stream, behind the forward pass of the batch before: images are copied
into one piece of device memory and resized from there into the batch's slot, as many at a time as it takes.
The stream's order keeps them apart, so that the host waits for none of it.
"""

from __future__ import annotations

import functools
import importlib.util
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import structlog
import torch

from encoder_service.engine.copies import Copies, CopyList, Memory
from encoder_service.engine.patches import Upload
from encoder_service.engine.staging import ALIGNMENT_BYTES, NUM_SLOTS, PixelSlot
from encoder_service.engine.streams import Streams
from encoder_service.errors import InternalError
from encoder_service.ingest.preprocessor import Preprocessor
from encoder_service.ingest.resize import resize_bicubic
from encoder_service.scheduler.admission import Permit
from encoder_service.towers.fused_inputs import shape_row
from encoder_service.towers.tower import Tower
from encoder_service.types import FrameItem, Grid

if TYPE_CHECKING:
    from encoder_service.towers.kernels.resize import Packing

log = structlog.get_logger(__name__)

# Elements of a side, before or after: bounds the tables, of which some are remembered.
MAX_SIDE = 16_384
# The part of the byte budget that decoded images may fill together with everything else that is held: the
# rest is left to what callers send.
DECODED_SHARE = 0.5
# Of images that are resized both ways at start: height, width, and what they become before padding.
TRIALS = ((37, 52, 24, 61), (9, 40, 28, 40), (64, 33, 11, 16))


Fit = Any


def packing_of(fit: Fit) -> Packing:
    from encoder_service.towers.kernels.resize import Packing  # triton, which only this needs

    return Packing(*fit[:6])


def span_bytes(packing: Packing) -> int:
    """Device memory that a packed image passes through, that between its passes included."""
    return _aligned(packing.num_bytes) + _aligned(packing.between_bytes)


def pinned_bytes(num_bytes: int) -> int:
    """What torch's allocator of pinned memory takes: a power of two."""
    return 1 << (num_bytes - 1).bit_length()


@dataclass(frozen=True, slots=True)
class Packed:
    """What a step has to know of a packed image, found out once. span_bytes: of the memory it passes through;
    between: the byte of it at which what lies between the passes begins; num_tiles: in either pass; result: a
    tensor without memory that is like the resized image."""

    packing: Packing
    span_bytes: int
    between: int
    num_tiles: tuple[int, int]
    result: torch.Tensor

    @classmethod
    def of(cls, packing: Packing) -> Packed:
        result = torch.empty((1, packing.height, packing.width, 3), dtype=torch.uint8, device="meta")
        between = _aligned(packing.num_bytes)
        return cls(packing, span_bytes(packing), between, packing.num_tiles, result)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class Resizing:
    """Which images are resized on ``device``, and their packing for it.

    num_bytes: of the device's memory that they pass through; an image that takes more is resized on the host.
    counts: images by where they are resized: ``device``; on the host those that are too large for it
    (``host_large``) and those for whose pixels there was no room to wait (``host_busy``). Decided and counted
    on the event loop.
    """

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        self.device = device
        self.num_bytes = num_bytes
        self.counts = {"device": 0, "host_large": 0, "host_busy": 0}

    def takes(self, fit: Fit, permit: Permit) -> bool:
        """Whether the device is to resize the image; its pixels count with ``permit`` then."""
        if fit.is_kept:
            return False
        packing = packing_of(fit)
        if max(packing) > MAX_SIDE or span_bytes(packing) > self.num_bytes:
            self.counts["host_large"] += 1
            return False
        if not permit.try_add_bytes(pinned_bytes(packing.num_bytes), DECODED_SHARE):
            self.counts["host_busy"] += 1
            return False
        self.counts["device"] += 1
        return True

    def load(
        self, preprocessor: Preprocessor, data: bytes, fit: Fit, tower: Tower
    ) -> tuple[FrameItem, float, float]:
        """On a worker: the image as it is decoded, in memory that the device reads, with the milliseconds
        spent in decoding and in packing. Raises UndecodableImage, ImageTooLarge, GridMismatch."""
        from encoder_service.towers.kernels.resize import pixels_of, write_tables

        started_s = time.perf_counter()
        packing = packing_of(fit)
        memory = self._host_memory(packing.num_bytes)
        image_HWC = pixels_of(memory, packing)
        write_tables(memory, packing)
        packed_s = time.perf_counter()
        raise NotImplementedError(preprocessor, data, image_HWC)
        decode_ms = (time.perf_counter() - packed_s) * 1e3
        return packed_item(memory, packing, fit.grid, tower), decode_ms, (packed_s - started_s) * 1e3

    def blank(self, grid: Grid, tower: Tower) -> FrameItem:
        """A black image that is resized to the grid, to warm up with."""
        from encoder_service.towers.kernels.resize import pixels_of, write_tables

        sides = grid.h * tower.patch_size, grid.w * tower.patch_size
        packing = packing_of(Fit(1, 1, *sides, *sides, grid))
        memory = self._host_memory(packing.num_bytes)
        pixels_of(memory, packing).zero_()
        write_tables(memory, packing)
        return packed_item(memory, packing, grid, tower)

    def try_out(self) -> None:
        """Raises InternalError unless the device resizes to the bits that the host does."""
        from encoder_service.towers.kernels.resize import pack, resize_alone

        for height, width, new_height, new_width in TRIALS:
            image_HWC = torch.from_numpy(
                np.random.default_rng(height).integers(0, 256, (height, width, 3), dtype=np.uint8)
            )
            packing = packing_of(
                Fit(height, width, new_height, new_width, new_height + 3, new_width + 5, Grid(1, 1, 1))
            )
            found = resize_alone(pack(image_HWC, packing), packing, self.device).cpu()
            expected = torch.nn.functional.pad(
                resize_bicubic(image_HWC, new_height, new_width), (0, 0, 0, 5, 0, 3)
            )
            if not torch.equal(found, expected):
                num_different = int((found != expected).sum())
                raise InternalError(
                    f"{height}x{width} to {new_height}x{new_width}: {num_different} of {found.numel()} bytes "
                    "differ from the host's"
                )

    def _host_memory(self, num_bytes: int) -> torch.Tensor:
        if self.device.type != "cuda":
            return torch.empty(num_bytes, dtype=torch.uint8)
        with torch.cuda.device(self.device):  # pinning makes a context on whatever is current
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


def open_resizing(where: str, num_bytes: int, device: torch.device) -> Resizing | None:
    """What resizes on ``device``; None for the host: where that was asked for, there is no Triton, or the
    device does not give the host's bits, which the log says. where: ``host`` or ``device``."""
    if where == "host":
        return None
    if importlib.util.find_spec("triton") is None:
        log.warning("images are resized on the host", reason="triton is not installed")
        return None
    resizing = Resizing(device, num_bytes)
    try:
        if device.type == "cuda":
            with torch.cuda.device(device):
                resizing.try_out()
        else:
            resizing.try_out()
    except InternalError as error:
        log.warning("images are resized on the host", reason=str(error))
        return None
    return resizing


def packed_item(memory: torch.Tensor, packing: Packing, grid: Grid, tower: Tower) -> FrameItem:
    """A packed image as the engine takes it. Raises GridMismatch."""
    from encoder_service.towers.kernels.resize import pixels_of

    tower.check_grid(grid)
    side = tower.patch_size
    assert (grid.t, grid.h * side, grid.w * side) == (1, packing.height, packing.width)
    row = (
        *shape_row(grid, merges_time=tower.merges_time),
        memory.data_ptr(),
        packing.result_bytes,
        1,
        tower.device.type == "cpu" or memory.is_pinned(),
        1,
    )
    upload = Upload(
        tower, memory, np.array(row, np.int64).tobytes(), tower.num_rows(grid), Packed.of(packing)
    )
    return FrameItem(pixels_of(memory, packing).unsqueeze(0), grid, upload)


def resized(pixels: torch.Tensor, packed: Packed, device: torch.device) -> torch.Tensor:
    """A packed image's frame, uint8 [1, H, W, 3], in memory of its own on the device: for a batch that no
    slot takes, in the current stream from start to end. Pinned host memory stays until that has passed."""
    from encoder_service.towers.kernels.resize import resize_alone

    return resize_alone(pixels, packed.packing, device).unsqueeze(0)


@dataclass
class Group:
    """Packed images that are resized together. first, last: their places; copies: what is copied to which
    byte; num_tiles: of all, in either pass."""

    first: int
    last: int
    copies: list[tuple[int, torch.Tensor]]
    num_tiles: tuple[int, int] = (0, 0)


class ResizeStage:
    """Device memory that packed images pass through, batch after batch, in the upload stream alone.

    num_bytes: of it; no image's span is larger. max_items: of a batch.
    """

    def __init__(
        self, num_bytes: int, max_items: int, device: torch.device, streams: Streams, copies: Copies | None
    ) -> None:
        from encoder_service.towers.kernels import resize

        self._kernels = resize
        self.num_bytes = num_bytes
        self.num_groups = 0
        self._upload = streams.upload
        self._copies = copies
        self._memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        shape, is_gpu = (max_items, resize.NUM_PLACES), device.type == "cuda"
        self._places = torch.zeros(shape, dtype=torch.int64, device=device)
        # One for each slot: whoever writes it knows that the transfer of the slot's last batch is over.
        self._host_places = [
            torch.zeros(shape, dtype=torch.int64, pin_memory=is_gpu) for _ in range(NUM_SLOTS)
        ]
        self._pieces = CopyList.of_capacity(max_items)
        # Memory comes in the compute stream's order: what had it before may yet write to it.
        given = streams.make_event()
        streams.compute.record(given)
        self._upload.wait(given)

    def send(
        self,
        slot: PixelSlot,
        offsets: Sequence[int],
        pixels: Sequence[torch.Tensor],
        packed: Sequence[Packed | None],
        *,
        all_pinned: bool,
    ) -> None:
        """A batch's pixels into ``slot``, at ``offsets`` of it, in the upload stream: those that are packed
        resized, the others as they are. pixels: host memory, kept by the slot; offsets are aligned."""
        places = self._host_places[slot.index]
        plain, groups = self._lay_out(slot, offsets, pixels, packed, places.numpy())
        num_packed = groups[-1].last
        source, destination = places[:num_packed], self._places[:num_packed]
        if self._copies is not None:
            self._upload.copy(self._copies, Memory(destination), Memory(source), source.nbytes)
        else:
            self._upload.run(lambda: destination.copy_(source, non_blocking=True))
        self._copy(slot.memory, plain, all_pinned=all_pinned)
        for group in groups:
            self._copy(self._memory, group.copies, all_pinned=all_pinned)
            self._upload.run(functools.partial(self._resize, slot.all_memory, group))
        self.num_groups += len(groups)

    def _lay_out(
        self,
        slot: PixelSlot,
        offsets: Sequence[int],
        pixels: Sequence[torch.Tensor],
        packed: Sequence[Packed | None],
        places: np.ndarray,
    ) -> tuple[list[tuple[int, torch.Tensor]], list[Group]]:
        """What is copied into the slot as it is, and the groups of packed images, whose places it writes."""
        plain: list[tuple[int, torch.Tensor]] = []
        groups: list[Group] = []
        end = 0
        for offset, one, its in zip(offsets, pixels, packed, strict=True):
            if its is None:
                plain.append((offset, one))
                continue
            assert its.span_bytes <= self.num_bytes, f"{its.span_bytes} bytes pass through {self.num_bytes}"
            if not groups or end + its.span_bytes > self.num_bytes:
                place = groups[-1].last if groups else 0
                groups.append(Group(place, place, []))
                end = 0
            group = groups[-1]
            column_tiles, row_tiles = group.num_tiles
            places[group.last] = column_tiles, row_tiles, end, end + its.between, slot.first_byte + offset
            group.copies.append((end, one))
            group.num_tiles = column_tiles + its.num_tiles[0], row_tiles + its.num_tiles[1]
            group.last += 1
            end += its.span_bytes
        return plain, groups

    def _copy(
        self, target: torch.Tensor, copies: Sequence[tuple[int, torch.Tensor]], *, all_pinned: bool
    ) -> None:
        """Each tensor's bytes to its place in ``target``, uint8 [B]."""
        if not copies:
            return
        if self._copies is not None and self._copies.by_address and all_pinned:
            start, pieces = target.data_ptr(), self._pieces
            for index, (place, one) in enumerate(copies):
                pieces.destinations[index] = start + place
                pieces.sources[index] = one.data_ptr()
                pieces.sizes[index] = one.nbytes
            self._upload.copy_many(self._copies, pieces, len(copies))
            return

        def copy() -> None:
            for place, one in copies:
                target[place : place + one.nbytes].copy_(one.view(torch.uint8).view(-1), non_blocking=True)

        self._upload.run(copy)

    def _resize(self, results: torch.Tensor, group: Group) -> None:
        self._kernels.resize_packed(
            self._memory, results, self._places[group.first : group.last], group.num_tiles
        )
