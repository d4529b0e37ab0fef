"""The service under everything at once for a long time: ``python -m tests.chaos.soak --minutes 60``.

Owns the order of events and the verdict. The service and each group of callers (``soak_caller``) are
processes of their own. A group is killed every ``kill_every_s`` and replaced. Memory, descriptors and threads
of the service are sampled and have to be flat after the warm-up. In the rests all callers pause, and nothing
may be held then.

Prints the result. The exit code is 0 without complaints.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.harness.pods import EncoderPod
from bench.harness.waiting import wait_until
from encoder_service.checkpoints.synthetic import make_checkpoint
from tests.unit.transport.broker_rig import num_descriptors

MIB = 1 << 20
# Small enough that caches and queues fill and turn over within a minute.
SETTINGS: dict[str, object] = {
    "dtype": "float32",
    "arena_bytes": 16 * MIB,
    "max_image_pixels": 1_000_000,
    "max_patches_per_item": 4096,
    "max_clip_patches": 16_384,
    "max_message_bytes": 16 * MIB,
    "max_encoded_bytes": 4 * MIB,
    "max_queued_bytes": 64 * MIB,
    "max_queued_patches": 32_768,
    "max_undelivered_bytes": 16 * MIB,
    "ingest_threads": 1,
    "torch_threads": 1,
    "drain_grace_s": 10,
}
# Metrics that are 0 while no caller runs.
HELD = ("ve_encodes_in_flight", "ve_queued_bytes", "ve_queued_patches", "ve_undelivered_bytes")
# The largest gain after the warm-up. For memory it is room for the allocator under varying load; a leak of
# 1 KiB a call at 100 calls a second exceeds it within ten minutes.
MAX_GAIN: Mapping[str, float] = {"rss_bytes": 32 * MIB, "descriptors": 4, "threads": 2}
WARM_UP_SHARE = 1 / 3
"""Of the time under load; caches and allocators fill in it."""
# A slow machine may need longer than the warm-up's share: caches fill by the call.
FIRST_CALLS = 200
REST_LIMIT_S, QUIET_S = 20.0, 2.0


def usage(pid: int) -> dict[str, float]:
    """rss_bytes, descriptors and threads of a process. Raises OSError once it is gone."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return {
        "rss_bytes": float(pages * os.sysconf("SC_PAGE_SIZE")),
        "descriptors": float(num_descriptors(pid)),
        "threads": float(len(os.listdir(f"/proc/{pid}/task"))),
    }


def judge(
    samples: Sequence[Mapping[str, float]],
    rests: Sequence[Mapping[str, float]],
    max_gain: Mapping[str, float] = MAX_GAIN,
) -> list[str]:
    """Complaints. samples: figures under load after the warm-up; the medians of their first and last third
    are compared, which bursts do not move. rests: figures of each pause, the first after the warm-up."""
    third = len(samples) // 3
    complaints = []
    for name, most in max_gain.items():
        parts = samples[:third], samples[-third:]
        first, last = (statistics.median(sample[name] for sample in part) for part in parts)
        if last - first > most:
            complaints.append(f"{name} went from {first:.0f} to {last:.0f}, at most {most:.0f} more")
        if name != "rss_bytes" and rests[-1][name] - rests[0][name] > most:
            complaints.append(f"{name} at rest went from {rests[0][name]:.0f} to {rests[-1][name]:.0f}")
    return complaints + [
        f"{name} is {rest[name]:.0f} at rest {number}"
        for number, rest in enumerate(rests)
        for name in HELD
        if rest[name]
    ]


@dataclass
class Soak:
    """One run. minutes: under load; rests are on top. num_rests: one after the warm-up, the others evenly
    after it."""

    folder: Path
    seed: int
    minutes: float
    num_rests: int = 3
    num_processes: int = 2
    kill_every_s: float = 20.0
    max_gain: Mapping[str, float] = field(default_factory=lambda: MAX_GAIN)

    def run(self) -> dict[str, Any]:
        make_checkpoint(self.folder / "model", "qwen3_vl", "tiny", 5)
        self._rng = random.Random(self.seed)
        self._callers: dict[int, subprocess.Popen[bytes]] = {}
        self._num_kills = 0
        self._complaints: list[str] = []
        self._counts: Counter[str] = Counter()
        self._rests: list[dict[str, float]] = []
        self._service = EncoderPod(self.folder, self.folder / "model", "", SETTINGS)
        try:
            self._service.wait_ready()
            for _ in range(self.num_processes):
                self._start_caller()
            samples = self._load()
            self._end_callers()
            for kind, label in (("ve_item_failures_total", "reason"), ("ve_requests_total", "status")):
                if found := self._service.figure(kind, **{label: "INTERNAL"}):
                    self._complaints.append(f"{kind} has {found:.0f} INTERNAL")
            calls = self._service.figure("ve_requests_total")
            self._service.pod.signal(signal.SIGTERM)
            if exit_code := self._service.pod.process.wait(60):
                self._complaints.append(f"the service ended with {exit_code}")
        finally:
            self._end_callers()
            self._service.pod.kill()
        return {
            "plan": {"minutes": self.minutes, "seed": self.seed, "num_processes": self.num_processes},
            "settings": SETTINGS,
            "complaints": [*self._complaints, *judge(samples, self._rests, self.max_gain)],
            "num_kills": self._num_kills,
            "calls": int(calls),
            "counts": dict(self._counts.most_common()),
            "rests": self._rests,
            "samples": samples,
        }

    def _load(self) -> list[dict[str, float]]:
        """Load and rests in turns, from the first calls on. The samples after the warm-up."""
        wait_until(lambda: self._service.figure("ve_requests_total") >= FIRST_CALLS, "the first calls")
        self._kill_s = time.monotonic() + self.kill_every_s / 2
        load_s = self.minutes * 60
        self._load_for(load_s * WARM_UP_SHARE)
        self._rest()
        samples = []
        for _ in range(self.num_rests - 1):
            samples += self._load_for(load_s * (1 - WARM_UP_SHARE) / (self.num_rests - 1))
            self._rest()
        return samples

    def _load_for(self, seconds: float) -> list[dict[str, float]]:
        samples, ends_s = [], time.monotonic() + seconds
        while time.monotonic() < ends_s:
            samples.append(usage(self._service.pod.pid))
            if time.monotonic() >= self._kill_s:
                self._kill_s = time.monotonic() + self.kill_every_s
                self._end_caller(self._rng.choice(list(self._callers)))
                self._num_kills += 1
                self._start_caller()
            time.sleep(max(0.5, seconds / 200))
        return samples

    def _rest(self) -> None:
        """All callers pause until nothing is held, and QUIET_S longer. Waits for callers that were just
        started, since rests are compared and connections count."""
        service, gate = self._service, self.folder / "rest"
        wait_until(lambda: service.figure("ve_broker_connections") >= len(self._callers), "the attachments")
        gate.touch()
        ends_s = time.monotonic() + REST_LIMIT_S
        while time.monotonic() < ends_s and any(service.figure(name) for name in HELD):
            time.sleep(0.2)
        time.sleep(QUIET_S)
        self._rests.append({**usage(service.pod.pid), **{name: service.figure(name) for name in HELD}})
        gate.unlink()

    def _start_caller(self) -> None:
        number = self._num_kills + len(self._callers)
        arguments = [str(self.folder), str(number), str(self._rng.getrandbits(32)), self._service.target]
        self._callers[number] = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.soak_caller", *arguments]
        )

    def _end_callers(self) -> None:
        for number in list(self._callers):
            self._end_caller(number)

    def _end_caller(self, number: int) -> None:
        """SIGKILL at any moment; adds what the process had reported."""
        process = self._callers.pop(number)
        if process.poll() is not None:
            self._complaints.append(f"callers {number} ended by themselves with {process.returncode}")
        process.kill()
        process.wait(30)
        with contextlib.suppress(FileNotFoundError):
            report = json.loads((self.folder / f"{number}.json").read_text())
            self._counts.update(report["counts"])
            self._complaints += report["complaints"]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0, help="Under load.")
    parser.add_argument("--rests", type=int, default=6)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ve-soak-") as folder:
        result = Soak(Path(folder), options.seed, options.minutes, options.rests).run()
    print(json.dumps({name: value for name, value in result.items() if name != "samples"}, indent=2))
    return 1 if result["complaints"] else 0


if __name__ == "__main__":
    sys.exit(main())
