"""gRPC's own ring hash over a name server, as a program that prints what it found: the environment has to be
set before grpc is imported, so that no test process can do it for itself.

    PYTHONPATH=.:proto python -m tests.fleet.grpc_ring

Owns the sequence: 4 replicas, 8 listed, one drains, one stops. Used by the test beside it and by
bench/fleet.py."""

from __future__ import annotations

import os

os.environ["GRPC_EXPERIMENTAL_RING_HASH_SET_REQUEST_HASH_KEY"] = "true"

import asyncio
import contextlib
import json
import secrets
from collections import Counter
from typing import Any

from lm_adapter import AsyncVisionEncoderClient, EncoderError, ImageItem
from lm_adapter.testing import FakeEncoder
from lm_adapter.transport.channel import ring_hash_options
from tests.fleet.dns_server import DnsServer
from tests.fleet.rig import DRAINING

NUM_KEYS = 150
DNS_INTERVAL_S = 0.2


async def look() -> dict[str, Any]:
    digests = [secrets.token_bytes(32) for _ in range(NUM_KEYS)]
    found: dict[str, Any] = {"num_keys": NUM_KEYS}
    with contextlib.ExitStack() as stack:
        fakes = [stack.enter_context(FakeEncoder("127.0.0.2:0"))]
        port = fakes[0].target.rpartition(":")[2]
        fakes += [stack.enter_context(FakeEncoder(f"127.0.0.{number}:{port}")) for number in range(3, 10)]
        addresses = [one.target.rpartition(":")[0] for one in fakes]
        async with DnsServer(addresses[:4]) as names:
            client = AsyncVisionEncoderClient(
                f"dns://127.0.0.1:{names.port}/encoders.test:{port}",
                options=ring_hash_options(min_dns_interval_s=DNS_INTERVAL_S),
                timeout_s=10,
                transports=("inline",),
            )
            async with client:
                first = await homes(client, digests, fakes)
                found["same_again"] = first == await homes(client, digests, fakes)
                found["shares"] = sorted(Counter(first.values()).values())
                names.addresses = addresses
                await asyncio.sleep(5 * DNS_INTERVAL_S)
                found["replicas_used_after_scaling_4_to_8"] = len(
                    set((await homes(client, digests, fakes)).values())
                )
                fakes[0].script.call_failures["Encode"] = DRAINING
                drained = await homes(client, digests, fakes)
                found["failed_while_one_of_4_drains"] = sum(
                    one.startswith("failed") for one in drained.values()
                )
                fakes[0].script.call_failures.clear()
                await asyncio.to_thread(fakes[1].stop)
                stopped = await homes(client, digests, fakes)
                found["failed_after_one_stopped"] = sum(one.startswith("failed") for one in stopped.values())
                await asyncio.sleep(5 * DNS_INTERVAL_S)
                found["replicas_used_after_it_stopped"] = len(
                    set((await homes(client, digests, fakes)).values())
                )
    return found


async def homes(
    client: AsyncVisionEncoderClient, digests: list[bytes], fakes: list[FakeEncoder]
) -> dict[bytes, str]:
    """Who served each digest, or how it failed."""
    found = {}
    for digest in digests:
        before = [one.num_calls["Encode"] for one in fakes]
        try:
            await client.encode_one(ImageItem(b"content", digest=digest))
        except EncoderError as error:
            found[digest] = f"failed: {error.reason}"
            continue
        (found[digest],) = (
            one.target for one, calls in zip(fakes, before, strict=True) if one.num_calls["Encode"] > calls
        )
    return found


if __name__ == "__main__":
    print(json.dumps(asyncio.run(look())))
