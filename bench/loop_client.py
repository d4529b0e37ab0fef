"""A caller of the loop bench: one image a call, by either door, its rows by lease, each lease given back.

Owns the ways of asking: by gRPC or by a local call; always so many calls at a time, to see what the service's
loop can do, or one at a time, to see how long a call takes that waits for nothing. It reads no rows: what is
done with them is the caller's own time.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from serve_traffic import read_photos, with_comment
from transport_processes import serve_commands

from lm_adapter.transport.broker_client import BrokerClient
from lm_adapter.transport.local_calls import LocalCalls
from vision_encoder.v1 import encoder_pb2 as pb
from vision_encoder.v1 import encoder_pb2_grpc

CONNECT_S = 30.0
CALL_S = 60.0
STAGES = tuple(field.name for field in pb.StageTimings.DESCRIPTOR.fields)


class Client:
    """Answers ``connect``, then any number of ``run``."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._photos: list[bytes] = []
        self._broker: BrokerClient | None = None
        self._channel: grpc.aio.Channel | None = None
        self._local = LocalCalls()
        self._path = ""

    def connect(self, target: str, broker: str, folder: str) -> dict[str, Any]:
        self._photos = read_photos(Path(folder))
        self._broker = BrokerClient(broker)
        self._broker.connect(CONNECT_S)

        async def make() -> None:
            self._channel = grpc.aio.insecure_channel(target)
            self._encode = encoder_pb2_grpc.VisionEncoderStub(self._channel).Encode

        self._runner.run(make())
        return {"photos": len(self._photos)}

    def run(self, door: str, seed: int, count: int, at_once: int, contents: int) -> dict[str, Any]:
        """count calls by a door, ``grpc`` or ``local``, at_once at a time, over ``contents`` different
        contents. Milliseconds of each call and of its stages."""
        assert self._broker is not None
        session = self._broker.wait_for_session(CONNECT_S)
        owner_id = session.owner_id.encode()
        self._path = session.calls_path if door == "local" else ""
        if door == "local" and not self._path:
            raise ValueError("the service takes no local calls")
        requests = [
            pb.EncodeRequest(
                items=[
                    pb.Item(
                        modality=pb.MODALITY_IMAGE,
                        encoded=with_comment(self._photos[number % len(self._photos)], seed, number),
                    )
                ],
                delivery=pb.DELIVERY_DEVICE_LEASE,
                lease=pb.LeaseOptions(owner_id=owner_id),
            )
            for number in range(min(count, contents))
        ]
        return self._runner.run(self._run(requests, count, at_once))

    def close(self) -> None:
        self._local.close()
        if self._broker is not None:
            self._broker.close()
        if self._channel is not None:
            self._runner.run(self._channel.close())
        self._runner.close()

    async def _run(self, requests: list[pb.EncodeRequest], count: int, at_once: int) -> dict[str, Any]:
        rows: list[list[float]] = []
        numbers = iter(range(count))

        async def ask() -> None:
            for number in numbers:
                row = await self._ask(requests[number % len(requests)])
                rows.append(row)

        cpu_s, begun_s = time.process_time(), time.monotonic()
        await asyncio.gather(*(ask() for _ in range(at_once)))
        return {
            "columns": ["latency_ms", *STAGES],
            "rows": rows,
            "seconds": time.monotonic() - begun_s,
            "cpu_s": time.process_time() - cpu_s,
        }

    async def _ask(self, request: pb.EncodeRequest) -> list[float]:
        """Raises ValueError for an item that failed or came without a lease."""
        begun_s = time.monotonic()
        result = None
        async for event in self._events(request):
            if event.WhichOneof("event") != "result" or event.result.WhichOneof("rows") != "lease":
                raise ValueError(f"no lease: {' '.join(str(event).split())[:300]}")
            result = event.result
        assert result is not None
        assert self._broker is not None
        latency_ms = (time.monotonic() - begun_s) * 1e3
        self._broker.release(
            pb.ReleaseRequest(lease_ids=[result.lease.lease_id], owner_id=request.lease.owner_id)
        )
        return [round(latency_ms, 4), *(round(getattr(result.timings, name), 4) for name in STAGES)]

    async def _events(self, request: pb.EncodeRequest) -> AsyncIterator[pb.ItemEvent]:
        if not self._path:
            async for event in self._encode(request, timeout=CALL_S):
                yield event
            return

        def otherwise(_: float) -> Any:
            raise ValueError(f"no connection to {self._path}")

        data = request.SerializeToString()
        call = self._local.begin_on_loop(self._path, "Encode", data, CALL_S, (), otherwise)
        try:
            async for message in call:
                yield pb.ItemEvent.FromString(message)
        finally:
            call.cancel()


def main() -> None:
    client = Client()
    serve_commands({"connect": client.connect, "run": client.run})
    client.close()


if __name__ == "__main__":
    main()
