"""Items without a digest, hashed by their client: rows that are resident are read without a call, and all
that a caller can see is as without the hashing."""

from __future__ import annotations

import asyncio
import faulthandler
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lm_adapter import (
    AsyncFleetClient,
    AsyncVisionEncoderClient,
    CallCancelled,
    ClipItem,
    EncodedRows,
    FramesItem,
    Grid,
    ImageItem,
    Item,
    ItemFailed,
    PixelItem,
    PreprocessOptions,
    RequestRefused,
    UrlItem,
    VisionEncoderClient,
    convert,
    hashing,
    keys,
)
from lm_adapter.fleet import homes
from lm_adapter.hashing import HashedItems
from lm_adapter.transport.control_page import ControlPageReader
from tests.integration.images import photo
from tests.integration.test_directory_reads import Told, module_shared, reading, shared
from tests.integration.test_resident_rows import Counted, connected, new_item, rows_of, same
from tests.integration.test_shared_memory import Shared, sharing
from tests.unit.ingest import clip_files
from tests.unit.transport.broker_rig import wait_until
from vision_encoder.v1 import encoder_pb2 as pb

__all__ = ["module_shared", "shared"]

LARGE_BYTES = hashing.HASHED_ON_LOOP_BYTES + 1


def large_photo() -> bytes:
    """A file that is hashed off the loop: what follows its end is nothing to its decoder."""
    return photo(image_format="JPEG") + os.urandom(LARGE_BYTES)


def pixels(seed: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(seed).standard_normal((16, 3 * 2 * 16 * 16), dtype=np.float32)


def pixel_item(tensor: bool = False) -> PixelItem:
    values = pixels(int.from_bytes(os.urandom(4), "little"))
    return PixelItem(torch.from_numpy(values) if tensor else values, Grid(1, 4, 4))


KINDS: dict[str, Any] = {
    "file": lambda: ImageItem(photo()),
    "large file": lambda: ImageItem(large_photo()),
    "file with options": lambda: ImageItem(photo(), options=PreprocessOptions(max_pixels=300 * 300)),
    "numpy pixels": pixel_item,
    "torch pixels": lambda: pixel_item(tensor=True),
}


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[pb.Item]:
    """What goes out as messages."""
    messages: list[pb.Item] = []
    plain = convert.item_message

    def note(*given: Any) -> pb.Item:
        messages.append(plain(*given))
        return messages[-1]

    monkeypatch.setattr(convert, "item_message", note)
    return messages


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of what is hashed, for routing or for a look."""
    calls: list[str] = []
    for module in (hashing, homes):
        for name in ("content_digest", "pixels_digest", "frames_digest"):
            plain = getattr(keys, name)

            def note(content: Any, name: str = name, plain: Any = plain) -> bytes:
                calls.append(name)
                return plain(content)  # type: ignore[no-any-return]

            monkeypatch.setattr(module, name, note)
    return calls


def seen(outcome: object) -> dict[str, object]:
    """All that a caller sees of an outcome, but for what times and places it."""
    if isinstance(outcome, ItemFailed):
        return {"reason": outcome.reason, "message": outcome.message, "details": outcome.details}
    rows = rows_of(outcome)
    left = {field.name for field in fields(EncodedRows)} - {"payload", "timings", "tier", "reading", "shared"}
    return {name: getattr(rows, name) for name in left} | {"rows": rows.numpy().tobytes()}


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_content_again_makes_no_call(shared: Shared, kind: str) -> None:
    item = KINDS[kind]()
    with reading(shared) as client:
        first = client.encode_one(item)
        with Told(shared, 3) as counted:
            again = [
                client.encode_one(item),
                *client.encode([item]),
                *(r for _, r in client.encode_iter([item])),
            ]
        assert counted.pop("hits") in (1, 2, 3)
        assert counted == {"read": 3, "items": 3, "delivered": 3}, "used and delivered, without any request"
        for rows in again:
            same(rows, first)
            assert seen(rows) == seen(first)
    assert item.digest is None


@pytest.mark.parametrize("kind", KINDS)
def test_the_async_client_does_the_same(shared: Shared, kind: str) -> None:
    item = KINDS[kind]()

    async def main() -> None:
        async with AsyncVisionEncoderClient(shared.service.target, timeout_s=60) as client:
            assert (await client.wait_transport()).resident == "directory"
            first = await client.encode_one(item)
            with Told(shared, 9) as counted:
                again = await asyncio.gather(*(client.encode_one(item) for _ in range(9)))
            counted.pop("hits")
            assert counted == {"read": 9, "items": 9, "delivered": 9}
            for rows in again:
                assert seen(rows) == seen(first)

    asyncio.run(main())


def test_a_clip_is_leased_in_one_round_trip(shared: Shared, tmp_path: Path) -> None:
    """Its timestamps have no room in the directory."""
    frames = clip_files.moving(8)
    items: list[Item] = [ClipItem(clip_files.encode(frames, fps=8)), FramesItem(frames, fps=8.0)]
    with reading(shared) as client:
        first = client.encode(items)
        with Counted(shared) as counted:
            again = client.encode(items)
        assert counted["fetched"] == 2
        assert "encode" not in counted
        for rows, one in zip(again, first, strict=True):
            assert seen(rows) == seen(one)


def test_a_miss_is_not_asked_for_twice(shared: Shared) -> None:
    """What the directory does not list goes out at once, without a round trip to the broker before."""
    with reading(shared) as client, Counted(shared) as counted:
        client.encode_one(ImageItem(photo()))
        rows_of(client.encode([ImageItem(photo())], borrow=True)[0]).confirm()
    assert counted["encode"] == 2
    assert "missed" not in counted


def test_rows_to_borrow_are_leased_where_they_are_listed(shared: Shared) -> None:
    item = ImageItem(photo())
    with reading(shared) as client:
        first = client.encode_one(item)
        with Counted(shared) as counted, client.encode_one(item, borrow=True) as rows:
            same(rows, first)
        assert counted["fetched"] == 1
        assert "encode" not in counted


def test_items_of_all_kinds_come_in_their_places_and_buffers(shared: Shared) -> None:
    known, digested, new, tensor = ImageItem(photo()), new_item(), ImageItem(photo()), pixel_item()
    with reading(shared) as client:
        first = client.encode([known, digested, tensor])
        items = [new, known, ImageItem(b"no image"), digested, UrlItem("https://a.test/b"), tensor, known]
        out: list[Any] = [np.zeros(1 << 20, np.uint8) for _ in items]
        with Told(shared, 4) as counted:
            outcomes = client.encode(items, out=out)
        assert (counted["read"], counted["encode"]) == (4, 1)
        for index, one in ((1, first[0]), (3, first[1]), (5, first[2]), (6, first[0])):
            assert seen(outcomes[index]) == seen(one)
        for index in (0, 1, 3, 5, 6):
            assert np.shares_memory(rows_of(outcomes[index]).payload, out[index])
        reasons = [getattr(outcomes[index], "reason", "") for index in (2, 4)]
        assert reasons == ["UNDECODABLE_IMAGE", "UNSUPPORTED_CONTENT"]
        small = client.encode([known, tensor], out=[np.zeros(8, np.uint8), np.zeros(1 << 20, np.uint8)])
        assert isinstance(small[0], ItemFailed)
        assert small[0].reason == "BUFFER_TOO_SMALL"
        assert seen(small[1]) == seen(first[2])


def test_whatever_a_caller_sees_is_as_without_hashing(shared: Shared) -> None:
    """Also of items that fail, before and after their likes are resident."""
    content = photo()
    items: list[Item] = [
        ImageItem(content),
        ImageItem(b""),
        ImageItem(b"x"),
        ImageItem(content[:-20]),
        ImageItem(content, options=PreprocessOptions(min_pixels=1 << 40)),
        ImageItem(content, options=PreprocessOptions(fps=1.0)),
        ImageItem(content, digest=b"short"),
        ImageItem(content, digest=os.urandom(32)),
        PixelItem(pixels(1), Grid(1, 4, 5)),
        PixelItem(pixels(2).astype(np.float64), Grid(1, 4, 4)),
        PixelItem(np.full((16, 1536), np.nan, np.float32), Grid(1, 4, 4)),
        FramesItem(np.zeros((1, 32, 32, 4), np.uint8)),
        FramesItem(np.zeros((1, 32, 32, 3), np.uint8), fps=-1.0),
        pixel_item(),
    ]
    with reading(shared) as client, reading(shared, hash_items="off") as plain:
        expected = [seen(outcome) for outcome in plain.encode(items)]
        for _ in range(2):
            assert [seen(outcome) for outcome in client.encode(items)] == expected
            assert [seen(client.encode([item])[0]) for item in items] == expected
        for wrong in (ImageItem("text"), PixelItem("pixels", Grid(1, 4, 4))):  # type: ignore[arg-type]
            for one in (client, plain):
                with pytest.raises(TypeError):
                    one.encode([wrong])
        assert client.encode([]) == plain.encode([]) == []


def test_an_item_above_the_limit_fails_also_where_its_rows_are_there(
    checkpoints: dict[str, Path], device: torch.device
) -> None:
    settings = {"max_message_bytes": 2 << 20, "device_arena_bytes": 0}
    with sharing(checkpoints["qwen3_vl"], device, **settings) as shared, reading(shared) as client:
        item = ImageItem(photo(image_format="JPEG") + bytes(2 << 20))
        client.encode_one(ImageItem(photo(), digest=keys.content_digest(item.data)))
        outcome = client.encode([item])[0]
        assert isinstance(outcome, ItemFailed)
        assert outcome.reason == "MESSAGE_TOO_LARGE"


def test_what_is_sent_of_a_miss(shared: Shared, sent: list[pb.Item]) -> None:
    """A file's digest, which saves the service the hashing; no tensor's, which its owner may write to."""
    with reading(shared) as client, reading(shared, hash_items="off") as plain:
        first, tensor = ImageItem(photo()), pixel_item()
        client.encode([first, tensor])
        assert [message.content_digest for message in sent] == [keys.content_digest(first.data), b""]
        sent.clear()
        second = ImageItem(photo())
        plain.encode([second, pixel_item()])
        assert [message.content_digest for message in sent] == [b"", b""]
    assert first.digest is None


def test_a_tensor_that_is_written_to_after_it_was_hashed_spoils_no_key(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is stored under a digest is its own content's, whatever happens between hashing and sending."""
    item, plain = pixel_item(), keys.pixels_digest
    before = PixelItem(item.pixel_values.copy(), item.grid)  # type: ignore[union-attr]

    def write_after(hashed: PixelItem) -> bytes:
        digest = plain(hashed)
        hashed.pixel_values[:] += 1  # type: ignore[index]
        return digest

    with reading(shared) as client, reading(shared, hash_items="off") as other:
        with monkeypatch.context() as patched:
            patched.setattr(hashing, "pixels_digest", write_after)
            after = client.encode_one(item)
        assert after.content_digest == plain(item)
        rows = client.encode_one(before)
        assert rows.content_digest == plain(before)
        assert seen(rows) == seen(other.encode_one(before))
        assert seen(after) == seen(other.encode_one(item))


@pytest.mark.parametrize("given", [{"hash_items": "off"}, {"transports": ("inline",)}, {"directory": False}])
def test_where_there_is_nothing_to_look_at_nothing_is_hashed(
    shared: Shared, hashed: list[str], sent: list[pb.Item], given: dict[str, Any]
) -> None:
    """Without a directory a miss would cost a round trip: there items are hashed where that was asked for."""
    item = ImageItem(photo())
    with VisionEncoderClient(shared.service.target, timeout_s=60, **given) as client:
        client.wait_transport()
        with Counted(shared) as counted:
            for _ in range(2):
                client.encode_one(item)
        assert counted["encode"] == 2
        assert "missed" not in counted
    assert not hashed
    assert [message.content_digest for message in sent] == [b"", b""]


def test_a_client_without_a_directory_hashes_where_that_was_asked_for(shared: Shared) -> None:
    item = ImageItem(photo())
    with connected(shared, hash_items="on") as client:
        first = client.encode_one(item)
        with Counted(shared) as counted:
            assert seen(client.encode_one(item)) == seen(first)
        assert counted["fetched"] == 1
        assert "encode" not in counted


@pytest.mark.parametrize(("extra", "num_hashed"), [(0, 1), (1, 0)])
def test_p17_the_bound_of_auto(
    shared: Shared, monkeypatch: pytest.MonkeyPatch, hashed: list[str], extra: int, num_hashed: int
) -> None:
    content = photo()
    monkeypatch.setattr(hashing, "MAX_HASHED_BYTES", len(content) - extra)
    with reading(shared) as client:
        client.encode_one(ImageItem(content))
        assert len(hashed) == num_hashed
        with Counted(shared) as counted:
            client.encode_one(ImageItem(content))
            if num_hashed:
                wait_until(lambda: shared.memory.broker.counters.read_unasked > 0, "word of it")
        assert ("encode" in counted) == (not num_hashed)


def test_nothing_is_hashed_twice(shared: Shared, hashed: list[str]) -> None:
    with reading(shared) as client:
        client.encode([ImageItem(photo()), pixel_item(), new_item()])
        assert sorted(hashed) == ["content_digest", "pixels_digest"]


def test_a_fleets_client_hashes_once_for_routing_and_looking(shared: Shared, hashed: list[str]) -> None:
    items: list[Item] = [ImageItem(large_photo()), pixel_item()]

    async def main() -> None:
        async with AsyncFleetClient([shared.service.target], timeout_s=60) as client:
            await client.wait_ready(20)
            (member,) = client._directory.members
            assert (await member.client.wait_transport()).resident == "directory"
            first = await client.encode(items)
            assert sorted(hashed) == ["content_digest", "pixels_digest"]
            with Told(shared, 2) as counted:
                again = await client.encode(items)
            assert counted["read"] == 2
            assert "encode" not in counted
            assert len(hashed) == 4
            assert [seen(rows) for rows in again] == [seen(rows) for rows in first]

    asyncio.run(main())


def test_p18_another_namespaces_rows_are_not_found(shared: Shared) -> None:
    item = ImageItem(photo())
    with reading(shared) as everyone, reading(shared, namespace="other") as other:
        first = everyone.encode_one(item)
        with Counted(shared) as counted:
            found = other.encode_one(item)
        assert counted["encode"] == 1
        assert "read" not in counted
        assert found.key != first.key
        assert found.content_digest == first.content_digest


def test_where_the_model_is_not_settled_nothing_is_hashed(
    shared: Shared, monkeypatch: pytest.MonkeyPatch, hashed: list[str]
) -> None:
    items = [ImageItem(photo())]
    with reading(shared) as client:
        client.encode(items)
        hashed.clear()
        session = client._session
        with reading(shared, model="another") as other, pytest.raises(RequestRefused, match="'another'"):
            other.encode(items)
        two = [*session.models(session.info), *session.models(session.info)]  # type: ignore[arg-type]
        monkeypatch.setattr(session, "models", lambda info: two)
        session.resident._last_known = None
        assert session.resident.hashed(items) is items
        rows_of(client.encode(items)[0])
    assert not hashed


def test_a_closed_client_hashes_nothing(shared: Shared, hashed: list[str]) -> None:
    client = reading(shared)
    item = ImageItem(photo())
    client.encode_one(item)
    client.close()
    hashed.clear()
    with pytest.raises(CallCancelled):
        client.encode_one(item)
    assert not hashed


def test_a_forked_childs_client_hashes_nothing_until_it_has_looked_around(shared: Shared) -> None:
    item = ImageItem(photo())
    with reading(shared) as client:
        client.encode_one(item)
        chooser, resident = client._session.transports, client._session.resident
        assert isinstance(resident.hashed([item]), HashedItems)
        pid = os.fork()
        if pid == 0:
            faulthandler.dump_traceback_later(60, exit=True)
            status = 1
            try:
                is_plain = not isinstance(resident.hashed([item]), HashedItems)
                wait_until(lambda: chooser.current() is not None, "its own probe")
                found = resident.items_at_once(resident.hashed([item]), None, {})
                status = 0 if is_plain and found is not None and chooser.current() is not None else 2
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        wait_until(lambda: shared.memory.broker.num_connections == 1, "the end of the child's session")
        with Told(shared, 1) as counted:
            client.encode_one(item)
        assert counted["read"] == 1


@pytest.mark.parametrize("times", [1, 2])
def test_p21_rows_that_go_under_the_copy_are_asked_for(
    shared: Shared, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    item = ImageItem(photo())
    with reading(shared) as client:
        first = client.encode_one(item)
        unchanged, answers = ControlPageReader.unchanged, [False] * times

        def check(page: ControlPageReader, slot_index: int, generation: int) -> bool:
            return unchanged(page, slot_index, generation) and (not answers or answers.pop())

        monkeypatch.setattr(ControlPageReader, "unchanged", check)
        stale = shared.memory.broker.counters.read_stale
        with Counted(shared) as counted:
            assert seen(client.encode_one(item)) == seen(first)
        assert "encode" not in counted, "leased at the worst: they are still there"
        assert counted.get("fetched", 0) == times - 1
        wait_until(lambda: shared.memory.broker.counters.read_stale == stale + times, "word of it")


def test_rows_that_were_evicted_are_encoded_again(checkpoints: dict[str, Path], device: torch.device) -> None:
    small = {"device_arena_bytes": 0, "arena_bytes": 1 << 20}
    with sharing(checkpoints["qwen3_vl"], device, **small) as shared, reading(shared) as client:
        item = ImageItem(photo())
        first = client.encode_one(item)
        evictions = shared.memory.store.counters.evictions
        while (found := client.lookup([first.key])[0]).state.value == "resident":
            client.encode_one(ImageItem(photo()))
        assert found.state.value == "absent"
        assert shared.memory.store.counters.evictions > evictions
        with Counted(shared) as counted:
            assert seen(client.encode_one(item)) == seen(first)
        assert counted["encode"] == 1


def test_use_keeps_what_was_hashed_in_the_store(checkpoints: dict[str, Path], device: torch.device) -> None:
    """What is read by the directory is not what goes next."""
    small = {"device_arena_bytes": 0, "arena_bytes": 1 << 20}
    with sharing(checkpoints["qwen3_vl"], device, **small) as shared, reading(shared) as client:
        item = ImageItem(photo())
        kept = client.encode_one(item)
        counters = shared.memory.broker.counters
        for number in range(400):
            client.encode_one(ImageItem(photo()))
            assert seen(client.encode_one(item)) == seen(kept)
            wait_until(lambda: counters.read_unasked > number, "word of every read")  # noqa: B023
            if shared.memory.store.counters.evictions > 30:
                break
        assert shared.memory.store.counters.evictions > 30


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashing, "blake3_is_installed", lambda: False)


@pytest.mark.usefixtures("nothing_installed")
def test_without_the_package_everything_is_as_ever(shared: Shared, sent: list[pb.Item]) -> None:
    item, digested = ImageItem(photo()), new_item()
    with reading(shared) as client:
        client.encode([item, digested])
        with Told(shared, 1) as counted:
            client.encode([item, digested])
        assert (counted["read"], counted["encode"]) == (1, 1)
    assert [message.content_digest for message in sent] == [b"", digested.digest, b""]
