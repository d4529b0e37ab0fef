"""The other process of the arena's GPU tests: it maps the arena through a broker, with one GPU in sight.

Run as ``python -m tests.gpu.arena_reader BROKER_PATH``. It reads one command in JSON from each line of its
input and answers with one line. A CUDA graph that was captured before anything was mapped is replayed with
every answer.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from typing import Any

import torch

from lm_adapter.shm.broker import BrokerConnection
from lm_adapter.shm.reader import MappedArena
from vision_encoder.layout.control_page import CLOSED_WORD, FIRST_GENERATION_WORD

DEVICE = torch.device("cuda:0")


class ArenaReader:
    """One process that maps one arena."""

    def __init__(self, path: str) -> None:
        self.number = torch.ones(1024, device=DEVICE)
        self.doubled = torch.zeros_like(self.number)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            torch.mul(self.number, 2, out=self.doubled)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            torch.mul(self.number, 2, out=self.doubled)
        self.connection = BrokerConnection(path, namespace="", token="", timeout_s=10)
        (geometry,) = self.connection.welcome.arenas
        with self.connection.attach(geometry.arena_id) as attachment:
            self.arena = MappedArena(attachment, "", DEVICE)
        self.arena.check_probe(self.connection.probe(geometry.arena_id))

    def earlier_graph_is_right(self) -> bool:
        self.number.add_(1)
        self.graph.replay()
        return bool((self.doubled == self.number * 2).all())

    def state(self) -> dict[str, Any]:
        return {"pid": os.getpid(), "num_devices": torch.cuda.device_count()}

    def read(self, slot_index: int, generation: int, offset_bytes: int, num_bytes: int) -> dict[str, Any]:
        """SHA-256 of a copy; None for a lost one."""
        copied = self.arena.read(slot_index, generation, offset_bytes, num_bytes)
        if copied is None:
            return {"digest": None}
        assert isinstance(copied, torch.Tensor)
        return {"digest": hashlib.sha256(bytes(copied.cpu().numpy())).hexdigest()}

    def race(self, slot_index: int, offset_bytes: int, num_bytes: int) -> dict[str, Any]:
        """Reads one slot again and again while it is rewritten, until the connection ends. Rows of one
        generation are all alike."""
        words = self.arena._page
        seen = {"whole": 0, "lost": 0, "wrong": 0}
        while not words[CLOSED_WORD]:
            generation = words[FIRST_GENERATION_WORD + slot_index]
            if generation % 2 == 0:
                continue  # the generation to come is listed and announced only once its rows are whole
            copied = self.arena.read(slot_index, generation, offset_bytes, num_bytes)
            if copied is None:
                seen["lost"] += 1
            else:
                is_whole = bool((copied == copied[0]).all())
                seen["whole" if is_whole else "wrong"] += 1
        return seen

    def write(self, offset_bytes: int, num_bytes: int) -> dict[str, Any]:
        """Tries to write through the mapping."""
        from cuda.bindings import driver

        memory: Any = self.arena._memory
        (status,) = driver.cuMemsetD8(memory._address + offset_bytes, 0xFF, num_bytes)
        return {"status": int(status)}


def main(path: str) -> None:
    reader = ArenaReader(path)
    print(json.dumps(reader.state()), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        answer = getattr(reader, command.pop("do"))(**command)
        print(json.dumps({**answer, "graph": reader.earlier_graph_is_right()}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
