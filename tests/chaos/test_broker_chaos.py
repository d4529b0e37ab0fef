"""The broker under bad clients, and a reader in namespaces of its own, as in another pod."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.unit.transport.broker_rig import (
    RawClient,
    num_descriptors,
    running_broker,
    small_arena,
)
from tests.waiting import wait_until
from vision_encoder.v1 import broker_pb2 as pb

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}", "OMP_NUM_THREADS": "1"}
ISOLATED = ("unshare", "--pid", "--fork", "--mount-proc", "--ipc", "--mount", "--net")

READER = """
import sys
from tests.reference_reader import ReferenceReader
from tests.unit.transport.broker_rig import RawClient

with RawClient(sys.argv[1]) as client:
    (geometry,) = client.welcome.arenas
    client.attach(geometry.arena_id)
    descriptors, client.descriptors = tuple(client.descriptors), []
    with ReferenceReader(descriptors, geometry.arena_id) as reader:
        probe = reader.header.probe
        data = reader.data[probe.offset_bytes : probe.offset_bytes + probe.num_bytes]
        record = reader.find("", bytes(32))
        rows = record and reader.read(record)
        print("read", probe.matches(data), rows == b"\\7" * 4096, flush=True)
"""


@pytest.mark.parametrize("inside", [(), ISOLATED], ids=["this host", "another pod"])
def test_p25_a_reader_maps_the_arena_through_the_socket_alone(inside: tuple[str, ...]) -> None:
    import torch

    from encoder_service.types import EncodedItem, Grid

    if inside and subprocess.run([*inside, "true"], capture_output=True, check=False).returncode:
        pytest.skip("new namespaces are not permitted here")
    with small_arena() as arena:
        slot = arena.allocate(4096)
        assert slot is not None
        rows = arena.view(slot, (4, 1024), torch.uint8).fill_(7).view(torch.float32)
        arena.publish(slot)
        arena.index(slot, "", EncodedItem(bytes(32), bytes(32), Grid(1, 4, 4), rows, 0))
        with running_broker((None, arena)) as broker:
            done = subprocess.run(
                [*inside, sys.executable, "-c", READER, broker.options.path],
                capture_output=True,
                text=True,
                env=ENVIRONMENT,
                timeout=60,
                check=False,
            )
        assert done.stdout == "read True True\n", done.stderr


def make_trouble(path: str, arena_id: bytes, seed: int, until_s: float) -> None:
    """One kind of abuse after the other, at random; some connections stay open."""
    chance = random.Random(seed)
    with contextlib.ExitStack() as kept:
        num_kept = 0
        while time.monotonic() < until_s:
            with contextlib.suppress(OSError, AssertionError), contextlib.ExitStack() as stack:
                client = stack.enter_context(RawClient(path, greet=chance.random() < 0.5))
                frame = client.frame(attach=pb.BrokerAttach(arena_id=arena_id, layout_version=2))
                match chance.randrange(4):
                    case 0:
                        client.socket.sendall(chance.randbytes(chance.randrange(1, 400)))
                    case 1:
                        client.socket.sendall(frame[: chance.randrange(1, len(frame))])
                    case 2:
                        client.socket.sendall(frame * chance.randrange(1, 300))
                    case 3:
                        socket.send_fds(client.socket, [frame], [0] * chance.randrange(1, 20))
                if num_kept < 40 and chance.random() < 0.2:
                    num_kept += 1
                    kept.push(stack.pop_all())


def test_p33_a_storm_of_bad_clients_does_not_reach_a_good_one() -> None:
    with small_arena() as arena, running_broker((None, arena)) as broker:
        path = broker.options.path
        gc.collect()  # what earlier tests dropped
        before, ends_s = num_descriptors(), time.monotonic() + 2
        storm = [
            threading.Thread(target=make_trouble, args=(path, arena.arena_id, seed, ends_s))
            for seed in range(4)
        ]
        for thread in storm:
            thread.start()
        num_good = 0
        while time.monotonic() < ends_s:
            with RawClient(path) as good:
                assert good.attach(arena.arena_id).num_descriptors == 3
            num_good += 1
        for thread in storm:
            thread.join()
        assert num_good
        wait_until(lambda: num_descriptors() <= before)
