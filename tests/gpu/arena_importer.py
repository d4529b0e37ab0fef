"""The other process of the arena's GPU tests: maps what it is sent over a socket, with one GPU in sight.

Run as ``arena_importer.py <descriptor of a unix socket>``. Each request is one JSON message, that to map with
the arena's three descriptors and its geometry in hexadecimal; each reply is one JSON message.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sys
from typing import Any

import torch

from lm_adapter.shm.broker import Attachment
from lm_adapter.shm.reader import MappedArena
from vision_encoder.layout.control_page import CLOSED_WORD, FIRST_GENERATION_WORD
from vision_encoder.v1 import broker_pb2

MAX_MESSAGE_BYTES = 1 << 16
DEVICE = torch.device("cuda:0")


def allocator_state() -> dict[str, int]:
    """Bytes and allocations that the caching allocator counts."""
    return {key: int(value) for key, value in torch.cuda.memory_stats(DEVICE).items()}


class Importer:
    def __init__(self) -> None:
        self.arena: MappedArena | None = None
        self.number = torch.ones(1024, device=DEVICE)
        self.doubled = torch.zeros_like(self.number)
        self.graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.mul(self.number, 2, out=self.doubled)
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph):
            torch.mul(self.number, 2, out=self.doubled)

    def mapped(self) -> MappedArena:
        assert self.arena is not None
        return self.arena

    def earlier_graph_is_right(self) -> bool:
        """The graph that was captured before anything was mapped."""
        self.number.add_(1)
        self.graph.replay()
        return bool((self.doubled == self.number * 2).all())

    def map(self, request: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        torch.cuda.synchronize()
        before = allocator_state()
        geometry = broker_pb2.ArenaGeometry.FromString(bytes.fromhex(request["geometry"]))
        self.arena = MappedArena(Attachment(geometry, *fds), "", DEVICE)
        for fd in fds:
            os.close(fd)
        is_unchanged = allocator_state() == before
        self.arena.check_probe(broker_pb2.BrokerProbeSlot.FromString(bytes.fromhex(request["probe"])))
        return {
            "num_devices": torch.cuda.device_count(),
            "pid": os.getpid(),
            "allocator_unchanged": is_unchanged,
            "graph": self.earlier_graph_is_right(),
        }

    def read(self, request: dict[str, Any]) -> dict[str, Any]:
        """By the read rules; digest: None for rows that changed."""
        rows = self.mapped().read(
            request["slot"], request["generation"], request["offset"], request["num_bytes"]
        )
        if rows is None:
            return {"digest": None}
        assert isinstance(rows, torch.Tensor)
        assert rows.device == DEVICE
        return {"digest": hashlib.sha256(bytes(rows.cpu().numpy())).hexdigest()}

    def race(self, request: dict[str, Any]) -> dict[str, Any]:
        """Reads one slot again and again while the exporter rewrites it, until the arena is closed."""
        arena = self.mapped()
        whole = lost = wrong = 0
        while not arena._page[CLOSED_WORD]:
            generation = arena._page[FIRST_GENERATION_WORD + request["slot"]]
            rows = arena.read(request["slot"], generation, request["offset"], request["num_bytes"])
            if rows is None:
                lost += generation % 2
            else:
                whole += 1
                wrong += not bool((rows == rows[0]).all())
        return {"whole": whole, "lost": lost, "wrong": wrong}

    def write(self, request: dict[str, Any]) -> dict[str, Any]:
        """Tries to write through the mapping."""
        from cuda.bindings import driver

        address = self.mapped()._memory._address + request["offset"]  # type: ignore[union-attr]
        (status,) = driver.cuMemsetD8(address, 0xFF, request["num_bytes"])
        return {"status": int(status), "graph": self.earlier_graph_is_right()}

    def unmap(self, request: dict[str, Any]) -> dict[str, Any]:
        self.mapped().unmap(10.0)
        return {"graph": self.earlier_graph_is_right()}


def serve(connection: socket.socket) -> None:
    importer = Importer()
    connection.sendall(json.dumps({"ready": True}).encode())
    while True:
        message, fds, _, _ = socket.recv_fds(connection, MAX_MESSAGE_BYTES, 3)
        if not message:
            return
        request = json.loads(message)
        reply = importer.map(request, fds) if fds else getattr(importer, request["do"])(request)
        connection.sendall(json.dumps(reply).encode())


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        serve(connection)
