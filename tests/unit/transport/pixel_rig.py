"""Segments in a folder of a test's own, and what is left of them."""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from encoder_service.transport.pixel_book import SegmentBook
from encoder_service.transport.pixel_folder import SegmentFolder
from encoder_service.transport.pixel_input import PixelInput
from encoder_service.transport.pixel_segments import PixelCounters
from lm_adapter.transport.segment_names import is_lock_name

PREFIX = "ve-test-"
SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


def put(folder: Path, data: bytes, *, name: str = "", mode: int = 0o600) -> str:
    """A segment of this content; its name."""
    name = name or PREFIX + secrets.token_hex(8)
    (folder / name).write_bytes(data)
    (folder / name).chmod(mode)
    return name


def segments(folder: Path) -> list[Path]:
    """What is published there, without the locks of publishers that live."""
    return [path for path in folder.iterdir() if not is_lock_name(path.name)]


def floats(*shape: int) -> npt.NDArray[np.float32]:
    return np.random.default_rng().standard_normal(shape, dtype=np.float32)


def memfd(data: bytes, *, seals: int = SIZE_SEALS) -> int:
    descriptor = os.memfd_create("pixels", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(descriptor, data)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def source(
    folder: Path | None = None,
    *,
    prefixes: Sequence[str] = (PREFIX,),
    book_bytes: int = 0,
    max_tensor_bytes: int = 1 << 26,
    allowed_uids: Sequence[int] = (),
) -> PixelInput:
    counters = PixelCounters()
    return PixelInput(
        counters,
        folder=None
        if folder is None
        else SegmentFolder(str(folder), prefixes, counters, allowed_uids=allowed_uids),
        book=SegmentBook(book_bytes, counters) if book_bytes else None,
        max_tensor_bytes=max_tensor_bytes,
    )
