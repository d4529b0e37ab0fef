"""Where a fleet's replicas are found."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Sequence

import pytest

from lm_adapter.errors import EncoderUnavailable, InvalidRequest
from lm_adapter.fleet import DnsEndpoints
from lm_adapter.fleet.endpoints import resolver_of

pytestmark = pytest.mark.anyio


async def test_a_name_gives_each_address_once_and_sorted() -> None:
    asked = []

    async def lookup(host: str, port: int) -> Sequence[str]:
        asked.append((host, port))
        return ["10.0.0.2", "10.0.0.1", "10.0.0.2", "fd00::1"]

    found = await DnsEndpoints("dns:///encoders.ns.svc:50051", lookup=lookup)()
    assert found == ["10.0.0.1:50051", "10.0.0.2:50051", "[fd00::1]:50051"]
    assert asked == [("encoders.ns.svc", 50051)]


async def test_a_name_without_addresses_is_unavailable_and_says_why() -> None:
    async def lookup(host: str, port: int) -> Sequence[str]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    with pytest.raises(EncoderUnavailable, match=r"no address of encoders: .*not known"):
        await DnsEndpoints("encoders:1", lookup=lookup)()


async def test_the_systems_resolver_is_asked() -> None:
    assert "127.0.0.1:7" in await resolver_of("dns:///localhost:7")()


async def test_a_plain_function_runs_on_a_thread_and_one_that_hangs_holds_nobody_up() -> None:
    """Nor is it asked again before it has answered, nor waited for when the process ends."""
    go_on, threads = threading.Event(), []

    def listed() -> list[str]:
        threads.append(threading.current_thread())
        assert go_on.wait(10)
        return ["a:1"]

    resolve = resolver_of(listed)
    for _ in range(3):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(resolve(), 0.02)
    (thread,) = threads
    assert thread is not threading.main_thread()
    assert thread.daemon
    go_on.set()
    assert await resolve() == ["a:1"]


async def test_what_is_no_host_name_at_all_is_a_failed_lookup() -> None:
    with pytest.raises(EncoderUnavailable, match=r"no address of .*'a\.\.b' is no host name"):
        await DnsEndpoints("dns:///a..b:50051")()


@pytest.mark.parametrize(
    "name", ["dns:///host", "dns:///:5", "dns:///host:0", "dns:///host:70000", "dns:///h:x"]
)
async def test_a_name_needs_host_and_port(name: str) -> None:
    with pytest.raises(InvalidRequest, match="dns:///host:port"):
        resolver_of(name)


async def test_lists_functions_and_single_targets() -> None:
    assert await resolver_of("10.0.0.1:5")() == ["10.0.0.1:5"]
    assert await resolver_of(["b:1", "a:1", "b:1"])() == ["b:1", "a:1"]
    assert await resolver_of(lambda: ["c:1"])() == ["c:1"]

    async def later() -> list[str]:
        return ["d:1"]

    assert await resolver_of(later)() == ["d:1"]
    with pytest.raises(InvalidRequest, match="0 endpoints, needs at least 1"):
        resolver_of([])
    with pytest.raises(InvalidRequest, match="found the text"):
        await resolver_of(lambda: "a:1")()
    with pytest.raises(InvalidRequest, match="host:port, found ''"):
        resolver_of([""])
