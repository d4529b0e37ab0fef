"""Clients of a gateway: one call an item with its routing digest, one repeat, two targets."""

from __future__ import annotations

import dataclasses
import hashlib
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest

from bench.harness.waiting import wait_until
from lm_adapter import (
    CallFailed,
    DeadlineExceeded,
    DigestItem,
    EncodedRows,
    EncoderUnavailable,
    FramesItem,
    ImageItem,
    InvalidRequest,
    Item,
    ItemFailed,
    KeyState,
    PrefetchStatus,
    UrlItem,
    VisionEncoderClient,
    keys,
)
from lm_adapter.fleet import KnownRoutes
from lm_adapter.local_first import LocalFirstClient
from lm_adapter.testing import FakeEncoder, Fault
from tests.unit.lm_adapter.conftest import Open, opener
from tests.unit.lm_adapter.test_client import assert_rows_of, digest_of, image
from vision_encoder.layout.keys import ROUTING_KEY

DRAINING = ItemFailed("the service is stopping", reason="DRAINING", status=14, retryable=True)


@pytest.fixture
def client(open_client: Open) -> Any:
    return open_client(fleet=True)


def routes_of(fake: FakeEncoder, method: str) -> list[str]:
    return sorted(call.metadata[ROUTING_KEY] for call in fake.calls if call.method == method)


def test_every_item_is_a_call_of_its_own_with_its_digest(fake: FakeEncoder, client: Any) -> None:
    items = [image(index) for index in range(5)]
    outcomes = client.encode(items)
    for index, outcome in enumerate(outcomes):
        assert_rows_of(outcome, digest_of(index))
    encodes = [call for call in fake.calls if call.method == "Encode"]
    assert [len(call.request.items) for call in encodes] == [1] * 5
    for call in encodes:
        assert call.metadata[ROUTING_KEY] == call.request.items[0].content_digest.hex()
    announced = client.prefetch(items)
    assert routes_of(fake, "Prefetch") == routes_of(fake, "Encode")
    routes = [status.routing_digest for status in announced]
    found = client.fetch([status.key for status in announced], routing_digests=routes)
    assert all(isinstance(outcome, EncodedRows) for outcome in found)
    assert routes_of(fake, "Fetch") == routes_of(fake, "Encode")
    statuses = client.lookup([status.key for status in announced], routing_digests=routes)
    assert [status.state for status in statuses] == [KeyState.RESIDENT] * 5
    assert [status.key for status in statuses] == [status.key for status in announced]
    assert routes_of(fake, "Lookup") == routes_of(fake, "Encode")


def test_items_are_asked_for_at_once(fake: FakeEncoder, client: Any) -> None:
    """The first item's stream stands still until another item's call has been seen."""
    fake.script.faults[digest_of(0)] = Fault.HANG

    def resume_once_both_came() -> None:
        wait_until(lambda: fake.num_calls["Encode"] == 2, "the second call", timeout_s=20)
        fake.resume()

    with ThreadPoolExecutor(1) as pool:
        resumed = pool.submit(resume_once_both_came)
        outcomes = client.encode([image(0), image(1)])
        resumed.result()
    assert all(isinstance(outcome, EncodedRows) for outcome in outcomes)


def test_a_url_is_routed_by_its_string_unless_it_has_a_digest() -> None:
    url = "https://example.org/a.jpg"
    assert keys.routing_digest(UrlItem(url)) == hashlib.sha256(url.encode()).digest()
    assert keys.routing_digest(UrlItem(url, digest=b"d" * 32)) == b"d" * 32


@pytest.mark.parametrize("method", ["fetch", "lookup"])
def test_routing_digests_are_those_of_all_keys_or_known(client: Any, method: str) -> None:
    with pytest.raises(InvalidRequest, match="routing_digests has 1 digests, keys has 3 keys"):
        getattr(client, method)([b"k" * 32] * 3, routing_digests=[b"r" * 32])
    with pytest.raises(InvalidRequest, match=r"keys\[0\] was not announced by this .* routing_digests"):
        getattr(client, method)([b"k" * 32])


def test_the_routes_of_announced_and_encoded_items_are_remembered(fake: FakeEncoder, client: Any) -> None:
    (announced,) = client.prefetch([image(0)])
    encoded = client.encode(image(1))
    for index, rows in enumerate(client.fetch([announced.key, encoded.key])):
        assert_rows_of(rows, digest_of(index))
    client.lookup([announced.key])
    assert routes_of(fake, "Fetch") == sorted([digest_of(0).hex(), digest_of(1).hex()])
    assert routes_of(fake, "Lookup") == [digest_of(0).hex()]


def test_the_least_recently_used_route_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lm_adapter.fleet.MAX_KNOWN_ROUTES", 2)
    known = KnownRoutes()
    known.note(b"a", b"1")
    known.note(b"b", b"2")
    assert known.of([b"a"], ()) == {0: b"1"}
    known.note(b"c", b"3")
    assert known.of([b"c", b"a"], ()) == {0: b"3", 1: b"1"}
    with pytest.raises(InvalidRequest, match="was not announced"):
        known.of([b"b"], ())


@pytest.mark.parametrize("method", ["Encode", "Prefetch"])
def test_p44_a_replica_that_drains_is_asked_once_more_and_what_came_is_kept(
    fake: FakeEncoder, client: Any, method: str
) -> None:
    client.info()
    fake.script.call_failures[method] = (grpc.StatusCode.UNAVAILABLE, DRAINING)
    (failed,) = getattr(client, method.lower())([image(0)])
    assert isinstance(failed, ItemFailed)
    assert (failed.reason, failed.status, failed.retryable) == ("DRAINING", 14, True)
    assert fake.num_calls[method] == 2


@pytest.mark.parametrize(
    "bad",
    [DigestItem(b""), FramesItem(np.zeros((1, 4, 4, 3), np.float32)), ImageItem(b"a", digest=b"z" * 9000)],
)
@pytest.mark.parametrize("method", ["encode", "prefetch"])
def test_p33_a_malformed_item_fails_alone(client: Any, method: str, bad: Item) -> None:
    fine, failed = getattr(client, method)([image(0), bad])
    assert not isinstance(fine, ItemFailed)
    assert isinstance(failed, ItemFailed)


def test_an_item_that_gateways_cannot_repeat_waits_until_all_have_left_out_its_replica(
    fake: FakeEncoder, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lm_adapter.fleet.GATEWAY_BUFFER_BYTES", 1000)
    monkeypatch.setattr("lm_adapter.fleet.LARGE_PAUSE_S", 1.0)
    client.info()
    fake.script.call_failures["Encode"] = (grpc.StatusCode.UNAVAILABLE, DRAINING)
    for num_calls, num_bytes in ((2, 1001), (4, 100)):
        started_s = time.monotonic()
        client.encode([ImageItem(bytes(num_bytes))])
        assert (time.monotonic() - started_s >= 1.0) == (num_bytes > 1000)
        assert fake.num_calls["Encode"] == num_calls


def test_information_of_a_fleet_is_asked_for_again_when_it_is_old(
    fake: FakeEncoder, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.encode_one(image(0))
    monkeypatch.setattr("lm_adapter.fleet.FLEET_INFO_S", 0.0)
    client.encode_one(image(1))
    assert fake.num_calls["GetServerInfo"] == 2
    fake.script.call_failures["GetServerInfo"] = (grpc.StatusCode.UNAVAILABLE, DRAINING)
    client.encode_one(image(2))  # what is known serves on


def test_other_items_keep_their_outcome_when_one_call_fails(fake: FakeEncoder, client: Any) -> None:
    fake.script.faults[digest_of(1)] = Fault.ABORT
    with pytest.raises(CallFailed) as raised:
        client.encode([image(index) for index in range(3)])
    assert sorted(raised.value.completed) == [0, 2]
    assert_rows_of(raised.value.completed[2], digest_of(2))


def test_calls_take_turns_over_two_gateways_and_one_may_go(fake: FakeEncoder) -> None:
    with FakeEncoder() as other:
        both = [fake, other]
        ports = [one.target.rpartition(":")[2] for one in both]
        target = "ipv4:" + ",".join(f"127.0.0.1:{port}" for port in ports)
        with opener(target, fleet=True) as open_client:
            client = open_client()

            def both_were_asked() -> bool:
                client.encode_one(image(0))
                return all(one.num_calls["Encode"] for one in both)

            wait_until(both_were_asked)
            fake.stop()
            for index in range(20):
                assert_rows_of(client.encode_one(image(index)), digest_of(index))


# -- two targets -----------------------------------------------------------------------------------------


@pytest.fixture
def gateway() -> Iterator[FakeEncoder]:
    with FakeEncoder() as running:
        yield running


@pytest.fixture
def two(open_client: Open, gateway: FakeEncoder) -> Any:
    """A client of both."""
    return open_client(fallback_target=gateway.target)


def test_the_local_encoder_is_asked_alone_while_it_answers(
    two: Any, fake: FakeEncoder, gateway: FakeEncoder
) -> None:
    two.encode([image(0), image(1)])
    (announced,) = two.prefetch([image(2)])
    assert announced.routing_digest == digest_of(2)
    two.fetch([announced.key], routing_digests=[announced.routing_digest])
    two.lookup([announced.key], routing_digests=[announced.routing_digest])
    assert not gateway.num_calls
    assert fake.num_calls["Encode"] == 1  # both items in one call
    (rows,) = two.fetch([announced.key])  # its digest is remembered
    assert_rows_of(rows, digest_of(2))
    with pytest.raises(InvalidRequest, match=r"keys\[0\] was not announced"):
        two.fetch([b"k" * 32])
    statuses = two.prefetch([image(2), DigestItem(b"")])
    assert [isinstance(status, PrefetchStatus) for status in statuses] == [True, False]


def test_readiness_is_that_of_either_target(two: Any, fake: FakeEncoder, gateway: FakeEncoder) -> None:
    assert two.wait_ready(10).instance_id in {fake.instance_id, gateway.instance_id}
    fake.stop()
    assert two.wait_ready(10).instance_id == gateway.instance_id
    assert two.info().instance_id == gateway.instance_id
    assert two.wait_transport().name == "inline"
    gateway.stop()
    with pytest.raises(DeadlineExceeded, match="was not ready"):
        two.wait_ready(0.3)


def test_the_gateway_answers_while_the_local_encoder_is_down(
    two: Any, fake: FakeEncoder, gateway: FakeEncoder
) -> None:
    fake.stop()
    for index, outcome in enumerate(two.encode([image(0), image(1)])):
        assert_rows_of(outcome, digest_of(index))
    (announced,) = two.prefetch([image(2)])
    assert isinstance(announced, PrefetchStatus)
    (rows,) = two.fetch([announced.key], routing_digests=[announced.routing_digest])
    assert_rows_of(rows, digest_of(2))
    assert routes_of(gateway, "Encode") == sorted(digest_of(index).hex() for index in (0, 1))
    fake.start()
    wait_until(lambda: two.encode_one(image(3)) and fake.num_calls["Encode"])  # it is asked again


@pytest.mark.anyio
async def test_the_key_of_an_announced_item_is_the_gateways_while_the_local_encoder_is_down(
    fake: FakeEncoder, gateway: FakeEncoder
) -> None:
    fake.stop()
    client = LocalFirstClient(fake.target, fallback_target=gateway.target, timeout_s=10.0)
    try:
        (announced,) = await client.prefetch([image(2)])
        assert isinstance(announced, PrefetchStatus)
        named = dataclasses.replace(image(2), digest=digest_of(2))
        assert await client.known_key(named) == announced.key
    finally:
        await client.close()


def test_p44_the_gateway_is_asked_only_for_what_had_not_come(
    two: Any, fake: FakeEncoder, gateway: FakeEncoder
) -> None:
    two.info()
    fake.script.num_cuts = 1  # after the first item
    for index, outcome in enumerate(two.encode([image(index) for index in range(3)])):
        assert_rows_of(outcome, digest_of(index))
    assert fake.num_calls["Encode"] == 1
    assert routes_of(gateway, "Encode") == sorted(digest_of(index).hex() for index in (1, 2))


def test_items_of_a_local_encoder_that_drains_go_to_the_gateway(
    two: Any, fake: FakeEncoder, gateway: FakeEncoder
) -> None:
    fake.script.failures[digest_of(1)] = DRAINING
    fake.script.failures[digest_of(2)] = ItemFailed("no image", reason="UNDECODABLE_IMAGE", status=3)
    first, second, third = two.encode([image(0), image(1), image(2)])
    assert_rows_of(first, digest_of(0))
    assert_rows_of(second, digest_of(1))
    assert isinstance(third, ItemFailed)
    assert third.reason == "UNDECODABLE_IMAGE"
    assert routes_of(gateway, "Encode") == [digest_of(1).hex()]


def test_both_down_is_one_error_with_what_had_come(two: Any, fake: FakeEncoder, gateway: FakeEncoder) -> None:
    two.info()
    fake.script.num_cuts = 1
    gateway.stop()
    with pytest.raises(EncoderUnavailable) as raised:
        two.encode([image(0), image(1)])
    assert sorted(raised.value.completed) == [0]


def test_an_item_that_broke_here_is_asked_of_the_gateway_once(
    two: Any, fake: FakeEncoder, gateway: FakeEncoder
) -> None:
    """With the gateway's own retry, an item that crashes its encoder is asked three times at most."""
    two.info()
    two.encode_one(image(9))
    fake.script.num_cuts = 1
    gateway.script.call_failures["Encode"] = (grpc.StatusCode.UNAVAILABLE, ItemFailed("", reason=""))
    with pytest.raises(EncoderUnavailable):
        two.encode([image(0), image(1)])
    assert gateway.num_calls["Encode"] == 1


def test_p43_a_local_encoder_that_stands_still_holds_a_call_for_two_seconds(
    open_client: Open, gateway: FakeEncoder
) -> None:
    """A listener that accepts and says nothing, as a stopped process does."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = open_client(f"127.0.0.1:{silent.getsockname()[1]}", fallback_target=gateway.target)
        for index in range(3):
            started_s = time.monotonic()
            assert_rows_of(client.encode_one(image(index)), digest_of(index))
            assert time.monotonic() - started_s < 2.5
        client.close()


def test_a_gateway_is_named_once() -> None:
    with pytest.raises(InvalidRequest, match="exclude each other"):
        VisionEncoderClient("127.0.0.1:1", fallback_target="127.0.0.1:2", fleet=True)
