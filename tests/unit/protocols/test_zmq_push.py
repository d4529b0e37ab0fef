"""Messages by ZMQ: which hosts may receive, and what a receiver costs that takes nothing."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
from collections.abc import AsyncIterator

import pytest
import zmq
import zmq.asyncio

from bench.harness.waiting import PATIENCE_S
from encoder_service.errors import InvalidRequest, PermissionDenied, TransportUnavailable
from encoder_service.protocols.zmq_push import AllowedReceivers, Sender

MODULE = "encoder_service.protocols.zmq_push"


@pytest.mark.parametrize(
    ("host", "peer", "endpoint"),
    [
        ("192.0.2.7", "192.0.2.7", "tcp://192.0.2.7:5000"),
        ("192.0.2.7", "::ffff:192.0.2.7", "tcp://192.0.2.7:5000"),
        ("[2001:db8::7]", "2001:db8::7", "tcp://[2001:db8::7]:5000"),
        ("127.0.0.9", "127.0.0.1", "tcp://127.0.0.9:5000"),  # two addresses of this machine
        ("198.51.100.20", "192.0.2.7", "tcp://198.51.100.20:5000"),  # the allow-list
    ],
)
def test_p46_rows_go_to_the_peer_and_to_allowed_networks(host: str, peer: str, endpoint: str) -> None:
    receivers = AllowedReceivers("sglang_receivers", ["198.51.100.0/24"])
    assert receivers.endpoint(host, 5000, peer) == endpoint
    assert receivers.endpoint_of(f"{host}:5000", peer) == endpoint


@pytest.mark.parametrize(
    ("host", "peer"),
    [
        ("192.0.2.8", "192.0.2.7"),
        ("192.0.2.8", "127.0.0.1"),
        ("127.0.0.1", "192.0.2.7"),
        ("0.0.0.0", "127.0.0.1"),
        ("224.0.0.1", "127.0.0.1"),
        ("169.254.169.254", "127.0.0.1"),
        ("198.51.101.1", "192.0.2.7"),
    ],
)
def test_p46_no_other_host_receives(host: str, peer: str) -> None:
    with pytest.raises(PermissionDenied, match=f"{host}.*{peer}"):
        AllowedReceivers("sglang_receivers", ["198.51.100.0/24"]).endpoint(host, 5000, peer)


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("localhost:5000", "'localhost' is not an IP address"),
        ("127.0.0.1;tcp://192.0.2.1:5000", "not an IP address"),
        ("fd00::2%1]:0;[::1:5000", "not an IP address"),
        ("tcp://127.0.0.1:5000", "not an IP address"),
        (":5000", "'' is not an IP address"),
        ("." * (1 << 20) + ":5000", "1048576 characters, at most 64"),
        ("127.0.0.1:0", "0, needed"),
        ("127.0.0.1:65536", "65536, needed"),
        ("127.0.0.1", "needed is host:port"),
        ("127.0.0.1:", "needed is host:port"),
        ("127.0.0.1:x", "needed is host:port"),
        ("127.0.0.1:" + "1" * 5000, "needed is host:port"),
    ],
    ids=lambda value: value[:32],
)
def test_a_receiver_is_an_address_and_a_port(url: str, text: str) -> None:
    with pytest.raises(InvalidRequest, match=text) as refused:
        AllowedReceivers("sglang_receivers", []).endpoint_of(url, "127.0.0.1")
    assert len(refused.value.message) < 200


# -- sending -------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def pulling(host: str = "127.0.0.1") -> AsyncIterator[tuple[zmq.asyncio.Socket, str]]:
    """A receiver and its endpoint."""
    with zmq.asyncio.Context() as context, context.socket(zmq.PULL) as receiver:
        receiver.linger = 0
        yield receiver, f"tcp://{host}:{receiver.bind_to_random_port(f'tcp://{host}')}"


@pytest.mark.anyio
async def test_p46_a_receiver_that_never_answers_costs_its_time_and_no_socket() -> None:
    """A listener that takes the connection and says nothing."""
    sender = Sender(0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        with pytest.raises(TransportUnavailable, match=r"did not take 5 bytes within 0.2 s"):
            await sender.push(f"tcp://127.0.0.1:{silent.getsockname()[1]}", [b"head", b"r"])
        connection, _ = silent.accept()
        with connection:
            connection.settimeout(PATIENCE_S)
            while await asyncio.to_thread(connection.recv, 1024):  # ZMQ's greeting, then the end
                pass
    sender.close()


@pytest.mark.anyio
@pytest.mark.parametrize(("num_ports", "live_host"), [(1, "127.0.0.1"), (2, "127.0.0.2")])
async def test_p46_a_port_that_takes_nothing_leaves_permits_for_others(
    num_ports: int, live_host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One port leaves permits for its host's other ports, a host for other hosts."""
    monkeypatch.setattr(f"{MODULE}.MAX_SENDS", 3)
    monkeypatch.setattr(f"{MODULE}.MAX_SENDS_TO_HOST", 2)
    monkeypatch.setattr(f"{MODULE}.MAX_SENDS_TO_PORT", 2 if num_ports > 1 else 1)

    def num_semaphores() -> int:
        gc.collect()
        return sum(type(entry) is asyncio.Semaphore for entry in gc.get_objects())

    sender = Sender(PATIENCE_S / 6)
    num_before = num_semaphores()
    async with pulling(live_host) as (receiver, endpoint):
        with contextlib.ExitStack() as stack:
            silent = [
                stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
                for _ in range(num_ports)
            ]
            waiting = [
                asyncio.ensure_future(sender.push(f"tcp://127.0.0.1:{port}", [b"r"]))
                for port in silent
                for _ in range(8)
            ]
            await asyncio.sleep(0)
            await sender.push(endpoint, [b"r"])
            assert await receiver.recv_multipart() == [b"r"]
            assert not any(task.done() for task in waiting)
            for task in waiting:
                task.cancel()
            await asyncio.wait(waiting)
            del task, waiting
    assert num_semaphores() == num_before
    sender.close()


@pytest.mark.anyio
async def test_messages_larger_than_what_the_kernel_takes_at_once_come_whole() -> None:
    """Several at a time; each connection ends as soon as its message has left."""
    rows = memoryview(bytes(range(256)) * (1 << 16))
    sender = Sender(30.0)
    async with pulling() as (receiver, endpoint):
        with receiver.get_monitor_socket(zmq.EVENT_DISCONNECTED) as monitor:
            async with asyncio.TaskGroup() as group:
                for number in range(3):
                    group.create_task(sender.push(endpoint, [bytes([number]), rows]))
                received = [await receiver.recv_multipart() for _ in range(3)]
            assert sorted(head for head, _ in received) == [b"\0", b"\1", b"\2"]
            assert all(data == rows for _, data in received)
            async with asyncio.timeout(PATIENCE_S):
                for _ in range(3):
                    await monitor.recv_multipart()
            receiver.disable_monitor()
    sender.close()
