"""Kills, stalls and storms: the broker and its clients as processes, none of which ends in good order."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from encoder_service.transport.offers import ArenaOffer, ProbeSlot
from lm_adapter.transport.broker_client import BrokerClient
from lm_adapter.transport.broker_errors import BrokerError
from tests.chaos.broker_process import content_of
from tests.unit.transport.broker_rig import (
    RawClient,
    hello,
    num_descriptors,
    running_broker,
    socket_folder,
    wait_until,
)
from vision_encoder.v1 import broker_pb2 as pb

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "chaos" / "broker_process.py"
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}", "OMP_NUM_THREADS": "1"}


class Process:
    """One of the roles of broker_process.py; its output is read by lines."""

    def __init__(self, *arguments: str, inside: tuple[str, ...] = ()) -> None:
        self.popen = subprocess.Popen(
            [*inside, sys.executable, str(SCRIPT), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=ENVIRONMENT,
        )
        self.lines: list[str] = []
        self._readers = [
            threading.Thread(target=self._read, args=(self.popen.stdout, self.lines)),
            threading.Thread(target=self._read, args=(self.popen.stderr, [])),
        ]
        for reader in self._readers:
            reader.start()

    @staticmethod
    def _read(stream: object, into: list[str]) -> None:
        for line in stream:  # type: ignore[attr-defined]
            into.append(line.strip())  # noqa: PERF401  # as they come

    def says(self, word: str) -> str:
        """The rest of the first line that starts with the word."""
        wait_until(lambda: any(line.startswith(word) for line in self.lines), word)
        return next(line for line in self.lines if line.startswith(word)).removeprefix(word).strip()

    @property
    def gone(self) -> list[str]:
        """Owners that a broker has reported."""
        return [line.split()[1] for line in self.lines if line.startswith("gone ")]

    def end(self, number: int = signal.SIGKILL) -> int:
        """Sends the signal and waits; the exit code."""
        if self.popen.poll() is None:
            self.popen.send_signal(number)
        code = self.popen.wait(30)
        for reader in self._readers:
            reader.join()
        for stream in (self.popen.stdout, self.popen.stderr):
            assert stream is not None
            stream.close()
        return code


@contextlib.contextmanager
def process(*arguments: str, inside: tuple[str, ...] = ()) -> Iterator[Process]:
    started = Process(*arguments, inside=inside)
    try:
        yield started
    finally:
        started.end()


@contextlib.contextmanager
def serving(path: str, instance: str = "one") -> Iterator[Process]:
    with process("serve", path, instance) as broker:
        broker.says("ready")
        yield broker


def reads(client: BrokerClient, instance: str) -> bool:
    """Whether the client attaches the instance's arena and finds its content."""
    (arena,) = client.list_arenas()
    with client.attach(arena.arena_id) as attached:
        return os.pread(attached.data_fd, 1 << 20, 0) == content_of(instance)


def test_p21_killed_clients_lose_their_leases_at_once_and_leave_no_descriptor() -> None:
    with socket_folder() as folder, serving(str(folder / "s")) as broker:
        path = str(folder / "s")
        before = num_descriptors(broker.popen.pid)
        with BrokerClient(path) as survivor, contextlib.ExitStack() as stack:
            survivor.connect()
            clients = [stack.enter_context(process("hold", path)) for _ in range(4)]
            owners = [client.says("holding") for client in clients]
            assert broker.gone == []
            for client, owner in zip(clients, owners, strict=True):
                killed_s = time.monotonic()
                client.end(signal.SIGKILL)
                wait_until(lambda owner=owner: owner in broker.gone)  # type: ignore[misc]
                assert time.monotonic() - killed_s < 5
            assert sorted(broker.gone) == sorted(owners)
            assert reads(survivor, "one")
        wait_until(lambda: num_descriptors(broker.popen.pid) == before)


def test_a_killed_broker_is_replaced_and_its_clients_attach_anew() -> None:
    before = num_descriptors()
    lost: list[BrokerError] = []
    with socket_folder() as folder:
        path = str(folder / "s")
        with BrokerClient(
            path, min_pause_s=0.01, max_pause_s=0.1, on_lost=lambda _, error: lost.append(error)
        ) as client:
            client.start()
            mapped = None
            for number in range(4):
                instance = f"instance {number}"
                with serving(path, instance) as broker:
                    session = client.wait_for_session(20)
                    assert session.instance_id == instance
                    assert session.restarted == (number > 0)
                    assert reads(client, instance)
                    if mapped is None:
                        mapped = client.attach(session.arenas[0].arena_id)
                    broker.end(signal.SIGKILL)
                    assert os.path.exists(path), "a killed broker leaves its file"
                    wait_until(lambda: client.session is None)
            assert mapped is not None
            kept = os.pread(mapped.data_fd, 1 << 20, 0)
            assert kept == content_of("instance 0"), "memory outlives its maker"
            mapped.close()
        assert [error.reason for error in lost] == ["CONNECTION_LOST"] * 4
    wait_until(lambda: num_descriptors() == before)


def test_p37_a_broker_that_is_told_to_stop_says_so_and_removes_its_file() -> None:
    with socket_folder() as folder, serving(str(folder / "s")) as broker:
        lost: list[BrokerError] = []
        with BrokerClient(str(folder / "s"), on_lost=lambda _, error: lost.append(error)) as client:
            session = client.connect()
            assert broker.end(signal.SIGTERM) == 0
            assert broker.lines[-1] == "stopped"
            assert broker.gone == [session.owner_id]
            assert not (folder / "s").exists()
            wait_until(lambda: bool(lost))
            assert lost[0].reason == "BROKER_STOPPING"


def test_a_stalled_broker_is_noticed_and_found_again_when_it_goes_on() -> None:
    with socket_folder() as folder, serving(str(folder / "s")) as broker:
        lost: list[BrokerError] = []
        with BrokerClient(
            str(folder / "s"), max_pause_s=0.2, on_lost=lambda _, error: lost.append(error)
        ) as client:
            owner = client.connect().owner_id
            broker.popen.send_signal(signal.SIGSTOP)
            try:
                wait_until(lambda: bool(lost))
                assert lost[0].reason == "BROKER_SILENT"
            finally:
                broker.popen.send_signal(signal.SIGCONT)
            assert client.wait_for_session(20).owner_id != owner
            assert reads(client, "one")
            wait_until(lambda: owner in broker.gone)


def test_a_broker_that_stood_still_does_not_hold_it_against_its_clients() -> None:
    """What they said meanwhile is heard before anybody is found to have been silent for too long."""
    with (
        socket_folder() as folder,
        serving(str(folder / "s")) as broker,
        RawClient(str(folder / "s")) as known,
        RawClient(str(folder / "s"), greet=False) as new,
    ):
        broker.popen.send_signal(signal.SIGSTOP)
        try:
            time.sleep(0.2)  # until it stands, in its wait for news
            known.socket.sendall(known.frame(ping=pb.BrokerPing()))
            new.socket.sendall(new.frame(hello=hello()))
            time.sleep(2.5)  # longer than a handshake or a silence may last
        finally:
            broker.popen.send_signal(signal.SIGCONT)
        for client, answer in ((known, "pong"), (new, "welcome")):
            reply = client.reply()
            assert reply is not None, f"it was ended in place of a {answer}"
            assert reply.HasField(answer)  # type: ignore[arg-type]


def test_p21_a_stalled_client_loses_its_leases() -> None:
    with (
        socket_folder() as folder,
        serving(str(folder / "s")) as broker,
        process("hold", str(folder / "s")) as client,
    ):
        owner = client.says("holding")
        client.popen.send_signal(signal.SIGSTOP)
        wait_until(lambda: broker.gone == [owner])


def make_trouble(path: str, seed: int, until_s: float) -> None:
    """One kind of abuse after the other, by chance."""
    chance = random.Random(seed)
    with contextlib.ExitStack() as kept:
        num_kept = 0
        while time.monotonic() < until_s:
            with contextlib.suppress(OSError, AssertionError), contextlib.ExitStack() as stack:
                client = stack.enter_context(RawClient(path, greet=chance.random() < 0.5))
                abuse(client, chance)
                if num_kept < 40 and chance.random() < 0.2:
                    num_kept += 1
                    kept.push(stack.pop_all())


def abuse(client: RawClient, chance: random.Random) -> None:
    """One thing that no good client does, or nothing at all."""
    frame = client.frame(list=pb.BrokerListArenas())
    match chance.randrange(5):
        case 0:
            client.socket.sendall(chance.randbytes(chance.randrange(1, 400)))
        case 1:
            client.socket.sendall(frame[: chance.randrange(1, len(frame))])
        case 2:
            client.socket.sendall(frame * chance.randrange(1, 300))
        case 3:
            fd = os.memfd_create("unasked")
            try:
                socket.send_fds(client.socket, [frame], [fd] * chance.randrange(1, 20))
            finally:
                os.close(fd)


def test_p33_a_storm_of_bad_clients_does_not_reach_a_good_one() -> None:
    with socket_folder() as folder, serving(str(folder / "s")) as broker:
        path = str(folder / "s")
        before = num_descriptors(broker.popen.pid)
        ends_s = time.monotonic() + 4
        storm = [threading.Thread(target=make_trouble, args=(path, seed, ends_s)) for seed in range(4)]
        with BrokerClient(path) as good:
            session = good.connect()
            for thread in storm:
                thread.start()
            slowest_s = 0.0
            while time.monotonic() < ends_s:
                asked_s = time.monotonic()
                assert reads(good, "one")
                slowest_s = max(slowest_s, time.monotonic() - asked_s)
                time.sleep(0.02)
            for thread in storm:
                thread.join()
            assert good.session is session
            assert slowest_s < 2
        assert broker.popen.poll() is None
        wait_until(lambda: num_descriptors(broker.popen.pid) == before)
        assert broker.end(signal.SIGTERM) == 0
        gone = broker.gone  # all of its output is there now
        assert len(set(gone)) == len(gone) > 0, "each owner is released once"


# -- what two pods are to each other ---------------------------------------------------------------------

NAMESPACES = {
    "pid, ipc, mount, network": ("unshare", "--pid", "--fork", "--mount-proc", "--ipc", "--mount", "--net"),
    "user as well": (
        "unshare",
        "--user",
        "--map-root-user",
        "--pid",
        "--fork",
        "--mount-proc",
        "--ipc",
        "--mount",
        "--net",
    ),
}


def test_a_read_only_mount_of_the_folder_is_enough_to_connect() -> None:
    with socket_folder() as folder, serving(str(folder / "s")) as broker:
        read_only = (
            "mount --bind $0 $0 && mount -o remount,bind,ro $0 && ! touch $0/file && exec $1 $2 hold $0/s"
        )
        command = ["unshare", "--mount", "sh", "-c", read_only, str(folder), sys.executable, str(SCRIPT)]
        trial = subprocess.run([*command[:4], "mount --bind / /mnt"], capture_output=True, check=False)
        if trial.returncode:
            pytest.skip(f"mounts are not allowed here: {trial.stderr.decode().strip()}")
        client = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=ENVIRONMENT
        )
        assert client.stdout is not None
        with client, client.stdout:
            word, owner = client.stdout.readline().split()
            client.kill()
        assert word == "holding"
        wait_until(lambda: broker.gone == [owner])


@pytest.mark.parametrize("name", NAMESPACES)
def test_a_client_in_namespaces_of_its_own_maps_the_arena(name: str) -> None:
    import torch

    from encoder_service.store.arena import Arena
    from encoder_service.store.host_memory import HostMemory

    inside = NAMESPACES[name]
    trial = subprocess.run([*inside, "true"], capture_output=True, text=True, timeout=30, check=False)
    if trial.returncode:
        pytest.skip(f"unshare is not allowed here: {trial.stderr.strip()}")
    arena = Arena(HostMemory(1 << 20), max_slots=8)
    slot = arena.allocate(arena.capacity_bytes)
    assert slot is not None
    rows = torch.frombuffer(bytearray(os.urandom(slot.num_bytes)), dtype=torch.uint8)
    arena.view(slot, (slot.num_bytes,), torch.uint8).copy_(rows)
    arena.publish(slot)
    geometry = arena.geometry
    probe = ProbeSlot(geometry.probe.offset_bytes, geometry.probe.num_bytes, geometry.probe.sha256)
    with running_broker() as rig:
        fds = arena.export_fd(), arena.export_page_fd()
        offer = ArenaOffer(geometry.arena_id, "host", geometry.size_bytes, geometry.page_bytes, probe=probe)
        rig.broker.offer(offer, *fds)
        for descriptor in fds:
            os.close(descriptor)
        with process("read", rig.path, inside=inside) as client:
            found = json.loads(client.says("found"))
        wait_until(lambda: len(rig.gone) == 1)
    arena.drop(slot)
    arena.close()
    assert found["pid"] < 100, "the client runs in a process namespace of its own"
    assert found["probe_matches"]
    assert found["page_agrees"]
    assert found["rows"] == hashlib.sha256(rows.numpy().tobytes()).hexdigest()
