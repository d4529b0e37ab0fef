"""A storm of lease operations with kills on both sides: ``python -m tests.chaos.lease_storm --operations N``.

Owns the order of events and the verdict. One encoder and several readers run as processes of their own; until
enough operations were made, readers and the encoder are killed (SIGKILL) at random moments and started again.
After each encoder's end every low-level reader has to map the new one by itself, in the end every client too.
Then all is left to come to rest: nothing may be held any more.

Prints one line of JSON; the exit code is 0 when ``failures`` is empty. Operations are those of the lease
tables' own counters: leases granted, renewed, released, expired, revoked.
"""

from __future__ import annotations

import os

# Before anything that would start threads: this process forks.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import structlog

from tests.chaos.lease_storm_board import OPERATIONS, Board, Phase, Plan, Word
from tests.chaos.lease_storm_encoder import StormEncoder
from tests.chaos.lease_storm_processes import Child, fork
from tests.chaos.lease_storm_readers import GrpcReader, LowLevelReader

ENCODER = "encoder"
STEP_S = 60.0
"""For one thing that was begun to happen: a start, a new mapping, an end."""
NEVER_ZERO = (
    *(word.name.lower() for word in OPERATIONS),
    "evictions",
    "integrity_checks",
    "reads_accepted",
    "reads_shared_by_ranks",
    "stale_found",
    "reads_by_directory",
    "stale_by_directory",
)


class StormFailed(Exception):
    """The storm cannot go on."""


class Storm:
    def __init__(self, options: argparse.Namespace, folder: str) -> None:
        self.options = options
        self.chance = random.Random(options.seed)
        self.devices: list[str] = options.devices.split(",") if options.devices else []
        device = "cuda:0" if self.devices else "cpu"
        self.plan = Plan(folder, options.seed, device, options.sabotage)
        self.num_readers = options.readers + options.grpc_clients
        self.board = Board(self.num_readers)
        self.ends_s = time.monotonic() + options.limit_s
        self.children: dict[str, Child] = {}
        self.num_encoders = 0
        self.num_forks = 0
        self.kills = {"readers": 0, "encoder": 0}
        self.restarts_s: list[float] = []

    # -- events ----------------------------------------------------------------------------------------

    def run(self) -> None:
        """Raises StormFailed. Ends every process that it started."""
        try:
            self._start_encoder()
            for number in range(self.num_readers):
                self._start_reader(number)
            self._wait("the first reads of every reader", lambda: self._all_mapped(self.num_readers))
            for after_operations, kill in self._events():
                self.board.storm[Word.ALLOWED] = after_operations + self.options.operations // 20
                self._wait("operations", lambda: self.board.operations() >= after_operations)  # noqa: B023
                time.sleep(self.chance.random() * 0.05)
                kill()
            self.board.storm[Word.ALLOWED] = self.options.operations
            self._wait("operations", lambda: self.board.operations() >= self.options.operations)
            self._wait("reads", lambda: self._num_reads() >= self.options.reads)
            self._wait("reads from the last encoder", lambda: self._all_mapped(self.num_readers))
            self._come_to_rest()
        finally:
            for child in self.children.values():
                child.kill()

    def _events(self) -> list[tuple[int, Callable[[], None]]]:
        """Kills in random order, each after a random number of operations."""
        options = self.options
        kills = [self._kill_reader] * options.reader_kills + [self._kill_encoder] * options.encoder_kills
        self.chance.shuffle(kills)
        most = int(options.operations * 0.95)
        return list(zip(sorted(self.chance.randrange(most) for _ in kills), kills, strict=True))

    def _kill_reader(self) -> None:
        number = self.chance.randrange(self.num_readers)
        self.children.pop(f"reader {number}").kill()
        self.kills["readers"] += 1
        self._start_reader(number)

    def _kill_encoder(self) -> None:
        """The low-level readers have to find the next one at once; a client's pauses may be longer."""
        self.children.pop(ENCODER).kill()
        self.kills["encoder"] += 1
        killed_s = time.monotonic()
        self._start_encoder()
        self._wait("new mappings", lambda: self._all_mapped(self.options.readers))
        self.restarts_s.append(round(time.monotonic() - killed_s, 3))

    def _come_to_rest(self) -> None:
        self.board.storm[Word.PHASE] = Phase.LEAVE
        for name in [name for name in self.children if name != ENCODER]:
            self._wait(f"the end of {name}", self.children[name].has_ended)
            self._reap(name)
        self.board.storm[Word.PHASE] = Phase.QUIESCE
        self._wait("the encoder's end", self.children[ENCODER].has_ended)
        self._reap(ENCODER)

    def _reap(self, name: str) -> None:
        code = self.children.pop(name).reap()
        if code:
            raise StormFailed(f"{name} ended with {code}")

    # -- processes -------------------------------------------------------------------------------------

    def _start_encoder(self) -> None:
        self.num_encoders += 1
        number = self.num_encoders
        self._fork(ENCODER, lambda: asyncio.run(StormEncoder(self.plan, self.board, number).run()), 0)
        self._wait("the encoder's start", lambda: self.board.encoder[Word.INSTANCE] == number)

    def _start_reader(self, number: int) -> None:
        kind = LowLevelReader if number < self.options.readers else GrpcReader
        seed = self.chance.getrandbits(32)
        self._fork(f"reader {number}", lambda: kind(self.plan, self.board, number, seed).run(), 1 + number)

    def _fork(self, name: str, work: Callable[[], None], place: int) -> None:
        """place: readers are spread over all GPUs but the encoder's, where there are others."""
        self.num_forks += 1
        others = self.devices[1:] or self.devices
        visible = ""
        if self.devices:
            visible = self.devices[0] if place == 0 else others[(place - 1) % len(others)]
        self.children[name] = fork(name, work, visible_device=visible, isolated=self.options.isolate)

    def _wait(self, what: str, happened: Callable[[], bool]) -> None:
        """Raises StormFailed when it takes too long, or a process ended that was not to."""
        ends_s = (
            min(self.ends_s, time.monotonic() + STEP_S)
            if what not in ("operations", "reads")
            else self.ends_s
        )
        while not happened():
            if self.board.storm[Word.PHASE] == Phase.STORM:
                for name, child in self.children.items():
                    if child.has_ended():
                        self._reap(name)
                        raise StormFailed(f"{name} ended by itself")
            if time.monotonic() > ends_s:
                raise StormFailed(
                    f"{what} did not happen in time: {self.board.operations()} operations, encoder "
                    f"{self.num_encoders}, read from {self._instances()}"
                )
            time.sleep(0.002)

    def _num_reads(self) -> int:
        return self.board.over_readers(Word.ACCEPTED) + self.board.over_readers(Word.STALE)

    def _instances(self) -> list[int]:
        return [self.board.reader(number)[Word.INSTANCE] for number in range(self.num_readers)]

    def _all_mapped(self, num_readers: int) -> bool:
        """Whether the first readers have accepted rows of the encoder that runs now."""
        return all(found == self.num_encoders for found in self._instances()[:num_readers])

    # -- the verdict -----------------------------------------------------------------------------------

    def report(self, stopped_by: str | None) -> dict[str, Any]:
        """What happened, as JSON-ready data."""
        board, encoder, over = self.board, self.board.encoder, self.board.over_readers
        found: dict[str, Any] = {
            "operations": board.operations(),
            **{word.name.lower(): encoder[word] for word in OPERATIONS},
            "generations_revoked": encoder[Word.GENERATIONS_REVOKED],
            "leases_to_processes": encoder[Word.SHARED],
            "evictions": encoder[Word.EVICTIONS],
            "reads_accepted": over(Word.ACCEPTED),
            "reads_shared_by_ranks": over(Word.SHARED_READERS),
            "stale_found": over(Word.STALE),
            "stale_accepted": over(Word.WRONG),
            "reads_by_directory": over(Word.BY_DIRECTORY),
            "stale_by_directory": over(Word.STALE_BY_DIRECTORY),
            "inline": over(Word.INLINE),
            "refused": over(Word.REFUSED),
            "failed_calls": over(Word.FAILED_CALLS),
            "kills": self.kills,
            "restarts": self.num_encoders - 1,
            "restart_s": self.restarts_s,
            "remaps": over(Word.REMAPS),
            "integrity_checks": encoder[Word.CHECKS],
            "integrity_failures": encoder[Word.BROKEN],
            "leaks": {
                "leases": encoder[Word.LEAKED_LEASES],
                "slots": encoder[Word.LEAKED_SLOTS],
                "bytes": encoder[Word.LEAKED_BYTES],
            },
            "descriptors": self._before_and_after(Word.DESCRIPTORS_BEFORE, Word.DESCRIPTORS_AFTER),
            "mappings": self._before_and_after(Word.MAPPINGS_BEFORE, Word.MAPPINGS_AFTER),
            "processes": self.num_forks,
        }
        failures = [] if stopped_by is None else [stopped_by]
        failures += self._wrong(found, ended=stopped_by is None)
        return {"passed": not failures, "failures": failures, **found, "seed": self.options.seed}

    def _before_and_after(self, before: Word, after: Word) -> dict[str, list[int]]:
        """By process: those that ended in good order know both."""
        rows = {ENCODER: self.board.encoder} | {
            f"reader {number}": self.board.reader(number) for number in range(self.num_readers)
        }
        return {name: [row[before], row[after]] for name, row in rows.items() if row[Word.ENDED]}

    def _wrong(self, found: dict[str, Any], *, ended: bool) -> list[str]:
        wrong = []
        if found["stale_accepted"]:
            wrong.append(f"{found['stale_accepted']} accepted reads had rows of another tenant")
        if found["integrity_failures"]:
            wrong.append(f"{found['integrity_failures']} integrity checks failed")
        wrong += [f"{count} {what} leaked" for what, count in found["leaks"].items() if count]
        # The driver may open some for itself later than with the first mapping.
        for what, slack in (("descriptors", 8 if self.devices else 0), ("mappings", 0)):
            wrong += [
                f"{name} had {before} {what} and was left with {after}"
                for name, (before, after) in found[what].items()
                if after > before + slack
            ]
        if ended:
            # A storm in which these never happened proves nothing.
            wrong += [f"the storm was too calm: {name} is 0" for name in NEVER_ZERO if not found[name]]
        return wrong


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--operations", type=int, default=1_000_000)
    parser.add_argument("--reads", type=int, default=1000, help="at least so many, accepted and stale")
    parser.add_argument("--readers", type=int, default=4, help="processes of the low-level kind")
    parser.add_argument("--grpc-clients", type=int, default=2, help="processes with a whole client")
    parser.add_argument("--reader-kills", type=int, default=40)
    parser.add_argument("--encoder-kills", type=int, default=12)
    parser.add_argument("--limit-s", type=float, default=110.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(32))
    parser.add_argument(
        "--devices",
        default="",
        help="GPUs as CUDA_VISIBLE_DEVICES names them: the encoder's, then the readers'; none: host memory",
    )
    parser.add_argument(
        "--isolate", action="store_true", help="PID, IPC and mount namespaces for each process"
    )
    parser.add_argument("--sabotage", default="", help="a defect that has to be found: returns, late, keeps")
    options = parser.parse_args(arguments)
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(40),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ve-") as folder:
        storm = Storm(options, folder)
        try:
            storm.run()
            report = storm.report(None)
        except StormFailed as error:
            report = storm.report(str(error))
    report["seconds"] = round(time.monotonic() - started_s, 1)
    print(json.dumps(report), flush=True)
    return 0 if report["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
