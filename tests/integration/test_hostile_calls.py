"""Callers that try to take everything: memory, calls, connections, streams. A second caller is served."""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from bench.harness.waiting import wait_until
from encoder_service.config import parse_settings
from encoder_service.ops.tokens import NamespaceTokens
from encoder_service.rpc import gate
from encoder_service.rpc.gate import CallGate, CallPermits
from encoder_service.rpc.response import UNREAD_S
from encoder_service.rpc.server import GrpcServer
from encoder_service.scheduler.admission import Admission
from lm_adapter import AsyncVisionEncoderClient, EncoderError, EncoderOverloaded, VisionEncoderClient
from tests.integration import http2
from tests.integration.conftest import RunningService, Serve, tokens_file
from tests.integration.health import health_stub
from tests.integration.held import held, wait_until_free
from tests.integration.probe import Probe
from tests.integration.test_process import ServiceProcess
from tests.unit.rpc.test_messages import shape
from vision_encoder.v1 import encoder_pb2 as pb

pytestmark = pytest.mark.without_device

MIB = 1 << 20
CHECK = "/grpc.health.v1.Health/Check"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
UNLIMITED = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
OWN_CONNECTION = [("grpc.use_local_subchannel_pool", 1)]


def peak_bytes(process: subprocess.Popen[str]) -> int:
    status = Path(f"/proc/{process.pid}/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found
    return int(found[1]) << 10


def refusal(target: str, method: str, data: bytes, **options: Any) -> str:
    """The code with which the call of one message ends, and its text."""
    with grpc.insecure_channel(target, options=UNLIMITED) as channel:
        function: grpc.StreamStreamMultiCallable[Any, Any] = channel.stream_stream(method)
        call = function(iter([data]), timeout=30, **options)
        with contextlib.suppress(grpc.RpcError):
            list(call)
        return f"{call.code().name} {call.details()}"


@pytest.fixture
def small(checkpoints: dict[str, Path]) -> Iterator[ServiceProcess]:
    """A service process with small limits."""
    found = ServiceProcess(
        *("--model", checkpoints["qwen3_vl"], "--device", "cpu"),
        *("--listen", "127.0.0.1:0", "--admin-listen", ""),
        VE_MAX_MESSAGE_BYTES=str(16 * MIB),
        VE_MAX_QUEUED_BYTES=str(32 * MIB),
        VE_ARENA_BYTES=str(8 * MIB),
        VE_BROKER_PATH="",
    )
    yield found
    found.end(signal.SIGKILL)


def test_p67_hostile_messages_cost_no_more_memory_than_is_admitted(small: ServiceProcess) -> None:
    """All sorts at once: compressed ones, many numbers and fields, large ones, also to health and reflection,
    and messages that stop before their end."""
    encode = http2.ENCODE
    gzip: dict[str, object] = {"compression": grpc.Compression.Gzip}
    too_many, too_large = "or more fields|QUEUE_FULL", "at most 4096 are taken here|QUEUE_FULL"
    large = pb.EncodeRequest(items=[pb.Item(encoded=bytes(15 * MIB))], model="none").SerializeToString()
    attacks: list[tuple[str, bytes, dict[str, object], str]] = [
        (encode, bytes(100 * MIB), gzip, "UNIMPLEMENTED"),
        (CHECK, bytes(100 * MIB), gzip, "UNIMPLEMENTED"),
        (REFLECTION, bytes(100 * MIB), gzip, "UNIMPLEMENTED"),
        (encode, shape(b"\1" * (15 * MIB)), {}, too_many),
        (encode, b"\x0a\0" * (7 * MIB), {}, too_many),
        (encode, b"\x0a\x80\x80\x80\4" + b"\x08\1" * (4 * MIB), {}, too_many),
        (CHECK, bytes(15 * MIB), {}, too_large),
        (REFLECTION, bytes(15 * MIB), {}, too_large),
        *[(encode, large, {}, "UNKNOWN_MODEL|QUEUE_FULL")] * 12,
    ]  # fmt: skip
    refusal(small.target, encode, b"\x0a\0")
    before = peak_bytes(small.process)
    with contextlib.ExitStack() as open_:
        stalled = [open_.enter_context(http2.Connection(small.target)) for _ in range(12)]
        probe = open_.enter_context(Probe(small.target))
        pool = open_.enter_context(ThreadPoolExecutor(len(attacks)))
        begin = http2.message(large)[: 14 * MIB]
        for connection in stalled:
            connection.send(http2.headers(1) + http2.frame(http2.DATA, 0, 1, begin[:1000]))
        time.sleep(0.3)  # gRPC opens the window for the rest
        for connection in stalled:
            frames = (
                http2.frame(http2.DATA, 0, 1, begin[at : at + 16384]) for at in range(0, len(begin), 16384)
            )
            pool.submit(connection.send, http2.headers(1) + b"".join(frames))
        futures = [
            pool.submit(refusal, small.target, method, data, **options)
            for method, data, options, _ in attacks
        ]
        for future, (method, data, _, expected) in zip(futures, attacks, strict=True):
            found = future.result(60)
            assert re.search(expected, found), (method, len(data), found)
        probe.wait_for(100)
    assert probe.num_failed == 0, probe.outcomes
    grown = peak_bytes(small.process) - before
    assert grown < (3 * 32 + 150) * MIB, "messages that arrive, that are late, and that are admitted"


BURSTS: dict[str, Callable[[], list[bytes]]] = {
    "headers": lambda: [b"".join(http2.headers(2 * i + 1) for i in range(3000))] * 15,
    "whole calls, reset": lambda: (
        [
            b"".join(
                http2.headers(stream)
                + http2.frame(http2.DATA, http2.END_STREAM, stream, http2.message(b"\x12\1a"))
                + http2.reset(stream)
                for stream in range(1, 6000, 2)
            )
        ]
        * 4
    ),
    "headers, reset": lambda: [
        b"".join(http2.headers(stream) + http2.reset(stream) for stream in range(1, 20_000, 2))
    ],
}


@pytest.mark.parametrize("kind", BURSTS)
def test_p70_bursts_end_no_call_of_others(serve: Serve, tmp_path: Path, kind: str) -> None:
    """Of callers without a token."""
    token = secrets.token_urlsafe()
    file = tokens_file(tmp_path, f"a={token}", "")
    with (
        serve(tokens_file=file, open_namespaces=False) as found,
        Probe(found.target, token=token, namespace="a") as probe,
    ):
        for burst in BURSTS[kind]():
            with http2.Connection(found.target) as attacker:
                attacker.send(burst)
                probe.wait_for(probe.outcomes.total() + 20)
    assert probe.num_failed == 0, probe.outcomes


def test_p70_more_calls_than_streams_wait_on_the_callers_side(service: RunningService) -> None:
    """The adapter opens a call for each, on one connection."""

    async def all_at_once() -> int:
        async with AsyncVisionEncoderClient(service.target, timeout_s=60) as client:
            answers = await asyncio.gather(*(client.lookup([bytes(32)]) for _ in range(600)))
        return len(answers)

    assert asyncio.run(all_at_once()) == 600


def test_p69_calls_without_a_message_leave_room_for_another_tenant(serve: Serve, tmp_path: Path) -> None:
    tokens = {name: secrets.token_urlsafe() for name in ("a", "b")}
    file = tokens_file(tmp_path, *(f"{name}={token}" for name, token in tokens.items()), "")
    with serve(tokens_file=file, max_calls=64) as found:
        with (
            http2.Connection(found.target) as attacker,
            Probe(found.target, token=tokens["b"], namespace="b") as probe,
        ):
            for stream in range(1, 256, 2):
                attacker.send(http2.headers(stream, authorization=f"Bearer {tokens['a']}"))
            wait_until(lambda: held(found)["calls"] >= 48)
            probe.wait_for(probe.outcomes.total() + 50)
            assert held(found)["calls"] in (48, 49)
            with (
                VisionEncoderClient(found.target, token=tokens["a"], namespace="a", timeout_s=4) as own,
                pytest.raises(EncoderOverloaded, match="48 of them of this caller"),
            ):
                own.info()
        assert probe.num_failed == 0, probe.outcomes
        wait_until_free(found)


# -- health and reflection ---------------------------------------------------------------------------------


def test_p67_watchers_have_a_limit_and_checks_still_answer(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "MAX_STREAMS", 8)
    with serve() as found, grpc.insecure_channel(found.target) as channel:
        stub, request = health_stub(channel), health_pb2.HealthCheckRequest()
        watches = [stub.Watch(request) for _ in range(6)]
        assert [next(watch).status for watch in watches] == [1] * 6
        with pytest.raises(grpc.RpcError, match="6 of them of this caller; at most 8") as caught:
            next(stub.Watch(request))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert stub.Check(request, timeout=10).status == 1
        watches[0].cancel()
        wait_until(lambda: found.service.gate.streams.num_calls == 5)
        assert next(stub.Watch(request)).status == 1
        unknown = health_pb2.HealthCheckRequest(service="x")
        assert next(stub.Watch(unknown)).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        with pytest.raises(grpc.RpcError) as not_found:
            stub.Check(unknown, timeout=10)
        assert not_found.value.code() is grpc.StatusCode.NOT_FOUND


def test_p67_a_watcher_that_does_not_read_delays_nobody(serve: Serve) -> None:
    check = http2.frame(http2.DATA, 0, 1, http2.message(b""))
    started_s = time.monotonic()
    with (
        serve() as found,
        grpc.insecure_channel(found.target) as channel,
        http2.Connection(found.target, window=0) as silent,
    ):
        silent.send(http2.headers(1, path="/grpc.health.v1.Health/Watch") + check)
        wait_until(lambda: found.service.gate.streams.num_calls == 1)
        watch = health_stub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=60)
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        found.loop.call_soon_threadsafe(found.service.request_stop)
        assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
    assert time.monotonic() - started_s < UNREAD_S


def test_p67_reflection_takes_small_messages_and_a_limited_number_of_streams(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "MAX_STREAMS", 8)
    monkeypatch.setattr(gate, "RECEIVE_S", 20)
    with serve() as found, grpc.insecure_channel(found.target) as channel:
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        wanted = reflection_pb2.ServerReflectionRequest(list_services="")
        answers = list(stub.ServerReflectionInfo(iter([wanted, wanted]), timeout=20))
        names = {service.name for service in answers[1].list_services_response.service}
        assert "vision_encoder.v1.VisionEncoder" in names
        large = reflection_pb2.ServerReflectionRequest(file_by_filename="x" * gate.MAX_SMALL_BYTES)
        with pytest.raises(grpc.RpcError, match="at most 4096 are taken here"):
            list(stub.ServerReflectionInfo(iter([large]), timeout=20))
        idle = [stub.ServerReflectionInfo(iter(threading.Event().wait, None), timeout=20) for _ in range(6)]
        wait_until(lambda: found.service.gate.streams.num_calls == 6)
        with pytest.raises(grpc.RpcError, match="at most 8"):
            list(stub.ServerReflectionInfo(iter([wanted]), timeout=20))
        for stream in idle:
            stream.cancel()


# -- connections, sockets ----------------------------------------------------------------------------------


def test_p69_an_address_leaves_connections_to_others(serve: Serve) -> None:
    with (
        serve(max_connections=64) as found,
        Probe(found.target) as probe,
        contextlib.ExitStack() as open_,
    ):
        first = open_.enter_context(http2.Connection(found.target, source="127.0.0.2"))
        for _ in range(119):
            with contextlib.suppress(OSError):
                open_.enter_context(http2.Connection(found.target, source="127.0.0.2"))

        def is_served() -> bool:
            with VisionEncoderClient(found.target, timeout_s=5) as fresh, contextlib.suppress(EncoderError):
                return bool(fresh.info().models)
            return False

        wait_until(is_served, "room for another address", timeout_s=2)
        assert not first.is_closed(0.5), "the newest end first"
        probe.wait_for(probe.outcomes.total() + 10)
    assert probe.num_failed == 0, probe.outcomes


def test_p73_a_stopping_server_leaves_its_successors_socket(tmp_path: Path) -> None:
    """Both in one process; the second takes the path while the first still has a call."""
    address = f"unix:{tmp_path}/encoder.sock"

    def server() -> GrpcServer:
        settings = parse_settings(model=tmp_path)
        permits = CallPermits(settings.max_calls)
        return GrpcServer(settings, CallGate(NamespaceTokens(), permits, Admission(0, MIB), MIB))

    async def check(channel: grpc.aio.Channel) -> int:
        request = health_pb2.HealthCheckRequest()
        status: int = (await health_stub(channel).Check(request, timeout=10)).status
        return status

    async def main() -> None:
        first, second = server(), server()
        first.bind((address,))
        await first.start({})
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with (
            grpc.aio.insecure_channel(address, options=options) as old,
            grpc.aio.insecure_channel(address, options=options) as new,
        ):
            assert await check(old) == 1
            held_open = health_stub(old).Watch(health_pb2.HealthCheckRequest())
            assert await anext(aiter(held_open)) is not None
            stopping = asyncio.ensure_future(first.stop(1.0))
            await asyncio.sleep(0.1)
            second.bind((address,))
            await second.start({})
            await stopping
            assert await check(new) == 1
            await second.stop(0)

    asyncio.run(main())
    assert list(tmp_path.iterdir()) == []
