"""The images and clips of one vLLM request, as its features describe them.

Owns what the scheduler reads of vLLM's requests and features, and when two items may share rows. Imports
neither vLLM nor torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, ClassVar, Protocol

from lm_adapter.engines.shared.geometry import Geometry
from lm_adapter.engines.vllm.file_items import FILE_FIELDS, GRID_FIELDS, FileItem
from lm_adapter.errors import InvalidRequest
from lm_adapter.items import Grid


class VllmPosition(Protocol):
    """What is read of vLLM's ``PlaceholderRange``."""

    offset: int
    length: int

    def get_num_embeds(self) -> int: ...


class VllmFeature(Protocol):
    """What is read of vLLM's ``MultiModalFeatureSpec``. data: elements with a tensor in ``data``."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    data: Any
    modality: str
    identifier: str
    mm_position: VllmPosition


class VllmRequest(Protocol):
    """What is read and written of vLLM's ``Request``."""

    request_id: str
    mm_features: list[VllmFeature]
    status: Enum
    num_computed_tokens: int


@dataclass(frozen=True, eq=False)
class RequestItem:
    """One feature of a request. identifier: its name in vLLM's caches. start, end: its tokens. num_bytes: of
    its rows."""

    identifier: str
    start: int
    end: int
    grid: Grid
    num_bytes: int
    file: FileItem

    def check_same(self, other: RequestItem) -> None:
        """other: an item with the same identifier, whose rows are there or on their way. Raises
        InvalidRequest if it has other content, options or another grid."""
        mine, others = (replace(item.file, data=b"", reply="", is_announced=False) for item in (self, other))
        if self.grid != other.grid or mine != others:
            raise InvalidRequest(
                f"identifier {self.identifier} stands for an item of digest "
                f"{other.file.digest.hex()} and grid_thw {list(other.grid)}, this one has "
                f"{self.file.digest.hex()} and {list(self.grid)}",
                reason="IDENTIFIER_REUSED",
            )


def total_bytes(items: Iterable[RequestItem]) -> int:
    """Bytes of the rows of these items. Rows that several of them share count once."""
    return sum({item.identifier: item.num_bytes for item in items}.values())


def read_files(features: Iterable[VllmFeature]) -> list[FileItem | None]:
    """The file of each feature. Raises ValueError for damaged ones."""
    datas: list[Mapping[str, Any]] = [feature.data or {} for feature in features]
    fields = [next((data[name] for name in FILE_FIELDS if name in data), None) for data in datas]
    return [None if field is None else FileItem.unpacked(field.data.numpy()) for field in fields]


def take_items(
    request: VllmRequest, files: Sequence[FileItem | None], geometry: Geometry
) -> list[RequestItem]:
    """The items of a request. Their files leave the request, because vLLM sends it to every rank.

    files: of ``read_files``. Raises InvalidRequest for a feature without a file, and for a grid whose rows
    are not as many as the feature's placeholders."""
    features, items = [], []
    for feature, file in zip(request.mm_features, files, strict=True):
        data = feature.data
        if file is None:
            raise InvalidRequest(f"a feature of modality {feature.modality} has no file")
        position = feature.mm_position
        (grid,) = [Grid(*map(int, data[name].data.reshape(-1))) for name in GRID_FIELDS if name in data]
        num_rows, num_placeholders = geometry.num_rows(grid), position.get_num_embeds()
        if num_rows != num_placeholders:
            raise InvalidRequest(
                f"an item with grid_thw {list(grid)} has {num_rows} rows, the prompt has "
                f"{num_placeholders} placeholders"
            )
        start, end = position.offset, position.offset + position.length
        num_bytes = geometry.num_bytes(grid)
        items.append(RequestItem(feature.identifier, start, end, grid, num_bytes, file))
        # A new feature: vLLM's cache of processed items, and other samples of the prompt, keep their files.
        kept = {name: value for name, value in data.items() if name not in FILE_FIELDS}
        features.append(replace(feature, data=type(data)(kept)))
    request.mm_features = features
    return items


def check_steps(items: Sequence[RequestItem], *, step_tokens: int, max_bytes: int) -> None:
    """Raises InvalidRequest if the rows of some step do not fit into ``max_bytes``.

    items: in the order of the prompt. A step has at most ``step_tokens`` tokens, and may begin at the last
    token of any item."""
    if total_bytes(items) <= max_bytes:
        return
    for index, first in enumerate(items):
        end = first.end - 1 + step_tokens
        step = [item for item in items[index:] if item.start < end]
        if (num_bytes := total_bytes(step)) > max_bytes:
            raise InvalidRequest(
                f"a step of {step_tokens} tokens may need the rows of {len(step)} items, which have "
                f"{num_bytes} bytes, max_resident_bytes is {max_bytes}",
                reason="ROWS_TOO_LARGE",
            )
