"""Rows from shared memory: attaching, the directory, places, losses, and the end of the encoder."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from bench.harness.waiting import wait_until
from lm_adapter import (
    AsyncVisionEncoderClient,
    CacheTier,
    CallCancelled,
    DigestItem,
    EncoderUnavailable,
    ImageItem,
    InvalidRequest,
    InvalidRows,
    ItemFailed,
    TransportUnavailable,
    VisionEncoderClient,
)
from lm_adapter.calls import MIN_INFO_AGE_S
from lm_adapter.errors import BrokerError, MappingFailed
from lm_adapter.shm import mapping
from lm_adapter.shm.attachment import AttachedMemory, SharedMemory
from lm_adapter.shm.reader import MappedArena
from lm_adapter.testing import Fault
from tests.unit.lm_adapter import shm_rig
from tests.unit.lm_adapter.conftest import Open, opener
from tests.unit.lm_adapter.shm_rig import NAMESPACE, Encoder
from tests.unit.lm_adapter.test_client import assert_rows_of, digest_of, image
from vision_encoder.layout import LAYOUT_VERSION, control_page, directory
from vision_encoder.v1 import broker_pb2
from vision_encoder.v1 import encoder_pb2 as pb

pytestmark = pytest.mark.anyio


@pytest.fixture
def encoder(tmp_path: Path) -> Iterator[Encoder]:
    with Encoder(tmp_path) as running:
        yield running


@pytest.fixture
def open_client(encoder: Encoder) -> Iterator[Open]:
    with opener(encoder.fake.target, namespace=NAMESPACE) as open_one:
        yield open_one


def attached(open_client: Open, **settings: Any) -> Any:
    client = open_client(**settings)
    transport = client.wait_transport(10.0)
    assert transport.name == "host", transport.reason
    return client


def touches(encoder: Encoder) -> tuple[list[tuple[bytes, int]], int]:
    requests = encoder.requests("Touch")
    assert {request.namespace for request in requests} <= {NAMESPACE}
    rows = [(row.key, row.generation) for request in requests for row in request.rows]
    return rows, sum(request.num_lost for request in requests)


def num_mapped(arena: shm_rig.Arena) -> int:
    """Mappings of the arena's data in this process, without the writer's own."""
    inode = os.fstat(arena.fds[0]).st_ino
    return sum(line.split()[4] == str(inode) for line in Path("/proc/self/maps").read_text().splitlines()) - 1


def test_rows_come_by_place_and_then_by_directory(encoder: Encoder, open_client: Open) -> None:
    client = attached(open_client)
    first = client.encode([image(0), image(1)])
    assert [one.delivery for one in encoder.requests("Encode")] == [pb.DELIVERY_HOST]
    again = client.encode([image(0), DigestItem(digest_of(1))])
    fetched = client.fetch([one.key for one in first])
    assert encoder.fake.num_calls["Encode"] == 1
    assert encoder.fake.num_calls["Fetch"] == 0
    for outcomes in (first, again, fetched):
        for index, outcome in enumerate(outcomes):
            assert_rows_of(outcome, digest_of(index))
            assert outcome.payload.flags.owndata
            assert outcome.key == first[index].key
    assert [one.tier for one in (*first, *again)] == [CacheTier.MISS] * 2 + [CacheTier.HOST] * 2
    assert {(one.transport, one.was_lost) for one in (*first, *again)} == {("host", False)}


def test_a_file_without_a_digest_is_hashed_here_and_sent_with_its_digest(
    encoder: Encoder, open_client: Open
) -> None:
    client = attached(open_client)
    item = ImageItem(b"a file")
    rows = client.encode_one(item)
    (request,) = encoder.requests("Encode")
    assert request.items[0].content_digest == rows.content_digest
    assert_rows_of(client.encode_one(item), rows.content_digest)
    assert encoder.fake.num_calls["Encode"] == 1
    large = ImageItem(bytes((8 << 20) + 1))
    client.encode_one(large)
    assert encoder.requests("Encode")[1].items[0].content_digest == b"", "the service hashes large files"


def test_reads_are_reported_in_batches(encoder: Encoder, open_client: Open) -> None:
    client = attached(open_client)
    placed = client.encode_one(image(0))
    generation = encoder.arena.page.generation(0)
    for _ in range(3):
        client.encode_one(image(0))
    time.sleep(0.3)
    wait_until(lambda: len(touches(encoder)[0]) == 4)
    assert touches(encoder) == ([(placed.key, generation)] * 4, 0)
    assert len(encoder.requests("Touch")) <= 2


async def test_p34_short_copies_stay_on_the_loop_and_long_ones_leave_it(
    encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []
    copy = mapping.HostMemory.copy

    def recorded(self: mapping.HostMemory, *arguments: Any) -> Any:
        threads.append(threading.get_ident())
        return copy(self, *arguments)

    monkeypatch.setattr(mapping.HostMemory, "copy", recorded)
    async with AsyncVisionEncoderClient(encoder.fake.target, namespace=NAMESPACE, timeout_s=20.0) as client:
        assert (await client.wait_transport(10.0)).name == "host"
        for _ in ("placed", "listed"):
            assert_rows_of(await client.encode_one(image(0)), digest_of(0))
        assert threads == [threading.get_ident()] * 2
        monkeypatch.setattr("lm_adapter.resident.MAX_LOOP_COPY_S", 0.0)
        for _ in ("placed", "listed"):
            assert_rows_of(await client.encode_one(image(1)), digest_of(1))
        assert len(threads) == 4
        assert threading.get_ident() not in threads[2:]


@pytest.mark.parametrize("method", ["encode", "fetch"])
def test_p21_lost_rows_are_asked_for_once_more_inline(
    encoder: Encoder, open_client: Open, method: str
) -> None:
    client = attached(open_client)
    encoder.listed = False
    keys = [one.key for one in client.encode([image(0), image(1), image(2)])]
    encoder.lose_next = 2
    argument = [image(0), image(1), image(2)] if method == "encode" else keys
    outcomes = getattr(client, method)(argument)
    for index, outcome in enumerate(outcomes):
        assert_rows_of(outcome, digest_of(index))
    assert sorted((one.transport, one.was_lost) for one in outcomes) == [
        ("host", False),
        ("inline", True),
        ("inline", True),
    ]
    first, second = encoder.requests(method.capitalize())[-2:]
    entries = "items" if method == "encode" else "keys"
    assert (first.delivery, first.after_lost_read, len(getattr(first, entries))) == (
        pb.DELIVERY_HOST,
        False,
        3,
    )
    assert (second.delivery, second.after_lost_read, len(getattr(second, entries))) == (
        pb.DELIVERY_INLINE,
        True,
        2,
    )


def test_p21_a_place_in_answer_to_a_lost_read_fails_the_item(encoder: Encoder, open_client: Open) -> None:
    client = attached(open_client)
    encoder.lose_next = 1

    def always_place(request: Any, result: pb.ItemResult, rows: bytes) -> None:
        encoder.place(pb.EncodeRequest(), result, rows)

    encoder.fake.script.place = always_place
    encoder.fake.script.faults[digest_of(0)] = Fault.OTHER_DELIVERY
    (outcome,) = client.encode([image(0)])
    assert isinstance(outcome, InvalidRows)
    assert outcome.field == "delivery"
    assert encoder.fake.num_calls["Encode"] == 2


@pytest.mark.parametrize("where", ["generation", "closed", "instance"])
def test_p21_a_listed_slot_that_changes_is_never_believed(
    encoder: Encoder, open_client: Open, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """The writer overtakes the reader after its copy, and before the fence that precedes the comparison: a
    reader that compared earlier would accept bytes of the next content."""
    client = attached(open_client)
    rows = client.encode_one(image(0))
    words, word = encoder.arena.words, {"generation": control_page.FIRST_GENERATION_WORD, "closed": 13}
    copy, fence, has_copied = mapping.HostMemory.copy, control_page.fence, threading.Event()

    def noted(self: mapping.HostMemory, *arguments: Any) -> Any:
        copied = copy(self, *arguments)
        has_copied.set()
        return copied

    def overtaken() -> None:
        if has_copied.is_set():
            has_copied.clear()
            words[word.get(where, 4)] += 1
        fence()

    monkeypatch.setattr(mapping.HostMemory, "copy", noted)
    monkeypatch.setattr(control_page, "fence", overtaken)
    encoder.places = False
    again = client.encode_one(image(0))
    assert_rows_of(again, digest_of(0))
    assert again.tier is CacheTier.HOST
    assert encoder.fake.num_calls["Encode"] == 2, "asked for, since the copy was not whole"
    assert rows.key == again.key


def mapped(encoder: Encoder) -> MappedArena:
    from lm_adapter.shm.broker import BrokerConnection

    connection = BrokerConnection(str(encoder.broker.path), namespace=NAMESPACE, token="", timeout_s=5.0)
    try:
        with connection.attach(encoder.arena.arena_id) as attachment_:
            arena = MappedArena(attachment_, NAMESPACE, None)
        arena.check_probe(connection.probe(encoder.arena.arena_id))
        return arena
    finally:
        connection.close()


@pytest.mark.parametrize(
    "change",
    [
        {"slot_index": 99},
        {"slot_index": -1},
        {"generation": 2},
        {"offset_bytes": -1},
        {"offset_bytes": 1 << 40},
        {"num_bytes": 0},
    ],
)
def test_places_outside_the_arena_and_freed_ones_are_lost(encoder: Encoder, change: dict[str, int]) -> None:
    written = encoder.arena.write(pb.ItemResult(key=b"k" * 32), b"r" * 64, listed=False)
    place = {name: getattr(written, name) for name in ("slot_index", "generation", "offset_bytes")}
    arena = mapped(encoder)
    assert arena.read(**place, num_bytes=64) is not None
    assert arena.read(**{"num_bytes": 64, **place, **change}) is None
    encoder.arena.lose_newest()
    freed = {**place, "generation": encoder.arena.page.generation(place["slot_index"])}
    assert arena.read(**freed, num_bytes=64) is None


def test_reads_end_before_the_memory_is_unmapped(encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    arena = mapped(encoder)
    place = encoder.arena.write(pb.ItemResult(key=b"k" * 32), b"r" * 64, listed=False)
    entered, go_on = threading.Event(), threading.Event()
    copy = mapping.HostMemory.copy

    def slow(*given: Any) -> Any:
        entered.set()
        assert go_on.wait(20)
        return copy(*given)

    monkeypatch.setattr(mapping.HostMemory, "copy", slow)
    read: list[Any] = []
    arguments = (place.slot_index, place.generation, place.offset_bytes, 64)
    reader = threading.Thread(target=lambda: read.append(arena.read(*arguments)))
    reader.start()
    assert entered.wait(20)
    with pytest.raises(MappingFailed, match="1 reads did not end"):
        arena.unmap(0.05)
    assert arena.find(b"k" * 32) is None, "no read begins any more"
    go_on.set()
    reader.join(20)
    assert bytes(read[0]) == b"r" * 64
    arena.unmap(5.0)
    arena.unmap(5.0)
    assert arena.read(*arguments) is None
    assert num_mapped(encoder.arena) == 0


def test_memory_is_unmapped_within_a_second_of_the_encoders_end(encoder: Encoder, open_client: Open) -> None:
    client = attached(open_client)
    client.encode_one(image(0))
    assert num_mapped(encoder.arena) == 1
    encoder.broker.stop()
    started = time.monotonic()
    wait_until(lambda: num_mapped(encoder.arena) == 0)
    assert time.monotonic() - started < 1.0
    assert client.transport.name == "inline"
    encoder.places = False
    assert_rows_of(client.encode_one(image(0)), digest_of(0))
    assert encoder.requests("Encode")[-1].delivery == pb.DELIVERY_INLINE


def test_memory_that_was_not_unmapped_is_unmapped_before_the_next_attach(
    encoder: Encoder, open_client: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = attached(open_client)
    attempts: list[int] = []
    unmap = MappedArena.unmap

    def fails_twice(self: MappedArena, timeout_s: float) -> None:
        attempts.append(len(encoder.broker.tokens))
        if len(attempts) <= 2:
            raise MappingFailed("the driver fails")
        unmap(self, timeout_s)

    monkeypatch.setattr(MappedArena, "unmap", fails_twice)
    monkeypatch.setattr("lm_adapter.shm.attachment.RETRY_S", 0.05)
    encoder.broker.drop()
    wait_until(lambda: len(encoder.broker.tokens) == 2 and client.transport.name == "host")
    assert attempts == [1, 1, 1], "all before the second connection"
    assert num_mapped(encoder.arena) == 1


@pytest.mark.parametrize("retryable", [True, False])
def test_attempts_are_a_second_apart_and_none_follows_a_refusal_for_good(
    encoder: Encoder, open_client: Open, retryable: bool
) -> None:
    refusal = broker_pb2.BrokerRefused(reason="A_REASON", message="not now", retryable=retryable)
    encoder.broker.refusal = refusal
    started = time.monotonic()
    client = open_client(token="secret")
    assert client.wait_transport(10.0).name == "inline"
    assert "not now" in client.transport.reason
    assert_rows_of(client.encode_one(image(0)), digest_of(0))
    if not retryable:
        time.sleep(1.5)
        assert encoder.broker.tokens == ["secret"]
        return
    wait_until(lambda: encoder.broker.tokens == ["secret"] * 2)
    assert time.monotonic() - started >= 1
    encoder.broker.refusal = None
    wait_until(lambda: client.transport.name == "host")


class Attempts(SharedMemory):
    """Its attempts wait for ``go``. ``refusal`` ends them; else they attach any kind for which it knows the
    device."""

    def __init__(self, refusal: BrokerError | None = None) -> None:
        names = ("device", "host", "inline")
        super().__init__(names, namespace="", token=str, broker_path="", device=None)
        self.begun, self.go, self.refusal = threading.Event(), threading.Event(), refusal
        self.tried: list[str] = []

    def _attach_kind(self, name: str) -> Any:
        assert self._info is not None
        self.tried.append(f"{name} of {self._info.instance_id}")
        if name == "device" and self._device is None:
            raise MappingFailed("this process does not use CUDA")
        self.begun.set()
        assert self.go.wait(10)
        if self.refusal is not None:
            raise self.refusal
        ended = threading.Event()
        connection: Any = SimpleNamespace(wait_end=ended.wait, close=ended.set)
        self._connection = connection
        return connection, AttachedMemory(name, [])


def server(instance_id: str) -> Any:
    return SimpleNamespace(instance_id=instance_id)


def test_a_server_that_comes_while_another_one_refuses_is_tried() -> None:
    memory = Attempts(BrokerError("no", retryable=False))
    memory.offer(server("old"))
    assert memory.begun.wait(10)
    memory.offer(server("new"))
    memory.go.set()
    kinds = ("device", "host")
    wait_until(lambda: memory.is_refused and len(memory.tried) == 4)
    assert memory.tried == [f"{kind} of {name}" for name in ("old", "new") for kind in kinds]
    memory.close()


def test_a_gpu_that_is_used_while_host_memory_is_attached_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapping, "current_device", lambda: 0)
    memory = Attempts()
    memory.offer(server("one"))
    assert memory.begun.wait(10)
    memory.note_device()
    memory.go.set()
    wait_until(lambda: memory.transport.name == "device")
    memory.close()


@pytest.mark.parametrize("old_side", ["welcome", "page"])
def test_another_layout_version_means_inline_and_one_log_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, old_side: str
) -> None:
    """An old reader against a new encoder."""
    version = LAYOUT_VERSION + (old_side == "page")
    caplog.set_level("INFO", logger="lm_adapter")
    with Encoder(tmp_path, version=version) as encoder:
        encoder.broker.layout_version += old_side == "welcome"
        with VisionEncoderClient(encoder.fake.target, namespace=NAMESPACE, timeout_s=20.0) as client:
            transport = client.wait_transport(10.0)
            assert transport.name == "inline"
            assert "layout version" in transport.reason
            for index in range(3):
                assert_rows_of(client.encode_one(image(index)), digest_of(index))
    said = [record for record in caplog.records if "layout version" in record.getMessage()]
    assert len(said) == 1


def test_without_inline_a_client_without_memory_says_why(encoder: Encoder, open_client: Open) -> None:
    encoder.broker.refusal = broker_pb2.BrokerRefused(reason="ACCESS_DENIED", message="no token")
    with pytest.raises(TransportUnavailable, match="no token"):
        open_client(transports=("host",)).encode_one(image(0))
    encoder.broker.refusal = None
    assert_rows_of(open_client(transports=("host",)).encode_one(image(0)), digest_of(0))
    assert encoder.requests("Encode")[-1].delivery == pb.DELIVERY_HOST


def test_without_inline_the_encoder_that_took_anothers_place_is_found(
    encoder: Encoder, open_client: Open
) -> None:
    client = open_client(transports=("host",))
    client.encode_one(image(0))
    encoder.fake.stop()
    encoder.broker.instance_id = "of the next one"
    encoder.broker.drop()
    wait_until(lambda: client.transport.name == "inline")
    started_s = time.monotonic()
    with pytest.raises(EncoderUnavailable):
        client.encode_one(image(1))
    assert time.monotonic() - started_s < 5
    encoder.fake.start()
    encoder.broker.instance_id = encoder.fake.instance_id
    client.wait_ready(10.0)
    assert_rows_of(client.encode_one(image(1)), digest_of(1))
    assert encoder.requests("Encode")[-1].delivery == pb.DELIVERY_HOST


async def test_calls_that_wait_for_memory_end_in_time_and_with_the_client(encoder: Encoder) -> None:
    """More of them than there are threads to wait on."""
    encoder.broker.refusal = broker_pb2.BrokerRefused(reason="BUSY", message="not now", retryable=True)
    client = AsyncVisionEncoderClient(encoder.fake.target, transports=("host",), timeout_s=20.0)
    started_s = time.monotonic()
    late = await asyncio.gather(
        *(client.encode([image(0)], timeout_s=0.5) for _ in range(50)), return_exceptions=True
    )
    assert {type(error) for error in late} == {TransportUnavailable}
    assert time.monotonic() - started_s < 5
    waiting = [asyncio.ensure_future(client.encode([image(0)])) for _ in range(50)]
    await asyncio.sleep(0.2)
    await client.close()
    ended = await asyncio.gather(*waiting, return_exceptions=True)
    assert {type(error) for error in ended} == {CallCancelled}
    assert time.monotonic() - started_s < 10


def test_a_call_that_waits_for_memory_says_so_although_the_encoder_describes_itself_late(
    encoder: Encoder, open_client: Open
) -> None:
    encoder.broker.refusal = broker_pb2.BrokerRefused(reason="BUSY", message="not now", retryable=True)
    client = open_client(transports=("host",))
    client.info()
    late = ItemFailed("late", reason="DEADLINE_EXCEEDED")
    encoder.fake.script.call_failures["GetServerInfo"] = (grpc.StatusCode.DEADLINE_EXCEEDED, late)
    with pytest.raises(TransportUnavailable, match="not now"):
        client.encode([image(0)], timeout_s=MIN_INFO_AGE_S + 0.5)
    assert encoder.fake.num_calls["GetServerInfo"] > 1


@pytest.mark.parametrize("way", ["place", "directory"])
def test_rows_that_this_process_has_no_memory_for_fail_alone(
    encoder: Encoder, open_client: Open, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    client = attached(open_client)
    if way == "directory":
        client.encode([image(0), image(1)])
    copy, offsets = mapping.HostMemory.copy, list[int]()

    def scarce(memory: Any, offset_bytes: int, *arguments: Any) -> Any:
        """There is no memory for the rows that are read first."""
        offsets.append(offset_bytes)
        if offset_bytes == offsets[0]:
            raise MemoryError
        return copy(memory, offset_bytes, *arguments)

    monkeypatch.setattr(mapping.HostMemory, "copy", scarce)
    encoder.places = way == "place"
    first, second = client.encode([image(0), image(1)])
    if way == "place":
        assert isinstance(first, ItemFailed)
        assert first.reason == "OUT_OF_MEMORY"
    else:  # the rows of the directory come inline then, as far as there is memory for them
        assert_rows_of(first, digest_of(0))
        assert [len(request.items) for request in encoder.requests("Encode")] == [2, 1]
    assert_rows_of(second, digest_of(1))


def test_rows_that_the_driver_does_not_copy_come_inline(
    encoder: Encoder, open_client: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = attached(open_client)

    def fail(*_: Any) -> Any:
        raise MappingFailed("cuMemcpyDtoDAsync: an error of this test")

    monkeypatch.setattr(mapping.HostMemory, "copy", fail)
    for _ in range(2):
        assert_rows_of(client.encode_one(image(0)), digest_of(0))
        assert encoder.requests("Encode")[-1].delivery == pb.DELIVERY_INLINE


@pytest.mark.parametrize("wrong", ["host", "instance", "probe", "seals"])
def test_memory_that_cannot_be_the_encoders_is_not_read(
    encoder: Encoder, open_client: Open, wrong: str
) -> None:
    if wrong == "host":
        encoder.fake.script.transports[0].host_id = "elsewhere"
    elif wrong == "instance":
        encoder.broker.instance_id = "another"
    elif wrong == "probe":
        encoder.arena.data[3] ^= 1
    else:
        encoder.arena.fds[0] = os.memfd_create("without seals")
        os.ftruncate(encoder.arena.fds[0], encoder.arena.size_bytes)
    client = open_client()
    transport = client.wait_transport(10.0)
    assert transport.name == "inline"
    named = {"host": "on host", "instance": "instance", "probe": "probe", "seals": "seals"}[wrong]
    assert named in transport.reason
    assert_rows_of(client.encode_one(image(0)), digest_of(0))


@pytest.mark.parametrize("wrong", ["another model's", "torn"])
def test_p22_a_listed_record_that_is_wrong_is_asked_for(
    encoder: Encoder, open_client: Open, wrong: str
) -> None:
    client = attached(open_client)
    key = client.encode_one(image(0)).key
    if wrong == "torn":
        record = directory.record_offset(encoder.arena.num_slots, 0)
        encoder.arena.directory_bytes[record + 57] ^= 1  # the rows' offset, 256 bytes off
    else:
        result = pb.ItemResult(key=key, content_digest=digest_of(0), num_rows=7, width=9, rows_bytes=252)
        result.dtype = pb.DTYPE_FLOAT32
        encoder.arena.write(result, bytes(252))
    assert_rows_of(client.encode_one(image(0)), digest_of(0))
    assert encoder.fake.num_calls["Encode"] == 2


@pytest.mark.parametrize(
    "settings",
    [
        {"transports": ()},
        {"transports": "host"},
        {"transports": ("host", "fax")},
        {"broker_path": "relative"},
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        VisionEncoderClient("127.0.0.1:1", **settings)


def test_a_forked_child_reads_nothing_and_leaves_the_parent_attached(encoder: Encoder) -> None:
    with VisionEncoderClient(encoder.fake.target, namespace=NAMESPACE, timeout_s=20.0) as client:
        assert client.wait_transport(10.0).name == "host"
        client.encode_one(image(0))
        pid = os.fork()
        if pid == 0:
            # The directory lists this image, so an attached client would return its rows without a call.
            try:
                client.encode_one(image(0))
            except CallCancelled:
                os._exit(0)
            finally:
                os._exit(1)
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert_rows_of(client.encode_one(image(0)), digest_of(0))
        assert encoder.fake.num_calls["Encode"] == 1
        assert client.transport.name == "host"
