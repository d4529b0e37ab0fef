"""A client against the fake service, over real sockets: what goes right."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from lm_adapter import (
    CacheTier,
    DigestItem,
    EncodedRows,
    Grid,
    ImageItem,
    InvalidRequest,
    ItemFailed,
    KeyState,
    PrefetchStatus,
)
from lm_adapter.keys import item_key
from lm_adapter.testing import FakeEncoder, fake_model, fake_rows
from lm_adapter.types import Limits
from tests.unit.lm_adapter.conftest import Open


def digest_of(index: int) -> bytes:
    return hashlib.sha256(f"image {index}".encode()).digest()


def image(index: int) -> ImageItem:
    return ImageItem(f"image {index}".encode(), digest=digest_of(index))


def assert_rows_of(outcome: object, digest: bytes) -> None:
    assert isinstance(outcome, EncodedRows), outcome
    assert outcome.content_digest == digest
    np.testing.assert_array_equal(outcome.numpy(), fake_rows(digest, outcome.num_rows, outcome.width))


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5", "kimi_k25"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_rows_come_in_input_order_in_every_geometry(
    fake: FakeEncoder, open_client: Open, family: str, dtype: str
) -> None:
    fake.script.model = fake_model(family, dtype=dtype)
    fake.script.order = "reverse"
    fake.script.grids[digest_of(0)] = Grid(3, 4, 6)
    outcomes = open_client().encode([image(index) for index in range(6)])
    for index, outcome in enumerate(outcomes):
        assert_rows_of(outcome, digest_of(index))
        assert outcome.dtype == dtype
        assert outcome.key == item_key(image(index), fake.script.model)
    assert outcomes[0].num_rows == (6 if family == "kimi_k25" else 18)


def test_items_over_the_limits_of_one_call_go_in_several(fake: FakeEncoder, open_client: Open) -> None:
    fake.script.limits = Limits(max_items_per_request=3, max_message_bytes=1 << 20, chunk_bytes=1 << 20)
    fake.restart()
    items = [image(index) for index in range(8)]
    items[5] = ImageItem(bytes(2 << 20), digest=digest_of(5))
    client = open_client()
    outcomes = client.encode(items)
    assert [isinstance(outcome, EncodedRows) for outcome in outcomes] == [index != 5 for index in range(8)]
    assert outcomes[5].reason == "MESSAGE_TOO_LARGE"
    assert [len(call.request.items) for call in fake.calls if call.method == "Encode"] == [3, 3, 1]
    statuses = client.prefetch(items)
    assert [isinstance(status, PrefetchStatus) for status in statuses] == [index != 5 for index in range(8)]
    assert [status.content_digest for index, status in enumerate(statuses) if index != 5] == [
        digest_of(index) for index in range(8) if index != 5
    ]


def test_keys_go_in_calls_within_the_servers_limit(fake: FakeEncoder, open_client: Open) -> None:
    fake.script.limits = Limits(max_items_per_request=3, max_message_bytes=1 << 20, chunk_bytes=1 << 20)
    client = open_client()
    keys = [outcome.key for outcome in client.encode([image(index) for index in range(7)])]
    for index, outcome in enumerate(client.fetch(keys)):
        assert_rows_of(outcome, digest_of(index))
    assert [status.key for status in client.lookup(keys)] == keys
    for method in ("Fetch", "Lookup"):
        assert [len(call.request.keys) for call in fake.calls if call.method == method] == [3, 3, 1]


def test_calls_about_nothing_are_not_sent(fake: FakeEncoder, open_client: Open) -> None:
    """The service refuses a call without items."""
    client = open_client()
    for method in ("encode", "prefetch", "fetch", "lookup"):
        assert getattr(client, method)([]) == []
    assert [call.method for call in fake.calls if call.method != "GetServerInfo"] == []


def test_miss_then_hit_lookup_prefetch_and_fetch(fake: FakeEncoder, open_client: Open) -> None:
    client = open_client()
    model = client.info().model()
    keys = [item_key(image(index), model) for index in range(3)]
    first = client.encode_one(image(0))
    second = client.encode_one(DigestItem(digest_of(0)))
    assert (first.tier, second.tier) == (CacheTier.MISS, CacheTier.HOST)
    assert second.key == keys[0]
    (prefetched,) = client.prefetch([image(1)])
    assert (prefetched.key, prefetched.state) == (keys[1], KeyState.RESIDENT)
    assert [status.state for status in client.lookup(keys)] == [
        KeyState.RESIDENT,
        KeyState.RESIDENT,
        KeyState.ABSENT,
    ]
    fetched = client.fetch(keys)
    assert_rows_of(fetched[0], digest_of(0))
    assert_rows_of(fetched[1], digest_of(1))
    assert isinstance(fetched[2], ItemFailed)
    assert fetched[2].reason == "UNKNOWN_KEY"
    assert fake.num_calls["Encode"] == 2


def test_p35_the_protocol_is_checked_once_per_channel(fake: FakeEncoder, open_client: Open) -> None:
    client = open_client()
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(client.encode, ([image(index)] for index in range(16))))
    client.lookup([digest_of(0)])
    assert fake.num_calls["GetServerInfo"] == 1


def test_info_tells_what_the_server_announces(fake: FakeEncoder, open_client: Open) -> None:
    info = open_client().info()
    assert info.models == (fake.script.model,)
    assert info.limits == fake.script.limits
    assert info.instance_id == fake.instance_id
    assert [transport.delivery for transport in info.transports] == ["inline"]


def test_each_item_owns_its_payload(fake: FakeEncoder, open_client: Open) -> None:
    first, second = open_client().encode([image(0), image(0)])
    first.payload[:] = 0
    assert_rows_of(second, digest_of(0))
    assert second.payload.flags.owndata


@pytest.mark.parametrize("timeout_s", [1e10, float("inf")])
def test_a_timeout_beyond_grpcs_range_is_no_past_one(open_client: Open, timeout_s: float) -> None:
    client = open_client(timeout_s=timeout_s)
    (rows,) = client.encode([image(0)])
    assert_rows_of(rows, digest_of(0))


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("nan")])
def test_a_timeout_is_positive(open_client: Open, timeout_s: float) -> None:
    with pytest.raises(InvalidRequest, match="timeout_s"):
        open_client().info(timeout_s=timeout_s)


def test_keys_have_thirty_two_bytes(open_client: Open) -> None:
    client = open_client()
    for method in ("lookup", "fetch"):
        with pytest.raises(InvalidRequest, match=r"keys\[1\] has 3 bytes, needs 32"):
            getattr(client, method)([digest_of(0), b"abc"])
        with pytest.raises(InvalidRequest, match=r"needs a sequence of them: \[keys\]"):
            getattr(client, method)(digest_of(0))


@pytest.mark.parametrize("method", ["encode", "prefetch"])
def test_what_is_no_item_is_named(open_client: Open, method: str) -> None:
    client = open_client()
    with pytest.raises(InvalidRequest, match=r"items\[1\] is a bytes, needs an ImageItem"):
        getattr(client, method)([image(0), b"jpeg"])
    with pytest.raises(InvalidRequest, match="items is a str, needs items such as ImageItem"):
        getattr(client, method)("photo.jpg")


def test_encode_takes_one_item(fake: FakeEncoder, open_client: Open) -> None:
    client = open_client()
    assert_rows_of(client.encode(image(0)), digest_of(0))
    fake.script.failures[digest_of(1)] = ItemFailed("no image", reason="UNDECODABLE_IMAGE", status=3)
    with pytest.raises(ItemFailed, match="no image"):
        client.encode(image(1))
