"""Named segments: which are taken, and that each ends exactly once, whoever else is about."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from encoder_service.errors import Cancelled, ConfigurationError, PixelTensorMismatch, TransportUnavailable
from encoder_service.transport import pixel_folder, pixel_segments
from encoder_service.transport.pixel_input import PixelInput
from encoder_service.transport.pixel_layout import PixelLayout
from encoder_service.transport.pixel_segments import PixelSegment, SegmentRef
from tests.unit.transport.broker_rig import num_descriptors
from tests.unit.transport.pixel_rig import PREFIX, floats, put, source

LAYOUT = PixelLayout(torch.float32, (6, 5))


@pytest.fixture
def pixels(tmp_path: Path) -> Iterator[PixelInput]:
    before = num_descriptors()
    found = source(tmp_path)
    yield found
    assert found.folder is not None
    found.folder.close()
    assert num_descriptors() == before


def attach(pixels: PixelInput, name: str, *, ends: bool = True) -> PixelSegment:
    return pixels.attach(SegmentRef(name, ends=ends), "")


@pytest.mark.parametrize("ends", [True, False])
def test_p19_a_consumed_segment_is_unlinked_once_where_it_is_to_be(
    pixels: PixelInput, tmp_path: Path, ends: bool
) -> None:
    array = floats(6, 5)
    name = put(tmp_path, array.tobytes())
    segment = attach(pixels, name, ends=ends)
    assert np.array_equal(segment.consume(LAYOUT).numpy(), array)
    segment.close()
    segment.close()
    assert (tmp_path / name).exists() is not ends
    assert pixels.counters.unlinked == int(ends)
    assert pixels.counters.consumed_bytes == array.nbytes
    with pytest.raises(Cancelled):
        segment.consume(LAYOUT)


def test_p19_closed_before_the_copy_or_wrong_for_it_is_unlinked_too(
    pixels: PixelInput, tmp_path: Path
) -> None:
    given_up, too_small = put(tmp_path, b"x" * 120), put(tmp_path, b"x" * 119)
    attach(pixels, given_up).close()
    with pytest.raises(PixelTensorMismatch, match=r"has 119 bytes, .* needs 120"):
        attach(pixels, too_small).consume(LAYOUT)
    assert list(tmp_path.iterdir()) == []
    assert (pixels.counters.unlinked, pixels.counters.consumed) == (2, 0)


def test_p19_a_name_that_leads_to_another_file_is_left_alone(pixels: PixelInput, tmp_path: Path) -> None:
    name = put(tmp_path, floats(6, 5).tobytes())
    segment = attach(pixels, name)
    other = put(tmp_path, b"another's")
    (tmp_path / other).rename(tmp_path / name)
    segment.close()
    assert (tmp_path / name).read_bytes() == b"another's"
    assert (pixels.counters.unlinked, pixels.counters.already_gone) == (0, 1)


def test_p19_a_name_that_is_gone_is_no_error(pixels: PixelInput, tmp_path: Path) -> None:
    array = floats(6, 5)
    segment = attach(pixels, put(tmp_path, array.tobytes()))
    (path,) = tmp_path.iterdir()
    path.unlink()
    assert np.array_equal(segment.consume(LAYOUT).numpy(), array)
    assert (pixels.counters.unlinked, pixels.counters.already_gone) == (0, 1)


def test_a_name_that_may_not_be_removed_fails_nothing(
    pixels: PixelInput, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    segment = attach(pixels, put(tmp_path, floats(6, 5).tobytes()))

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(pixel_folder.os, "unlink", refuse)
    assert segment.consume(LAYOUT).shape == (6, 5)
    assert pixels.counters.not_unlinked == 1


def make_symlink(path: Path) -> None:
    (path.parent / "elsewhere").write_bytes(b"x" * 120)
    path.symlink_to("elsewhere")


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


def make_writable_by_all(path: Path) -> None:
    path.write_bytes(b"x" * 120)
    path.chmod(0o606)


def make_second_name(path: Path) -> None:
    (path.parent / "elsewhere").write_bytes(b"x" * 120)
    os.link(path.parent / "elsewhere", path)


@pytest.mark.parametrize(
    ("make", "cause"),
    [
        (make_symlink, "NO_PLAIN_FILE"),
        (make_fifo, "NO_PLAIN_FILE"),
        (make_socket, "NOT_OPENED"),
        (Path.mkdir, "NO_PLAIN_FILE"),
        (make_writable_by_all, "MODE"),
        (make_second_name, "LINKS"),
    ],
)
def test_p19_what_is_no_plain_file_of_its_owner_alone_is_neither_read_nor_removed(
    pixels: PixelInput, tmp_path: Path, make: Callable[[Path], None], cause: str
) -> None:
    make(tmp_path / f"{PREFIX}1")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(TransportUnavailable) as raised:
        attach(pixels, f"{PREFIX}1")
    assert raised.value.details["pixels"] == cause
    assert pixels.counters.refused == {cause: 1}
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    "name",
    [
        "other-1", f"/{PREFIX}1", f"{PREFIX}/../x", f"../{PREFIX}1", f"{PREFIX}\0", f"{PREFIX}\n", ".", "..",
        PREFIX + "x" * 248, PREFIX[:-1],
    ],
)  # fmt: skip
def test_p19_names_are_checked_before_anything_is_opened(
    pixels: PixelInput, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pixel_folder.os, "open", lambda *_, **__: pytest.fail("opened"))
    with pytest.raises(TransportUnavailable) as raised:
        attach(pixels, name)
    assert raised.value.details["pixels"] == "NAME"


def test_a_name_that_is_not_there(pixels: PixelInput) -> None:
    with pytest.raises(TransportUnavailable, match="No such file") as raised:
        attach(pixels, f"{PREFIX}none")
    assert raised.value.details["pixels"] == "NOT_FOUND"


def test_p19_files_of_users_who_are_not_allowed_are_left_alone(tmp_path: Path) -> None:
    pixels = source(tmp_path, allowed_uids=[os.geteuid() + 1])
    name = put(tmp_path, b"x" * 120)
    with pytest.raises(TransportUnavailable, match=f"user {os.geteuid()}"):
        attach(pixels, name)
    assert (tmp_path / name).exists()
    assert pixels.folder is not None
    pixels.folder.close()


def test_a_folder_that_is_not_there_is_a_setting_that_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="shared memory folder"):
        source(tmp_path / "none")


def test_p19_giving_up_under_a_copy_unlinks_at_once_and_closes_after_it(
    pixels: PixelInput, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of a descriptor that is still read must not become another file's."""
    array = floats(6, 5)
    name = put(tmp_path, array.tobytes())
    segment = attach(pixels, name)
    reading, go_on = threading.Event(), threading.Event()
    read = pixel_segments.read_tensor

    def slowly(descriptor: int, layout: PixelLayout) -> torch.Tensor:
        reading.set()
        assert go_on.wait(20)
        return read(descriptor, layout)

    monkeypatch.setattr(pixel_segments, "read_tensor", slowly)
    found: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: found.append(segment.consume(LAYOUT)))
    thread.start()
    assert reading.wait(20)
    before = num_descriptors()
    segment.close()
    assert not (tmp_path / name).exists()
    assert num_descriptors() == before
    go_on.set()
    thread.join(20)
    assert num_descriptors() == before - 1
    assert np.array_equal(found[0].numpy(), array)
    assert pixels.counters.unlinked == 1


def test_p19_many_threads_that_end_one_segment_unlink_it_once(
    pixels: PixelInput, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_unlinks = 0
    unlink = os.unlink

    def counted(*arguments: object, **named: object) -> None:
        nonlocal num_unlinks
        num_unlinks += 1
        unlink(*arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(pixel_folder.os, "unlink", counted)
    for _ in range(50):
        segment = attach(pixels, put(tmp_path, b"x" * 120))
        barrier = threading.Barrier(4)

        def end(segment: PixelSegment = segment, barrier: threading.Barrier = barrier) -> None:
            barrier.wait(20)
            segment.close()

        threads = [threading.Thread(target=end) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    assert num_unlinks == pixels.counters.unlinked == 50
    assert list(tmp_path.iterdir()) == []
