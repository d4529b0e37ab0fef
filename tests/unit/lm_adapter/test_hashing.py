"""Which items a client hashes, where that runs, and what becomes of the digests."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lm_adapter import (
    ClipItem,
    DigestItem,
    FramesItem,
    Grid,
    ImageItem,
    InvalidRequest,
    Item,
    PixelItem,
    UrlItem,
    VisionEncoderClient,
    hashing,
)
from lm_adapter.fleet.homes import routed_items, routing_keys
from lm_adapter.hashing import HashedItems, ItemHasher
from lm_adapter.keys import ItemKeys, content_digest, frames_digest, item_key, packed_digest, pixels_digest
from lm_adapter.testing import fake_model
from lm_adapter.transport.off_loop import CallerStreams
from lm_adapter.transport.settings import TransportSettings

ROOT = Path(__file__).parents[3]
GIVEN = b"g" * 32
GRID = Grid(1, 2, 2)
PIXELS = np.arange(24, dtype=np.float32).reshape(4, 6)
FRAMES = np.zeros((2, 4, 4, 3), np.uint8)


def computed(items: list[Item], mode: str = "auto", max_message_bytes: int = 0) -> dict[int, bytes]:
    found = ItemHasher(mode).hashed(items, max_message_bytes)
    return dict(found.computed) if isinstance(found, HashedItems) else {}


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(bytes, thread) of every file that is hashed."""
    calls: list[tuple[int, int]] = []

    def count(data: bytes) -> bytes:
        calls.append((len(data), threading.get_ident()))
        return content_digest(data)

    monkeypatch.setattr(hashing, "content_digest", count)
    return calls


@pytest.mark.parametrize("data", [b"", b"x", bytes(1024), bytes(1025)], ids=len)
def test_p10_a_files_digest_is_the_one_that_the_service_computes(data: bytes) -> None:
    assert computed([ImageItem(data), ClipItem(data)]) == dict.fromkeys((0, 1), content_digest(data))


def test_tensors_are_hashed_where_they_lie_in_host_memory() -> None:
    tensor = torch.arange(24, dtype=torch.bfloat16).reshape(4, 6)
    items = [
        PixelItem(PIXELS, GRID),
        PixelItem(tensor, GRID),
        FramesItem(FRAMES),
        FramesItem(torch.tensor(FRAMES)),
    ]
    digests = computed(items)
    assert digests == {
        0: pixels_digest(items[0]),  # type: ignore[arg-type]
        1: pixels_digest(items[1]),  # type: ignore[arg-type]
        2: frames_digest(items[2]),  # type: ignore[arg-type]
        3: frames_digest(items[2]),  # type: ignore[arg-type]
    }


@pytest.mark.parametrize(
    "pixels",
    [
        PIXELS,
        PIXELS.astype(">f4"),
        PIXELS[:, ::2],
        np.asfortranarray(PIXELS),
        PIXELS.astype(np.float16)[::-1],
        np.zeros((0, 6), np.float32),
        np.array(3.0, np.float32),
        torch.arange(24.0).reshape(4, 6)[:, 1::2],
        torch.zeros(0, 6),
        torch.tensor(1.5, dtype=torch.bfloat16),
        torch.ones(4, 6, requires_grad=True),
    ],
    ids=range(11),
)
def test_a_tensor_is_hashed_as_it_travels_without_being_copied_first(pixels: Any) -> None:
    item = PixelItem(pixels, GRID)
    assert pixels_digest(item) == packed_digest(*item.packed(), GRID)


def test_a_tensor_that_may_not_be_written_is_hashed() -> None:
    fixed = PIXELS.copy()
    fixed.flags.writeable = False
    assert pixels_digest(PixelItem(fixed, GRID)) == pixels_digest(PixelItem(PIXELS, GRID))


def test_items_with_a_digest_and_items_without_content_are_left_alone(counted: list[Any]) -> None:
    items: list[Item] = [
        ImageItem(b"a", GIVEN),
        ClipItem(b"a", GIVEN),
        PixelItem(PIXELS, GRID, GIVEN),
        FramesItem(FRAMES, digest=GIVEN),
        DigestItem(GIVEN),
        DigestItem(b""),
        UrlItem("https://a.test/b"),
        UrlItem("https://a.test/b", GIVEN),
    ]
    for mode in ("auto", "on"):
        assert ItemHasher(mode).hashed(items, 0) is items
    assert not counted


def test_the_callers_items_stay_as_they_are() -> None:
    items = [ImageItem(b"a"), ImageItem(b"b", GIVEN)]
    found = ItemHasher("auto").hashed(items, 0)
    assert isinstance(found, HashedItems)
    assert all(one is other for one, other in zip(found, items, strict=True))
    assert [item.digest for item in items] == [None, GIVEN]


@pytest.mark.parametrize("content", [None, "text", bytearray(b"a"), memoryview(b"a"), 7])
def test_what_is_not_bytes_is_left_to_the_ordinary_way(content: Any) -> None:
    assert computed([ImageItem(content), ClipItem(content)], "on") == {}


def test_what_cannot_be_hashed_is_left_to_the_ordinary_way() -> None:
    wrong: Any = [
        PixelItem("pixels", GRID),  # type: ignore[arg-type]
        PixelItem(np.array([object()]), GRID),
        PixelItem(SimpleNamespace(nbytes=4), GRID),  # type: ignore[arg-type]
        FramesItem(np.zeros((2, 2), np.uint8)),
        FramesItem(np.zeros((1, 2, 2, 3), np.float32)),  # type: ignore[arg-type]
        FramesItem(FRAMES, fps=-1.0),
        FramesItem(None),  # type: ignore[arg-type]
    ]
    for mode in ("auto", "on"):
        assert computed([*wrong, ImageItem(b"a")], mode) == {len(wrong): content_digest(b"a")}


@pytest.mark.parametrize(("num_bytes", "is_hashed"), [(999, True), (1000, True), (1001, False)])
def test_p17_content_above_the_bound_is_hashed_only_where_that_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, num_bytes: int, is_hashed: bool
) -> None:
    monkeypatch.setattr(hashing, "MAX_HASHED_BYTES", 1000)
    items: list[Item] = [ImageItem(bytes(num_bytes)), PixelItem(np.zeros((1, num_bytes), np.uint8), GRID)]
    assert len(computed(items)) == 2 * is_hashed
    assert len(computed(items, "on")) == 2
    assert computed(items, "off") == {}


@pytest.mark.parametrize(("num_bytes", "is_hashed"), [(1000, True), (1001, False)])
def test_an_item_that_is_too_large_to_be_sent_fails_in_the_ordinary_way(
    num_bytes: int, is_hashed: bool
) -> None:
    limit = 1000 + hashing.MESSAGE_MARGIN_BYTES
    for mode in ("auto", "on"):
        assert bool(computed([ImageItem(bytes(num_bytes))], mode, limit)) == is_hashed


def test_a_tensor_on_a_gpu_is_not_copied_to_be_hashed() -> None:
    """Unless that was asked for; this one says that it could not be."""

    class OnGpu:
        nbytes = 8
        device = SimpleNamespace(type="cuda")

    item = PixelItem(OnGpu(), GRID)  # type: ignore[arg-type]
    assert ItemHasher("auto")._to_hash([item], {}, 0) == {}
    assert ItemHasher("on")._to_hash([item], {}, 0) == {0: 8}


def test_what_is_known_is_not_hashed_again(counted: list[Any]) -> None:
    hasher = ItemHasher("auto")
    items = [ImageItem(b"a"), ImageItem(b"b"), PixelItem(PIXELS, GRID)]
    again = hasher.hashed(hasher.hashed(items, 0), 0)
    assert isinstance(again, HashedItems)
    assert sorted(again.computed) == [0, 1, 2]
    assert len(counted) == 2
    part = hasher.hashed(HashedItems(items, {1: GIVEN}), 0)
    assert isinstance(part, HashedItems)
    assert part.computed == {0: content_digest(b"a"), 1: GIVEN, 2: again.computed[2]}
    assert len(counted) == 3


def test_files_are_sent_with_their_digest_and_tensors_without() -> None:
    """A tensor may be written to after it was hashed; bytes may not."""
    items: list[Item] = [
        ImageItem(b"a"),
        ClipItem(b"b"),
        PixelItem(PIXELS, GRID),
        FramesItem(FRAMES),
        ImageItem(b"c", GIVEN),
        ImageItem(b"d"),
        UrlItem("https://a.test/b"),
    ]
    hashed = HashedItems(items, {index: content_digest(bytes([97 + index])) for index in range(4)})
    sent = hashed.to_send(range(7))
    assert sent[:2] == [
        replace(items[0], digest=content_digest(b"a")),
        replace(items[1], digest=content_digest(b"b")),
    ]
    assert all(one is other for one, other in zip(sent[2:], items[2:], strict=True))
    assert hashed.to_send([4, 1]) == [items[4], sent[1]]


@pytest.mark.parametrize(("num_bytes", "on_loop"), [(1, True), (500, True), (501, False)])
def test_p34_much_is_hashed_off_the_loop_and_little_on_it(
    monkeypatch: pytest.MonkeyPatch, counted: list[tuple[int, int]], num_bytes: int, on_loop: bool
) -> None:
    monkeypatch.setattr(hashing, "HASHED_ON_LOOP_BYTES", 1000)
    items = [ImageItem(bytes(num_bytes)), ImageItem(bytes(num_bytes)), ImageItem(bytes(9999), GIVEN)]
    found = asyncio.run(ItemHasher("auto").hashed_on_loop(items, 0, CallerStreams()))
    assert isinstance(found, HashedItems)
    assert [size for size, _ in counted] == [num_bytes] * 2
    assert {thread == threading.get_ident() for _, thread in counted} == {on_loop}
    again = asyncio.run(ItemHasher("auto").hashed_on_loop(found, 0, CallerStreams()))
    assert isinstance(again, HashedItems)
    assert again.computed == found.computed
    assert len(counted) == 2


def test_keys_of_computed_digests_are_those_of_given_ones() -> None:
    model = fake_model()
    keys = ItemKeys(model, "n")
    for item in (ImageItem(b"a"), ClipItem(b"a"), PixelItem(PIXELS, GRID), FramesItem(FRAMES, fps=2.0)):
        (digest,) = computed([item]).values()
        expected = item_key(item, model, namespace="n")
        for _ in range(2):
            assert keys.of(item, digest) == expected
        assert keys.of(replace(item, digest=digest)) == expected
        assert keys.of(replace(item, digest=GIVEN), digest) != expected, "the caller's is authoritative"


def test_a_fleet_hands_on_what_it_hashed_for_its_routing(counted: list[Any]) -> None:
    items: list[Item] = [
        ImageItem(b"a"),
        ImageItem(b"b", GIVEN),
        UrlItem("https://a.test/b"),
        PixelItem(PIXELS, GRID),
        DigestItem(GIVEN),
    ]
    keys = asyncio.run(routing_keys(items))
    chosen = routed_items(items, keys, [3, 2, 1, 4, 0])
    assert isinstance(chosen, HashedItems)
    assert chosen == [items[index] for index in (3, 2, 1, 4, 0)]
    assert chosen.computed == {0: keys[3], 4: content_digest(b"a")}
    found = ItemHasher("auto").hashed(chosen, 0)
    assert isinstance(found, HashedItems)
    assert found.computed == chosen.computed
    assert not counted
    assert computed(chosen, "off") == {}
    assert isinstance(routed_items(items, [None] * 5, [0]), HashedItems)


def test_the_option_is_checked() -> None:
    assert TransportSettings().hash_items == "auto"
    assert TransportSettings(hash_items="on").hash_items == "on"
    with pytest.raises(InvalidRequest, match="hash_items is 'yes', possible are auto, on, off"):
        VisionEncoderClient("localhost:1", hash_items="yes")
    with pytest.raises(InvalidRequest, match="hash_items is True"):
        VisionEncoderClient("localhost:1", hash_items=True)  # type: ignore[arg-type]


def test_p10_without_the_package_nothing_is_hashed() -> None:
    code = """
import sys
sys.modules["blake3"] = None
from lm_adapter import ImageItem, MissingDependency, VisionEncoderClient
from lm_adapter.hashing import ItemHasher
items = [ImageItem(b"x")]
print(ItemHasher("auto").is_on, ItemHasher("auto").hashed(items, 0) is items)
VisionEncoderClient("localhost:1").close()
try:
    VisionEncoderClient("localhost:1", hash_items="on")
except MissingDependency as error:
    print(error)
"""
    completed = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}"},
    )
    assert completed.stdout.splitlines() == [
        "False True",
        "hash_items='on' needs the package blake3, which is not installed",
    ]
