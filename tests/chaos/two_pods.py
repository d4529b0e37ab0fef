"""What holds between an encoder and its readers when each is a pod: the same scenarios on two GPUs, on one,
and on host memory.

Owns the scenarios. A test module gives the fixture ``site`` and makes a class out of ``TwoPods``.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from bench.harness.pods import EncoderPod, Pod
from bench.harness.waiting import wait_until
from tests.chaos.reader_pod import RELATIVE
from tests.unit.transport.broker_rig import socket_folder

MIB = 1 << 20
UNMAP_S = 1.0


@dataclass(frozen=True)
class Setup:
    """kind: how rows have to come. encoder_gpu, reader_gpus: as CUDA_VISIBLE_DEVICES names them; empty on the
    host. settings: of the service."""

    kind: str
    checkpoint: Path
    encoder_gpu: str = ""
    reader_gpus: tuple[str, ...] = ("",)
    settings: dict[str, object] = field(default_factory=dict)
    num_readers: int = 3


@dataclass(frozen=True)
class Site:
    """An encoder and readers, the first of which the tests use most."""

    setup: Setup
    encoder: EncoderPod
    readers: list[Pod]

    @property
    def reader(self) -> Pod:
        return self.readers[0]

    def new_reader(self, kind: str, gpu: str) -> Pod:
        return Pod(gpu, "tests.chaos.reader_pod", self.encoder.target, kind)


@contextmanager
def running_site(setup: Setup) -> Iterator[Site]:
    """An encoder and readers, mapped and ready."""
    with socket_folder() as folder, ExitStack() as stack:
        encoder = EncoderPod(folder, setup.checkpoint, setup.encoder_gpu, setup.settings)
        stack.callback(lambda: encoder.pod.kill())
        site = Site(setup, encoder, [])
        for rank in range(setup.num_readers):
            gpu = setup.reader_gpus[rank % len(setup.reader_gpus)]
            site.readers.append(site.new_reader(setup.kind, gpu))
            stack.callback(site.readers[-1].kill)
        encoder.wait_ready()
        for reader in site.readers:
            reader.send("state")
        for reader in site.readers:
            state = reader.answer()
            assert state["transport"] == setup.kind, state
            assert state["num_devices"] == (1 if setup.kind == "device" else 0)
        yield site


_fresh = random.SystemRandom()


def images(num_images: int, most: int = 512) -> list[list[int]]:
    """Width, height and seed of images that were never there before."""
    return [
        [_fresh.randrange(64, most), _fresh.randrange(64, most), _fresh.getrandbits(31)]
        for _ in range(num_images)
    ]


class TwoPods:
    """Scenarios. The encoder that one kills is there again for the next."""

    num_images = 24

    @pytest.mark.parametrize("concurrency", [1, 8])
    def test_p20_p25_rows_at_a_place_and_in_the_directory_are_equal_to_inline(
        self, site: Site, concurrency: int
    ) -> None:
        """The first read is answered with a location; the second uses the directory and makes no call."""
        chosen, encoder = images(self.num_images), site.encoder

        def num_encodes() -> float:
            return encoder.figure("ve_requests_total", method="Encode")

        placed = encoder.figure("ve_deliveries_total", transport=site.setup.kind)
        touched = encoder.figure("ve_directory_reads_total")
        for num_placed in (len(chosen), 0):
            encodes = num_encodes()
            found = site.reader.ask("compare", images=chosen, concurrency=concurrency)
            assert (found["equal"], found["here"]) == (len(chosen), len(chosen)), found
            assert num_encodes() == encodes + num_placed
        assert encoder.figure("ve_deliveries_total", transport=site.setup.kind) == placed + len(chosen)
        wait_until(
            lambda: encoder.figure("ve_directory_reads_total") >= touched + 2 * len(chosen), "the Touch calls"
        )
        assert encoder.figure("ve_reads_lost_total") == 0

    def test_p21_a_killed_reader_leaves_nothing_behind(self, site: Site) -> None:
        known = images(6)
        connections = site.encoder.figure("ve_broker_connections")
        victim = site.new_reader(site.setup.kind, site.setup.reader_gpus[-1])
        try:
            assert victim.ask("state")["transport"] == site.setup.kind
            victim.ask("learn", images=known)
            assert site.encoder.figure("ve_broker_connections") == connections + 1
            victim.send("hammer", images=known, num_readers=8, seconds=20, late_s=0.5, by="shared")
            time.sleep(1)
        finally:
            victim.kill()
        wait_until(
            lambda: site.encoder.figure("ve_broker_connections") == connections, "the connection's end"
        )
        found = site.reader.ask("compare", images=known, concurrency=2)
        assert (found["equal"], found["here"]) == (6, 6), found

    def test_p23_a_reader_without_a_gpu_is_served_too(self, site: Site) -> None:
        reader = site.new_reader("any", "")
        try:
            state = reader.ask("state")
            assert (state["num_devices"], state["transport"]) == (0, "host"), state
            found = reader.ask("compare", images=images(4), concurrency=2)
            assert found["equal"] == 4
        finally:
            reader.kill()

    def test_an_encoder_that_stands_still_for_a_while_is_waited_for(self, site: Site) -> None:
        site.encoder.pod.signal(signal.SIGSTOP)
        try:
            site.reader.send("compare", images=images(4), concurrency=4)
            time.sleep(1)
        finally:
            site.encoder.pod.signal(signal.SIGCONT)
        found = site.reader.answer()
        assert (found["equal"], found["here"]) == (4, 4), found

    def test_p32_a_killed_encoder_fails_items_with_a_reason_and_is_mapped_again(self, site: Site) -> None:
        """kill -9 under 16 readers. Its memory is unmapped within a second of its end."""
        known, encoder = images(12), site.encoder
        hammer, watch = site.readers[:2]
        watch.ask("compare", images=known, concurrency=4)
        hammer.ask("learn", images=known)
        hammer.send("hammer", images=known, num_readers=16, seconds=4, late_s=0.05, by="shared")
        time.sleep(2)
        self.before_kill(site)
        watch.send("watch_end", timeout_s=10)
        encoder.pod.kill()
        killed_s = time.monotonic()
        self.after_kill(site)
        gone = watch.answer()
        assert not gone["mapped"]
        assert gone["time_s"] < killed_s + UNMAP_S, f"unmapped after {gone['time_s'] - killed_s:.3f} s"
        found = hammer.answer()
        assert found["wrong"] == 0, found
        assert found["right"] > 0, found
        assert found["reasons"], "the encoder was gone for two seconds"
        assert set(found["reasons"]) <= {"UNAVAILABLE", "TRUNCATED_STREAM", "DEADLINE_EXCEEDED"}, found
        encoder.launch()
        encoder.wait_ready()
        for reader in site.readers:
            reader.send("until", transport=site.setup.kind, image=known[0])
        for reader in site.readers:
            assert reader.answer()["transport"] == site.setup.kind
        # Another process may have chosen other kernels.
        again = watch.ask("compare", images=known, concurrency=1)
        assert (again["equal"], again["here"]) == (len(known), len(known)), again
        assert again["worst"] < RELATIVE

    def before_kill(self, site: Site) -> None:
        """For more checks on a GPU."""

    def after_kill(self, site: Site) -> None:
        """Right after the encoder's end."""


@dataclass(frozen=True)
class Storm:
    """num_readers: each up to late_s late with its copies, for ``seconds``. side: of images, in pixels.
    factor: the working set over the arena."""

    num_readers: int
    late_s: float
    seconds: float
    side: int = 192
    factor: int = 10


ENCODES = ("ve_encoded_items_total", "ve_encodes_repeated_total")


def check_late_readers(
    kind: str, ask: Callable[..., dict[str, Any]], figure: Callable[..., float], storm: Storm
) -> None:
    """Readers over an arena smaller than their working set, in the memory that ``kind`` names. On a GPU all
    of the set fits on the host. ask: a command of a ``ReaderPod``. figure: of the encoder's metrics."""
    side = [storm.side, storm.side]
    num_bytes = ask("learn", images=[[*side, 0]])["num_bytes"]
    arena_bytes = figure("ve_arena_bytes", memory=kind)
    chosen = [[*side, seed] for _, _, seed in images(int(storm.factor * arena_bytes / num_bytes))]
    ask("learn", images=chosen)
    command = {
        "images": chosen,
        "num_readers": storm.num_readers,
        "seconds": storm.seconds,
        "late_s": storm.late_s,
    }
    inline = ask("hammer", by="inline", **command)
    placed = figure("ve_deliveries_total", transport=kind)
    encoded, repeated = (figure(name) for name in ENCODES)
    shared = ask("hammer", by="shared", **command)
    encoded, repeated = figure(ENCODES[0]) - encoded, figure(ENCODES[1]) - repeated
    lost = figure("ve_reads_lost_total")
    print(f"inline {inline}, shared {shared}, encoded {encoded}, repeated {repeated}, lost {lost}")
    assert inline["wrong"] == shared["wrong"] == 0
    assert inline["reasons"] == shared["reasons"] == {}
    assert figure("ve_deliveries_total", transport=kind) > placed
    assert inline["most_requests"] >= 1, "requests are counted"
    assert shared["most_requests"] <= 2
    assert shared["right"] >= storm.num_readers
    if storm.seconds >= 10:  # a short storm reads too little to compare its pace
        assert shared["right"] >= 0.8 * inline["right"]
    assert repeated <= max(1, 0.01 * shared["right"])
    if kind == "device":
        assert encoded <= 0.01 * shared["right"]
