"""What one gateway keeps from its fleet, and what two agree on."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from typer.testing import CliRunner

from bench.harness.fleet.caller_main import TOLERANCE
from bench.harness.fleet.fleet import READY_S, Fleet
from bench.harness.fleet.gateway import NAME, AccessLog, Gateway, dict_of, part
from bench.harness.fleet.images import HOLD, MIB, image_file
from bench.harness.fleet.names import NameServer
from bench.harness.waiting import wait_until
from encoder_service.cli import app
from lm_adapter import EncodedRows, ImageItem, InvalidRequest, PrefetchStatus, VisionEncoderClient
from tests.integration.http2 import ENCODE, GRPC_HEADERS, SERVER_INFO, RawCaller
from tests.unit.lm_adapter.connector_rig import Engine, Image, engine_config

pytestmark = pytest.mark.fleet

EMPTY_MESSAGE = bytes(5)
UNWANTED: dict[str, tuple[dict[str, str], bytes]] = {
    "GET": ({":method": "GET"}, EMPTY_MESSAGE),
    "PUT": ({":method": "PUT"}, EMPTY_MESSAGE),
    "no te": ({"te": ""}, EMPTY_MESSAGE),
    "another te": ({"te": "gzip"}, EMPTY_MESSAGE),
    "no content type": ({"content-type": ""}, EMPTY_MESSAGE),
    "JSON": ({"content-type": "application/json"}, b"{}"),
    "unknown path": ({":path": "/"}, EMPTY_MESSAGE),
    "empty message": ({}, EMPTY_MESSAGE),
    "message cut short": ({}, b"\0\0\0\0\x09abc"),
    "no message": ({}, b""),
    "unknown encoding": ({"grpc-encoding": "x"}, b"\1\0\0\0\3abc"),
    "malformed deadline": ({"grpc-timeout": "x"}, EMPTY_MESSAGE),
}
PARSED = {
    "grpc-timeout": (("x", "", "123456789S"), "10S"),
    "grpc-encoding": (("x", ""), "identity"),
    "grpc-accept-encoding": (("x", ""), "gzip"),
    "grpc-previous-rpc-attempts": (("x", ""), "1"),
    "grpc-trace-bin": (("!", "A"), "AAAA"),
    "grpc-tags-bin": (("!", "A"), "AAAA"),
}
"""Headers that an encoder's gRPC parses: malformed values, a good one."""
FIRST_IMAGE, NUM_IMAGES = 1000, 24
MAX_CONNECTIONS = 20
SMALL_HEAP_BYTES = 4_000_000
TIMEOUT_S, HELD_S = 1, 3
UNKNOWN = 2
"""grpc-status, from Envoy's 408."""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Iterator[Fleet]:
    """Three encoders, two gateways, no callers."""
    folder = tmp_path_factory.mktemp("fleet")
    with Fleet(folder, checkpoint, num_replicas=3, num_callers=0) as found:
        yield found


def test_malformed_requests_eject_no_replica_and_fail_no_call(fleet: Fleet) -> None:
    fleet.warm_up()
    before = fleet.counters()
    for what, (changes, body) in UNWANTED.items():
        headers = {name: value for name, value in {**GRPC_HEADERS, **changes}.items() if value}
        for gateway in fleet.gateways:
            with RawCaller(gateway.port) as caller:
                caller.ask(headers, body)
        assert len(fleet.encode([image_file(number) for number in range(20)])) == 20, what
    after = fleet.counters()
    assert after["outlier_detection.ejections_enforced_total"] == 0
    for name in ("upstream_cx_destroy", "upstream_rq_retry"):
        assert after[name] == before[name], name


def test_a_malformed_header_fails_no_call_of_another_caller(fleet: Fleet) -> None:
    """Both go to one replica through one connection of the gateway."""
    gateway = fleet.gateways[0]
    log = gateway.access_log()
    headers = {**GRPC_HEADERS, ":path": SERVER_INFO, "x-content-digest": "0" * 64}
    with RawCaller(gateway.port) as caller:
        for name, (malformed, good) in PARSED.items():
            for value in malformed:
                caller.ask({**headers, name: value}, EMPTY_MESSAGE)
                caller.ask({**headers, name: good}, EMPTY_MESSAGE)
    number = 2 * sum(len(malformed) for malformed, _ in PARSED.values())
    entries = entries_of(log, number)
    assert len(entries) == number
    of_good = entries[1::2]
    assert {(one["grpc_status"], one["attempts"]) for one in of_good} == {(0, 1)}
    assert len({one["replica"] for one in of_good}) == 1
    assert fleet.counters()["outlier_detection.ejections_enforced_total"] == 0


def test_a_client_without_fleet_is_told_that_it_needs_it(fleet: Fleet) -> None:
    target = fleet.gateways[0].target
    image = ImageItem(image_file(2))
    with VisionEncoderClient(target, timeout_s=READY_S) as client:
        assert client.info().models
        for call in (client.encode, client.prefetch):
            with pytest.raises(InvalidRequest, match=f"{target} is a gateway .* use fleet=True"):
                call([image])
    with VisionEncoderClient(target, fleet=True, timeout_s=READY_S) as client:
        (status,) = client.prefetch([image])
        assert isinstance(status, PrefetchStatus)
        (rows,) = client.fetch([status.key])  # its route is known
        assert isinstance(rows, EncodedRows)


def test_info_of_a_gateway_says_whether_a_namespace_is_open(fleet: Fleet) -> None:
    arguments = ["info", "--server", fleet.gateways[0].target, "--namespace", "tenant"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "'tenant' is open to this caller" in result.output


def test_the_commands_encode_and_bench_go_through_a_gateway(fleet: Fleet, tmp_path: Path) -> None:
    target, out = fleet.gateways[0].target, tmp_path / "rows"
    for number in range(10):
        (tmp_path / f"{number}.png").write_bytes(image_file(2000 + number))
    arguments = ["encode", "--server", target, str(tmp_path), "--out", str(out)]
    refused = CliRunner().invoke(app, arguments)
    assert (refused.exit_code, "use fleet=True, or --fleet" in refused.output) == (1, True)
    done = CliRunner().invoke(app, [*arguments, "--fleet"])
    assert done.exit_code == 0, done.output
    assert "10 encoded" in done.output
    again = CliRunner().invoke(app, [*arguments, "--fleet", "--resume"])
    assert "10 were there" in again.output
    arguments = ["bench", "--server", target, "--fleet", "--sizes", "32x32", "--num-images", "20"]
    measured = CliRunner().invoke(app, arguments)
    assert measured.exit_code == 0, measured.output


def test_two_gateways_send_equal_digests_to_one_replica(fleet: Fleet) -> None:
    one, other = (fleet.owners(gateway) for gateway in fleet.gateways)
    assert one == other
    assert set(one.values()) == {encoder.target for encoder in fleet.replicas}


def test_a_request_has_to_arrive_in_time_but_its_answer_may_take_longer(fleet: Fleet, tmp_path: Path) -> None:
    def change(config: dict[str, Any]) -> None:
        manager = dict_of(part(config, "listeners", "calls")["filter_chains"][0]["filters"][0])
        manager["typed_config"]["request_timeout"] = f"{TIMEOUT_S}s"

    with Gateway(tmp_path, fleet.names.port, change=change) as gateway:
        gateway.wait_members(3)
        log = gateway.access_log()
        with VisionEncoderClient(gateway.target, fleet=True, timeout_s=READY_S) as client:
            file = image_file(1, mark=HOLD + b"%02d" % HELD_S)
            assert client.encode_one(ImageItem(file)).num_rows
        with RawCaller(gateway.port) as caller:
            caller.ask(GRPC_HEADERS, EMPTY_MESSAGE[:1], is_whole=False)
        entries = entries_of(log, 3)  # with GetServerInfo
        assert gateway.counters()["outlier_detection.ejections_enforced_total"] == 0
    assert [one["grpc_status"] for one in entries] == [0, 0, UNKNOWN]
    assert entries[1]["duration_ms"] >= HELD_S * 1e3
    assert entries[2]["duration_ms"] < HELD_S * 1e3


def test_the_access_log_has_the_encoders_request_id(fleet: Fleet) -> None:
    """The caller's, where it gave one, also of failed calls. No header makes an entry long."""
    gateway = fleet.gateways[0]
    log = gateway.access_log()
    answered = {**GRPC_HEADERS, ":path": SERVER_INFO}
    long = {"x-content-digest": "0" * 100}
    with RawCaller(gateway.port) as caller:
        for headers in (answered | {"x-request-id": "of-a-caller"}, answered | long, GRPC_HEADERS):
            caller.ask(headers, EMPTY_MESSAGE)
    given, made, failed = entries_of(log, 3)
    assert given["request_id"] == "of-a-caller"
    assert made["digest"] == "0" * 64
    assert failed["grpc_status"] != 0
    assert len({made["request_id"], failed["request_id"], None}) == 3


def test_vllms_connector_reads_rows_through_the_gateway(fleet: Fleet, checkpoint: Path) -> None:
    """Both ranks where the scheduler's half has sent the file. What a replica's end has lost is encoded again
    by another one."""
    files = [image_file(FIRST_IMAGE + number) for number in range(NUM_IMAGES)]
    (known,) = fleet.encode([image_file(0)])
    images = [Image(file, known.grid_thw) for file in files]
    gateway = fleet.gateways[0]
    before = gateway.counters()["upstream_rq_total"]
    hf_config = json.loads((checkpoint / "config.json").read_text())
    config = engine_config(gateway.target, num_ranks=2, hf_config=hf_config, fleet=True)
    with Engine(config) as engine:

        def read_all() -> list[dict[str, torch.Tensor]]:
            request = engine.request(*images)
            engine.fetch(request)
            engine.load(engine.schedule(request))
            engine.finish(request)
            engine.wait_empty()
            found = [dict(cache) for cache in engine.caches]
            for cache in engine.caches:
                cache.clear()
            return found

        caches = read_all()
        num_calls = gateway.counters()["upstream_rq_total"] - before
        # A Prefetch and a Fetch of each rank. Every client asks for the models; a replica without the rows
        # would be asked for an Encode.
        assert 3 * NUM_IMAGES <= num_calls < 3 * NUM_IMAGES + NUM_IMAGES // 2
        lost = fleet.replicas[0]
        lost.send(signal.SIGKILL)
        lost.wait_ended()
        caches += read_all()
    fleet.start_again(lost)
    fleet.wait_members()
    for image, rows in zip(images, fleet.encode(files), strict=True):
        for cache in caches:  # rows' last bits depend on the batch that they were encoded in
            torch.testing.assert_close(cache[image.identifier], rows.torch(), rtol=TOLERANCE, atol=TOLERANCE)


def test_a_body_too_large_to_be_kept_for_a_retry_may_be_sent_again_by_the_caller(tmp_path: Path) -> None:
    """The first try has ended before the whole body is there. Here no replica accepts a connection, and the
    second try, which comes at a random time within the interval, is late."""

    def change(config: dict[str, Any]) -> None:
        del part(config, "clusters", "encoders")["health_checks"]
        manager = dict_of(part(config, "listeners", "calls")["filter_chains"][0]["filters"][0])
        route = manager["typed_config"]["route_config"]["virtual_hosts"][0]["routes"][-1]["route"]
        route["retry_policy"]["retry_back_off"] = {"base_interval": "10000000s", "max_interval": "10000000s"}

    with NameServer(NAME) as names, Gateway(tmp_path, names.port, change=change) as gateway:
        names.addresses = ("127.18.0.1", "127.18.0.2")
        gateway.wait_members(2)
        with grpc.insecure_channel(gateway.target) as channel:
            call: Any = channel.unary_unary(ENCODE)
            with pytest.raises(grpc.RpcError) as failure:
                call(bytes(64 * MIB), timeout=READY_S)
        assert gateway.counters()["retry_or_shadow_abandoned"] == 1
    assert failure.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "request buffer limit" in str(failure.value.details())


def entries_of(log: AccessLog, number: int) -> list[dict[str, Any]]:
    """So many entries, in the order of their calls' ends."""
    entries: list[dict[str, Any]] = []

    def are_there() -> bool:
        entries.extend(log.read())
        return len(entries) >= number

    wait_until(are_there, "the access log's entries")
    return entries


def few_connections(config: dict[str, Any]) -> None:
    monitor(config, "global_downstream_max_connections")["max_active_downstream_connections"] = (
        MAX_CONNECTIONS
    )


def small_heap(config: dict[str, Any]) -> None:
    monitor(config, "fixed_heap")["max_heap_size_bytes"] = SMALL_HEAP_BYTES


def monitor(config: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = (
        one["typed_config"]
        for one in config["overload_manager"]["resource_monitors"]
        if one["name"] == f"envoy.resource_monitors.{name}"
    )
    return dict_of(found)


def gauge(gateway: Gateway, name: str) -> float:
    """As Prometheus reads it."""
    (line,) = (
        one for one in gateway.operations("/stats/prometheus").splitlines() if one.startswith(f"{name}{{")
    )
    return float(line.split()[-1])


def test_callers_cannot_make_it_unready(tmp_path: Path) -> None:
    with NameServer("") as names:
        full, crowded = tmp_path / "full", tmp_path / "crowded"
        for folder in (full, crowded):
            folder.mkdir()
        with Gateway(full, names.port, change=small_heap) as gateway:
            name = "envoy_overload_envoy_overload_actions_stop_accepting_requests_active"
            wait_until(lambda: gauge(gateway, name) == 1, "the overload")
            assert gateway.operations("/ready").startswith("LIVE")
        with Gateway(crowded, names.port, change=few_connections) as gateway, ExitStack() as stack:
            for _ in range(2 * MAX_CONNECTIONS):
                stack.enter_context(socket.create_connection(("127.0.0.1", gateway.port)))
            name = "envoy_overload_envoy_resource_monitors_global_downstream_max_connections_pressure"
            wait_until(lambda: gauge(gateway, name) == 100, "the overload")
            assert gateway.operations("/ready").startswith("LIVE")
