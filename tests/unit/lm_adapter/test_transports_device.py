"""Rows by device lease without a GPU: the same code over host memory, and a driver's events as records."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lm_adapter import InvalidRequest, ItemFailed, StaleRows, VisionEncoderClient
from lm_adapter.leases import LeaseRecord, LeaseReturns
from lm_adapter.transport import arenas, chooser, device_lease, mapping
from lm_adapter.transport.buffers import RowsHandling
from lm_adapter.transport.mapping import MappingFailed
from lm_adapter.transport.reading import Unreadable, read_rows
from tests.unit.lm_adapter.shared_rig import SharingFake, sharing_fake
from tests.unit.lm_adapter.test_client import assert_rows_of, digest_of, image
from tests.unit.transport.broker_rig import wait_until
from vision_encoder.v1 import encoder_pb2 as pb


@pytest.fixture
def mapped(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """What was mapped as a device's memory; it is the host's here."""
    calls: list[tuple[int, str]] = []

    def map_device(fd: int, size_bytes: int, device: torch.device) -> Any:
        calls.append((size_bytes, str(device)))
        return mapping.map_host(fd, size_bytes)

    monkeypatch.setattr(mapping, "map_device", map_device)
    monkeypatch.setattr(chooser, "resolve_device", lambda wanted: torch.device("cuda", int(wanted)))
    monkeypatch.setattr(chooser, "device_uuid", lambda device: "GPU-test")
    return calls


@pytest.fixture
def encoder(mapped: list[tuple[int, str]]) -> Iterator[SharingFake]:
    with sharing_fake(kind="device") as running:
        yield running


def test_rows_come_by_lease_as_tensors(encoder: SharingFake, mapped: list[tuple[int, str]]) -> None:
    with (
        VisionEncoderClient(encoder.target, device=1, timeout_s=20) as client,
        VisionEncoderClient(encoder.target, device=1, timeout_s=20) as second,
    ):
        choice = client.wait_transport()
        assert choice.name == "device"
        assert choice.reason.endswith("for cuda:1, this GPU itself")
        second.wait_transport()
        rows, other = client.encode([image(0), image(1)])
        assert isinstance(rows.payload, torch.Tensor)  # type: ignore[union-attr]
        assert_rows_of(rows, digest_of(0))
        assert_rows_of(other, digest_of(1))
        assert_rows_of(second.encode_one(image(1)), digest_of(1))
        assert rows.torch().shape == (rows.num_rows, rows.width)  # type: ignore[union-attr]
        assert mapped == [(encoder.arena.geometry.size_bytes, "cuda:1")], "once per process and device"
    assert encoder.num_placed == 3


@pytest.mark.parametrize("on", ["tensor", "array"])
def test_rows_go_into_the_callers_buffer(encoder: SharingFake, on: str) -> None:
    out: Any = torch.zeros(64 * 1024) if on == "tensor" else np.zeros(64 * 1024, np.float32)
    with VisionEncoderClient(encoder.target, device=0, transports=("device",), timeout_s=20) as client:
        rows = client.encode_one(image(0), out=[out])
        assert_rows_of(rows, digest_of(0))
        values = torch.as_tensor(out[: rows.num_rows * rows.width]).reshape(rows.num_rows, rows.width)
        assert torch.equal(values, rows.torch())
        with client.encode_one(image(0), borrow=True) as borrowed:
            assert torch.equal(borrowed.torch(), rows.torch())


def test_p21_stale_device_rows_are_asked_for_again_then_inline(encoder: SharingFake) -> None:
    encoder.before_answer = lambda slot: encoder.overwrite(slot)
    with VisionEncoderClient(encoder.target, device=0, timeout_s=20) as client:
        client.wait_transport()
        assert_rows_of(client.encode_one(image(0)), digest_of(0))
        assert encoder.num_placed == 3
    with VisionEncoderClient(encoder.target, device=0, transports=("device",), timeout_s=20) as client:
        assert isinstance(client.encode([image(0)])[0], StaleRows)


def test_p22_a_lease_of_other_rows_is_refused(encoder: SharingFake) -> None:
    place = encoder.place

    def lying(delivery: int, lease: Any, result: pb.ItemResult, rows: bytes) -> None:
        place(delivery, lease, result, rows)
        result.lease.shape[0] += 1

    encoder.place = lying  # type: ignore[method-assign]
    with VisionEncoderClient(encoder.target, device=0, timeout_s=20) as client:
        client.wait_transport()
        (outcome,) = client.encode([image(0)])
        assert isinstance(outcome, ItemFailed)
        assert outcome.details["field"] == "shape"
        client.close()
        assert len(encoder.leases) == 0


def test_a_process_without_cuda_is_not_given_one(
    encoder: SharingFake, monkeypatch: pytest.MonkeyPatch
) -> None:
    current: list[int | None] = [None]
    monkeypatch.setattr(chooser, "device_in_use", lambda: current[0])
    with VisionEncoderClient(encoder.target, timeout_s=20) as client:
        choice = client.wait_transport()
        assert choice.name == "inline"
        assert "does not use CUDA" in choice.rejected["device"]
        current[0] = 3
        assert_rows_of(client.encode_one(image(0)), digest_of(0))
        wait_until(lambda: client.transport.name == "device", "the GPU that is in use by now")
        assert "for cuda:3" in client.transport.reason
        assert_rows_of(client.encode_one(image(0)), digest_of(0))


def test_a_gpu_that_cannot_map_falls_back(encoder: SharingFake, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, size_bytes: int, device: torch.device) -> Any:
        raise MappingFailed("cuMemSetAccess failed with CUDA_ERROR_INVALID_DEVICE")

    monkeypatch.setattr(mapping, "map_device", refuse)
    with VisionEncoderClient(encoder.target, device=0, timeout_s=20) as client:
        assert client.wait_transport().name == "inline"
        assert "CUDA_ERROR_INVALID_DEVICE" in client.transport.rejected["device"]
        assert_rows_of(client.encode_one(image(0)), digest_of(0))
    assert arenas.num_attached() == 0


def test_without_a_gpu_a_device_is_refused_with_its_reason() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert device_lease.device_in_use() is None
    with pytest.raises(MappingFailed, match="no CUDA device is visible"):
        device_lease.resolve_device("cuda:0")


def test_a_process_forked_from_one_with_cuda_asks_the_driver_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask() -> bool:
        raise AssertionError("a forked child called the driver")

    monkeypatch.setattr(torch.cuda, "is_available", ask)
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    with pytest.raises(MappingFailed, match="forked from one that used CUDA"):
        device_lease.resolve_device(0)


class RecordingArena:
    """Says in which order things happen to it; its rows change when ``changes`` does."""

    def __init__(self, *, changes_at: str = "") -> None:
        self.steps: list[str] = []
        self.changes_at = changes_at
        self.size_bytes = 1024
        self.memory = self
        self.page = SimpleNamespace(num_slots=4, closed=False, unchanged=self._unchanged)
        self.kind = "device"

    def _unchanged(self, slot_index: int, generation: int) -> bool:
        self.steps.append("compare")
        return self.changes_at not in self.steps

    def copy(self, offset_bytes: int, num_bytes: int, out: Any) -> tuple[torch.Tensor, Any]:
        self.steps.append("copy")
        return torch.zeros(num_bytes, dtype=torch.uint8), SimpleNamespace(synchronize=self._synchronize)

    def borrow(self, offset_bytes: int, num_bytes: int) -> torch.Tensor:
        self.steps.append("borrow")
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def _synchronize(self) -> None:
        self.steps.append("wait for the copy")

    def finish(self) -> None:
        self.steps.append("wait for the stream")

    def give_up(self, event: Any) -> None:
        self.steps.append("given up: no event" if event is None else "given up: its event")

    def drop(self) -> None:
        self.steps.append("drop")


RECORD = LeaseRecord(
    b"k" * 32,
    b"d" * 32,
    (1, 2, 2),
    1,
    4,
    "float32",
    0,
    16,
    lease_id=b"l" * 16,
    generation=3,  # type: ignore[arg-type]
)


def read(arena: RecordingArena, **handling: Any) -> tuple[Any, list[bytes]]:
    sent: list[bytes] = []

    def send(request: pb.ReleaseRequest, done: Callable[[], None]) -> None:
        arena.steps.append("release")
        sent.extend(request.lease_ids)
        done()

    _, reading = read_rows(arena, RECORD, LeaseReturns(send), RowsHandling(**handling), None)  # type: ignore[arg-type]
    return reading, sent


def test_p21_the_generation_is_compared_after_the_copy_is_complete() -> None:
    arena = RecordingArena()
    reading, sent = read(arena)
    assert reading is None
    assert arena.steps == ["copy", "wait for the copy", "compare", "drop", "release"]
    assert sent == [RECORD.lease_id]


def test_p21_a_copy_is_confirmed_later_by_its_own_event() -> None:
    arena = RecordingArena()
    reading, sent = read(arena, confirm_later=True)
    assert (arena.steps, sent) == (["copy"], [])
    reading.confirm()
    reading.confirm()
    assert arena.steps == ["copy", "wait for the copy", "compare", "drop", "release"]
    late = RecordingArena(changes_at="wait for the copy")
    reading, sent = read(late, confirm_later=True)
    for _ in range(2):
        with pytest.raises(StaleRows):
            reading.confirm()
    assert sent == [RECORD.lease_id]


def test_p21_a_wait_that_breaks_says_nothing_of_the_rows() -> None:
    class Interrupted(RecordingArena):
        def _synchronize(self) -> None:
            super()._synchronize()
            raise KeyboardInterrupt

    arena = Interrupted()
    reading, sent = read(arena, confirm_later=True)
    with pytest.raises(KeyboardInterrupt):
        reading.confirm()
    assert sent == [RECORD.lease_id]
    for _ in range(2):
        with pytest.raises(StaleRows):
            reading.confirm()
    assert "compare" not in arena.steps
    assert arena.steps[-3:] == ["given up: its event", "drop", "release"]


@pytest.mark.parametrize("ending", ["abandoned", "forgotten"])
def test_reads_that_nobody_waits_for_are_the_mappings_to_wait_for(ending: str) -> None:
    for handling, given_up in (
        ({"confirm_later": True}, "given up: its event"),
        ({"borrow": True}, "given up: no event"),
    ):
        arena = RecordingArena()
        reading, _ = read(arena, **handling)
        if ending == "abandoned":
            reading.abandon()
        else:
            del reading
            gc.collect()
        assert arena.steps[1:3] == [given_up, "drop"]


def test_p21_borrowed_rows_wait_for_the_readers_on_the_stream() -> None:
    arena = RecordingArena()
    reading, _ = read(arena, borrow=True)
    reading.confirm()
    assert arena.steps == ["borrow", "wait for the stream", "compare", "drop", "release"]
    with pytest.raises(Unreadable) as stale:
        read(RecordingArena(changes_at="copy"))
    assert stale.value.stale


def test_leases_gather_while_a_release_is_on_its_way() -> None:
    sent: list[tuple[list[bytes], int | None]] = []
    finish: list[Callable[[], None]] = []

    def send(request: pb.ReleaseRequest, done: Callable[[], None]) -> None:
        sent.append((list(request.lease_ids), request.reader if request.HasField("reader") else None))
        finish.append(done)

    returns = LeaseReturns(send)
    returns.give_back(b"0")
    for index in range(1, 70):
        returns.give_back(b"%d" % index)
    returns.give_back(b"x", 0)
    returns.give_back(b"y", 0, now=False)
    returns.give_back(b"z", 1)
    returns.give_back(b"")
    while finish:
        finish.pop(0)()
    assert [(len(leases), reader) for leases, reader in sent] == [
        (1, None),
        (64, None),
        (5, None),
        (2, 0),
        (1, 1),
    ]
    returns.flush(1)


def test_a_release_that_cannot_be_sent_is_let_go() -> None:
    attempts: list[int] = []

    def send(request: pb.ReleaseRequest, done: Callable[[], None]) -> None:
        attempts.append(len(request.lease_ids))
        raise ValueError("the channel is closed")

    returns = LeaseReturns(send)
    returns.give_back(b"a")
    returns.give_back(b"b")
    assert attempts == [1, 1]


def test_a_reader_has_its_number() -> None:
    with pytest.raises(InvalidRequest, match="reader 2 of 2"):
        RowsHandling(num_readers=2, reader=2)
    with pytest.raises(InvalidRequest, match="num_readers is 0"):
        RowsHandling(num_readers=0)
