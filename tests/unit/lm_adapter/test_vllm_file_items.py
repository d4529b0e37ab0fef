"""The packed form in which vLLM carries a file from its API server to its scheduler."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from lm_adapter.engines.vllm.file_items import FileItem
from lm_adapter.items import ClipItem, Grid, ImageItem, Modality, PixelItem, PreprocessOptions
from lm_adapter.keys import content_digest


def a_request(rng: random.Random) -> FileItem:
    data = rng.randbytes(rng.choice([0, 1, 3, 1000]))
    options = rng.choice(
        [
            PreprocessOptions(),
            PreprocessOptions(min_pixels=rng.randrange(1 << 40), max_pixels=rng.randrange(1 << 40)),
            PreprocessOptions(fps=rng.random(), max_frames=rng.randrange(768)),
        ]
    )
    modality = rng.choice(list(Modality))
    reply, is_announced = rng.choice(["", "socket ü"]), rng.choice([False, True])
    grid = rng.choice([None, Grid(1, 2, 4)])
    return FileItem(data, content_digest(data), modality, options, reply, is_announced, grid)


@pytest.mark.parametrize("seed", range(30))
def test_a_packed_request_comes_back(seed: int) -> None:
    request = a_request(random.Random(seed))
    packed = request.packed()
    assert (str(packed.dtype), packed.ndim, packed.flags.writeable) == ("uint8", 1, True)
    assert FileItem.unpacked(packed) == request
    assert FileItem.unpacked(torch.from_numpy(packed).numpy()) == request


def test_an_unpacked_file_is_not_copied() -> None:
    """vLLM's scheduler unpacks it between two steps, and keeps it until the request ends."""
    packed = FileItem(bytes(1000), bytes(32)).packed()
    unpacked = FileItem.unpacked(packed)
    assert np.shares_memory(np.frombuffer(unpacked.data, np.uint8), packed)
    assert isinstance(unpacked.item(), ImageItem)


@pytest.mark.parametrize("seed", range(30))
def test_p33_a_damaged_request_is_a_value_error_or_another_request(seed: int) -> None:
    rng = random.Random(seed)
    request = a_request(rng)
    packed = request.packed()
    header_end = len(packed) - len(request.data)
    for end in range(header_end):
        with pytest.raises(ValueError):
            FileItem.unpacked(packed[:end])
    for _ in range(200):
        damaged = packed.copy()
        for _ in range(rng.randint(1, 3)):
            damaged[rng.randrange(header_end)] = rng.randrange(256)
        try:
            assert isinstance(FileItem.unpacked(damaged), FileItem)
        except ValueError:
            continue


def test_the_item_that_is_sent_has_the_files_digest_and_the_requests_options() -> None:
    options = PreprocessOptions(min_pixels=5)
    request = FileItem(b"file", content_digest(b"file"), options=options, reply="socket")
    assert request.item() == ImageItem(b"file", request.digest, options)
    plain = replace(request, options=PreprocessOptions()).item()
    assert isinstance(plain, ImageItem)
    assert plain.options.given() == {}
    clip = replace(request, modality=Modality.VIDEO, options=PreprocessOptions(fps=3.5))
    assert clip.item() == ClipItem(b"file", request.digest, PreprocessOptions(fps=3.5))
    assert "file" not in repr(request)


def test_pixels_are_sent_as_such() -> None:
    values = np.arange(2 * 4 * 3, dtype=np.float32).reshape(8, 3)
    grid = Grid(1, 2, 4)
    request = FileItem(values.tobytes(), bytes(32), Modality.VIDEO, pixel_grid=grid)
    item = FileItem.unpacked(request.packed()).item()
    assert isinstance(item, PixelItem)
    assert (item.grid, item.digest, item.modality) == (grid, bytes(32), Modality.VIDEO)
    assert item.packed() == ("float32", (8, 3), values.tobytes())
