"""Waits for keys that the encoder's directory will list, without a call.

Owns the waits of one rank, and the timer that looks for all of their keys at once. A call that waits costs
more: its messages take the interpreter's lock, which delays the launches of vLLM's thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from lm_adapter.shm.attachment import AttachedMemory

LOOK_S, MAX_LOOK_S = 0.001, 0.005
"""Pauses between looks: for each key that is waited for, and at most. An engine that waits for one key has
little else to do."""


class ListedKeys:
    """On one event loop."""

    def __init__(self, attached: Callable[[], AttachedMemory | None]) -> None:
        """attached: returns the encoder's memory, or None."""
        self._attached = attached
        self._waits: dict[asyncio.Future[bool], tuple[bytes, float]] = {}
        """With the key, and the loop's time at which the wait ends."""
        self._timer: asyncio.TimerHandle | None = None
        self._seen: tuple[AttachedMemory | None, int] = None, 0
        """What was attached at the last look, and its number of listed records."""

    async def wait(self, key: bytes, timeout_s: float) -> bool:
        """Whether the key is listed; waits until it is, at most ``timeout_s``, and not while no memory is
        attached."""
        memory = self._attached()
        if memory is None or memory.find(key) is not None:
            return memory is not None
        loop = asyncio.get_running_loop()
        listed: asyncio.Future[bool] = loop.create_future()
        self._waits[listed] = key, loop.time() + timeout_s
        if self._timer is None:
            self._look_later()
        try:
            return await listed
        finally:
            self._waits.pop(listed, None)

    def _look(self) -> None:
        loop, memory = asyncio.get_running_loop(), self._attached()
        seen = memory, memory.num_listed if memory else 0
        has_changed, self._seen = seen != self._seen, seen
        for listed, (key, ends_s) in self._waits.items():
            if memory is None or loop.time() >= ends_s:
                _answer(listed, False)
            elif has_changed and memory.find(key) is not None:
                _answer(listed, True)
        self._timer = None
        if any(not listed.done() for listed in self._waits):
            self._look_later()

    def _look_later(self) -> None:
        pause_s = min(LOOK_S * len(self._waits), MAX_LOOK_S)
        self._timer = asyncio.get_running_loop().call_later(pause_s, self._look)


def _answer(listed: asyncio.Future[bool], is_listed: bool) -> None:
    if not listed.done():
        listed.set_result(is_listed)
