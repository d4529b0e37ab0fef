"""The arenas that the broker may hand out, and who may see which.

Owns duplicates of their descriptors: an arena's maker may close its own at any time, and a number that the
kernel has given to another file by then is never sent. A namespace sees the shared arenas or, when it is
isolated, its own only. Thread-safe.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

ARENA_ID_BYTES = 16
SHA256_BYTES = 32
MAX_DEVICE_UUID_CHARS = 64
MAX_OFFERS = 256
"""All of them are told in one frame."""


@dataclass(frozen=True, slots=True)
class ProbeSlot:
    """A stretch of an arena whose content never changes."""

    offset_bytes: int
    num_bytes: int
    sha256: bytes


@dataclass(frozen=True, slots=True)
class ArenaOffer:
    """What a client is told of one arena. device_uuid is empty for host memory; directory_bytes is 0 where
    there is no directory."""

    arena_id: bytes
    kind: Literal["host", "device"]
    size_bytes: int
    page_bytes: int
    device_uuid: str = ""
    probe: ProbeSlot | None = None
    directory_bytes: int = 0

    def __post_init__(self) -> None:
        if len(self.arena_id) != ARENA_ID_BYTES:
            raise ValueError(f"an arena id has {ARENA_ID_BYTES} bytes, found {len(self.arena_id)}")
        if (self.kind == "device") != bool(self.device_uuid):
            raise ValueError(f"an arena of kind {self.kind} has the device uuid {self.device_uuid!r}")
        if len(self.device_uuid) > MAX_DEVICE_UUID_CHARS:
            raise ValueError(
                f"a device uuid of {len(self.device_uuid)} characters, at most {MAX_DEVICE_UUID_CHARS} are "
                "allowed"
            )
        probe = self.probe
        if probe is not None and len(probe.sha256) != SHA256_BYTES:
            raise ValueError(f"a SHA-256 has {SHA256_BYTES} bytes, found {len(probe.sha256)}")
        if probe is not None and not (
            probe.num_bytes > 0 and 0 <= probe.offset_bytes <= self.size_bytes - probe.num_bytes
        ):
            end = probe.offset_bytes + probe.num_bytes
            raise ValueError(f"a probe slot ends at byte {end}, the arena has {self.size_bytes}")


@dataclass(frozen=True, slots=True)
class _Held:
    offer: ArenaOffer
    namespace: str | None
    descriptors: tuple[int, ...]


class OfferBook:
    """The offers by arena id."""

    def __init__(self, isolated_namespaces: Iterable[str] = ()) -> None:
        self._isolated = frozenset(isolated_namespaces)
        self._lock = threading.Lock()
        self._held: dict[bytes, _Held] = {}

    def __len__(self) -> int:
        with self._lock:
            return len(self._held)

    def add(
        self,
        offer: ArenaOffer,
        data_fd: int,
        page_fd: int,
        namespace: str | None = None,
        *,
        directory_fd: int | None = None,
    ) -> None:
        """namespace: the only one to see it; None: every one that is not isolated. directory_fd: where the
        offer has a directory. Raises ValueError for an arena that is there already and for a directory that
        the offer does not tell of, OSError when the descriptors cannot be duplicated."""
        if (directory_fd is not None) != bool(offer.directory_bytes):
            raise ValueError(f"a directory of {offer.directory_bytes} bytes with descriptor {directory_fd}")
        given = (data_fd, page_fd) if directory_fd is None else (data_fd, page_fd, directory_fd)
        with self._lock:
            if offer.arena_id in self._held:
                raise ValueError(f"arena {offer.arena_id.hex()} is offered already")
            if len(self._held) >= MAX_OFFERS:
                raise ValueError(f"{len(self._held)} arenas are offered, at most {MAX_OFFERS} are allowed")
            self._held[offer.arena_id] = _Held(offer, namespace, duplicates(given))

    def remove(self, arena_id: bytes) -> Callable[[str], bool] | None:
        """Says of a namespace whether it could see the arena; None when there was none of this id."""
        with self._lock:
            held = self._held.pop(arena_id, None)
        if held is None:
            return None
        close_all(held.descriptors)
        return lambda namespace: self._sees(namespace, held)

    def visible_to(self, namespace: str) -> list[ArenaOffer]:
        with self._lock:
            return [held.offer for held in self._held.values() if self._sees(namespace, held)]

    def find(self, namespace: str, arena_id: bytes) -> ArenaOffer | None:
        """None alike for an arena that is not there and for one that this namespace must not know of."""
        with self._lock:
            held = self._held.get(arena_id)
            return held.offer if held is not None and self._sees(namespace, held) else None

    def descriptors(
        self, namespace: str, arena_id: bytes, *, with_directory: bool = False
    ) -> tuple[ArenaOffer, tuple[int, ...]] | None:
        """The offer with fresh duplicates of its data and control descriptors, and of its directory's where
        that is wanted and there, the caller's to close. Raises OSError when there is no descriptor left."""
        with self._lock:
            held = self._held.get(arena_id)
            if held is None or not self._sees(namespace, held):
                return None
            return held.offer, duplicates(held.descriptors[: 3 if with_directory else 2])

    def close(self) -> None:
        with self._lock:
            held, self._held = list(self._held.values()), {}
        for entry in held:
            close_all(entry.descriptors)

    def _sees(self, namespace: str, held: _Held) -> bool:
        if held.namespace is None:
            return namespace not in self._isolated
        return held.namespace == namespace


def duplicates(descriptors: Iterable[int]) -> tuple[int, ...]:
    """All or none, closed on exec. Raises OSError."""
    made: list[int] = []
    try:
        for descriptor in descriptors:
            made.append(os.dup(descriptor))  # noqa: PERF401  # what was made must be known when one fails
    except OSError:
        close_all(made)
        raise
    return tuple(made)


def close_all(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
