"""Clients of a service that has no room for some items at first, and of one that never has."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from bench.harness.waiting import wait_until
from lm_adapter import (
    EncoderOverloaded,
    ItemFailed,
    VisionEncoderClient,
)
from lm_adapter.testing import FakeEncoder
from tests.unit.lm_adapter.conftest import Open
from tests.unit.lm_adapter.test_client import assert_rows_of, digest_of, image

pytestmark = pytest.mark.anyio

FULL = ItemFailed("queue holds 8 of 8", reason="QUEUE_FULL", status=8, retryable=True, retry_after_ms=1)
BROKEN = ItemFailed("the JPEG file is truncated", reason="UNDECODABLE_IMAGE", status=3)
SHORT_S = 0.6


@pytest.fixture(params=[False, True], ids=["one encoder", "fleet"])
def client(request: pytest.FixtureRequest, open_client: Open) -> Any:
    return open_client(fleet=request.param)


@pytest.mark.parametrize("method", ["encode", "prefetch"])
def test_only_refused_items_of_a_call_are_sent_again(fake: FakeEncoder, client: Any, method: str) -> None:
    fake.script.num_refusals = 3
    outcomes = getattr(client, method)([image(index) for index in range(8)])
    assert [outcome.content_digest for outcome in outcomes] == [digest_of(index) for index in range(8)]
    sent = [len(call.request.items) for call in fake.calls if call.method == method.capitalize()]
    assert sum(sent) == 11


@pytest.mark.parametrize("method", ["encode", "prefetch"])
def test_overload_until_the_deadline_is_no_bad_file(fake: FakeEncoder, client: Any, method: str) -> None:
    client.info()
    fake.script.failures[digest_of(1)] = FULL
    fake.script.failures[digest_of(2)] = BROKEN
    with pytest.raises(EncoderOverloaded, match=r"until the deadline: .*queue holds 8 of 8") as caught:
        getattr(client, method)([image(index) for index in range(3)], timeout_s=SHORT_S)
    assert (caught.value.reason, caught.value.retryable, caught.value.retry_after_ms) == (
        "QUEUE_FULL",
        True,
        1,
    )
    assert sorted(caught.value.completed) == [0, 2]
    assert caught.value.completed[2].reason == "UNDECODABLE_IMAGE"
    assert fake.num_calls[method.capitalize()] >= 3
    with pytest.raises(EncoderOverloaded):
        client.encode_one(image(1), timeout_s=SHORT_S)


@pytest.mark.parametrize("method", ["Encode", "Prefetch", "Fetch", "Lookup", "GetServerInfo"])
def test_a_call_that_is_refused_as_a_whole_is_made_again(fake: FakeEncoder, client: Any, method: str) -> None:
    key = digest_of(0) if method == "GetServerInfo" else client.encode(image(0)).key
    fake.script.call_failures[method] = (grpc.StatusCode.RESOURCE_EXHAUSTED, FULL)
    num_before = fake.num_calls[method]

    def admit() -> None:
        wait_until(lambda: fake.num_calls[method] >= num_before + 2, "the second refusal")
        fake.script.call_failures.clear()

    argument = [key] if method in ("Fetch", "Lookup") else [image(1)]
    called = {"GetServerInfo": "encode"}.get(method, method.lower())
    with ThreadPoolExecutor(1) as pool:
        admitted = pool.submit(admit)
        (outcome,) = getattr(client, called)(argument)
        admitted.result()
    assert not isinstance(outcome, ItemFailed)


def test_a_long_list_goes_in_calls_of_max_in_flight(fake: FakeEncoder) -> None:
    with VisionEncoderClient(fake.target, max_in_flight=3) as client:
        outcomes = client.encode([image(index) for index in range(8)])
    for index, outcome in enumerate(outcomes):
        assert_rows_of(outcome, digest_of(index))
    assert [len(call.request.items) for call in fake.calls if call.method == "Encode"] == [3, 3, 2]
