"""The service under everything at once for a long time: ``python -m tests.chaos.soak --minutes 60``.

Owns the order of events and the verdict. The service and each group of callers (``soak_caller``) are
processes of their own. A group is killed every ``kill_every_s`` and replaced. Memory, descriptors and threads
of the service have to be flat after the first third. In the rests all callers pause; nothing is held then.
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
MAX_GAIN = {"rss_bytes": 32 * MIB, "descriptors": 4, "threads": 2}
# A slow machine may need longer than a third of the time: caches fill by the call.
FIRST_CALLS = 200
QUIET_S = 2.0


def usage(pid: int) -> dict[str, float]:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return {
        "rss_bytes": pages * os.sysconf("SC_PAGE_SIZE"),
        "descriptors": num_descriptors(pid),
        "threads": len(os.listdir(f"/proc/{pid}/task")),
    }


class Soak:
    """minutes: under load; rests are on top: one after the warm-up, the others evenly after it."""

    def __init__(self, folder: Path, seed: int, minutes: float, num_rests: int = 3) -> None:
        self.folder, self.seed, self.num_rests = folder, seed, num_rests
        self.load_s, self.kill_every_s, self.num_kills = minutes * 60, 20.0, 0
        self.max_gain: dict[str, float] = {**MAX_GAIN}
        self.counts: Counter[str] = Counter()
        self.complaints: list[str] = []
        self._rng = random.Random(seed)
        self._callers: dict[int, subprocess.Popen[bytes]] = {}

    def run(self) -> None:
        make_checkpoint(self.folder / "model", "qwen3_vl", "tiny", 5)
        self.service = EncoderPod(self.folder, self.folder / "model", "", SETTINGS)
        try:
            self.service.wait_ready()
            for _ in range(2):
                self._start_caller()
            self._load_and_judge()
            self._end_callers()
            for kind, label in (("ve_item_failures_total", "reason"), ("ve_requests_total", "status")):
                if found := self.service.figure(kind, **{label: "INTERNAL"}):
                    self.complaints.append(f"{kind} has {found:.0f} INTERNAL")
            self.service.pod.signal(signal.SIGTERM)
            if exit_code := self.service.pod.process.wait(60):
                self.complaints.append(f"the service ended with {exit_code}")
        finally:
            self._end_callers()
            self.service.pod.kill()

    def _load_and_judge(self) -> None:
        """Medians of the first and the last third of the samples are compared, which bursts do not move."""
        wait_until(lambda: self.service.figure("ve_requests_total") >= FIRST_CALLS, "the first calls", 240)
        self._kill_s = time.monotonic() + self.kill_every_s / 2
        self._load_for(self.load_s / 3)
        rests, samples = [self._rest()], list[dict[str, float]]()
        for _ in range(self.num_rests - 1):
            samples += self._load_for(self.load_s * 2 / 3 / (self.num_rests - 1))
            rests.append(self._rest())
        third = len(samples) // 3
        for name, most in self.max_gain.items():
            first = statistics.median(sample[name] for sample in samples[:third])
            last = statistics.median(sample[name] for sample in samples[-third:])
            if last - first > most:
                self.complaints.append(f"{name} went from {first:.0f} to {last:.0f}, at most {most:.0f} more")
            if name != "rss_bytes" and rests[-1][name] - rests[0][name] > most:
                self.complaints.append(f"{name} at rest went from {rests[0][name]} to {rests[-1][name]}")

    def _load_for(self, seconds: float) -> list[dict[str, float]]:
        samples, ends_s = [], time.monotonic() + seconds
        while time.monotonic() < ends_s:
            samples.append(usage(self.service.pod.pid))
            if time.monotonic() >= self._kill_s:
                self._kill_s = time.monotonic() + self.kill_every_s
                self._end_caller(self._rng.choice(list(self._callers)))
                self.num_kills += 1
                self._start_caller()
            time.sleep(max(0.5, seconds / 200))
        return samples

    def _rest(self) -> dict[str, float]:
        """All callers pause until nothing is held, and QUIET_S longer. Waits for callers that were just
        started, since rests are compared and connections count."""
        service, gate = self.service, self.folder / "rest"
        wait_until(lambda: service.figure("ve_broker_connections") >= len(self._callers), "the attachments")
        gate.touch()
        wait_until(lambda: not any(service.figure(name) for name in HELD), f"the end of all {HELD}")
        time.sleep(QUIET_S)
        gate.unlink()
        return usage(service.pod.pid)

    def _start_caller(self) -> None:
        number = self.num_kills + len(self._callers)
        arguments = [str(self.folder), str(number), str(self._rng.getrandbits(32)), self.service.target]
        command = [sys.executable, "-m", "tests.chaos.soak_caller", *arguments]
        self._callers[number] = subprocess.Popen(command)

    def _end_callers(self) -> None:
        for number in list(self._callers):
            self._end_caller(number)

    def _end_caller(self, number: int) -> None:
        """SIGKILL at any moment; adds what the process had reported."""
        process = self._callers.pop(number)
        if process.poll() is not None:
            self.complaints.append(f"callers {number} ended by themselves with {process.returncode}")
        process.kill()
        process.wait(30)
        with contextlib.suppress(FileNotFoundError):
            report: dict[str, Any] = json.loads((self.folder / f"{number}.json").read_text())
            self.counts.update(report["counts"])
            self.complaints += report["complaints"]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0, help="Under load.")
    parser.add_argument("--rests", type=int, default=6)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ve-soak-") as folder:
        soak = Soak(Path(folder), options.seed, options.minutes, options.rests)
        soak.run()
    found = {"seed": soak.seed, "complaints": soak.complaints, "num_kills": soak.num_kills}
    print(json.dumps({**found, "counts": dict(soak.counts.most_common())}, indent=2))
    return 1 if soak.complaints else 0


if __name__ == "__main__":
    sys.exit(main())
