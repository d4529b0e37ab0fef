"""The arenas that one client reads, by the way in which their rows come.

Owns one use of each mapping; the mappings themselves, which clients of a process share, are ``arenas``'.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from lm_adapter.transport import arenas, probe
from lm_adapter.transport.arenas import AttachedArena
from lm_adapter.transport.broker_client import BrokerClient
from lm_adapter.transport.broker_link import BrokerLink
from lm_adapter.transport.unleased import UnleasedRows

if TYPE_CHECKING:
    import torch

__all__ = ["MappedArenas"]


class MappedArenas:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._arenas: dict[tuple[str, bytes], AttachedArena] = {}
        self._closed = False
        self._ending: threading.Timer | None = None

    def of(self, name: str) -> list[AttachedArena]:
        """Those of one way, with no use for the caller."""
        with self._lock:
            return [arena for (way, _), arena in self._arenas.items() if way == name]

    def have_directory(self, name: str) -> bool:
        """Whether any of these arenas can be searched."""
        return any(arena.directory is not None for arena in self.of(name))

    def unleased(self, name: str, namespace: str, link: BrokerLink | None) -> UnleasedRows | None:
        """Rows in them that need no lease; None where there are none, or where the encoder takes no word of
        their use."""
        found = [arena for arena in self.of(name) if arena.directory is not None]
        if not found or link is None or not link.welcome.max_uses:
            return None
        return UnleasedRows(found, namespace, link)

    def used(self, name: str, arena_id: bytes) -> AttachedArena | None:
        """An arena with one more use, the caller's to drop; None for one that is not known."""
        with self._lock:
            found = self._arenas.get((name, arena_id))
            return found if found is not None and found.use() else None

    def attach(
        self, broker: BrokerClient, name: str, arena_id: bytes, device: torch.device | None
    ) -> AttachedArena:
        """Mapped now, where it is new, and known from now on. Raises EncoderError."""
        with self._lock:
            found = self._arenas.get((name, arena_id))
        if found is not None:
            return found
        made = arenas.attach(broker, arena_id, device)
        with self._lock:
            # Another thread may have been faster, with one more use of the very same mapping.
            found = self._arenas.get((name, arena_id))
            keep = found is None and not self._closed
            if keep:
                found = self._arenas[name, arena_id] = made
        if not keep:
            made.drop()
        if found is None:
            raise probe.NotPossible("the client is closed")
        return found

    def drop(self, arena_id: bytes | None = None) -> None:
        """One arena, or all. Those who read go on, each with its own use."""
        with self._lock:
            gone = [key for key in self._arenas if arena_id in (None, key[1])]
            dropped = [self._arenas.pop(key) for key in gone]
        for arena in dropped:
            arena.drop()

    def drop_soon(self, after_s: float) -> None:
        """All of them after so many seconds, unless ``keep`` is called before; on a thread of its own, since
        unmapping device memory may wait for kernels that read it."""
        timer = threading.Timer(after_s, lambda: self._drop_for(timer))
        timer.name, timer.daemon = "arenas-ending", True
        with self._lock:
            if self._closed or not self._arenas:
                return
            before, self._ending = self._ending, timer
        if before is not None:
            before.cancel()
        timer.start()

    def keep(self) -> None:
        """What ``drop_soon`` would drop stays."""
        with self._lock:
            timer, self._ending = self._ending, None
        if timer is not None:
            timer.cancel()

    def _drop_for(self, timer: threading.Timer) -> None:
        with self._lock:
            is_wanted = self._ending is timer
            if is_wanted:
                self._ending = None
                dropped, self._arenas = self._arenas, {}
        if is_wanted:
            for arena in dropped.values():
                arena.drop()

    def close(self) -> None:
        """Drops all; none is known from now on."""
        with self._lock:
            self._closed = True
        self.keep()
        self.drop()
