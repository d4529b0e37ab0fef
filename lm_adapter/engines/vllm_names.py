"""What the names of images in vLLM's caches stand for: one key and one grid each, as rows have shown.

vLLM's encoder cache and prefix cache go by a name that clients choose (``vllm_items``). Two images under one
name, or one image said to have two grids, would share rows and KV. Owns the bounded memory of names and the
comparison; leaves to ``vllm_book`` when either is due. A name is bound by rows that arrived or by pixels that
vLLM encodes itself, never by what a request says of rows that nobody has seen.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from lm_adapter.engines.vllm_items import WantedRows
from lm_adapter.errors import InvalidRequest
from lm_adapter.items import Grid

__all__ = ["Names", "check_same"]


class _Named(NamedTuple):
    """key: None for pixels of vLLM's own."""

    key: bytes | None
    grid: Grid


class Names:
    """The last ``max_names`` that were bound or asked about."""

    def __init__(self, max_names: int) -> None:
        self._max_names = max_names
        self._bound: OrderedDict[str, _Named | None] = OrderedDict()

    def check(self, wanted: WantedRows) -> None:
        """Raises InvalidRequest where the name is known to stand for anything else."""
        if wanted.identifier not in self._bound:
            return
        self._bound.move_to_end(wanted.identifier)
        bound = self._bound[wanted.identifier]
        if bound is None:
            raise _reused(f"what vLLM computed for identifier {wanted.identifier} was of no image's rows")
        check_same(wanted, bound.key, bound.grid)

    def bind(self, wanted: WantedRows) -> None:
        """Of a name that was checked. A key that pixels left open is filled in."""
        bound = self._bound.get(wanted.identifier)
        key = bound.key if wanted.key is None and bound is not None else wanted.key
        self._put(wanted.identifier, _Named(key, wanted.grid))

    def spoil(self, identifier: str) -> None:
        """vLLM has cached what belongs to no image under this name: nobody may use it again."""
        self._put(identifier, None)

    def _put(self, identifier: str, named: _Named | None) -> None:
        self._bound[identifier] = named
        self._bound.move_to_end(identifier)
        if len(self._bound) > self._max_names:
            self._bound.popitem(last=False)


def check_same(wanted: WantedRows, key: bytes | None, grid: Grid) -> None:
    """Compares a feature with another of the same name, whose key and grid these are. Raises InvalidRequest
    with both figures. Pixels have no key and are compared by grid, where vLLM keeps it with them."""
    if key is not None and wanted.key is not None and key != wanted.key:
        raise _reused(
            f"identifier {wanted.identifier} stands for key {key.hex()}, the request has "
            f"{wanted.key.hex()}: one UUID cannot name two images"
        )
    if grid.t and wanted.grid.t and grid != wanted.grid:
        raise _reused(
            f"identifier {wanted.identifier} stands for an image with grid_thw {list(grid)}, the request has "
            f"{list(wanted.grid)}"
        )


def _reused(message: str) -> InvalidRequest:
    return InvalidRequest(message, reason="IDENTIFIER_REUSED")
