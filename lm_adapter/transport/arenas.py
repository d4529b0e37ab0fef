"""The arenas that this process has mapped: each once per device, however many clients read it.

Owns the count of users of a mapping and its end, also in a forked child, which must not touch what its parent
mapped on a GPU. Finding arenas and judging them is ``chooser``'s.
"""

from __future__ import annotations

import logging
import os
import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from lm_adapter.transport.broker_client import BrokerClient
from lm_adapter.transport.control_page import ControlPageReader
from lm_adapter.transport.device_lease import DeviceArena
from lm_adapter.transport.directory import DirectoryReader
from lm_adapter.transport.host_shm import HostArena
from lm_adapter.transport.mapping import MappingFailed

if TYPE_CHECKING:
    import torch

__all__ = ["AttachedArena", "attach", "num_attached"]

_Key = tuple[bytes, str]

_log = logging.getLogger(__name__)


class AttachedArena:
    """A mapped arena with its control page, and its directory where it has one. Every user drops it once; the
    last one unmaps it."""

    def __init__(
        self,
        key: _Key,
        memory: HostArena | DeviceArena,
        page: ControlPageReader,
        directory: DirectoryReader | None = None,
    ) -> None:
        self.memory = memory
        self.page = page
        self.directory = directory
        self._key = key
        self._num_users = 1
        self._pid = os.getpid()

    @property
    def arena_id(self) -> bytes:
        return self._key[0]

    @property
    def kind(self) -> str:
        return "host" if isinstance(self.memory, HostArena) else "device"

    @property
    def size_bytes(self) -> int:
        return self.memory.size_bytes

    def check_probe(self) -> None:
        """Reads what the encoder wrote for this through the mapping. Raises MappingFailed for an arena that
        is closed or whose bytes are not those."""
        if self.page.closed:
            raise MappingFailed("the arena is closed", reason="ARENA_CLOSED", retryable=True)
        probe = self.page.probe
        end_bytes = probe.offset_bytes + probe.num_bytes
        if probe.num_bytes < 1 or end_bytes > self.size_bytes:
            raise MappingFailed(f"the probe ends at byte {end_bytes}, the arena has {self.size_bytes}")
        if not probe.matches(self.memory.read(probe.offset_bytes, probe.num_bytes)):
            raise MappingFailed(
                f"the {probe.num_bytes} bytes of the probe read wrong through the mapping",
                reason="PROBE_MISMATCH",
            )

    def use(self) -> bool:
        """One more user; False when the last one is gone already."""
        with _state.lock:
            if not self._num_users:
                return False
            self._num_users += 1
            return True

    def drop(self) -> None:
        """One user less. In a forked child nothing: the mapping is its parent's."""
        if os.getpid() != self._pid:
            return
        with _state.lock:
            self._num_users -= 1
            if self._num_users:
                return
            if _state.attached.get(self._key) is self:
                del _state.attached[self._key]
        self.close()

    def close(self) -> None:
        """Unmaps, whoever uses it."""
        self.memory.close()
        self.page.close()
        if self.directory is not None:
            self.directory.close()


class _State:
    """The process's mappings, and those that a forked child inherited and never touches."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.attached: dict[_Key, AttachedArena] = {}
        self.inherited: list[Any] = []


_state = _State()


def attach(broker: BrokerClient, arena_id: bytes, device: torch.device | None = None) -> AttachedArena:
    """The arena, mapped now or before, with one more user. device: the GPU that reads a device arena; host
    arenas have none. Raises BrokerError, MappingFailed, MissingDependency."""
    key = (arena_id, "" if device is None else str(device))
    with _state.lock:
        found = _state.attached.get(key)
        if found is not None and found.use():
            return found
    made = _map(broker, key, device)
    with _state.lock:
        found = _state.attached.get(key)
        if found is None or not found.use():
            _state.attached[key] = made
            return made
    made.drop()  # another thread was faster
    return found


def num_attached() -> int:
    """Arenas that are mapped by this process."""
    with _state.lock:
        return len(_state.attached)


def _map(broker: BrokerClient, key: _Key, device: torch.device | None) -> AttachedArena:
    arena_id, _ = key
    with broker.attach(arena_id) as attachment:
        geometry = attachment.geometry
        if (geometry.kind == "device") != (device is not None):
            raise MappingFailed(f"arena {arena_id.hex()} is of the kind {geometry.kind}")
        with ExitStack() as undo:
            page = ControlPageReader(attachment.page_fd, geometry.page_bytes, arena_id=arena_id)
            undo.callback(page.close)
            directory = None
            if geometry.directory_bytes:
                directory = _directory(attachment.directory_fd, geometry.directory_bytes, page, arena_id)
            if directory is not None:
                undo.callback(directory.close)
            memory: HostArena | DeviceArena
            if device is None:
                memory = HostArena(attachment.data_fd, geometry.size_bytes)
            else:
                memory = DeviceArena(attachment.data_fd, geometry.size_bytes, device)
            undo.pop_all()
        return AttachedArena(key, memory, page, directory)


def _directory(fd: int, size_bytes: int, page: ControlPageReader, arena_id: bytes) -> DirectoryReader | None:
    """None for one that cannot be read here, such as a later version's: rows are leased then."""
    try:
        found = DirectoryReader(fd, size_bytes, arena_id=arena_id)
    except MappingFailed as error:
        _log.warning("the directory of arena %s is not read: %s", arena_id.hex(), error.message)
        return None
    if (found.instance, found.num_slots) == (page.instance, page.num_slots):
        return found
    found.close()
    _log.warning("the directory of arena %s is not its control page's", arena_id.hex())
    return None


def _forget_in_child() -> None:
    """Device mappings end with calls to a driver that a forked child cannot make: kept, not ended."""
    global _state
    inherited, _state = _state, _State()
    _state.inherited = [inherited.inherited]
    for arena in inherited.attached.values():
        if arena.kind == "device":
            _state.inherited.append(arena)
        else:
            arena.close()


os.register_at_fork(after_in_child=_forget_in_child)
