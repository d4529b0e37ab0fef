"""The processes of the transport bench: an encoder, a client, and a raw gRPC server.

Owns the items that they share, which depend only on a size; one timed call, from its start to complete rows
in the caller's memory; and the floors: plain copies of the same bytes, and a gRPC stream of existing bytes
without serialisers.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import itertools
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from bench.harness.children import START_S, serve_commands

# Rows of the served checkpoint take 256 bytes. Multiples of a page fit every width.
STEP_BYTES = 4096
MIN_RESIDENT = 3
MIN_CALLS = 3
CALL_TIMEOUT_S = 60.0
HOST_TIER_BYTES = 64 << 20
STREAM = "/bench.Raw/Stream"
RAW_OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


# -- items and timing ------------------------------------------------------------------------------------


def bytes_of(size_mib: float) -> int:
    """The number of bytes of one item's rows: the size rounded down to a multiple of a page."""
    return int(size_mib * (1 << 20)) // STEP_BYTES * STEP_BYTES


def num_resident(num_bytes: int, resident_bytes: int) -> int:
    """The number of items of a size that are used in rotation, so that no CPU cache can hold all of them."""
    return max(MIN_RESIDENT, -(-resident_bytes // num_bytes))


def key_of(num_bytes: int, index: int) -> bytes:
    """The embedding key of the index-th item of a size."""
    return hashlib.sha256(f"{num_bytes} bytes, item {index}".encode()).digest()


def timed(call: Callable[[], object], *, budget_s: float, max_calls: int) -> list[float]:
    """Milliseconds of every call. Ends when the budget is spent and MIN_CALLS were made, or after max_calls.
    Raises the call's error."""
    found: list[float] = []
    now_s = time.perf_counter()
    ends_s = now_s + budget_s
    while len(found) < max_calls and (now_s < ends_s or len(found) < MIN_CALLS):
        begun_s = now_s
        call()
        now_s = time.perf_counter()
        found.append((now_s - begun_s) * 1e3)
    return found


# -- floors ----------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1)
def random_rows(count: int, num_bytes: int) -> np.ndarray[Any, Any]:
    words = np.random.default_rng().integers(0, 1 << 64, (count, num_bytes // 8), dtype=np.uint64)
    return words.view(np.uint8)


def memcpy_call(num_bytes: int, resident_bytes: int) -> Callable[[], object]:
    """Copies to a warm buffer, from as many bytes as the encoder holds."""
    source = random_rows(num_resident(num_bytes, resident_bytes), num_bytes)
    target, indices = np.ones(num_bytes, dtype=np.uint8), itertools.cycle(range(len(source)))
    return lambda: np.copyto(target, source[next(indices)])


class DeviceCopies:
    """Copies within one GPU, or between two GPUs that this process sees."""

    def __init__(self, source: int, target: int, num_bytes: int, resident_bytes: int) -> None:
        import torch

        self._torch = torch
        count = num_resident(num_bytes, resident_bytes)
        self._indices = itertools.cycle(range(count))
        self._rows = torch.randint(
            0, 256, (count, num_bytes), dtype=torch.uint8, device=torch.device("cuda", source)
        )
        torch.cuda.synchronize(self._rows.device)
        self._target = torch.empty(num_bytes, dtype=torch.uint8, device=torch.device("cuda", target))
        self._stream = torch.cuda.Stream(self._target.device)

    def call(self) -> None:
        """Makes one copy on a stream of its own and waits for it."""
        with self._torch.cuda.stream(self._stream):
            self._target.copy_(self._rows[next(self._indices)], non_blocking=True)
        self._stream.synchronize()


class RawStreams:
    """A caller of the raw server, with one channel, like a client of the service."""

    def __init__(self, target: str) -> None:
        self._channel = grpc.insecure_channel(target, options=RAW_OPTIONS)
        self._start: Any = self._channel.unary_stream(STREAM)

    def call(self, num_bytes: int, count: int) -> Callable[[], object]:
        indices = itertools.cycle(range(count))

        def call() -> None:
            request = next(indices).to_bytes(4, "big")
            received = sum(len(chunk) for chunk in self._start(request, timeout=CALL_TIMEOUT_S))
            if received != num_bytes:
                raise ValueError(f"{received} bytes came, {num_bytes} were sent")

        return call

    def close(self) -> None:
        self._channel.close()


class RawServer:
    """Serves streams of bytes objects with grpc.aio, as the service does."""

    def __init__(self) -> None:
        self._payloads: list[list[bytes]] = []
        self._started = threading.Event()
        self._addresses: dict[str, Any] = {}

    def start(self, folder: str) -> dict[str, Any]:
        threading.Thread(target=lambda: asyncio.run(self._main(folder)), daemon=True).start()
        if not self._started.wait(START_S):
            raise TimeoutError("the raw server did not start")
        return self._addresses

    def fill(self, num_bytes: int, resident_bytes: int, chunk_bytes: int) -> None:
        """Replaces the payloads with random ones of this size."""
        self._payloads.clear()
        random = np.random.default_rng()
        for _ in range(num_resident(num_bytes, resident_bytes)):
            sizes = [min(chunk_bytes, num_bytes - start) for start in range(0, num_bytes, chunk_bytes)]
            self._payloads.append([random.bytes(size) for size in sizes])

    async def _main(self, folder: str) -> None:
        server = grpc.aio.server(options=RAW_OPTIONS)

        async def stream(request: bytes, _: Any) -> Any:
            for chunk in self._payloads[int.from_bytes(request, "big")]:
                yield chunk

        _, service, method = STREAM.split("/")
        handlers: dict[str, Any] = {method: grpc.unary_stream_rpc_method_handler(stream)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
        uds = f"unix:{folder}/raw.sock"
        server.add_insecure_port(uds)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        self._addresses = {"uds": uds, "tcp": f"127.0.0.1:{port}"}
        self._started.set()
        await server.wait_for_termination()


# -- the encoder -----------------------------------------------------------------------------------------


class Encoder:
    """The whole service, with rows written to its store, on an event loop in a thread. Its tower is the
    smallest one and never runs, because only delivery is measured."""

    def __init__(self) -> None:
        self._started = threading.Event()
        self._error: BaseException | None = None
        self._thread: threading.Thread
        self._service: Any
        self._loop: asyncio.AbstractEventLoop

    def start(self, kind: str, folder: str, num_bytes: int, address: str = "127.0.0.1") -> dict[str, Any]:
        """kind: ``host`` or ``device``, the memory of the rows. folder: for the sockets and the checkpoint,
        not shared with another encoder. num_bytes: total size of the rows that it will hold. address: that it
        listens at."""
        from encoder_service.checkpoints.synthetic import make_checkpoint
        from encoder_service.config import parse_settings
        from encoder_service.ops.logs import configure_logs

        root = Path(folder)
        make_checkpoint(root / "model", "qwen3_5", "tiny", 0)
        configure_logs("text", "warning", sys.stderr)
        settings = parse_settings(
            model=root / "model",
            device="cuda:0" if kind == "device" else "cpu",
            dtype="float32",
            tower="plain",
            listen=(f"unix:{root}/grpc.sock", f"{address}:0"),
            admin_listen="",
            broker_path=f"{root}/broker.sock",
            torch_threads=1,
            drain_grace_s=1,
            **arenas_for(kind, num_bytes),
        )
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main(settings)), daemon=True)
        self._thread.start()
        if not self._started.wait(START_S):
            raise TimeoutError(f"the service did not start within {START_S:g} s")
        if self._error is not None:
            raise self._error
        from encoder_service.rpc.convert import CHUNK_BYTES

        uds, tcp = self._service.listen
        return {"uds": uds, "tcp": tcp, "chunk_bytes": CHUNK_BYTES}

    def fill(self, num_bytes: int, resident_bytes: int) -> None:
        """Makes items of this size resident. They are random bytes; the content digest is their SHA-256."""
        random = np.random.default_rng()
        for index in range(num_resident(num_bytes, resident_bytes)):
            data = random.integers(0, 1 << 64, num_bytes // 8, dtype=np.uint64).view(np.uint8)
            kept = asyncio.run_coroutine_threadsafe(self._keep(key_of(num_bytes, index), data), self._loop)
            kept.result(CALL_TIMEOUT_S)

    def deliveries(self) -> dict[str, Any]:
        """Items that the service has delivered over gRPC, by transport. Rows that a reader found in the
        directory are not counted."""
        samples = self._service.metrics.deliveries.collect()[0].samples
        return {one.labels["transport"]: one.value for one in samples if one.name.endswith("_total")}

    def stop(self) -> None:
        if self._started.is_set() and self._error is None:
            self._loop.call_soon_threadsafe(self._service.request_stop)
            self._thread.join(10)

    async def _main(self, settings: Any) -> None:
        from encoder_service.serve import Service

        self._loop = asyncio.get_running_loop()
        self._service = Service(settings)
        try:
            await self._service.start()
        except BaseException as error:
            self._error = error
            return
        finally:
            self._started.set()
        await self._service.wait()
        await self._service.stop()

    async def _keep(self, key: bytes, data: np.ndarray[Any, Any]) -> None:
        import torch

        from encoder_service.types import EncodedItem, Grid

        tower, store = self._service.pipeline.model.tower, self._service.pipeline.store
        rows = torch.from_numpy(data).view(tower.dtype).view(-1, tower.width)
        grid = Grid(1, tower.merge_size * len(rows), tower.merge_size)
        digest = hashlib.sha256(data.tobytes()).digest()
        item = EncodedItem(key, digest, grid, rows, tower.num_deepstack_levels)
        reservation = store.reserve("", item)
        if reservation is None:
            raise MemoryError(f"the arena has no room for {data.nbytes} bytes more")
        reservation.destination.copy_(rows)
        if reservation.destination.is_cuda:
            torch.cuda.synchronize(reservation.destination.device)
        store.commit(reservation).drop()


def arenas_for(kind: str, num_bytes: int) -> dict[str, int]:
    """Settings for a service that holds this many bytes of rows in memory of this kind, ``host`` or
    ``device``."""
    # The first terms add room for the allocator's rounding and the probe's slot. The arena is larger by half,
    # because rows larger than a quarter of their arena go inline, and a fuller device tier would copy rows to
    # the host during the measurement.
    arena_bytes = (num_bytes + num_bytes // 64 + (16 << 20)) * 3 // 2
    if kind == "host":
        return {"arena_bytes": arena_bytes}
    return {"device_arena_bytes": arena_bytes, "arena_bytes": HOST_TIER_BYTES}


# -- the language model's side ---------------------------------------------------------------------------


class Caller:
    """A caller of the service. On a GPU it has a stream of its own."""

    def __init__(self, client: Any, num_bytes: int, count: int, *, on_gpu: bool) -> None:
        self._client = client
        self._num_bytes = num_bytes
        self._indices = itertools.cycle(range(count))
        self._stream: Any = None
        if on_gpu:
            import torch

            self._stream = torch.cuda.Stream()

    def fetch(self) -> Any:
        """The timed call: fetches one item by its key, complete and checked in the caller's own memory."""
        if self._stream is None:
            return self._fetch()
        import torch

        with torch.cuda.stream(self._stream):
            return self._fetch()

    def check(self) -> None:
        """Raises ValueError unless the bytes are those that the encoder holds."""
        rows = self.fetch()
        data = rows.payload if self._stream is None else rows.payload.cpu().numpy()
        if len(data) != self._num_bytes or hashlib.sha256(data).digest() != rows.content_digest:
            raise ValueError(f"{len(data)} bytes of rows are not the {self._num_bytes} that were put there")

    def _fetch(self) -> Any:
        (outcome,) = self._client.fetch([key_of(self._num_bytes, next(self._indices))])
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


class Client:
    """The client process. Commands: ``connect``, then for each cell ``prepare`` and any number of
    ``measure``."""

    def __init__(self) -> None:
        self._clients: dict[tuple[str, str], Any] = {}
        self._raw: dict[str, RawStreams] = {}
        self._calls: dict[str, Callable[[], object]] = {}

    def connect(self, path: str, transport: str, target: str, on_gpu: bool) -> dict[str, Any]:
        """Raises ValueError if rows come by another transport, and the client's errors."""
        if on_gpu:
            import torch

            torch.zeros(1, device="cuda")
        ways = ("inline",) if transport == "inline" else ("resident", "announced")
        for way in ways:
            self._clients[path, way] = connected(target, transport, on_gpu, way)
        return {"reason": self._clients[path, ways[0]].transport.reason}

    def prepare(
        self, path: str, num_bytes: int, count: int, on_gpu: bool, floor: dict[str, Any] | None
    ) -> None:
        """Creates the callers of one cell, compares their first rows with the encoder's, and warms them up.
        floor: the parameters of a floor that this process measures; None if it is measured elsewhere."""
        self._calls.clear()
        for (connected_path, way), client in self._clients.items():
            if connected_path == path:
                caller = Caller(client, num_bytes, count, on_gpu=on_gpu)
                caller.check()
                self._calls[way] = caller.fetch
        if floor is not None and "raw_target" in floor:
            if path not in self._raw:
                self._raw[path] = RawStreams(floor["raw_target"])
            self._calls["floor"] = self._raw[path].call(num_bytes, count)
        elif floor is not None:
            self._calls["floor"] = memcpy_call(num_bytes, floor["resident_bytes"])
        for call in self._calls.values():
            timed(call, budget_s=0, max_calls=MIN_CALLS)

    def measure(self, what: str, budget_s: float, max_calls: int) -> dict[str, Any]:
        """Measures one kind of call. what: ``resident``, ``announced``, ``inline`` or ``floor``."""
        return {"calls_ms": timed(self._calls[what], budget_s=budget_s, max_calls=max_calls)}

    def close(self) -> None:
        for client in (*self._clients.values(), *self._raw.values()):
            client.close()


def connected(target: str, transport: str, on_gpu: bool, way: str) -> Any:
    """A blocking client that allows no other transport. way: ``resident`` finds rows in the directory;
    ``announced`` asks the service for their place."""
    from lm_adapter import VisionEncoderClient

    client = VisionEncoderClient(
        target,
        timeout_s=CALL_TIMEOUT_S,
        transports=(transport,),
        device="cuda:0" if on_gpu else None,
    )
    choice = client.wait_transport()
    if choice.name != transport:
        raise ValueError(f"rows come by {choice.name}: {choice.reason}")
    if way == "announced":
        attached: Any = client._client._shared.current
        attached.find = lambda _: None  # as if no directory listed the key
    return client


ROLES: dict[str, Callable[[], Any]] = {"encoder": Encoder, "client": Client, "raw": RawServer}
COMMANDS = {
    "encoder": ("start", "fill", "deliveries"),
    "client": ("connect", "prepare", "measure"),
    "raw": ("start", "fill"),
}


def main() -> None:
    role = sys.argv[1]
    peer = ROLES[role]()
    serve_commands({name: getattr(peer, name) for name in COMMANDS[role]})
    if role == "encoder":
        peer.stop()
    elif role == "client":
        peer.close()


if __name__ == "__main__":
    main()
