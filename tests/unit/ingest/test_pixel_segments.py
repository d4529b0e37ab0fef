"""Named segments of pixels: which are accepted, that they are copied, and that they are left as they were."""

from __future__ import annotations

import gc
import os
import random
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from encoder_service.errors import ConfigurationError, PixelTensorMismatch, TransportUnavailable
from encoder_service.ingest.pixel_segments import PixelSegments, SegmentTensor

PREFIX = "gateway-"
NAME = PREFIX + "1"
ROWS, WIDTH = 6, 5
NUM_BYTES = ROWS * WIDTH * 4


def num_descriptors() -> int:
    gc.collect()  # what former tests left has descriptors too
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def segments(tmp_path: Path) -> Iterator[PixelSegments]:
    before = num_descriptors()
    found = PixelSegments((PREFIX,), max_tensor_bytes=1 << 20, folder=str(tmp_path))
    yield found
    found.close()
    found.close()
    assert num_descriptors() <= before, "what former tests left may go meanwhile"


def wanted(name: str = NAME, **changes: object) -> SegmentTensor:
    given: dict[str, object] = {"dtype": torch.float32, "shape": (ROWS, WIDTH), **changes}
    return SegmentTensor(name, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.uint8])
@pytest.mark.parametrize("offset_bytes", [0, 3, 4096])
def test_p19_a_segment_is_copied_and_left_alone(
    segments: PixelSegments, tmp_path: Path, dtype: torch.dtype, offset_bytes: int
) -> None:
    num_bytes = ROWS * WIDTH * dtype.itemsize
    data = random.randbytes(offset_bytes + num_bytes + 7)
    (tmp_path / NAME).write_bytes(data)
    tensor = segments.read(wanted(dtype=dtype, offset_bytes=offset_bytes))
    (tmp_path / NAME).write_bytes(bytes(len(data)))  # its owner goes on with it
    assert tensor.shape == (ROWS, WIDTH)
    assert tensor.view(torch.uint8).numpy().tobytes() == data[offset_bytes : offset_bytes + num_bytes]
    assert (tmp_path / NAME).exists()
    assert segments.outcomes == {"copied": 1}


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


def make_elsewhere(path: Path) -> Path:
    (path.parent / "elsewhere").write_bytes(b"x" * NUM_BYTES)
    return path.parent / "elsewhere"


@pytest.mark.parametrize(
    ("make", "cause"),
    [
        (lambda path: path.symlink_to(make_elsewhere(path)), "NO_PLAIN_FILE"),
        (os.mkfifo, "NO_PLAIN_FILE"),
        (Path.mkdir, "NO_PLAIN_FILE"),
        (make_socket, "NOT_OPENED"),
        (lambda path: make_elsewhere(path).rename(path).chmod(0o606), "MODE"),
        (lambda path: path.hardlink_to(make_elsewhere(path)), "LINKS"),
        (lambda path: None, "NOT_FOUND"),
    ],
)
def test_p19_only_plain_files_of_our_own_are_accepted(
    segments: PixelSegments, tmp_path: Path, make: Callable[[Path], object], cause: str
) -> None:
    make(tmp_path / NAME)
    with pytest.raises(TransportUnavailable, match="send the pixels inline") as caught:
        segments.read(wanted())
    assert caught.value.details["pixels"] == cause
    assert segments.outcomes == {cause: 1}


def test_p19_files_of_other_users_are_refused(tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(bytes(NUM_BYTES))
    found = PixelSegments(
        (PREFIX,), max_tensor_bytes=1 << 20, allowed_uids=(os.geteuid() + 1,), folder=str(tmp_path)
    )
    with pytest.raises(TransportUnavailable, match="belongs to user"):
        found.read(wanted())
    found.close()


@pytest.mark.parametrize(
    "name", ["", ".", "..", "gateway-/../x", "/gateway-1", "gateway-\0", "gateway-ä", "other-1", "x" * 256]
)
def test_p19_names_are_of_one_form(segments: PixelSegments, name: str) -> None:
    with pytest.raises(TransportUnavailable) as caught:
        segments.read(wanted(name))
    assert caught.value.details["pixels"] == "NAME"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"shape": ()}, "0 dimensions"),
        ({"shape": (1,) * 9}, "9 dimensions"),
        ({"shape": (0, 3)}, "has 0 bytes"),
        ({"shape": (1 << 40, 1 << 40)}, "at most|1 to 1048576"),
        ({"offset_bytes": 1}, f"has {NUM_BYTES} bytes, .* needs {NUM_BYTES + 1}"),
        ({"offset_bytes": (1 << 64) - 1}, "needs"),
        ({"shape": (ROWS + 1, WIDTH)}, "needs"),
    ],
)
def test_p33_what_does_not_fit_is_refused_with_both_numbers(
    segments: PixelSegments, tmp_path: Path, changes: dict[str, Any], text: str
) -> None:
    (tmp_path / NAME).write_bytes(bytes(NUM_BYTES))
    with pytest.raises(PixelTensorMismatch, match=text):
        segments.read(wanted(**changes))


def test_p19_a_segment_that_is_cut_while_it_is_read_fails_its_item(
    segments: PixelSegments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / NAME
    path.write_bytes(bytes(NUM_BYTES))
    preadv = os.preadv

    def short(descriptor: int, views: list[memoryview], offset: int) -> int:
        num_read = preadv(descriptor, [views[0][:16]], offset)
        os.truncate(path, 16)
        return num_read

    monkeypatch.setattr(os, "preadv", short)
    with pytest.raises(PixelTensorMismatch, match=f"was cut to 16 bytes .*, {NUM_BYTES} are needed"):
        segments.read(wanted())


def test_a_folder_that_is_not_there_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="No such file"):
        PixelSegments((PREFIX,), max_tensor_bytes=1, folder=str(tmp_path / "missing"))
