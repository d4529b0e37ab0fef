"""The caller's own tower, for items that no replica could serve.

Owns how it is called, and what its failure is to the item. Whether it is called is ``run``'s.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from lm_adapter.errors import ItemFailed
from lm_adapter.types import EncodedRows, Item

__all__ = ["Fallback", "fall_back"]

Fallback: TypeAlias = Callable[[Item, ItemFailed], "EncodedRows | Awaitable[EncodedRows]"]
"""Rows of an item, given the failure that it would have ended in. A plain function runs on a thread, and is
left to end by itself when the call's time is up before."""


async def fall_back(fallback: Fallback, item: Item, failure: ItemFailed) -> EncodedRows | ItemFailed:
    """An ItemFailed of the fallback is the item's; anything else that it raises is FALLBACK_FAILED."""
    try:
        answer: Any
        if inspect.iscoroutinefunction(fallback):
            answer = fallback(item, failure)
        else:
            answer = await asyncio.to_thread(lambda: fallback(item, failure))
        rows = await answer if inspect.isawaitable(answer) else answer
        if not isinstance(rows, EncodedRows):
            raise TypeError(f"a fallback returns EncodedRows, found {type(rows).__name__}")
    except ItemFailed as error:
        return error
    except Exception as error:
        failed = ItemFailed(
            f"no replica served the item ({failure.message}), and the fallback failed: {error!r}",
            reason="FALLBACK_FAILED",
            details=failure.details,
        )
        failed.__cause__ = error
        return failed
    return rows
