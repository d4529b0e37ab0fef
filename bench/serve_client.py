"""A caller of the serving bench: sends its part of a load when it is due, and says how each request ended.

Owns the open loop. A request's time counts from when it was due, not from when it was sent, so that a slow
answer delays nothing and hides nothing: one that was sent late was late. How late is told as well
(``lag_ms``), to see whether the callers were the limit.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from serve_traffic import Load, Request, read_photos, with_comment
from transport_processes import serve_commands

from lm_adapter import AsyncVisionEncoderClient, EncoderError, ImageItem

CONNECT_S = 60.0
# In the order of a row that goes back to the bench, behind the rest of it.
STAGES = (
    "identify_ms", "admit_ms", "decode_ms", "resize_ms", "queue_ms", "tower_ms", "store_ms", "total_ms",
    "delivery_ms",
)  # fmt: skip
COLUMNS = ("at_s", "lag_ms", "latency_ms", "status", "tier", "patches", "bytes", *STAGES)
OK, UNFINISHED = "ok", "unfinished"
# A core that slept this long wakes up late, and the request with it: its last moments are waited for awake.
AWAKE_S = 0.002


class Client:
    """Answers the bench's commands: ``photos`` and ``connect``, then any number of ``run``."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._photos: dict[str, list[bytes]] = {}
        self._clients: dict[str, AsyncVisionEncoderClient] = {}

    def photos(self, mix: str, folder: str) -> dict[str, Any]:
        self._photos[mix] = read_photos(Path(folder))
        return {"count": len(self._photos[mix])}

    def connect(self, name: str, target: str, transport: str, by_grpc: bool) -> dict[str, Any]:
        """by_grpc: every item is asked for over gRPC. Raises where the way of delivery is not possible."""
        on_gpu = transport == "device"
        if on_gpu:
            import torch

            torch.zeros(1, device="cuda")

        async def make() -> str:
            client = AsyncVisionEncoderClient(
                target,
                timeout_s=CONNECT_S,
                transports=(transport,),
                device="cuda:0" if on_gpu else None,
                directory=not by_grpc,
                hash_items="off" if by_grpc else "auto",
                local_calls=not by_grpc,
                options={"grpc.use_local_subchannel_pool": 1},
            )
            self._clients[name] = client
            await client.info()
            choice = await client.wait_transport()
            if choice.name != transport:
                raise ValueError(f"rows come by {choice.name}: {dict(choice.rejected) or choice.reason}")
            return choice.reason

        return {"reason": self._runner.run(make())}

    def run(
        self,
        name: str,
        mix: str,
        load: dict[str, Any],
        number: int,
        num_clients: int,
        start_s: float,
        timeout_s: float,
        grace_s: float,
    ) -> dict[str, Any]:
        """Every ``num_clients``-th request of the load from the ``number``-th on. start_s: by the clock that
        all processes share. grace_s: what has not ended then is cut off and counts as unfinished."""
        requests = Load(**load).requests()[number::num_clients]
        gc.collect()
        gc.freeze()  # the photographs are not to be walked through in the middle of a load
        rows = self._runner.run(
            self._send_all(
                self._clients[name], self._photos[mix], load, requests, start_s, timeout_s, grace_s
            )
        )
        return {"columns": COLUMNS, "rows": rows}

    def close(self) -> None:
        async def close_all() -> None:
            for client in self._clients.values():
                await client.close()

        self._runner.run(close_all())
        self._runner.close()

    async def _send_all(
        self,
        client: AsyncVisionEncoderClient,
        photos: list[bytes],
        load: dict[str, Any],
        requests: list[Request],
        start_s: float,
        timeout_s: float,
        grace_s: float,
    ) -> list[list[Any]]:
        loop = asyncio.get_running_loop()
        tasks: dict[asyncio.Task[list[Any]], Request] = {}
        for request in requests:
            await until(start_s + request.at_s)
            sending = self._send(client, photos[request.photo], load["seed"], request, start_s, timeout_s)
            tasks[loop.create_task(sending)] = request
        ends_s = start_s + load["duration_s"] + grace_s
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=max(0.0, ends_s - loop.time()))
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        return [
            task.result() if not task.cancelled() else failed(request, UNFINISHED)
            for task, request in tasks.items()
        ]

    async def _send(
        self,
        client: AsyncVisionEncoderClient,
        photo: bytes,
        seed: int,
        request: Request,
        start_s: float,
        timeout_s: float,
    ) -> list[Any]:
        """One row for one request. Rows of memory that is shared are borrowed and given back at once: what is
        done with them is the caller's own time."""
        loop = asyncio.get_running_loop()
        due_s = start_s + request.at_s
        item = ImageItem(with_comment(photo, seed, request.content))
        lag_ms = (loop.time() - due_s) * 1e3
        try:
            rows = await client.encode_one(item, timeout_s=timeout_s, borrow=True)
            rows.confirm()
        except EncoderError as error:
            return failed(request, error.reason, lag_ms, (loop.time() - due_s) * 1e3)
        stages = [round(getattr(rows.timings, stage), 4) for stage in STAGES]
        latency_ms = (loop.time() - due_s) * 1e3
        place = [rows.tier.value, rows.grid_thw.num_patches, rows.num_bytes]
        return [request.at_s, lag_ms, latency_ms, OK, *place, *stages]


async def until(due_s: float) -> None:
    """Returns at ``due_s`` of the loop's clock, as closely as the loop's other work allows."""
    loop = asyncio.get_running_loop()
    while (left_s := due_s - loop.time()) > 0:  # noqa: ASYNC110 - there is nothing but the clock to wait for
        await asyncio.sleep(max(0.0, left_s - AWAKE_S))


def failed(request: Request, status: str, lag_ms: float = 0.0, latency_ms: float = 0.0) -> list[Any]:
    return [request.at_s, lag_ms, latency_ms, status, "", 0, 0, *(0.0 for _ in STAGES)]


def main() -> None:
    client = Client()
    serve_commands({"photos": client.photos, "connect": client.connect, "run": client.run})
    client.close()


if __name__ == "__main__":
    main()
