"""Bounds on calls and connections, keepalive, deadlines, cancellation: nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status

from bench.harness.waiting import wait_until
from encoder_service.pipeline import EncodeResult, Pipeline
from encoder_service.rpc import gate, server
from encoder_service.types import Item
from lm_adapter import EncodedRows, EncoderOverloaded, ImageItem, VisionEncoderClient
from lm_adapter.channel import channel_options
from tests.integration.conftest import RunningService, Serve, connected
from tests.integration.health import health_of
from tests.integration.held import held, wait_until_free
from tests.integration.images import photo
from vision_encoder.v1 import encoder_pb2 as pb
from vision_encoder.v1 import encoder_pb2_grpc

OWN_CONNECTION = [("grpc.use_local_subchannel_pool", 1)]


def request(data: bytes) -> pb.EncodeRequest:
    return pb.EncodeRequest(items=[pb.Item(modality=pb.MODALITY_IMAGE, encoded=data)])


@contextlib.contextmanager
def stuck(found: RunningService) -> Iterator[threading.Event]:
    """Encodes wait until the block ends or the event is set."""
    pipeline = found.service.pipeline
    assert pipeline is not None
    go_on, inner = threading.Event(), Pipeline.encode

    async def encode(item: Item, **rest: object) -> EncodeResult:
        await asyncio.to_thread(go_on.wait)
        return await inner(pipeline, item, **rest)  # type: ignore[arg-type]

    pipeline.encode = encode  # type: ignore[method-assign]
    try:
        yield go_on
    finally:
        go_on.set()
        del pipeline.encode  # type: ignore[method-assign]


def wait_for_calls(found: RunningService, number: int) -> None:
    wait_until(lambda: held(found)["calls"] == number, f"{number} calls")


def test_p17_calls_over_the_bound_are_told_when_to_come_again(serve: Serve) -> None:
    with serve(max_calls=4) as found:
        with stuck(found) as go_on, grpc.insecure_channel(found.target) as channel:
            stub = encoder_pb2_grpc.VisionEncoderStub(channel)
            calls = [stub.Encode(request(photo()), timeout=60) for _ in range(3)]
            wait_for_calls(found, 3)
            with VisionEncoderClient(found.target, timeout_s=20, waits=False) as client:
                with pytest.raises(EncoderOverloaded, match="at most 4") as caught:
                    client.info()
                assert caught.value.reason == "TOO_MANY_CALLS"
                assert caught.value.retryable
                assert caught.value.retry_after_ms > 0
            with pytest.raises(grpc.RpcError) as raw:
                stub.Lookup(pb.LookupRequest(keys=[bytes(32)]), timeout=20)
            trailing: dict[str, Any] = {one.key: one.value for one in raw.value.trailing_metadata()}
            packed = trailing["grpc-status-details-bin"]
            advice = RetryInfo()
            assert Status.FromString(packed).details[1].Unpack(advice)
            assert advice.retry_delay.ToMilliseconds() == caught.value.retry_after_ms
            # p36: health answers beside full house
            assert health_of(found.target) == 1
            assert found.metric("ve_open_calls") == 3
            calls[0].cancel()
            wait_for_calls(found, 2)
            assert stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=20).models
            go_on.set()
            assert all(list(call) for call in calls[1:])
        wait_until_free(found)
        assert found.metric('ve_requests_total{method="GetServerInfo",status="RESOURCE_EXHAUSTED"}') == 1
        assert found.metric('ve_refused_calls_total{reason="TOO_MANY_CALLS"}') == 2
        assert found.metric("ve_open_calls") == 0


def test_connections_that_say_nothing_do_not_stay(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "HANDSHAKE_S", 0.5)
    with serve() as found:
        host, _, port = found.target.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=15) as silent:
            while silent.recv(4096):  # the server's settings, then its end
                pass


def test_a_message_that_does_not_come_is_not_waited_for(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "RECEIVE_S", 0.3)
    with serve() as found:
        with grpc.insecure_channel(found.target) as channel:
            encode: grpc.StreamStreamMultiCallable[Any, Any] = channel.stream_stream(
                "/vision_encoder.v1.VisionEncoder/Encode"
            )
            call = encode(iter(lambda: time.sleep(30), 0), timeout=20)
            with pytest.raises(grpc.RpcError, match=r"within 0\.3 s"):
                next(call)
            assert call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            monkeypatch.setattr(gate, "RECEIVE_S", 20)
            empty = channel.stream_stream("/vision_encoder.v1.VisionEncoder/Encode")(iter(()), timeout=20)
            with pytest.raises(grpc.RpcError, match="ended before its request"):
                next(empty)
        wait_until_free(found)


def test_p34_a_client_that_floods_with_pings_is_cut_off(service: RunningService) -> None:
    """By hand, as gRPC's own client does not ping that often: HTTP/2's preface, empty settings, PING frames
    (RFC 9113, sections 3.4 and 6.7)."""
    host, _, port = service.target.rpartition(":")
    ping = b"\0\0\x08\x06\0" + bytes(4 + 8)
    with socket.create_connection((host, int(port)), timeout=15) as flooding:
        flooding.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\x04\0" + bytes(4))
        with contextlib.suppress(ConnectionError):
            for _ in range(20):
                flooding.sendall(ping)
                time.sleep(0.02)
        answer = b""
        with contextlib.suppress(ConnectionError):
            while data := flooding.recv(4096):
                answer += data
    assert b"too_many_pings" in answer


def test_p34_the_adapter_pings_no_more_often_than_the_server_allows() -> None:
    ours = dict(channel_options())
    assert int(ours["grpc.keepalive_time_ms"]) >= 2000 * server.MIN_PING_INTERVAL_S


def test_p15_cancelled_and_late_callers_leave_nothing_behind(serve: Serve) -> None:
    """Calls that end at any moment of their life, by cancellation or deadline, some of them for the same
    content, beside one that does not."""
    seed = random.randrange(1 << 30)
    print("seed", seed)
    chance = random.Random(seed)
    with serve(ingest_threads=2) as found:
        files = [photo(chance.randrange(40, 700), chance.randrange(40, 500)) for _ in range(12)]
        with connected(found) as stub:

            def one(wait_s: float, by_deadline: bool, chosen: list[bytes]) -> None:
                items = [pb.Item(modality=pb.MODALITY_IMAGE, encoded=data) for data in chosen]
                call = stub.Encode(
                    pb.EncodeRequest(items=items, namespace=str(wait_s)),
                    timeout=max(wait_s, 0.001) if by_deadline else 60,
                )
                if not by_deadline:
                    time.sleep(wait_s)
                    call.cancel()
                with contextlib.suppress(grpc.RpcError):
                    list(call)

            with ThreadPoolExecutor(8) as pool:
                futures = [
                    pool.submit(
                        one, chance.uniform(0, 0.15), chance.random() < 0.5, chance.choices(files, k=3)
                    )
                    for _ in range(60)
                ]
                with VisionEncoderClient(found.target, timeout_s=60) as client:
                    for data in files[:4]:
                        assert isinstance(client.encode([ImageItem(data)])[0], EncodedRows)
                for future in futures:
                    future.result(60)
        wait_until_free(found)
        engine = found.service.engine
        assert engine is not None
        assert engine.fault is None
        internal = found.metric('ve_requests_total{method="Encode",status="INTERNAL"}')
        assert not internal, "a caller that left is no failure of the service"


def test_an_old_connection_is_replaced_unnoticed(serve: Serve) -> None:
    """Ends of connections meet no call."""
    with (
        serve(connection_age_s=0.3) as found,
        VisionEncoderClient(found.target, timeout_s=20) as client,
    ):
        ends_s = time.monotonic() + 2
        while time.monotonic() < ends_s:
            assert isinstance(client.encode([ImageItem(photo(40, 40))])[0], EncodedRows)
