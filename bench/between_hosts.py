"""Times rows between two hosts, inline and by the engines of Mooncake and NIXL, over TCP, in one run.

    pip install --target build/nixl --no-deps nixl-cu12==1.5.1
    PYTHONPATH=build/nixl .venv-tokenspeed/bin/python bench/between_hosts.py   # two minutes; root and ``ip``

A host is a network namespace; a veth pair connects the two. Each path has an encoder and a reader. A call
copies one item to the reader's own memory; its time is by the reader's clock. The engines know where the item
is, and the inline client asks the service for it. ``nixl_shm`` may use the shared memory of the one machine.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from measurement import RESULTS, ROOT, ResultFile, describe_environment, percentile
from processes import IMAGE_MALLOC, START_S, Process, serve_commands
from transport_peers import Caller, Encoder, connected, timed

from tests.chaos.pods import environment

PACKAGES = ("mooncake-transfer-engine-non-cuda", "nixl-cu12", "grpcio", "protobuf")
# Each path with variables of its processes.
PATHS: dict[str, dict[str, str]] = {
    "socket": {},
    "inline": {},
    "mooncake": {},
    "nixl": {"UCX_TLS": "tcp"},
    "nixl_shm": {"UCX_TLS": "all"},
}
MIB = 1 << 20
# Bytes of an item, and how many of them the encoder holds: calls take them in turns, so that no CPU cache
# holds the large ones. The smallest shows what a call costs besides its bytes.
ITEMS = {4096: 64, 3 * MIB: 64, 32 * MIB: 6}
RESIDENT_BYTES = max(num_bytes * count for num_bytes, count in ITEMS.items())
CALLS = 5
HOSTS = {"ve-encoder": "10.231.0.1", "ve-reader": "10.231.0.2"}
ENCODER_IP, READER_IP = HOSTS.values()

Bytes: TypeAlias = np.ndarray[Any, Any]
# Returns once this many bytes of the encoder's rows, from an offset on, are in the reader's memory.
Read: TypeAlias = Callable[[int, int], object]


# -- paths: ``hold_...`` returns what the reader takes ---------------------------------------------------


def hold_socket(rows: Bytes) -> dict[str, Any]:
    listening = socket.create_server((ENCODER_IP, 0))

    def serve() -> None:
        connection, _ = listening.accept()
        while request := connection.recv(16, socket.MSG_WAITALL):
            offset, num_bytes = struct.unpack("<QQ", request)
            connection.sendall(rows[offset : offset + num_bytes])

    threading.Thread(target=serve, daemon=True).start()
    return {"port": listening.getsockname()[1]}


def socket_reader(target: Bytes, port: int) -> Read:
    connection = socket.create_connection((ENCODER_IP, port))

    def read(offset: int, num_bytes: int) -> None:
        connection.sendall(struct.pack("<QQ", offset, num_bytes))
        missing = memoryview(target)[:num_bytes]
        while missing:
            missing = missing[connection.recv_into(missing) :]

    return read


def hold_inline() -> dict[str, Any]:
    """The whole service, with rows of its own."""
    encoder = Encoder()
    found = encoder.start("host", tempfile.mkdtemp(), len(ITEMS) * RESIDENT_BYTES, ENCODER_IP)
    for num_bytes, count in ITEMS.items():
        encoder.fill(num_bytes, num_bytes * count)
    return {"address": found["tcp"]}


def inline_reader(address: str) -> Read:
    client = connected(address, "inline", False, "inline")
    callers = {
        num_bytes: Caller(client, num_bytes, count, on_gpu=False) for num_bytes, count in ITEMS.items()
    }
    for caller in callers.values():
        caller.check()
    return lambda _, num_bytes: callers[num_bytes].fetch()


def mooncake_engine(memory: Bytes, host: str) -> Any:
    from mooncake.engine import TransferEngine

    engine = TransferEngine()
    status = engine.initialize(host, "P2PHANDSHAKE", "tcp", "")
    if status or engine.register_memory(memory.ctypes.data, memory.nbytes):
        raise OSError("Mooncake does not start")
    return engine


def mooncake_reader(target: Bytes, session: str, address: int) -> Read:
    engine = mooncake_engine(target, READER_IP)

    def read(offset: int, num_bytes: int) -> None:
        if engine.transfer_sync_read(session, target.ctypes.data, address + offset, num_bytes):
            raise OSError("Mooncake does not read")

    return read


def nixl_agent_of(memory: Bytes, name: str) -> Any:
    from nixl_cu12._api import nixl_agent, nixl_agent_config

    agent = nixl_agent(name, nixl_agent_config(backends=["UCX"]))
    agent.register_memory([torch.from_numpy(memory)])
    return agent


def nixl_reader(target: Bytes, metadata: str, address: int) -> Read:
    agent = nixl_agent_of(target, "reader")
    encoder = agent.add_remote_agent(bytes.fromhex(metadata))

    def read(offset: int, num_bytes: int) -> None:
        here, there = (
            agent.get_xfer_descs([(start, num_bytes, 0)], mem_type="DRAM")
            for start in (target.ctypes.data, address + offset)
        )
        transfer = agent.initialize_xfer("READ", here, there, encoder)
        state = agent.transfer(transfer)
        while state not in ("DONE", "ERR"):
            state = agent.check_xfer_state(transfer)
        agent.release_xfer_handle(transfer)
        if state == "ERR":
            raise OSError("NIXL does not read")

    return read


# -- processes -------------------------------------------------------------------------------------------


class Side:
    """What a process of a path does: the encoder's ``hold``, or the reader's ``connect`` and ``measure``."""

    def __init__(self, path: str) -> None:
        self._path = path.removesuffix("_shm")
        # Equal on both sides.
        self._rows = np.random.default_rng(0).integers(0, 256, RESIDENT_BYTES, dtype=np.uint8)

    def hold(self) -> dict[str, Any]:
        rows = self._rows
        match self._path:
            case "socket":
                return hold_socket(rows)
            case "inline":
                return hold_inline()
            case "mooncake":
                self._engine = mooncake_engine(rows, ENCODER_IP)
                place = {"session": f"{ENCODER_IP}:{self._engine.get_rpc_port()}"}
            case _:
                self._engine = nixl_agent_of(rows, "encoder")
                place = {"metadata": self._engine.get_agent_metadata().hex()}
        return place | {"address": rows.ctypes.data}

    def connect(self, **place: Any) -> None:
        """Raises ValueError if the bytes that come are not the encoder's."""
        if self._path == "inline":
            self._read = inline_reader(**place)
            return
        target = np.zeros(max(ITEMS), np.uint8)
        readers = {"socket": socket_reader, "mooncake": mooncake_reader, "nixl": nixl_reader}
        self._read = readers[self._path](target, **place)
        self._read(len(target), len(target))
        if not np.array_equal(target, self._rows[len(target) : 2 * len(target)]):
            raise ValueError(f"the {len(target)} bytes that came are not those of the encoder")

    def measure(self, num_bytes: int) -> dict[str, Any]:
        self._read(0, num_bytes)  # the first after a pause
        indices = itertools.cycle(range(1, ITEMS[num_bytes]))
        call = lambda: self._read(next(indices) * num_bytes, num_bytes)  # noqa: E731
        return {"calls_ms": timed(call, budget_s=60, max_calls=CALLS)}


class Peer(Process):
    """A process on one of the hosts."""

    def __init__(self, host: str, path: str, folder: str) -> None:
        self._name = f"{path} on {host}"
        variables = {**environment(""), **IMAGE_MALLOC, **PATHS[path], "TMPDIR": folder}
        variables["PYTHONPATH"] += f":{ROOT / 'bench'}"
        self.process = subprocess.Popen(
            ["ip", "netns", "exec", host, sys.executable, "-m", "between_hosts", "--peer", path],
            env=variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    @property
    def pid(self) -> int:
        return self.process.pid


@contextlib.contextmanager
def running(*peers: Peer) -> Iterator[None]:
    """The others are stopped: NIXL takes a core even while it has nothing to do."""
    for peer in peers:
        peer.signal(signal.SIGCONT)
    yield
    for peer in peers:
        peer.signal(signal.SIGSTOP)


@contextlib.contextmanager
def two_hosts() -> Iterator[None]:
    def ip(command: str) -> None:
        subprocess.run(["ip", *command.split()], check=True, timeout=30)

    encoder, reader = HOSTS
    try:
        for host in HOSTS:
            ip(f"netns add {host}")
        ip(f"link add veth0 netns {encoder} type veth peer name veth0 netns {reader}")
        for host, address in HOSTS.items():
            ip(f"-n {host} address add {address}/30 dev veth0")
            for link in ("lo", "veth0"):
                ip(f"-n {host} link set {link} up")
        yield
    finally:
        for host in HOSTS:
            ip(f"netns delete {host}")


# -- the run ---------------------------------------------------------------------------------------------


def measure(num_rounds: int) -> dict[tuple[str, int], list[float]]:
    """Milliseconds of calls by path and size. Every round has all of them, in a new order."""
    cells = list(itertools.product(PATHS, ITEMS))
    calls_ms: dict[tuple[str, int], list[float]] = {cell: [] for cell in cells}
    with tempfile.TemporaryDirectory() as folder, two_hosts(), ExitStack() as stack:
        peers = {path: [stack.enter_context(Peer(host, path, folder)) for host in HOSTS] for path in PATHS}
        for encoder, reader in peers.values():
            with running(encoder, reader):
                reader.ask("connect", timeout_s=START_S, **encoder.ask("hold", timeout_s=START_S))
        for number in range(num_rounds):
            random.Random(number).shuffle(cells)
            for path, num_bytes in cells:
                with running(*peers[path]):
                    found = peers[path][1].ask("measure", num_bytes=num_bytes)
                calls_ms[path, num_bytes] += found["calls_ms"]
    return calls_ms


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20, help=f"of {CALLS} calls")
    parser.add_argument("--commit", help="the commit measured, where git cannot tell")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result file")
    parser.add_argument("--peer", choices=PATHS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peer:
        side = Side(arguments.peer)
        serve_commands({name: getattr(side, name) for name in ("hold", "connect", "measure")})
        return
    machine = describe_environment(torch.device("cpu"), arguments.commit, PACKAGES)
    settings = {
        "rounds": arguments.rounds,
        "resident_mib": RESIDENT_BYTES // MIB,
        "num_cores": os.cpu_count(),
        "malloc": IMAGE_MALLOC,
    }
    records = [
        {
            "path": path,
            "bytes": num_bytes,
            "median_ms": statistics.median(found),
            "p99_ms": percentile(found, 0.99),
            "min_ms": min(found),
            "num_calls": len(found),
        }
        for (path, num_bytes), found in measure(arguments.rounds).items()
    ]
    ResultFile(arguments.out, "between-hosts", machine | {"settings": settings, "records": records})
    for record in records:
        print("{path:8} {bytes:9} bytes {median_ms:8.3f} ms".format(**record))


if __name__ == "__main__":
    main()
