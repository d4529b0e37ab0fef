"""What goes out to SGLang: the pickled frame, and which hosts may receive."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import sys

import pytest
import torch
import zmq
import zmq.asyncio

from bench.harness.waiting import PATIENCE_S
from encoder_service.errors import (
    ConfigurationError,
    InvalidRequest,
    PermissionDenied,
    TransportUnavailable,
)
from encoder_service.protocols.sglang.push import Part, head_frame, payload
from encoder_service.protocols.zmq_push import Receivers, Sender
from encoder_service.types import Grid, Modality
from tests.sglang.frames import Modality as ReadModality
from tests.sglang.frames import fields_of, message_of

IMAGE = Part("r_local_part_1", 3, 1, Modality.IMAGE)


def test_head_frame_golden() -> None:
    """Byte for byte: what an unpickler of SGLang 0.5.23 has been seen to take."""
    expected = (
        b"\x80\x03csglang.srt.disaggregation.encoder.receiver\nEmbeddingData\n)\x81}("
        b"X\x06\x00\x00\x00req_idX\x0e\x00\x00\x00r_local_part_1"
        b"X\x09\x00\x00\x00num_partsJ\x03\x00\x00\x00"
        b"X\x08\x00\x00\x00part_idxJ\x01\x00\x00\x00"
        b"X\x08\x00\x00\x00grid_dim](](J\x01\x00\x00\x00J\x04\x00\x00\x00J\x06\x00\x00\x00ee"
        b"X\x08\x00\x00\x00modalitycsglang.srt.multimodal.modality\nModality\nJ\x01\x00\x00\x00\x85R"
        b"X\x09\x00\x00\x00embeddingNX\x09\x00\x00\x00send_timeN"
        b"X\x05\x00\x00\x00dtypectorch\nfloat32\n"
        b"X\x05\x00\x00\x00shape](J\x06\x00\x00\x00J\x08\x00\x00\x00e"
        b"X\x07\x00\x00\x00_mr_ptrNX\x09\x00\x00\x00error_msgNX\x0a\x00\x00\x00error_codeN"
        b"X\x10\x00\x00\x00video_timestampsNX\x12\x00\x00\x00second_per_grid_tsNub."
    )
    assert head_frame(IMAGE, [Grid(1, 4, 6)], [], torch.zeros(6, 8)) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_receiver_reads_rows_and_fields(dtype: torch.dtype) -> None:
    rows = torch.randn(10, 6).to(dtype)
    part = Part("clip \udc80 ü", 70_000, 4, Modality.VIDEO)
    frame = head_frame(part, [Grid(2, 4, 6), Grid(1, 2, 2)], [[0.25, 1.5], [0.0]], rows)
    fields, found = message_of([frame, bytes(payload(rows))])
    assert torch.equal(found, rows)
    assert fields == {
        "req_id": "clip \udc80 ü",
        "num_parts": 70_000,
        "part_idx": 4,
        "grid_dim": [[2, 4, 6], [1, 2, 2]],
        "modality": ReadModality.VIDEO,
        "embedding": None,
        "send_time": None,
        "dtype": dtype,
        "shape": [10, 6],
        "_mr_ptr": None,
        "error_msg": None,
        "error_code": None,
        "video_timestamps": [[0.25, 1.5], [0.0]],
        "second_per_grid_ts": None,
    }


def test_what_a_request_says_never_becomes_opcodes() -> None:
    name = "\nX)\x81}(ub.cos\nsystem\n"
    assert (
        fields_of(head_frame(Part(name, 1, 0, Modality.IMAGE), [], [], torch.zeros(1, 1)))["req_id"] == name
    )


# -- hosts ---------------------------------------------------------------------------------------------


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
    receivers = Receivers("sglang_receivers", ["198.51.100.0/24"])
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
        Receivers("sglang_receivers", ["198.51.100.0/24"]).endpoint(host, 5000, peer)


@pytest.mark.parametrize(
    ("host", "port", "text"),
    [
        ("localhost", 5000, "'localhost' is not an IP address"),
        ("127.0.0.1;tcp://192.0.2.1", 5000, "not an IP address"),
        ("fd00::2%1]:0;[::1", 5000, "not an IP address"),
        ("." * (1 << 20), 5000, "1048576 characters, at most 64"),
        ("127.0.0.1", 0, "0, needed"),
        ("127.0.0.1", 65536, "65536, needed"),
    ],
)
def test_a_host_is_an_address_and_a_port_in_range(host: str, port: int, text: str) -> None:
    with pytest.raises(InvalidRequest, match=text):
        Receivers("sglang_receivers", []).endpoint(host, port, "127.0.0.1")


@pytest.mark.parametrize(
    "url", ["127.0.0.1", "127.0.0.1:", "127.0.0.1:x", "tcp://127.0.0.1:5000", "127.0.0.1:" + "1" * 5000]
)
def test_a_receive_url_is_an_address_and_a_port(url: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        Receivers("sglang_receivers", []).endpoint_of(url, "127.0.0.1")
    assert len(refused.value.message) < 200


# -- sending -------------------------------------------------------------------------------------------


def test_without_pyzmq_the_start_fails_and_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(ConfigurationError, match=r"needs zmq.*vision-encoder\[sglang\]"):
        Sender("sglang", 1.0)


def test_p46_a_receiver_that_never_answers_costs_its_time_and_no_memory() -> None:
    """A listener that takes the connection and says nothing."""

    async def run() -> None:
        sender = Sender("sglang", 0.2)
        with socket.create_server(("127.0.0.1", 0)) as silent:
            port = silent.getsockname()[1]
            with pytest.raises(TransportUnavailable, match=r"did not take 5 bytes within 0.2 s"):
                await sender.push(f"tcp://127.0.0.1:{port}", [b"head", b"r"])
        assert all(one.closed for one in sender._context._sockets)
        sender.close()

    asyncio.run(run())


@pytest.mark.parametrize(("num_ports", "live_host"), [(1, "127.0.0.1"), (2, "127.0.0.2")])
def test_p46_a_port_that_takes_nothing_leaves_places_for_others(
    num_ports: int, live_host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One port leaves places for its host's other ports, a host for other hosts."""
    monkeypatch.setattr("encoder_service.protocols.zmq_push.MAX_SENDS", 3)
    monkeypatch.setattr("encoder_service.protocols.zmq_push.MAX_SENDS_TO_HOST", 2)
    monkeypatch.setattr("encoder_service.protocols.zmq_push.MAX_SENDS_TO_PORT", 2 if num_ports > 1 else 1)

    async def run() -> None:
        sender, context = Sender("sglang", PATIENCE_S / 6), zmq.asyncio.Context()
        with contextlib.ExitStack() as stack:
            silent = [
                stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
                for _ in range(num_ports)
            ]
            receiver = stack.enter_context(context.socket(zmq.PULL))
            receiver.linger = 0
            port = receiver.bind_to_random_port(f"tcp://{live_host}")
            waiting = [
                asyncio.ensure_future(sender.push(f"tcp://127.0.0.1:{one}", [b"r"]))
                for one in silent
                for _ in range(8)
            ]
            await asyncio.sleep(0)
            await sender.push(f"tcp://{live_host}:{port}", [b"r"])
            assert await receiver.recv_multipart() == [b"r"]
            assert not any(task.done() for task in waiting)
            while waiting:
                waiting.pop().cancel()
            await asyncio.wait(asyncio.all_tasks() - {asyncio.current_task()})
        gc.collect()
        assert not sender._places_of
        sender.close()
        context.term()

    asyncio.run(run())


def test_messages_larger_than_what_the_kernel_takes_at_once_come_whole() -> None:
    """Several at a time; each socket is closed as soon as its message has left."""
    rows = torch.arange(4 << 20, dtype=torch.float32).reshape(-1, 8)

    async def run() -> None:
        sender, context = Sender("sglang", 30.0), zmq.asyncio.Context()
        with context.socket(zmq.PULL) as receiver:
            receiver.linger = 0
            endpoint = f"tcp://127.0.0.1:{receiver.bind_to_random_port('tcp://127.0.0.1')}"
            async with asyncio.TaskGroup() as group:
                for number in range(3):
                    group.create_task(sender.push(endpoint, [bytes([number]), payload(rows)]))
                received = [await receiver.recv_multipart() for _ in range(3)]
        assert sorted(head for head, _ in received) == [b"\0", b"\1", b"\2"]
        assert all(data == bytes(payload(rows)) for _, data in received)
        assert all(one.closed for one in sender._context._sockets)
        sender.close()
        context.term()

    asyncio.run(run())
