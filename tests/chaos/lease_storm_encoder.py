"""The encoder's side of a lease storm: the product's arena, store, lease table and broker under callers that
never rest.

Owns one encoder process. Most operations are made in here, by callers without a process ("ghosts"), so that
a million of them take no longer than the table takes; the same table, arena and broker serve the readers'
leases at the same time. Rows are written in two halves with turns of the event loop between them, as by a
copy on another thread, so that a reader that comes too late meets slots that are half another tenant's. The
clock of the leases jumps ahead now and then: leases run out under their readers.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import time
from collections import deque
from typing import Any

import numpy as np
import torch

from encoder_service.errors import VisionEncoderError
from encoder_service.store.arena import Arena, ArenaMemory
from encoder_service.store.arena_store import ArenaStore
from encoder_service.store.embedding_store import Held, Writing
from encoder_service.store.host_memory import HostMemory
from encoder_service.store.partitions import PartitionedStore
from encoder_service.transport.access import BrokerAccess
from encoder_service.transport.broker_options import BrokerOptions
from encoder_service.transport.shared_memory import LeasedRows, LeaseTerms, SharedMemory, host_id
from encoder_service.types import EncodedItem, Grid
from lm_adapter.testing import FakeEncoder, FakeScript, fake_model
from tests.chaos.lease_storm_board import (
    LINE_BYTES,
    LONG_LEASE_S,
    MAX_LINES,
    NUM_KEYS,
    Board,
    Phase,
    Plan,
    Word,
    digest_of,
    lines_of,
    num_descriptors,
    num_shared_mappings,
)
from tests.chaos.lease_storm_sharing import StormSharing, sabotage

ARENA_BYTES = 1 << 20
NUM_SLOTS = 96
HOT_KEYS = 8
MAX_GHOST_LEASES = 400
NUM_GHOSTS = 16
SLICE_OPERATIONS = 150
WRITES_PER_SLICE = 2
OPEN_WRITES = 12
"""Slots that are half written at any time."""
SLICES_PER_CHECK = 60
QUIET_S = 5.0
"""For the ends of the last connections to be noticed. Long leases are far from running out by then."""


class SkewedClock:
    """Seconds, monotonic, with leaps ahead."""

    def __init__(self) -> None:
        self.skew_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.skew_s


class StormEncoder:
    """One instance, from its start to its end in good order, or to a kill."""

    def __init__(self, plan: Plan, board: Board, number: int) -> None:
        self.plan = plan
        self.board = board
        self.number = number
        self.chance = random.Random(plan.seed * 1000 + number)
        self.clock = SkewedClock()
        self.memory: ArenaMemory = self._open_memory()
        self.arena = Arena(self.memory, max_slots=NUM_SLOTS)
        self.store = ArenaStore(self.arena)
        self.stamps: dict[bytes, int] = {}
        self.hot: list[bytes] = []
        self.ghost_leases: list[bytes] = []
        self.writings: deque[tuple[Writing, int]] = deque()
        self.for_others: deque[dict[str, Any]] = deque(maxlen=64)
        """Leases of several readers, waiting for the processes that are to be the others."""

    def _open_memory(self) -> ArenaMemory:
        if self.plan.device == "cpu":
            return HostMemory(ARENA_BYTES)
        from encoder_service.store.cuda_memory import CudaMemory

        return CudaMemory(ARENA_BYTES, torch.device(self.plan.device))

    async def run(self) -> None:
        row = self.board.encoder
        row[Word.DESCRIPTORS_BEFORE] = num_descriptors()
        self.shared = SharedMemory(
            PartitionedStore(self.store, {}),
            BrokerOptions(
                self.plan.broker_path,
                f"storm-{self.number}",
                host_id(),
                access=BrokerAccess(open_namespaces=True),
            ),
            default_lease_s=30.0,
            max_lease_s=LONG_LEASE_S,
            max_leases_per_client=4096,
            clock=self.clock,
        )
        sabotage(self.plan.sabotage, self.arena, self.shared)
        self.before = {word: row[word] for word in Word}
        self.shared.start()
        fake = FakeEncoder(
            self.plan.target,
            model=None,
            script=FakeScript(
                model=fake_model("qwen3_5", out_width=LINE_BYTES // 4),
                sharing=StormSharing(self, asyncio.get_running_loop()),
            ),
        )
        fake.start()
        fake._service.instance_id = f"storm-{self.number}"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.plan.desk_path)
        desk = await asyncio.start_unix_server(self._serve_desk, self.plan.desk_path)
        row[Word.ARENA] = int.from_bytes(self.arena.arena_id[:8], "little")
        row[Word.INSTANCE] = self.number
        await self._storm()
        fake.stop()
        desk.close()
        await self._quiesce()

    # -- the storm -------------------------------------------------------------------------------------

    async def _storm(self) -> None:
        storm, slices = self.board.storm, 0
        while storm[Word.PHASE] != Phase.QUIESCE:
            if self.board.operations() < storm[Word.ALLOWED]:
                for _ in range(SLICE_OPERATIONS):
                    self._ghost_operation()
                slices += 1
                if slices % SLICES_PER_CHECK == 0:
                    self._check()
                await asyncio.sleep(0)
            else:
                await asyncio.sleep(0.001)
            self._write_rows()
            self._publish_counts()

    def _ghost_operation(self) -> None:
        """One of those that callers make, by chance; a leap of the clock, or a caller's end, now and then."""
        chance, leases = self.chance, self.shared.leases
        draw = chance.random()
        if draw < 0.002:
            self.clock.skew_s += chance.choice((0.01, 0.1, 1.0))
            leases.expire()
        elif draw < 0.003:
            leases.release_all(f"ghost-{chance.randrange(NUM_GHOSTS)}")
        elif not self.ghost_leases or (draw < 0.36 and len(self.ghost_leases) < MAX_GHOST_LEASES):
            self._ghost_grant()
        else:
            position = chance.randrange(len(self.ghost_leases))
            lease_id = self.ghost_leases[position]
            if draw < 0.62:
                with contextlib.suppress(VisionEncoderError):
                    leases.renew(lease_id, chance.uniform(0.1, 20.0))
                    return
            self.ghost_leases[position] = self.ghost_leases[-1]
            self.ghost_leases.pop()
            leases.release(lease_id)

    def _ghost_grant(self) -> None:
        chance = self.chance
        if not self.hot or chance.random() < 0.001:
            self.hot = chance.sample(sorted(self.stamps), min(HOT_KEYS, len(self.stamps)))
        held = self.store.hold("", chance.choice(self.hot)) if self.hot else None
        if held is None or held.slot is None:
            return
        owner = f"ghost-{chance.randrange(NUM_GHOSTS)}"
        lease = self.shared.leases.grant(self.arena, held.slot, owner, ttl_s=chance.uniform(0.1, 20.0))
        self.ghost_leases.append(lease.lease_id)
        held.drop()

    def _write_rows(self) -> None:
        """Ends what was begun some turns ago, and begins anew."""
        while len(self.writings) > OPEN_WRITES - WRITES_PER_SLICE:
            writing, stamp = self.writings.popleft()
            self._fill(writing, stamp, second=True)
            self.memory.synchronize()
            self.store.finish_put(writing)
            self.stamps[writing.item.key] = stamp
        for _ in range(WRITES_PER_SLICE):
            key = self.chance.randrange(NUM_KEYS).to_bytes(32, "little")
            stamp, num_lines = self.chance.getrandbits(64), self.chance.randrange(2, MAX_LINES + 1)
            begun = self._begin_write(key, digest_of(stamp), num_lines, Grid(1, 2, 2 * num_lines))
            if begun is not None:
                self._fill(begun, stamp, second=False)
                self.writings.append((begun, stamp))

    def _begin_write(self, key: bytes, content_digest: bytes, num_lines: int, grid: Grid) -> Writing | None:
        rows = torch.empty(num_lines, LINE_BYTES // 4)
        return self.store.begin_put("", EncodedItem(key, content_digest, grid, rows, 0))

    def _fill(self, writing: Writing, stamp: int, *, second: bool) -> None:
        num_lines = len(writing.target)
        lines = torch.from_numpy(lines_of(stamp, num_lines).view(np.uint8))
        half = slice(num_lines // 2, None) if second else slice(0, num_lines // 2)
        writing.target.view(torch.uint8)[half].copy_(lines[half])

    def _check(self) -> None:
        row = self.board.encoder
        try:
            self.store.check_integrity()
            self.shared.leases.check_integrity()
        except AssertionError as error:
            row.add(Word.BROKEN)
            print(f"integrity: {error!r}", flush=True)
        else:
            row.add(Word.CHECKS)

    def _publish_counts(self) -> None:
        row, counts = self.board.encoder, self.shared.leases.counters
        for word, count in (
            (Word.GRANTED, counts.granted),
            (Word.RENEWED, counts.renewed),
            (Word.RELEASED, counts.released),
            (Word.EXPIRED, counts.expired),
            (Word.REVOKED, counts.revoked),
            (Word.GENERATIONS_REVOKED, counts.generations_revoked),
            (Word.EVICTIONS, self.store.counters.evictions),
            (Word.SHARED, self.shared.counters.shared),
        ):
            row[word] = self.before[word] + count

    # -- readers of the low-level parts ----------------------------------------------------------------

    async def _serve_desk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A line of JSON for each request, as long as the reader lives."""
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while line := await reader.readline():
                writer.write(json.dumps(self._answer(json.loads(line))).encode() + b"\n")
                await writer.drain()
        writer.close()

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        for lease_id, of_reader in request["release"]:
            with contextlib.suppress(VisionEncoderError):
                self.shared.release(bytes.fromhex(lease_id), of_reader)
        for lease_id in request["renew"]:
            with contextlib.suppress(VisionEncoderError):
                self.shared.renew(bytes.fromhex(lease_id), 30.0)
        granted = [self._grant(request["owner"], *want) for want in request["want"]]
        records = [record for record in granted if record is not None]
        for _ in range(min(2, len(self.for_others))):
            record = self.for_others.popleft()
            if record["owner"] == request["owner"]:
                self.for_others.append(record)
            else:
                records.append(record)
        for record in granted:
            if record is not None:
                self.for_others.extend({**record, "reader": n} for n in range(1, record["num_readers"]))
        return {"records": records}

    def _grant(self, owner: str, key_number: int, ttl_s: float, num_readers: int) -> dict[str, Any] | None:
        key = key_number.to_bytes(32, "little")
        held = self.store.hold("", key)
        if held is None:
            return None
        rows, stamp = self._lease(held, LeaseTerms(owner, num_readers, ttl_s)), self.stamps[key]
        if rows is None:
            return None
        return {
            "owner": owner,
            "lease_id": rows.lease_id.hex(),
            "arena_id": rows.arena.arena_id.hex(),
            "slot": rows.slot_index,
            "offset": rows.offset_bytes,
            "generation": rows.generation,
            "num_bytes": held.item.spec.num_bytes,
            "num_readers": num_readers,
            "reader": 0,
            "stamp": stamp,
        }

    def _lease(self, held: Held, terms: LeaseTerms) -> LeasedRows | None:
        try:
            return self.shared.lease(held, "", terms)
        except VisionEncoderError:
            return None  # the owner's connection has just ended
        finally:
            held.drop()

    # -- the end ---------------------------------------------------------------------------------------

    async def _quiesce(self) -> None:
        """Ends what is this process's own; whatever is left of others then is a leak."""
        row, leases = self.board.encoder, self.shared.leases
        while self.writings:
            self.store.cancel_put(self.writings.popleft()[0])
        for ghost in range(NUM_GHOSTS // 2):
            leases.release_all(f"ghost-{ghost}")
        for lease_id in self.ghost_leases:
            leases.release(lease_id)
        ends_s = time.monotonic() + QUIET_S
        while (len(leases) or self.shared.broker.num_connections) and time.monotonic() < ends_s:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        self._check()
        self._publish_counts()
        row[Word.LEAKED_LEASES] = len(leases)
        held_elsewhere = len(self.arena) - len(self.store)
        capacity_bytes = self.arena.capacity_bytes
        await self.shared.stop()
        self._check()
        row[Word.LEAKED_SLOTS] = max(held_elsewhere, len(self.arena))
        row[Word.LEAKED_BYTES] = capacity_bytes - self.arena.free_bytes
        del self.shared, self.store, self.arena, self.memory
        row[Word.DESCRIPTORS_AFTER] = num_descriptors()
        row[Word.MAPPINGS_AFTER] = num_shared_mappings()
        row.add(Word.ENDED)
