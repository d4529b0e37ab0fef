"""The language model's side of the transport bench: fetches rows into buffers of its own, and times it.

Owns one call from its start to rows that are complete in the caller's buffer and checked, and the other ways
in which rows that are resident could come: leased over the broker's socket, or over gRPC. The floors over
host memory and gRPC are timed here too, so that they meet the same process.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from transport_cases import MIN_CALLS, OTHER_WAYS, in_turn, key_of, timed
from transport_floors import RawStreams, memcpy_calls
from transport_processes import serve_commands

from lm_adapter import EncodedRows, VisionEncoderClient

CONNECT_S = 60.0
# Of one call: the service takes no more by default.
MAX_KEYS = 256


class Caller:
    """One of several callers of one client, with a buffer of its own."""

    def __init__(self, client: VisionEncoderClient, num_bytes: int, count: int, number: int, on_gpu: bool):
        self._client = client
        self._num_bytes = num_bytes
        self._places = in_turn(count, number)
        self._out: Any
        self._stream: Any = None
        if on_gpu:
            import torch

            self._out = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
            self._stream = torch.cuda.Stream()
        else:
            self._out = np.ones(num_bytes, dtype=np.uint8)

    def fetch(self) -> EncodedRows:
        """What is timed: one item by its key, complete and checked in this caller's buffer."""
        return self._on_stream(lambda: self._fetch(out=[self._out]))

    def borrow_all(self, count: int) -> list[EncodedRows]:
        """Views of every item's rows where they lie."""
        found: list[EncodedRows] = []
        for start in range(0, count, MAX_KEYS):
            keys = [key_of(self._num_bytes, index) for index in range(start, min(start + MAX_KEYS, count))]
            for outcome in self._client.fetch(keys, borrow=True):
                if not isinstance(outcome, EncodedRows):
                    raise outcome
                found.append(outcome)
        return found

    def copy(self, borrowed: list[EncodedRows]) -> None:
        """The one part of a call that grows with the rows: out of the mapped memory into the buffer, with
        the wait for it."""
        source = borrowed[next(self._places)].payload
        if isinstance(source, np.ndarray):
            np.copyto(self._out, source)
            return
        import torch

        with torch.cuda.stream(self._stream):
            self._out.copy_(source, non_blocking=True)
        self._stream.synchronize()

    def check(self) -> None:
        """Raises ValueError unless the bytes are those that the encoder made."""
        rows = self.fetch()
        data = self._out if isinstance(self._out, np.ndarray) else self._out.cpu().numpy()
        if hashlib.sha256(data).digest() != rows.content_digest:
            raise ValueError(f"{self._num_bytes} bytes of rows are not those that were put there")

    def _fetch(self, **rows: Any) -> EncodedRows:
        (outcome,) = self._client.fetch([key_of(self._num_bytes, next(self._places))], **rows)
        if not isinstance(outcome, EncodedRows):
            raise outcome
        return outcome

    def _on_stream(self, fetch: Callable[[], EncodedRows]) -> EncodedRows:
        if self._stream is None:
            return fetch()
        import torch

        with torch.cuda.stream(self._stream):
            return fetch()


class Client:
    """Answers the bench's commands: ``connect``, then for each cell ``prepare`` and any number of
    ``measure``."""

    def __init__(self) -> None:
        self._clients: dict[str, VisionEncoderClient] = {}
        self._others: dict[tuple[str, str], VisionEncoderClient] = {}
        self._opened: list[VisionEncoderClient] = []
        self._raw: dict[str, RawStreams] = {}
        self._calls: dict[str, list[Callable[[], object]]] = {}
        self._callers: list[Caller] = []
        self._count = 0

    def connect(self, path: str, transport: str, target: str, on_gpu: bool) -> dict[str, Any]:
        """Raises EncoderError where the way of delivery is not possible."""
        if on_gpu:
            import torch

            torch.zeros(1, device="cuda")
        device = "cuda:0" if on_gpu else None

        def connected(**more: Any) -> VisionEncoderClient:
            client = VisionEncoderClient(
                target, timeout_s=CONNECT_S, transports=(transport,), device=device, **more
            )
            self._opened.append(client)
            choice = client.wait_transport()
            if choice.name != transport:
                raise ValueError(f"rows come by {choice.name}: {dict(choice.rejected) or choice.reason}")
            return client

        self._clients[path] = connected()
        if transport != "inline":
            for way in OTHER_WAYS:
                client = self._others[path, way] = connected(directory=False, local_calls=way != "grpc")
                if way == "grpc":  # as after a round trip of the socket that failed, for ever
                    client._session.resident._not_before_s = math.inf
        choice = self._clients[path].transport
        return {"reason": choice.reason, "resident": choice.resident}

    def prepare(
        self,
        path: str,
        num_bytes: int,
        count: int,
        concurrency: int,
        on_gpu: bool,
        floor: dict[str, Any] | None,
    ) -> dict[str, Any]:
        """Callers of one cell in place of the last one's, warm, their first rows compared with what the
        encoder put there. floor: what the floor needs that is measured here; None: it is not."""
        self._calls.clear()
        callers = [
            Caller(self._clients[path], num_bytes, count, number, on_gpu) for number in range(concurrency)
        ]
        for caller in callers:
            caller.check()
        self._calls["call"] = [caller.fetch for caller in callers]
        for way in OTHER_WAYS if concurrency == 1 else ():
            if (path, way) in self._others:
                other = Caller(self._others[path, way], num_bytes, count, 0, on_gpu)
                other.check()
                self._calls[way] = [other.fetch]
        self._callers = callers
        self._count = count
        if floor is not None and "raw_target" in floor:
            if path not in self._raw:
                self._raw[path] = RawStreams(floor["raw_target"])
            self._calls["floor"] = self._raw[path].calls(num_bytes, floor["count"], concurrency)
        elif floor is not None:
            self._calls["floor"] = memcpy_calls(num_bytes, floor["resident_bytes"], concurrency)
        for calls in self._calls.values():
            timed(calls, budget_s=0, max_calls=MIN_CALLS)
        return {}

    def measure(self, what: str, budget_s: float, max_calls: int) -> dict[str, Any]:
        """what: ``call``, ``floor``, or one of OTHER_WAYS."""
        found = timed(self._calls[what], budget_s=budget_s, max_calls=max_calls)
        return {"calls_ms": found.calls_ms, "wall_s": found.wall_s}

    def measure_copy(self, budget_s: float, max_calls: int) -> dict[str, Any]:
        """The first caller's copies alone, under leases on all items."""
        caller = self._callers[0]
        borrowed = caller.borrow_all(self._count)
        try:
            found = timed([lambda: caller.copy(borrowed)], budget_s=budget_s, max_calls=max_calls)
        finally:
            for rows in borrowed:
                rows.confirm()
        return {"calls_ms": found.calls_ms, "wall_s": found.wall_s}

    def close(self) -> None:
        for client in self._opened:
            client.close()
        for streams in self._raw.values():
            streams.close()


def main() -> None:
    client = Client()
    serve_commands(
        {
            "connect": client.connect,
            "prepare": client.prepare,
            "measure": client.measure,
            "measure_copy": client.measure_copy,
        }
    )
    client.close()


if __name__ == "__main__":
    main()
