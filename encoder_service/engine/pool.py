"""Memory of the pool that all graphs share: how much there is, and views that do not keep it."""

from __future__ import annotations

from typing import Any

import torch


class BorrowedMemory:
    """Device memory by address, for ``torch.as_tensor``: the interface of CUDA array libraries."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def borrowed_view(rows: torch.Tensor) -> torch.Tensor:
    """The same device memory, shape and dtype as contiguous ``rows``, without keeping the memory alive."""
    view = torch.as_tensor(BorrowedMemory(rows.data_ptr(), rows.nbytes))
    assert view.data_ptr() == rows.data_ptr()
    return view.view(rows.dtype).view(rows.shape)


def pool_bytes(pool: Any, device: torch.device) -> int:
    """Device memory that an allocation pool holds."""
    return sum(
        segment["total_size"]
        for segment in torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        if tuple(segment["segment_pool_id"]) == tuple(pool) and segment["device"] == device.index
    )
