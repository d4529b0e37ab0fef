"""Published pixels: every layout as its contiguous self, and a segment that ends once, however it goes."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from encoder_service.transport.pixel_book import SegmentBook
from encoder_service.transport.pixel_segments import PixelCounters
from lm_adapter.errors import InvalidRequest
from lm_adapter.transport import publish, segment_names
from lm_adapter.transport.broker_client import BrokerClient
from lm_adapter.transport.publish import PublishedPixels, PublishFailed, publish_pixels
from tests.unit.transport.broker_rig import num_descriptors, running_broker, wait_until
from tests.unit.transport.pixel_rig import floats, segments

PREFIX = "ve-test-"
ROOT = Path(__file__).parents[3]


def named(folder: Path, array: Any = None) -> PublishedPixels:
    return publish_pixels(floats(3, 4) if array is None else array, prefix=PREFIX, folder=str(folder))


def as_bytes(values: Any) -> bytes:
    if isinstance(values, np.ndarray):
        return values.astype(values.dtype.newbyteorder("<")).tobytes()
    return bytes(values.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


@pytest.mark.parametrize(
    "values",
    [
        floats(6, 5),
        floats(6, 5).T,
        floats(6, 8)[1::2, ::3],
        floats(4, 5)[::-1],
        np.broadcast_to(floats(1, 5), (4, 5)),
        floats(6, 5).astype(">f4"),
        floats(6, 5).astype(np.float16),
        np.asfortranarray(floats(4, 3, 2)),
        torch.randn(6, 5).T,
        torch.randn(6, 8)[:, ::3].to(torch.bfloat16),
        torch.randn(1, 5).expand(4, 5),
        torch.randn(6, 5, requires_grad=True),
    ],
    ids=lambda _: "values",  # of random numbers, each worker would have its own
)
def test_p19_tensors_of_any_strides_publish_as_their_contiguous_selves(tmp_path: Path, values: Any) -> None:
    plain = values.detach() if isinstance(values, torch.Tensor) else values
    with named(tmp_path, values) as published:
        (path,) = segments(tmp_path)
        assert path.read_bytes() == as_bytes(plain)
        assert path.stat().st_mode & 0o777 == 0o600
        message = published.message()
        assert (message.name, tuple(message.shape)) == (path.name, tuple(values.shape))
        assert message.unlink_after_read
        assert not message.stride_bytes
    assert segments(tmp_path) == []


@pytest.mark.parametrize(
    ("values", "error"),
    [
        (np.zeros((0, 3), np.float32), InvalidRequest),
        (np.zeros(3, np.int32), InvalidRequest),
        ([1.0], TypeError),
    ],
)
def test_what_does_not_travel_leaves_nothing(tmp_path: Path, values: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        named(tmp_path, values)
    assert segments(tmp_path) == []


def test_p19_without_room_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    named(tmp_path).close()  # the lock that this process holds from now on
    before = num_descriptors()
    monkeypatch.setattr(publish.os, "posix_fallocate", full)
    with pytest.raises(PublishFailed, match="48 bytes of pixels: No space left"):
        named(tmp_path)
    with pytest.raises(PublishFailed, match="No such file"):
        named(tmp_path / "none")
    assert segments(tmp_path) == []
    assert num_descriptors() == before


def count_unlinks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    unlink = os.unlink

    def counted(path: str) -> None:
        found.append(path)
        unlink(path)

    monkeypatch.setattr(publish.os, "unlink", counted)
    return found


@pytest.mark.parametrize("way", ["close", "with", "error", "forgotten", "threads"])
def test_p19_the_owner_unlinks_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    unlinks = count_unlinks(monkeypatch)
    published = named(tmp_path)
    if way == "close":
        published.close()
        published.close(consumed=True)
    elif way == "with":
        with published:
            assert published.is_open
    elif way == "error":
        with pytest.raises(ZeroDivisionError), published:
            1 / 0  # noqa: B018
    elif way == "threads":
        threads = [threading.Thread(target=published.close) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    if way != "forgotten":
        assert not published.is_open
    del published
    gc.collect()
    assert len(unlinks) == 1
    assert segments(tmp_path) == []


def test_p19_what_the_service_unlinked_or_replaced_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unlinks = count_unlinks(monkeypatch)
    consumed, replaced = named(tmp_path), named(tmp_path)
    os.remove(tmp_path / consumed.name)
    Path(tmp_path / replaced.name).rename(tmp_path / "elsewhere")
    (tmp_path / replaced.name).write_bytes(b"another's")
    consumed.close(consumed=True)
    replaced.close()
    assert unlinks == []
    assert (tmp_path / replaced.name).read_bytes() == b"another's"


SCRIPT = """
import os, sys, time
import numpy as np
from lm_adapter.transport.publish import publish_pixels
folder, way = sys.argv[1:]
published = publish_pixels(np.zeros((3, 4), np.float32), prefix="ve-test-", folder=folder)
if way == "fork":
    if os.fork() == 0:
        published.close()
        sys.exit(0)
    os.wait()
    print(os.path.exists(os.path.join(folder, published.name)), flush=True)
print("ready", flush=True)
if way == "error":
    raise SystemExit(3)
if way == "kill":
    time.sleep(60)
"""


def run(folder: Path, way: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(folder), way],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/proto"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    if way == "fork":
        assert line == "True\n", "the child ended its parent's segment"
        line = process.stdout.readline()
    assert line == "ready\n"
    return process


@pytest.mark.parametrize("way", ["exit", "error", "fork"])
def test_p19_the_interpreters_end_ends_what_is_left_and_a_child_nothing_of_its_parents(
    tmp_path: Path, way: str
) -> None:
    run(tmp_path, way).communicate(timeout=60)
    assert list(tmp_path.iterdir()) == []


def test_p19_a_killed_publishers_segment_is_swept_when_the_next_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish, "_swept", set())
    dead, alive = run(tmp_path, "kill"), run(tmp_path, "kill")
    try:
        dead.send_signal(signal.SIGKILL)
        dead.communicate(timeout=30)
        assert len(segments(tmp_path)) == 2
        with named(tmp_path) as own:
            names = {path.name for path in segments(tmp_path)}
            assert own.name in names
            assert len(names) == 2, "the living publisher's stays"
    finally:
        alive.kill()
        alive.communicate(timeout=30)
    assert segment_names.sweep(str(tmp_path), "someone-elses") == 0
    assert segment_names.sweep(str(tmp_path), PREFIX) == 1


@pytest.fixture
def book() -> Iterator[tuple[SegmentBook, BrokerClient]]:
    before = num_descriptors()
    found = SegmentBook(1 << 20, PixelCounters())
    with running_broker(segments=found) as rig, BrokerClient(rig.path) as client:
        client.connect(20)
        yield found, client
    wait_until(lambda: num_descriptors() == before, "every descriptor's close")


@pytest.mark.parametrize("way", ["close", "consumed", "forgotten", "lost"])
def test_p19_a_published_memfd_ends_once(book: tuple[SegmentBook, BrokerClient], way: str) -> None:
    held, client = book
    published = publish_pixels(floats(3, 4), broker=client)
    assert (len(held), held.num_bytes) == (1, 48)
    message = published.message()
    assert client.session is not None
    assert message.owner_id == client.session.owner_id.encode()
    if way == "close":
        published.close()
        published.close()
    elif way == "consumed":
        assert held.remove(client.session.owner_id, message.segment_id)
        published.close(consumed=True)
    elif way == "lost":
        client.close()
        published.close()
    else:
        del published
        gc.collect()
        publish_pixels(floats(3, 4), broker=client).close()
    wait_until(lambda: len(held) == 0, "the segment's end")


def test_a_refusal_of_the_broker_is_told(book: tuple[SegmentBook, BrokerClient]) -> None:
    held, client = book
    with pytest.raises(PublishFailed, match="at most 262144 are taken"):
        publish_pixels(floats(300, 300), broker=client)
    client.close()
    with pytest.raises(PublishFailed, match="closed"):
        publish_pixels(floats(3, 4), broker=client)
    assert len(held) == 0
