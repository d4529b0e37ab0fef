"""The readers' side of a lease storm: processes that take leases, read late, and may be killed at any time.

Owns two kinds of reader. One is made of the adapter's low-level parts (broker client, mappings, checked
reads) and asks the encoder for leases by the dozen over a socket of the test's own; the other is the whole
client over gRPC. Both check every line of what they accepted.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from lm_adapter import CallFailed, EncoderError, ImageItem, ItemFailed, StaleRows, VisionEncoderClient
from lm_adapter.leases import LeaseRecord, LeaseReturns
from lm_adapter.testing import fake_rows
from lm_adapter.transport import arenas
from lm_adapter.transport.broker_client import BrokerClient
from lm_adapter.transport.buffers import RowsHandling, RowsOptions
from lm_adapter.transport.reading import Unreadable, read_rows
from lm_adapter.transport.unleased import CheckedShapes, Place, UnleasedRows
from lm_adapter.items import Grid
from lm_adapter.types import EncodedRows
from tests.chaos.lease_storm_board import (
    LINE_BYTES,
    LONG_LEASE_S,
    NUM_KEYS,
    Board,
    Phase,
    Plan,
    Row,
    Word,
    has_stamp,
    num_descriptors,
    num_shared_mappings,
)
from vision_encoder.v1 import encoder_pb2 as pb

LEASES_PER_TURN = 12
MAX_OLD_RECORDS = 64
OLD_READS_PER_TURN = 8
DIRECTORY_READS_PER_TURN = 16
GRPC_KEYS = 48


class Reader:
    """What both kinds do besides reading."""

    def __init__(self, plan: Plan, board: Board, number: int, seed: int) -> None:
        self.plan = plan
        self.board = board
        self.row: Row = board.reader(number)
        self.chance = random.Random(seed)
        self.row[Word.INSTANCE] = 0

    @property
    def storms(self) -> bool:
        return self.board.storm[Word.PHASE] == Phase.STORM

    def accept(self, is_right: bool, arena_id: bytes) -> None:
        """Takes note of a read whose generation held."""
        row, encoder = self.row, self.board.encoder
        row.add(Word.ACCEPTED)
        if not is_right:
            row.add(Word.WRONG)
        elif int.from_bytes(arena_id[:8], "little") == encoder[Word.ARENA] and (
            row[Word.INSTANCE] != encoder[Word.INSTANCE]
        ):
            row[Word.INSTANCE] = encoder[Word.INSTANCE]
            row.add(Word.REMAPS)


def on_host(payload: Any) -> npt.NDArray[np.uint8]:
    return payload if isinstance(payload, np.ndarray) else payload.cpu().numpy()


class LowLevelReader(Reader):
    """Maps by itself; finds a new encoder by itself."""

    def run(self) -> None:
        if self.plan.kind == "device":
            self._touch_the_device()
        row = self.row
        row[Word.DESCRIPTORS_BEFORE] = num_descriptors()
        row[Word.MAPPINGS_BEFORE] = num_shared_mappings()
        self._mapped: dict[bytes, arenas.AttachedArena] = {}
        self._held: list[dict[str, Any]] = []
        self._old: deque[dict[str, Any]] = deque(maxlen=MAX_OLD_RECORDS)
        self._to_release: list[tuple[str, int | None]] = []
        self._to_renew: list[str] = []
        self._places: list[Place] = []
        self._shapes = CheckedShapes((), 1 << 30)
        self._returns = LeaseReturns(self._send_release)
        self._desk: socket.socket | None = None
        self._instance_id = ""
        with BrokerClient(self.plan.broker_path, min_pause_s=0.01, max_pause_s=0.2) as broker:
            self._broker = broker
            broker.start()
            while self.storms:
                self._try(self._turn)
            # The last leases are neither read nor given back.
            self._try(lambda: self._ask([LONG_LEASE_S] * LEASES_PER_TURN))
            self._forget()
        row[Word.DESCRIPTORS_AFTER] = num_descriptors()
        row[Word.MAPPINGS_AFTER] = num_shared_mappings() + arenas.num_attached()
        row.add(Word.ENDED)

    def _touch_the_device(self) -> None:
        """What the driver opens with the first mapping stays open, and is no leak. The encoder may be killed
        meanwhile."""
        with BrokerClient(self.plan.broker_path, max_pause_s=0.2) as broker:
            broker.start()
            for attempt in range(20):
                session = broker.wait_for_session(60)
                try:
                    arena = arenas.attach(broker, session.arenas[0].arena_id, self._device())
                    try:
                        arena.check_probe()
                        on_host(arena.memory.copy(0, LINE_BYTES, None)[0])
                    finally:
                        arena.drop()
                except EncoderError:
                    if attempt == 19:
                        raise
                    time.sleep(0.1)
                else:
                    return

    def _device(self) -> Any:
        if self.plan.kind == "host":
            return None
        import torch

        return torch.device("cuda:0")

    def _try(self, step: Callable[[], object]) -> None:
        try:
            step()
        except (OSError, EncoderError, json.JSONDecodeError):  # the encoder is gone
            self._forget()
            time.sleep(0.005)

    def _forget(self) -> None:
        """What is held of an encoder that is gone; its memory ends here."""
        if self._desk is not None:
            self._desk.close()
            self._desk = None
        for arena in self._mapped.values():
            arena.drop()
        self._mapped.clear()
        self._held.clear()
        self._old.clear()
        self._places.clear()

    def _turn(self) -> None:
        session = self._broker.wait_for_session(1.0)
        if session.instance_id != self._instance_id:
            self._forget()
            self._instance_id = session.instance_id
        chance = self.chance
        wanted_s = [chance.choice((0.02, 0.2, 5.0, LONG_LEASE_S)) for _ in range(LEASES_PER_TURN)]
        records = self._ask(wanted_s)
        due, self._held = self._held, []
        for record in due:
            self._read(record)
        for record in records:
            match chance.randrange(8):
                case 0:
                    self._held.append(record)  # to be late
                case 1:
                    self._to_renew.append(record["lease_id"])
                    self._held.append(record)
                case 2:
                    self._to_release.append((record["lease_id"], self._reader_of(record)))
                    self._old.append(record)  # given back, and read all the same
                case _:
                    self._read(record)
        for _ in range(min(OLD_READS_PER_TURN, len(self._old))):
            self._read(chance.choice(self._old))
        self._read_by_directory()

    def _read_by_directory(self) -> None:
        """Without a lease, by the adapter's own code; also places that were found some turns ago, in which
        others may have moved in since."""
        link = self._broker.fetch_link()
        if link is None or not self._mapped:
            return
        arena = self._arena(next(iter(self._mapped)))
        try:
            rows = UnleasedRows([arena], "", link)
            places, self._places = self._places, []
            for _ in range(DIRECTORY_READS_PER_TURN):
                key = self.chance.randrange(NUM_KEYS).to_bytes(32, "little")
                place = rows.find(key, None, self._shapes)
                if place is not None and self.chance.random() < 0.3:
                    self._places.append(place)
                elif place is not None:
                    places.append(place)
            for place in places:
                self._read_place(rows, place)
        finally:
            arena.drop()

    def _read_place(self, rows: UnleasedRows, place: Place) -> None:
        found = rows.read(place, None)
        if found is None:
            self.row.add(Word.STALE)
            self.row.add(Word.STALE_BY_DIRECTORY)
            return
        stamp = int.from_bytes(found.content_digest, "little")
        self.accept(has_stamp(on_host(found.payload), stamp), place.arena.arena_id)
        self.row.add(Word.BY_DIRECTORY)

    def _ask(self, wanted_s: list[float]) -> list[dict[str, Any]]:
        if self._desk is None:
            self._desk = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._desk.settimeout(10)
            self._desk.connect(self.plan.desk_path)
        chance = self.chance
        session = self._broker.wait_for_session(1.0)
        request = {
            "owner": session.owner_id,
            "release": self._to_release,
            "renew": self._to_renew,
            "want": [
                (chance.randrange(NUM_KEYS), ttl_s, chance.choice((1, 1, 1, 2, 4))) for ttl_s in wanted_s
            ],
        }
        self._to_release, self._to_renew = [], []
        self._desk.sendall(json.dumps(request).encode() + b"\n")
        answer = b""
        while not answer.endswith(b"\n"):
            piece = self._desk.recv(1 << 16)
            if not piece:
                raise ConnectionResetError
            answer += piece
        records: list[dict[str, Any]] = json.loads(answer)["records"]
        return records

    def _reader_of(self, record: dict[str, Any]) -> int | None:
        return record["reader"] if record["num_readers"] > 1 else None

    def _send_release(self, request: pb.ReleaseRequest, done: Callable[[], None]) -> None:
        reader = request.reader if request.HasField("reader") else None
        self._to_release += [(lease_id.hex(), reader) for lease_id in request.lease_ids]
        done()

    def _arena(self, arena_id: bytes) -> arenas.AttachedArena:
        found = self._mapped.get(arena_id)
        if found is None:
            found = self._mapped[arena_id] = arenas.attach(self._broker, arena_id, self._device())
        assert found.use()
        return found

    def _read(self, record: dict[str, Any]) -> None:
        """By the adapter's own code, in one of its three ways."""
        arena_id, row = bytes.fromhex(record["arena_id"]), self.row
        lease = LeaseRecord(
            key=b"",
            content_digest=b"",
            grid_thw=Grid(1, 1, 1),
            num_rows=record["num_bytes"] // LINE_BYTES,
            width=LINE_BYTES // 4,
            dtype="float32",
            num_deepstack_levels=0,
            rows_bytes=record["num_bytes"],
            transport=self.plan.kind,
            num_readers=record["num_readers"],
            lease_id=bytes.fromhex(record["lease_id"]),
            arena_id=arena_id,
            slot_index=record["slot"],
            generation=record["generation"],
            offset_bytes=record["offset"],
        )
        way = self.chance.randrange(4)
        handling = RowsHandling(
            borrow=way == 1,
            confirm_later=way == 2,
            num_readers=record["num_readers"],
            reader=record["reader"],
        )
        try:
            payload, reading = read_rows(self._arena(arena_id), lease, self._returns, handling, None)
            if way == 1 and self.chance.random() < 0.3:
                time.sleep(self.chance.random() * 0.004)
            is_right = has_stamp(on_host(payload), record["stamp"])
            if reading is not None:
                reading.confirm()
        except StaleRows:
            row.add(Word.STALE)
        except Unreadable as error:
            row.add(Word.STALE if error.stale else Word.REFUSED)
        else:
            self.accept(is_right, arena_id)
            if record["reader"]:
                row.add(Word.SHARED_READERS)
        self._old.append(record)


class GrpcReader(Reader):
    """The adapter's client as an engine uses it."""

    def run(self) -> None:
        plan, row = self.plan, self.row
        row[Word.DESCRIPTORS_BEFORE] = num_descriptors(shared_only=True)
        row[Word.MAPPINGS_BEFORE] = num_shared_mappings()
        with VisionEncoderClient(
            plan.target,
            transports=(plan.kind, "inline"),
            device="cuda:0" if plan.kind == "device" else None,
            timeout_s=10,
        ) as client:
            while self.storms:
                try:
                    self._turn(client)
                except CallFailed:
                    row.add(Word.FAILED_CALLS)
                    time.sleep(0.02)
            # Borrowed, and never given back.
            with contextlib.suppress(CallFailed):
                self._last = client.encode([self._item(number) for number in range(4)], borrow=True)
        self._last = []
        row[Word.DESCRIPTORS_AFTER] = num_descriptors(shared_only=True)
        row[Word.MAPPINGS_AFTER] = num_shared_mappings() + arenas.num_attached()
        row.add(Word.ENDED)

    def _item(self, number: int) -> ImageItem:
        return ImageItem(b"x", digest=hashlib.sha256(b"%d" % number).digest())

    def _turn(self, client: VisionEncoderClient) -> None:
        ways: tuple[RowsOptions, ...] = ({}, {"borrow": True}, {"confirm_later": True}, {"num_readers": 2})
        way = self.chance.choice(ways)
        items = [self._item(self.chance.randrange(GRPC_KEYS)) for _ in range(self.chance.randrange(1, 5))]
        for item, outcome in zip(items, client.encode(items, **way), strict=True):
            if isinstance(outcome, ItemFailed):
                self.row.add(Word.REFUSED)
                continue
            shared = outcome.shared
            by_lease = outcome.reading is not None or (not way and client.transport.is_shared)
            if shared is None or shared.transport == "inline":
                self._check(item, outcome, by_lease=by_lease)
            else:
                self._check(item, outcome, shared.arena_id)
                other = client.read_shared(shared, reader=1)
                self._check(item, other, shared.arena_id)
                self.row.add(Word.SHARED_READERS)

    def _check(
        self, item: ImageItem, rows: EncodedRows, arena_id: bytes = b"", *, by_lease: bool = True
    ) -> None:
        expected = fake_rows(item.digest or b"", rows.num_rows, rows.width)
        if rows.reading is not None and self.chance.random() < 0.3:
            time.sleep(self.chance.random() * 0.004)
        is_right = np.array_equal(on_host(rows.payload).view(np.float32), expected.reshape(-1))
        try:
            rows.confirm()
        except StaleRows:
            self.row.add(Word.STALE)
        else:
            if by_lease or not is_right:
                self.accept(is_right, arena_id)
            else:
                self.row.add(Word.INLINE)
