"""The connections of this process are named as gRPC names peers, and ended by the share of their address."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from encoder_service.rpc import connections
from encoder_service.rpc.connections import ConnectionShares, connection_of, open_connections, received_bytes
from tests.unit.service.rig import until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/fd")


class Server:
    """Accepted connections by the address that they came from."""

    def __init__(self, family: int, host: str) -> None:
        self.socket = socket.create_server(
            (host, 0), family=family, dualstack_ipv6=family == socket.AF_INET6 and host == "::"
        )
        self.port: int = self.socket.getsockname()[1]
        self.accepted: list[socket.socket] = []
        self.clients: list[socket.socket] = []

    def connect(self, host: str, source: str) -> socket.socket:
        client = socket.create_connection((host, self.port), timeout=10, source_address=(source, 0))
        self.clients.append(client)
        self.accepted.append(self.socket.accept()[0])
        return client

    def is_open(self, client: socket.socket) -> bool:
        client.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            return client.recv(1) != b""
        return True

    def close(self) -> None:
        for each in (self.socket, *self.accepted, *self.clients):
            each.close()


@pytest.fixture(params=["127.0.0.1", "::"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """Also gRPC's way: IPv4 connections on an IPv6 socket."""
    found = Server(socket.AF_INET6 if ":" in request.param else socket.AF_INET, request.param)
    yield found
    found.close()


def test_connections_are_named_as_grpc_names_them(server: Server, tmp_path: Path) -> None:
    client = server.connect("127.0.0.1", "127.0.0.2")
    name = f"ipv4:127.0.0.2:{client.getsockname()[1]}"
    (found,) = (each for each in open_connections() if each.port == server.port)
    assert found.peer == name
    client.sendall(bytes(1000))
    accepted = server.accepted[0]
    assert len(accepted.recv(1000, socket.MSG_WAITALL)) == 1000
    assert received_bytes(accepted.fileno()) == 1000
    assert accepted.fileno() == found.descriptor
    assert accepted.send(b"a") == 1, "the socket is still its owner's"
    with (tmp_path / "file").open("wb") as file:
        assert connection_of(file.fileno()) is None
        assert received_bytes(file.fileno()) is None
    assert connection_of(server.socket.fileno()) is None


def test_connections_over_ipv6() -> None:
    server = Server(socket.AF_INET6, "::1")
    try:
        client = server.connect("::1", "::1")
        (found,) = (each for each in open_connections() if each.port == server.port)
        assert found.peer == f"ipv6:%5B::1%5D:{client.getsockname()[1]}"
    finally:
        server.close()


def test_p69_the_newest_connections_of_an_address_above_its_share_end(server: Server) -> None:
    shares, ports = ConnectionShares(16), {server.port}
    first = server.connect("127.0.0.1", "127.0.0.1")
    flood = [server.connect("127.0.0.1", "127.0.0.2") for _ in range(7)]
    assert shares.check(ports) == set(), "up to half of the limit anybody may have all"
    flood += [server.connect("127.0.0.1", "127.0.0.2") for _ in range(11)]
    other = server.connect("127.0.0.1", "127.0.0.3")
    assert shares.check(ports) == {"127.0.0.2"}
    assert server.is_open(first)
    assert server.is_open(other)
    assert [server.is_open(each) for each in flood[:7]] == [True] * 7
    assert sum(map(server.is_open, flood)) == 11, "three quarters, less what was there before"


def test_a_descriptor_that_has_become_anothers_is_left_alone(server: Server) -> None:
    server.connect("127.0.0.1", "127.0.0.2")
    (found,) = (each for each in open_connections() if each.port == server.port)
    other, end = socket.socketpair()
    os.dup2(other.fileno(), found.descriptor)
    found.end()
    assert server.is_open(end)
    other.close()
    end.close()


@pytest.mark.anyio
@pytest.mark.parametrize("reason", ["none", "more connections", "some were ended"])
async def test_many_connections_are_checked_often_while_something_happens(
    monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    """A check reads every descriptor of the process. Here the seldom ones never come."""
    monkeypatch.setattr(connections, "CHECK_S", 3600.0)
    monkeypatch.setattr(connections, "FILLING_CHECK_S", 0.0)
    names, num_checks = ["1"] * 100, 0
    monkeypatch.setattr(connections, "_descriptor_names", lambda: names)

    def check(_shares: ConnectionShares, _ports: object) -> set[str]:
        nonlocal num_checks
        num_checks += 1
        if reason == "more connections":
            names.append("1")
        return {"10.0.0.1"} if reason == "some were ended" else set()

    monkeypatch.setattr(ConnectionShares, "check", check)
    checking = asyncio.ensure_future(ConnectionShares(16).run({1}))
    is_often = reason != "none"
    await until(lambda: num_checks >= (20 if is_often else 1))
    if not is_often:
        await asyncio.sleep(0.05)
        assert num_checks == 1
    checking.cancel()
