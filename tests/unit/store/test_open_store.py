"""The arenas that settings ask for."""

from __future__ import annotations

import contextlib
import gc
import os
from pathlib import Path

import pytest

from encoder_service.config import parse_settings
from encoder_service.errors import ConfigurationError, InternalError
from encoder_service.store.embedding_store import EmbeddingStore, open_store
from tests.unit.store.arenas import land

MIB = 1 << 20


def opened(folder: Path, **given: object) -> EmbeddingStore:
    settings = parse_settings(model=str(folder), device="cpu", **given)
    return open_store(settings, on_copy_error=lambda _: False)


def test_without_a_broker_the_store_is_private(tmp_path: Path) -> None:
    store = opened(tmp_path, arena_bytes=MIB, broker_path="")
    ((namespace, arena),) = store.arenas()
    assert namespace is None
    assert arena.kind == "host"
    assert MIB * 0.9 < store.max_bytes <= MIB
    with pytest.raises(InternalError, match="private"):
        arena.export_all()
    assert land(store, 1)
    store.close()


def memory_files() -> int:
    """Open descriptors of memory without a name, as arenas have."""
    num_files = 0
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            num_files += "memfd:" in os.readlink(path)
    return num_files


def test_an_arena_that_the_host_lacks_leaves_nothing_open(tmp_path: Path) -> None:
    gc.collect()
    before = memory_files()
    with pytest.raises(ConfigurationError, match="more than the"):
        opened(
            tmp_path,
            broker_path=str(tmp_path / "s"),
            arena_bytes=MIB,
            isolated_namespaces=f"a={1 << 50}",
            tokens_file="tokens",
        )
    gc.collect()
    assert memory_files() == before
