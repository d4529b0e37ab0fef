"""The other process of the arena's GPU tests: maps what it is sent over a socket, with one GPU in sight.

Run as ``arena_importer.py <descriptor of a unix socket>``. Each request is one JSON message, that to map with
the arena's two descriptors; each reply is one JSON message.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import socket
import sys
from typing import Any

import torch

from lm_adapter.transport.control_page import ControlPageReader
from lm_adapter.transport.mapping import Mapping, device_uuid, map_device

MAX_MESSAGE_BYTES = 1 << 16
DEVICE = torch.device("cuda:0")


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(bytes(tensor.cpu().numpy())).hexdigest()


def allocator_state() -> dict[str, int]:
    """What the caching allocator counts, of all kinds."""
    return {key: int(value) for key, value in torch.cuda.memory_stats(DEVICE).items()}


class Importer:
    def __init__(self) -> None:
        self.mapping: Mapping | None = None
        self.page: ControlPageReader | None = None
        self.number = torch.ones(1024, device=DEVICE)
        self.doubled = torch.zeros_like(self.number)
        self.graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.mul(self.number, 2, out=self.doubled)
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph):
            torch.mul(self.number, 2, out=self.doubled)
        self.copy_graph: torch.cuda.CUDAGraph | None = None
        self.copied = torch.empty(0, dtype=torch.uint8, device=DEVICE)

    def rows(self, request: dict[str, Any]) -> torch.Tensor:
        assert self.mapping is not None
        return self.mapping.tensor[request["offset"] : request["offset"] + request["num_bytes"]]

    def earlier_graph_is_right(self) -> bool:
        """The graph that was captured before anything was mapped."""
        self.number.add_(1)
        self.graph.replay()
        return bool((self.doubled == self.number * 2).all())

    def map(self, request: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        torch.cuda.synchronize()
        before = allocator_state()
        self.mapping = map_device(fds[0], request["size_bytes"], DEVICE)
        self.page = ControlPageReader(
            fds[1], request["page_bytes"], arena_id=bytes.fromhex(request["arena_id"])
        )
        for fd in fds:
            os.close(fd)
        probe = self.page.probe
        unchanged = allocator_state() == before
        data = self.mapping.tensor[probe.offset_bytes : probe.offset_bytes + probe.num_bytes].cpu()
        return {
            "uuid": device_uuid(DEVICE),
            "num_devices": torch.cuda.device_count(),
            "pid": os.getpid(),
            "device": str(self.mapping.tensor.device),
            "probe": probe.matches(bytes(data.numpy())),
            "allocator_unchanged": unchanged,
            "graph": self.earlier_graph_is_right(),
        }

    def read(self, request: dict[str, Any]) -> dict[str, Any]:
        """A copy on a side stream, judged after it is complete."""
        assert self.page is not None
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            copied = self.rows(request).clone()
        stream.synchronize()
        return {
            "digest": digest(copied),
            "unchanged": self.page.unchanged(request["slot"], request["generation"]),
        }

    def capture(self, request: dict[str, Any]) -> dict[str, Any]:
        """A copy out of the mapping as a graph of this process."""
        self.copied = torch.zeros(request["num_bytes"], dtype=torch.uint8, device=DEVICE)
        self.copy_graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(self.copy_graph):
            self.copied.copy_(self.rows(request))
        return {"empty": not bool(self.copied.any())}

    def replay(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self.copy_graph is not None
        self.copy_graph.replay()
        torch.cuda.synchronize()
        return {"digest": digest(self.copied), "graph": self.earlier_graph_is_right()}

    def race(self, request: dict[str, Any]) -> dict[str, Any]:
        """Copies one slot again and again while the exporter rewrites it, until the arena is closed."""
        assert self.page is not None
        whole = stale = mixed = wrong = 0
        rows = self.rows(request)
        while not self.page.closed:
            generation = self.page._words[16 + request["slot"]]
            copied = rows.clone()
            torch.cuda.synchronize()
            unchanged = self.page.unchanged(request["slot"], generation)
            is_whole = bool((copied == copied[0]).all())
            whole += unchanged
            stale += not unchanged
            mixed += not is_whole
            wrong += unchanged and not is_whole
        return {"whole": whole, "stale": stale, "mixed": mixed, "wrong": wrong}

    def write(self, request: dict[str, Any]) -> dict[str, Any]:
        """Tries to, and to map the same address for writing."""
        from cuda.bindings import driver

        (status,) = driver.cuMemsetD8(self.rows(request).data_ptr(), 0xFF, request["num_bytes"])
        return {"status": int(status), "graph": self.earlier_graph_is_right()}

    def unmap(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self.mapping is not None
        assert self.page is not None
        mapping, self.mapping, self.copy_graph = self.mapping, None, None
        mapping.close()
        self.page.close()
        gc.collect()
        return {"mapped": mapping.mapped, "graph": self.earlier_graph_is_right()}


def serve(connection: socket.socket) -> None:
    importer = Importer()
    connection.sendall(json.dumps({"ready": True}).encode())
    while True:
        message, fds, _, _ = socket.recv_fds(connection, MAX_MESSAGE_BYTES, 2)
        if not message:
            return
        request = json.loads(message)
        if request["do"] == "map":
            reply = importer.map(request, fds)
        else:
            reply = getattr(importer, request["do"])(request)
        connection.sendall(json.dumps(reply).encode())


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        serve(connection)
