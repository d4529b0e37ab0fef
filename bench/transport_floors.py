"""The least that a delivery can cost: plain copies of the same bytes, and a gRPC stream with nothing in it.

Owns the floors that the paths of the transport bench are held against. As a script, the server of the raw
stream: chunks that exist already as bytes, no serialiser, nothing looked up.
"""

from __future__ import annotations

import asyncio
import functools
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from transport_cases import in_turn, num_resident
from transport_processes import serve_commands

STREAM = "/bench.Raw/Stream"
TIMEOUT_S = 60.0
OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


# -- host memory -----------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1)
def random_rows(count: int, num_bytes: int) -> np.ndarray[Any, Any]:
    words = np.random.default_rng().integers(0, 1 << 64, (count, num_bytes // 8), dtype=np.uint64)
    return words.view(np.uint8)


def memcpy_calls(num_bytes: int, resident_bytes: int, concurrency: int) -> list[Callable[[], object]]:
    """Copies into a warm buffer for each caller, out of as many bytes as the encoder keeps."""
    source = random_rows(num_resident(num_bytes, resident_bytes), num_bytes)
    count = len(source)

    def call_of(caller: int) -> Callable[[], object]:
        target, places = np.ones(num_bytes, dtype=np.uint8), in_turn(count, caller)
        return lambda: np.copyto(target, source[next(places)])

    return [call_of(caller) for caller in range(concurrency)]


# -- gRPC ------------------------------------------------------------------------------------------------


class RawStreams:
    """Callers of the raw server over one channel, as one client of the service has it."""

    def __init__(self, target: str) -> None:
        self._channel = grpc.insecure_channel(target, options=OPTIONS)
        # No serialisers: what is sent is what arrives.
        self._start = self._channel.unary_stream(STREAM)

    def calls(self, num_bytes: int, count: int, concurrency: int) -> list[Callable[[], object]]:
        def call_of(caller: int) -> Callable[[], object]:
            places = in_turn(count, caller)

            def call() -> None:
                request = next(places).to_bytes(4, "big")
                received = sum(len(chunk) for chunk in self._start(request, timeout=TIMEOUT_S))
                if received != num_bytes:
                    raise ValueError(f"{received} bytes came, {num_bytes} were sent")

            return call

        return [call_of(caller) for caller in range(concurrency)]

    def close(self) -> None:
        self._channel.close()


class RawServer:
    """grpc.aio, as the service is."""

    def __init__(self) -> None:
        self._payloads: list[list[bytes]] = []
        self._started = threading.Event()
        self._addresses: dict[str, Any] = {}
        self._loop: asyncio.AbstractEventLoop

    def start(self, folder: str) -> dict[str, Any]:
        threading.Thread(target=lambda: asyncio.run(self._main(folder)), daemon=True).start()
        if not self._started.wait(TIMEOUT_S):
            raise TimeoutError("the raw server did not start")
        return self._addresses

    def fill(self, num_bytes: int, resident_bytes: int, chunk_bytes: int) -> dict[str, Any]:
        """Random payloads of this size, in place of the last size's."""
        self._payloads.clear()
        random = np.random.default_rng()
        for _ in range(num_resident(num_bytes, resident_bytes)):
            sizes = [min(chunk_bytes, num_bytes - start) for start in range(0, num_bytes, chunk_bytes)]
            self._payloads.append([random.bytes(size) for size in sizes])
        return {"count": len(self._payloads)}

    async def _main(self, folder: str) -> None:
        server = grpc.aio.server(options=OPTIONS)

        async def stream(request: bytes, _: Any) -> Any:
            for chunk in self._payloads[int.from_bytes(request, "big")]:
                yield chunk

        _, service, method = STREAM.split("/")
        handlers = {method: grpc.unary_stream_rpc_method_handler(stream)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
        uds = f"unix:{folder}/raw.sock"
        server.add_insecure_port(uds)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        self._addresses = {"uds": uds, "tcp": f"127.0.0.1:{port}"}
        self._started.set()
        await server.wait_for_termination()


# -- device memory ---------------------------------------------------------------------------------------


class DeviceCopies:
    """Copies between two GPUs that this process both sees, or within one."""

    def __init__(self, source: int, target: int, num_bytes: int, resident_bytes: int) -> None:
        import torch

        self._torch = torch
        self._target = torch.device("cuda", target)
        self._num_bytes = num_bytes
        self._count = num_resident(num_bytes, resident_bytes)
        self._rows = torch.randint(
            0, 256, (self._count, num_bytes), dtype=torch.uint8, device=torch.device("cuda", source)
        )
        torch.cuda.synchronize(self._rows.device)

    def calls(self, concurrency: int) -> list[Callable[[], object]]:
        """Each: one copy and the wait for it, on a stream of the caller's own."""
        return [self._call(caller) for caller in range(concurrency)]

    def device_ms(self, repeats: int) -> list[float]:
        """Milliseconds of copies by events around them, without what the host adds."""
        torch, found = self._torch, []
        target, places = self._buffer(), in_turn(self._count, 0)
        # A copy between two GPUs runs on its source's stream and is waited for on its target's.
        with torch.cuda.device(self._rows.device):
            for _ in range(repeats):
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                target.copy_(self._rows[next(places)], non_blocking=True)
                end.record()
                end.synchronize()
                torch.cuda.synchronize(self._target)
                found.append(float(start.elapsed_time(end)))
        return found

    def _buffer(self) -> Any:
        return self._torch.empty(self._num_bytes, dtype=self._torch.uint8, device=self._target)

    def _call(self, caller: int) -> Callable[[], object]:
        torch = self._torch
        target, places = self._buffer(), in_turn(self._count, caller)
        stream = torch.cuda.Stream(self._target)

        def call() -> None:
            with torch.cuda.stream(stream):
                target.copy_(self._rows[next(places)], non_blocking=True)
            stream.synchronize()

        return call


def main() -> None:
    server = RawServer()
    serve_commands({"start": server.start, "fill": server.fill})


if __name__ == "__main__":
    main()
