"""A stand-in for Mooncake's engines, which writes to memory of this process."""

from __future__ import annotations

import ctypes
import sys
import threading
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from bench.harness.waiting import PATIENCE_S


class FakeMooncake:
    """What all engines of a process did, and what they do: refused: sessions whose writes fail. silent: those
    that do not answer until the event; meanwhile all writes of their engine wait."""

    def __init__(self) -> None:
        self.started: list[tuple[str, ...]] = []
        self.registered: list[tuple[int, int]] = []
        self.written: list[tuple[str, Sequence[int]]] = []
        self.num_refused_registrations = 0
        self.topology = '{"cpu:0": [["mlx5_0"], []]}'
        self.refused: set[str] = set()
        self.silent: dict[str, threading.Event] = {}

    @property
    def sessions(self) -> list[str]:
        """Of all writes that were started."""
        return [session for session, _ in self.written]


class FakeEngine:
    def __init__(self, fake: FakeMooncake) -> None:
        self._fake, self._lock = fake, threading.Lock()

    def initialize(self, *arguments: str) -> int:
        self._fake.started.append(arguments)
        return 0

    def get_local_topology(self) -> str:
        return self._fake.topology

    def register_memory(self, address: int, num_bytes: int) -> int:
        self._fake.num_refused_registrations -= 1
        if self._fake.num_refused_registrations >= 0:
            return -1
        self._fake.registered.append((address, num_bytes))
        return 0

    def batch_transfer_sync_write(
        self, session: str, sources: Sequence[int], addresses: Sequence[int], lengths: Sequence[int]
    ) -> int:
        self._fake.written.append((session, sources))
        with self._lock:
            if session in self._fake.silent:
                assert self._fake.silent[session].wait(PATIENCE_S)
                return -1
        if session in self._fake.refused:
            return -1
        for source, address, num_bytes in zip(sources, addresses, lengths, strict=True):
            ctypes.memmove(address, source, num_bytes)
        return 0


@contextmanager
def fake_mooncake() -> Iterator[FakeMooncake]:
    """Takes the place of the package."""
    fake = FakeMooncake()
    module = types.ModuleType("mooncake.engine")
    module.TransferEngine = lambda: FakeEngine(fake)  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "mooncake", types.ModuleType("mooncake"))
        patch.setitem(sys.modules, "mooncake.engine", module)
        yield fake
