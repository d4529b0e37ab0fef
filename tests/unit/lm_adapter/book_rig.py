"""As much of vLLM and of the fetching thread as the book deals with: requests, and fetches that end when a
test says so."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from lm_adapter.engines.vllm_book import Book
from lm_adapter.engines.vllm_fetch import Fetched, FetchSettings
from lm_adapter.engines.vllm_items import Geometry, WantedRows, transfer_params
from lm_adapter.errors import InvalidRows, ItemFailed
from lm_adapter.items import Grid
from lm_adapter.types import EncodedRows

GEOMETRY = Geometry(width=12, dtype="float32", num_levels=2, merge_size=2, merges_time=False)
GRID = Grid(1, 4, 6)
NUM_ROWS = 6
ITEM_BYTES = NUM_ROWS * 12 * 4
SETTINGS = FetchSettings(target="nowhere:1", max_resident_bytes=4 * ITEM_BYTES)


@dataclass
class Position:
    offset: int
    length: int

    def get_num_embeds(self) -> int:
        return self.length


@dataclass(eq=False)
class Feature:
    identifier: str
    mm_position: Position
    data: dict[str, Any] | None = None


@dataclass(eq=False)
class Request:
    """As much of vLLM's Request as the connector looks at."""

    mm_features: list[Feature]
    ec_transfer_params: dict[str, Any] | None
    request_id: str = field(default_factory=lambda: secrets.token_hex(4))


@dataclass(frozen=True)
class Named:
    """An image as a request speaks of it: vLLM's name, our key, and the grid that the request says."""

    name: str
    key: bytes
    grid: Grid = GRID


class Fetches:
    """Fetches that end when a test says so. grids: of the rows under a key, where that is not GRID."""

    def __init__(self) -> None:
        self.ended: deque[Fetched] = deque()
        self.under_way: dict[bytes, Any] = {}
        self.open: list[tuple[Any, WantedRows]] = []
        self.grids: dict[bytes, Grid] = {}
        self.cancelled: list[bytes] = []
        self.num_started = 0
        self.waits: list[float] = []

    def start(self, handle: object, wanted: WantedRows) -> None:
        assert wanted.key is not None
        self.num_started += 1
        self.under_way[wanted.key] = handle
        self.open.append((handle, wanted))

    def cancel(self, handle: Any) -> None:
        self.cancelled.append(handle.wanted.key)
        self.open = [(other, wanted) for other, wanted in self.open if other is not handle]

    def wait(self, timeout_s: float) -> None:
        self.waits.append(timeout_s)

    def end(self, key: bytes, error: ItemFailed | None = None) -> None:
        """The last fetch that was started under this key."""
        handle = self.under_way.pop(key)
        self.open = [(other, wanted) for other, wanted in self.open if other is not handle]
        self.ended.append(Fetched(handle, error or rows_of(key, self.grids.get(key, GRID))))

    def end_one(self, number: int = 0, error: ItemFailed | None = None) -> None:
        """The fetch at this place among those under way, as ``Fetcher`` ends it: rows of another grid than
        was asked for are an error."""
        handle, wanted = self.open.pop(number)
        assert wanted.key is not None
        outcome: EncodedRows | ItemFailed = error or rows_of(wanted.key, self.grids.get(wanted.key, GRID))
        if isinstance(outcome, EncodedRows):
            try:
                GEOMETRY.check(outcome, wanted.grid)
            except InvalidRows as unfit:
                outcome = unfit
        self.ended.append(Fetched(handle, outcome))

    def end_all(self) -> None:
        while self.open:
            self.end_one()


def rows_of(key: bytes, grid: Grid = GRID) -> EncodedRows:
    payload = np.zeros(GEOMETRY.num_bytes(grid), dtype=np.uint8)
    return EncodedRows(key, b"", grid, GEOMETRY.num_rows(grid), 12, "float32", 2, payload)


def request_for(*keys: bytes, gap: int = 2, reply: str = "", replica: str = "") -> Request:
    """Text, image, text, image, ...: each image has NUM_ROWS placeholders."""
    return request_of([Named(f"id-{key.hex()}", key) for key in keys], gap=gap, reply=reply, replica=replica)


def request_of(images: Sequence[Named], *, gap: int = 2, reply: str = "", replica: str = "") -> Request:
    """Text, image, text, image, ...: each has as many placeholders as the grid says that it comes with."""
    features, offset = [], gap
    for image in images:
        num_rows = GEOMETRY.num_rows(image.grid)
        features.append(Feature(image.name, Position(offset, num_rows), grid_field(image.grid)))
        offset += num_rows + gap
    params = transfer_params([(image.key, image.grid, replica) for image in images], reply)
    return Request(features, params)


def pixels(name: str, grid: Grid, offset: int = 2) -> Feature:
    """An image for vLLM's own tower."""
    place = Position(offset, GEOMETRY.num_rows(grid))
    return Feature(name, place, {"pixel_values": object(), **grid_field(grid)})


def grid_field(grid: Grid) -> dict[str, Any]:
    return {"image_grid_thw": SimpleNamespace(data=np.array(grid))}


def key() -> bytes:
    return secrets.token_bytes(32)


def is_ready(book: Book, fetches: Fetches, request: Request) -> bool:
    """Whether vLLM may take it once all fetches have ended."""
    book.ensure(request, 0)
    fetches.end_all()
    return book.ensure(request, 0)
