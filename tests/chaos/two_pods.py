"""What holds between an encoder and its readers when each is a pod: the same scenarios on two GPUs, on one,
and on host memory.

Owns the pods (processes in PID, IPC and mount namespaces of their own, with one GPU in sight or none) and the
scenarios. A test module gives the fixture ``site`` and makes a class out of ``TwoPods``.
"""

from __future__ import annotations

import json
import os
import random
import re
import select
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.lease_storm_processes import ISOLATE, can_isolate, children_of
from tests.unit.transport.broker_rig import socket_folder, wait_until

ROOT = Path(__file__).resolve().parents[2]
START_S, ANSWER_S = 120.0, 90.0
ARENA_BYTES = 256 << 20
# One rounding to bfloat16 is 0.2 %; another process may batch, and so sum, in another order.
RELATIVE = 2e-2


@dataclass
class Ground:
    """kind: how rows have to come. encoder_gpu, reader_gpus: as CUDA_VISIBLE_DEVICES names them; none on the
    host. settings: of the service, as options of the command line and environment."""

    kind: str
    checkpoint: Path
    encoder_gpu: str = ""
    reader_gpus: tuple[str, ...] = ("",)
    arguments: tuple[object, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)


def environment(gpu: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("VE_")}
    paths = (str(ROOT), str(ROOT / "proto"), os.environ.get("PYTHONPATH", ""))
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "CUDA_VISIBLE_DEVICES": gpu,
        "OMP_NUM_THREADS": "1",
    }


class Pod:
    """A process that shares nothing with this one but folders."""

    def __init__(self, gpu: str, *arguments: object, **more: str) -> None:
        self.process = subprocess.Popen(
            [*ISOLATE, sys.executable, "-m", *map(str, arguments)],
            cwd=ROOT,
            env={**environment(gpu), **more},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def line(self, timeout_s: float) -> str:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], timeout_s)
        assert ready, f"nothing was said within {timeout_s:g} s"
        line = self.process.stdout.readline()
        assert line, f"the pod ended with {self.process.wait(30)}"
        return line

    def signal_inner(self, number: int) -> None:
        """To the process inside; what started it sees how that ends."""
        for pid in children_of(self.process.pid):
            os.kill(pid, number)

    def kill(self) -> None:
        """As the kernel kills when memory is short. Harmless when it has ended."""
        self.signal_inner(signal.SIGKILL)
        try:
            self.process.wait(30)
        finally:
            self.process.kill()
            self.process.communicate(timeout=30)


class EncoderPod:
    """A whole service; ``launch`` again after a kill, at the same addresses."""

    def __init__(self, ground: Ground, folder: Path) -> None:
        self.ground = ground
        self.folder = folder
        self.broker_path = folder / "broker.sock"
        self.target = f"unix:{folder}/grpc.sock"
        self.launch()

    def launch(self) -> None:
        ground = self.ground
        device = "cuda:0" if ground.kind == "device" else "cpu"
        self.pod = Pod(
            ground.encoder_gpu, "encoder_service", "serve", "--model", ground.checkpoint, "--device", device,
            "--listen", self.target, "--admin-listen", "127.0.0.1:0", "--broker-path", self.broker_path,
            "--arena-bytes", ARENA_BYTES, "--log-level", "warning", *ground.arguments, **ground.environment,
        )  # fmt: skip

    def wait_ready(self) -> None:
        ready = self.pod.line(START_S)
        admin = re.search(r"admin (http://\S+)\)", ready)
        assert admin, ready
        self.admin = admin[1]

    def figure(self, name: str, or_else: float | None = None) -> float:
        """One of the service's metrics, summed over its labels. or_else: for one that has no labels yet."""
        with urllib.request.urlopen(f"{self.admin}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        found = re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
        if not found and or_else is not None:
            return or_else
        assert found, name
        return sum(map(float, found))

    def no_lease_is_left(self) -> None:
        wait_until(lambda: self.figure("ve_leases") == 0, "the end of every lease")
        assert self.figure("ve_arena_integrity_failures_total") == 0


class ReaderPod(Pod):
    def __init__(self, encoder: EncoderPod, kind: str, gpu: str) -> None:
        super().__init__(gpu, "tests.chaos.two_pods_client", encoder.target, kind)

    def send(self, do: str, **command: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **command}) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.line(ANSWER_S))
        assert "error" not in found, found
        return found

    def ask(self, do: str, **command: object) -> dict[str, Any]:
        self.send(do, **command)
        return self.answer()


@dataclass
class Site:
    """An encoder and readers, the first of which the tests use most."""

    ground: Ground
    encoder: EncoderPod
    readers: list[ReaderPod]

    @property
    def reader(self) -> ReaderPod:
        return self.readers[0]


@contextmanager
def running_site(ground: Ground) -> Iterator[Site]:
    """An encoder and four readers, mapped and ready. Skips where no namespaces can be made."""
    if not can_isolate():
        pytest.skip("new PID and IPC namespaces are not permitted here")
    with socket_folder() as folder, ExitStack() as stack:
        encoder = EncoderPod(ground, folder)
        stack.callback(lambda: encoder.pod.kill())
        readers = []
        for rank in range(4):
            gpu = ground.reader_gpus[rank % len(ground.reader_gpus)]
            readers.append(ReaderPod(encoder, ground.kind, gpu))
            stack.callback(readers[-1].kill)
        encoder.wait_ready()
        for reader in readers:
            reader.send("state")
        for reader in readers:
            state = reader.answer()
            assert state["transport"] == ground.kind, state
            assert state["pid"] < 10, "the reader has its own process numbers"
            assert state["num_devices"] == (1 if ground.kind == "device" else 0)
        yield Site(ground, encoder, readers)


_fresh = random.SystemRandom()


def images(num_images: int, most: int = 512) -> list[list[int]]:
    """Width, height and seed of images that were never there before."""
    return [
        [_fresh.randrange(64, most), _fresh.randrange(64, most), _fresh.getrandbits(31)]
        for _ in range(num_images)
    ]


class TwoPods:
    """Scenarios. The encoder that one kills is there again for the next."""

    num_images = 48

    @pytest.mark.parametrize("concurrency", [1, 8, 32])
    def test_p20_p25_rows_are_bit_equal_to_inline(self, site: Site, concurrency: int) -> None:
        before = site.encoder.figure("ve_shared_deliveries_total")
        calls = site.encoder.figure("ve_local_calls_total", or_else=0.0)
        chosen = images(self.num_images)
        found = site.reader.ask("compare", images=chosen, concurrency=concurrency)
        assert site.encoder.figure("ve_local_calls_total") >= calls + len(chosen), (
            "a call for each, without gRPC"
        )
        assert (found["equal"], found["by_lease"]) == (len(chosen), len(chosen)), found
        assert site.encoder.figure("ve_shared_deliveries_total") >= before + len(chosen)
        site.encoder.no_lease_is_left()

    @pytest.mark.parametrize("concurrency", [1, 8, 32])
    def test_p20_p25_rows_read_by_the_directory_are_bit_equal_to_inline(
        self, site: Site, concurrency: int
    ) -> None:
        chosen = images(self.num_images)
        leased, read = (
            site.encoder.figure(name) for name in ("ve_broker_fetched_total", "ve_directory_reads_total")
        )
        found = site.reader.ask("reread", images=chosen, concurrency=concurrency)
        assert found == {"resident": "directory", "equal": 4 * len(chosen)}
        wait_until(
            lambda: site.encoder.figure("ve_directory_reads_total") == read + 4 * len(chosen), "word of it"
        )
        assert site.encoder.figure("ve_broker_fetched_total") == leased
        assert site.encoder.figure("ve_directory_stale_total") == 0
        site.encoder.no_lease_is_left()

    @pytest.mark.parametrize("backend", ["uni", "mp"])
    def test_p20_vllms_connector_fills_the_encoder_cache_from_shared_memory(
        self, site: Site, backend: str
    ) -> None:
        """uni: rows go to the worker's device by themselves; mp: with the step's metadata."""

        def num_shared() -> float:
            names = ("ve_shared_deliveries_total", "ve_directory_reads_total")
            return sum(map(site.encoder.figure, names))

        chosen, before = images(9), num_shared()
        config = str(site.ground.checkpoint / "config.json")
        found = site.reader.ask("engine", config=config, backend=backend, images=chosen)
        num_taken = len(chosen) - 1
        assert found == {
            "transport": site.ground.kind,
            "loaded": num_taken,
            "equal": num_taken,
            "on_device": num_taken,
        }
        wait_until(lambda: num_shared() >= before + num_taken, "word of every row that was read")
        site.encoder.no_lease_is_left()

    @pytest.mark.parametrize("num_readers", [1, 2, 4])
    def test_p21_every_rank_reads_the_slot_for_itself(self, site: Site, num_readers: int) -> None:
        for image in images(3):
            shared = site.reader.ask("share", image=image, num_readers=num_readers)
            if num_readers == 1:
                assert shared["transport"] == "alone"
                continue
            assert shared["transport"] == site.ground.kind
            command = {"record": shared["record"], "num_bytes": shared["num_bytes"]}
            for rank, reader in enumerate(site.readers[1:num_readers], 1):
                reader.send("read", reader=rank, **command)
            for reader in site.readers[1:num_readers]:
                assert reader.answer() == {"digest": shared["digest"], "in_place": True}
        site.encoder.no_lease_is_left()

    def test_p21_a_killed_reader_loses_its_leases(self, site: Site) -> None:
        victim = ReaderPod(site.encoder, site.ground.kind, site.ground.reader_gpus[-1])
        try:
            assert victim.ask("state")["transport"] == site.ground.kind
            assert victim.ask("hold", images=images(6)) == {"held": 6}
            assert site.encoder.figure("ve_leases") == 6
        finally:
            victim.kill()
        site.encoder.no_lease_is_left()
        assert site.encoder.figure("ve_leases_revoked_total") >= 6
        found = site.reader.ask("compare", images=images(4), concurrency=2)
        assert (found["equal"], found["by_lease"]) == (4, 4)

    def test_p23_without_the_broker_rows_come_inline_until_it_is_back(self, site: Site) -> None:
        aside = site.encoder.broker_path.with_suffix(".aside")
        image = images(1)[0]
        site.encoder.broker_path.rename(aside)
        try:
            site.reader.ask("cut")
            away = site.reader.ask("until", transport="inline", image=image)
            assert (away["transport"], away["num_failed"]) == ("inline", 0), away
            found = site.reader.ask("compare", images=images(4), concurrency=2)
            assert (found["equal"], found["by_lease"]) == (4, 0), found
        finally:
            aside.rename(site.encoder.broker_path)
        back = site.reader.ask("until", transport=site.ground.kind, image=image)
        assert (back["transport"], back["num_failed"]) == (site.ground.kind, 0), back
        site.encoder.no_lease_is_left()

    def test_an_encoder_that_stands_still_for_a_while_is_waited_for(self, site: Site) -> None:
        site.encoder.pod.signal_inner(signal.SIGSTOP)
        try:
            site.reader.send("compare", images=images(4), concurrency=4)
            time.sleep(1)
        finally:
            site.encoder.pod.signal_inner(signal.SIGCONT)
        found = site.reader.answer()
        assert (found["equal"], found["by_lease"]) == (4, 4), found

    def test_p23_a_reader_without_a_gpu_is_served_all_the_same(self, site: Site) -> None:
        reader = ReaderPod(site.encoder, "any", "")
        try:
            state = reader.ask("state")
            assert state["num_devices"] == 0
            assert state["transport"] in ("host", "inline"), state
            found = reader.ask("compare", images=images(4), concurrency=2)
            assert found["equal"] == 4
            assert found["by_lease"] == (4 if state["transport"] == "host" else 0)
        finally:
            reader.kill()

    def test_p21_a_killed_encoder_is_mapped_again_by_itself(self, site: Site) -> None:
        """Rows are those that they were, as far as another process computes the same."""
        known = images(6)
        site.reader.ask("compare", images=known, concurrency=1)
        assert site.reader.ask("hold", images=known[:2]) == {"held": 2}
        site.encoder.pod.kill()
        site.reader.send("until", transport=site.ground.kind, image=known[0])
        site.encoder.launch()
        site.encoder.wait_ready()
        back = site.reader.answer()
        assert back["transport"] == site.ground.kind, back
        assert back["num_failed"] > 0, "nobody told the reader to wait"
        # The old memory outlives its maker as long as somebody reads there, and is never written again.
        assert site.reader.ask("stale") == {"stale": 0}
        found = site.reader.ask("compare", images=known, concurrency=1)
        assert (found["equal"], found["by_lease"]) == (6, 6), found
        assert found["worst"] < RELATIVE
        for reader in site.readers[1:]:
            reader.send("until", transport=site.ground.kind, image=known[1])
        for reader in site.readers[1:]:
            assert reader.answer()["transport"] == site.ground.kind
        site.encoder.no_lease_is_left()
