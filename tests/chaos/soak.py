"""The service under everything at once for a long time: ``python -m tests.chaos.soak --minutes 60``.

Owns the order of events and the verdict. The service and each group of callers (``soak_caller``) are
processes of their own. A group is killed every ``kill_every_s`` and replaced. Memory, descriptors and threads
are sampled and have to be flat by the rule of ``soak_verdict``. In the rests all callers pause, and nothing
may be held then.

Prints the verdict; ``--out FOLDER`` writes the result with every sample as JSON. The exit code is 0 without
complaints.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from encoder_service.towers.synthetic import make_checkpoint
from tests.chaos.soak_process import HELD, SETTINGS, SoakedService
from tests.chaos.soak_verdict import BOUNDS, Bound, judge, judge_rests

WARM_UP_SHARE = 1 / 3
"""Of the time under load; caches and allocators fill in it."""
START_LIMIT_S, REST_LIMIT_S = 60.0, 20.0
# A slow machine may need longer than the warm-up's share: caches fill by the call.
FIRST_CALLS = 200
QUIET_S = 2.0
MAX_SAMPLES = 600
ALSO_KEPT = ("calls", "store_bytes")
"""Of the figures under load, besides those that have a bound."""
FAMILY = "qwen3_vl"


@dataclass
class Plan:
    """minutes: under load; rests are on top. num_rests: one after the warm-up, the others evenly after it."""

    minutes: float
    seed: int
    num_processes: int = 2
    num_rests: int = 3
    kill_every_s: float = 20.0

    @property
    def load_s(self) -> float:
        return self.minutes * 60

    @property
    def sample_s(self) -> float:
        return max(0.5, self.load_s / MAX_SAMPLES)


@dataclass
class Soak:
    """One run."""

    plan: Plan
    folder: Path
    bounds: Mapping[str, Bound] = field(default_factory=lambda: BOUNDS)
    series: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    rests: list[dict[str, float]] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    num_kills: int = 0

    def run(self) -> dict[str, Any]:
        make_checkpoint(self.folder / "model", FAMILY, "tiny", 5)
        self._rng = random.Random(self.plan.seed)
        self._callers: dict[int, subprocess.Popen[bytes]] = {}
        self._service = SoakedService(self.folder / "model", self.folder)
        try:
            for _ in range(self.plan.num_processes):
                self._start_caller()
            self._load()
        finally:
            for number in list(self._callers):
                self._end_caller(number)
            exit_code = self._service.stop()
        return self._verdict(exit_code)

    # -- the load --------------------------------------------------------------------------------------

    def _load(self) -> None:
        """Load and rests in turns. Counted is the time under load, from the first calls on."""
        plan = self.plan
        self._until("ve_requests_total", FIRST_CALLS)
        warm_up_s = plan.load_s * WARM_UP_SHARE
        between_s = (plan.load_s - warm_up_s) / (plan.num_rests - 1)
        loaded_s = 0.0
        for number in range(plan.num_rests):
            until_s = warm_up_s + number * between_s
            loaded_s = self._load_until(loaded_s, until_s)
            self._rest()

    def _until(self, name: str, least: int) -> None:
        """Raises RuntimeError when the figure does not come to it."""
        ends_s = time.monotonic() + START_LIMIT_S
        while (found := self._service.metrics()[name]) < least:
            if time.monotonic() > ends_s:
                raise RuntimeError(f"{name} is {found} after {START_LIMIT_S:g} s, {least} was expected")
            time.sleep(0.2)

    def _load_until(self, loaded_s: float, until_s: float) -> float:
        started_s = time.monotonic() - loaded_s
        kill_s = loaded_s + self.plan.kill_every_s / 2
        while (now_s := time.monotonic() - started_s) < until_s:
            if self._service.has_ended:
                raise RuntimeError("the service has ended")
            for name, figure in self._service.figures().items():
                self.series.setdefault(name, []).append((round(now_s, 2), figure))
            if now_s >= kill_s:
                kill_s = now_s + self.plan.kill_every_s
                self._kill_one()
            time.sleep(max(0.0, min(self.plan.sample_s - (time.monotonic() - started_s - now_s), 60)))
        return until_s

    def _rest(self) -> None:
        """All callers pause until nothing is held, and QUIET_S longer. Waits for callers that were just
        started, since rests are compared and connections count."""
        self._until("ve_broker_connections", len(self._callers))
        gate = self.folder / "rest"
        gate.touch()
        ends_s = time.monotonic() + REST_LIMIT_S
        while time.monotonic() < ends_s:
            time.sleep(0.2)
            found = self._service.metrics()
            if not any(found[name] for name in HELD):
                break
        time.sleep(QUIET_S)
        self.rests.append(self._service.figures())
        gate.unlink()

    def _start_caller(self) -> None:
        number = self.num_kills + len(self._callers)
        arguments = [str(self.folder), str(number), str(self._rng.getrandbits(32)), self._service.target]
        self._callers[number] = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.soak_caller", *arguments]
        )

    def _kill_one(self) -> None:
        """SIGKILL at a random moment."""
        self._end_caller(self._rng.choice(list(self._callers)))
        self.num_kills += 1
        self._start_caller()

    def _end_caller(self, number: int) -> None:
        process = self._callers.pop(number)
        if process.poll() is not None:
            self.complaints.append(f"callers {number} ended by themselves with {process.returncode}")
        process.kill()
        process.wait(30)
        with contextlib.suppress(FileNotFoundError):
            report = json.loads((self.folder / f"{number}.json").read_text())
            self.counts.update(report["counts"])
            self.complaints += report["complaints"]

    # -- the verdict -----------------------------------------------------------------------------------

    def _verdict(self, exit_code: int) -> dict[str, Any]:
        warm_up_s = self.plan.load_s * WARM_UP_SHARE
        drifts, gained = judge(self.series, warm_up_s, self.bounds)
        complaints = [*self.complaints, *gained, *judge_rests(self.rests, HELD)]
        if exit_code:
            complaints.append(f"the service ended with {exit_code}")
        complaints += [f"the service logged: {line[:500]}" for line in self._service.errors()[:20]]
        return {
            "plan": {**asdict(self.plan), "family": FAMILY, "size": "tiny", "warm_up_s": warm_up_s},
            "settings": {name: value for name, value in SETTINGS.items() if not name.endswith("listen")},
            "bounds": {name: asdict(bound) for name, bound in self.bounds.items()},
            "complaints": complaints,
            "num_kills": self.num_kills,
            "calls": int(self.rests[-1]["calls"]),
            "drifts": {name: asdict(found) for name, found in drifts.items()},
            "rests": self.rests,
            "counts": dict(self.counts.most_common()),
            "series": {
                "seconds": [at_s for at_s, _ in self.series["calls"]],
                **{name: [figure for _, figure in self.series[name]] for name in (*self.bounds, *ALSO_KEPT)},
            },
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0, help="Under load.")
    parser.add_argument("--processes", type=int, default=2, help="Of callers.")
    parser.add_argument("--rests", type=int, default=6)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    parser.add_argument("--commit", help="For a tree that is no checkout.")
    parser.add_argument("--out", type=Path, help="Folder for the result.")
    options = parser.parse_args()
    plan = Plan(options.minutes, options.seed, options.processes, options.rests)
    with tempfile.TemporaryDirectory(prefix="ve-soak-") as folder:
        result = Soak(plan, Path(folder)).run()
    if options.out is not None:
        import torch

        from bench.measurement import describe_environment, write_result

        described = describe_environment(
            torch.device("cpu"), options.commit, ("grpcio", "protobuf", "pillow")
        )
        print(write_result(options.out, "soak", {**described, **result}))
    print(json.dumps({name: value for name, value in result.items() if name != "series"}, indent=2))
    return 1 if result["complaints"] else 0


if __name__ == "__main__":
    sys.exit(main())
