"""Where rows go: memory of their own, or the caller's buffer; and what else a caller says of its rows.

Owns the caller's options of one call and the reading of a buffer as plain bytes. torch is looked at only
where a caller handed in one of its tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict

import numpy as np
import numpy.typing as npt

from lm_adapter.errors import InvalidRequest, ItemFailed

if TYPE_CHECKING:
    import torch

    from lm_adapter.types import EncodedRows

__all__ = ["Bytes", "RowsHandling", "RowsOptions", "buffer_bytes"]

Bytes: TypeAlias = "npt.NDArray[np.uint8] | torch.Tensor"
"""uint8 [n], contiguous: an array on the host, or a tensor on a GPU."""

MAX_READERS = 256
_INVALID_ARGUMENT = 3


class RowsOptions(TypedDict, total=False):
    """What a caller may say of the rows of one call.

    out: one buffer per item (or None), a writable contiguous numpy array or torch tensor on any device, of
    any dtype, with at least the bytes of the rows, which go to its start. borrow: rows are views of the
    encoder's memory where that is shared, to be read inside ``with rows:``. confirm_later: copies from shared
    memory are checked by ``rows.confirm()``, not before the rows are handed out; until then a copy on a GPU
    may be under way. num_readers: how many processes read each result, this one included; ``rows.shared``
    is what the others need. on_rows: called with an item's index, its rows and how many of them have come,
    the
    first ones, as inline rows arrive: those of a clip come while the rest of it is encoded. The rows beyond
    are not filled in yet, and the item may still fail.
    """

    out: Sequence[Any]
    borrow: bool
    confirm_later: bool
    num_readers: int
    on_rows: Callable[[int, EncodedRows, int], None] | None


@dataclass(frozen=True)
class RowsHandling:
    """``RowsOptions``, checked. reader: which of the readers this process is."""

    out: Sequence[Any] = ()
    borrow: bool = False
    confirm_later: bool = False
    num_readers: int = 1
    reader: int = 0
    on_rows: Callable[[int, EncodedRows, int], None] | None = None

    def __post_init__(self) -> None:
        """Raises InvalidRequest."""
        if not 1 <= self.num_readers <= MAX_READERS:
            raise InvalidRequest(f"num_readers is {self.num_readers}, 1 to {MAX_READERS} are possible")
        if not 0 <= self.reader < self.num_readers:
            raise InvalidRequest(f"reader {self.reader} of {self.num_readers} readers")
        if self.borrow and len(self.out):
            raise InvalidRequest("borrowed rows stay where they are: borrow and out exclude each other")

    @classmethod
    def of_reader(
        cls, num_readers: int, reader: int, out: object, borrow: bool, confirm_later: bool
    ) -> RowsHandling:
        """Of one of several readers of one item. Raises InvalidRequest."""
        return cls(() if out is None else (out,), borrow, confirm_later, max(1, num_readers), reader)

    @property
    def is_plain_copy(self) -> bool:
        """Whether rows are copied for this caller alone and checked before it gets them: no lease is needed
        where they can be read without."""
        return self.num_readers == 1 and not self.borrow and not self.confirm_later

    @property
    def alone(self) -> RowsOptions:
        """For the same rows without the other readers."""
        return RowsOptions(out=self.out, borrow=self.borrow, confirm_later=self.confirm_later)

    def only(self, indices: Sequence[int]) -> RowsHandling:
        """The same for some of the call's items."""
        tell = self.on_rows
        return replace(
            self,
            out=[self.out[index] for index in indices] if len(self.out) else (),
            on_rows=None if tell is None else lambda index, rows, num: tell(indices[index], rows, num),
        )

    def check_items(self, num_items: int) -> None:
        """Raises InvalidRequest when the buffers are not one per item."""
        if len(self.out) not in (0, num_items):
            raise InvalidRequest(f"out has {len(self.out)} buffers, the call {num_items} items")

    def out_of(self, index: int, num_bytes: int) -> Bytes | None:
        """The bytes of the caller's buffer for an item's rows; None without a buffer. Raises ItemFailed."""
        out = self.out[index] if len(self.out) else None
        return None if out is None else buffer_bytes(out, num_bytes)


def buffer_bytes(out: Any, num_bytes: int) -> Bytes:
    """The first bytes of a buffer, sharing its memory; an array where the buffer is on the host. Raises
    ItemFailed for a buffer that is too small, is not contiguous or cannot be written."""
    torch = sys.modules.get("torch")
    if isinstance(out, np.ndarray):
        usable, found = out.flags.c_contiguous and out.flags.writeable, out.nbytes
    elif torch is not None and isinstance(out, torch.Tensor):
        usable, found = out.is_contiguous(), out.nbytes
    else:
        raise _unfit(f"out is a numpy array or a torch tensor, found {type(out).__name__}")
    if not usable:
        raise _unfit("out is not contiguous, or cannot be written")
    if found < num_bytes:
        raise ItemFailed(
            f"out has {found} bytes, the rows need {num_bytes}",
            reason="BUFFER_TOO_SMALL",
            status=_INVALID_ARGUMENT,
            details={"found": found, "needed": num_bytes},
        )
    if isinstance(out, np.ndarray):
        if out.dtype == np.uint8 and out.shape == (num_bytes,):
            return out
        return out.reshape(-1).view(np.uint8)[:num_bytes]
    assert torch is not None
    flat = out if out.dtype is torch.uint8 and out.dim() == 1 else out.detach().reshape(-1).view(torch.uint8)
    if len(flat) != num_bytes:
        flat = flat[:num_bytes]
    found_bytes: Bytes = flat.numpy() if flat.device.type == "cpu" else flat
    return found_bytes


def _unfit(message: str) -> ItemFailed:
    return ItemFailed(message, reason="INVALID_BUFFER", status=_INVALID_ARGUMENT)
