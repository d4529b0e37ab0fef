"""Both faces of the fleet client against fakes: what a caller sees of each kind of trouble."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import grpc
import numpy as np
import pytest

from lm_adapter import (
    AsyncFleetClient,
    CallCancelled,
    DigestItem,
    EncodedRows,
    FleetClient,
    FleetSettings,
    ImageItem,
    InvalidRequest,
    ItemFailed,
    KeyState,
    PixelItem,
)
from lm_adapter.errors import DeadlineExceeded, EncoderError
from lm_adapter.keys import embedding_key
from lm_adapter.testing import FakeEncoder, FakeScript, Fault, fake_model
from lm_adapter.types import Grid
from tests.fleet.faces import NO_HEDGES, homes_of, image, is_right, targets
from tests.fleet.rig import DRAINING, QUICK


def test_results_of_all_homes_come_in_input_order(face: Callable[..., Any], fakes: list[FakeEncoder]) -> None:
    items = [image() for _ in range(50)]
    with face(targets(fakes), settings=NO_HEDGES) as client:
        client.wait_ready(10, num_replicas=3)
        outcomes = client.encode(items)
        homes = Counter(client.home(item.digest) for item in items)
        assert client.encode([]) == []
    assert all(map(is_right, outcomes, items))
    # One call to each home, which holds its items and no other.
    assert {one.target: one.calls[-1].num_items for one in fakes if one.num_calls["Encode"]} == homes
    assert all(one.num_calls["Encode"] == 1 for one in fakes)


def test_the_digest_header_goes_with_every_single_item(
    face: Callable[..., Any], fakes: list[FakeEncoder]
) -> None:
    """Beside a proxy with a ring of its own, or gRPC's."""
    item = image()
    with face(targets(fakes)) as client:
        assert is_right(client.encode_one(item), item)
        (served,) = [one for one in fakes if one.num_calls["Encode"]]
    assert item.digest is not None
    assert served.calls[-1].metadata["x-content-digest"] == item.digest.hex()


def test_p37_items_of_a_draining_replica_go_to_the_next_and_it_is_asked_no_more(
    face: Callable[..., Any], fakes: list[FakeEncoder]
) -> None:
    with face(targets(fakes), settings=NO_HEDGES) as client:
        client.wait_ready(10, num_replicas=3)
        item = homes_of(client, 3)[fakes[0].target]
        fakes[0].script.call_failures["Encode"] = DRAINING
        fakes[0].script.serving = False
        assert all(is_right(client.encode_one(item), item) for _ in range(5))
        assert fakes[0].num_calls["Encode"] <= 1
        assert client.counts.retries <= 1
        assert client.home(item.digest) != fakes[0].target
        fakes[0].script.call_failures.clear()
        fakes[0].script.serving = True
        client.wait_ready(10, num_replicas=3)
        assert client.home(item.digest) == fakes[0].target


def test_a_refusal_of_the_item_itself_is_not_tried_elsewhere(
    face: Callable[..., Any], fakes: list[FakeEncoder]
) -> None:
    bad, good = image(), image()
    assert bad.digest is not None
    failure = ItemFailed("no image at all", reason="UNDECODABLE_IMAGE", status=3)
    for one in fakes:
        one.script.failures[bad.digest] = failure
    with face(targets(fakes), settings=NO_HEDGES) as client:
        outcomes = client.encode([bad, good])
        assert client.counts.attempts == 2
        with pytest.raises(ItemFailed, match="no image at all"):
            client.encode_one(bad)
    assert outcomes[0].reason == "UNDECODABLE_IMAGE"
    assert is_right(outcomes[1], good)


def test_a_stream_cut_in_the_middle_loses_and_doubles_nothing(
    face: Callable[..., Any], fakes: list[FakeEncoder]
) -> None:
    """The replica answers some items and ends; only the others are asked for again."""
    with face(targets(fakes), settings=NO_HEDGES) as client:
        client.wait_ready(10, num_replicas=3)
        items: list[ImageItem] = []
        while len(items) < 6:
            item = image()
            items += [item] if client.home(item.digest) == fakes[1].target else []
        assert items[3].digest is not None
        fakes[1].script.faults[items[3].digest] = Fault.MISSING_ITEM
        seen = Counter(
            index for index, outcome in client.encode_iter(items) if is_right(outcome, items[index])
        )
    assert seen == Counter(range(6))
    assert sum(one.calls[-1].num_items for one in fakes if one.num_calls["Encode"]) == 7


def test_a_call_never_outlives_its_deadline(face: Callable[..., Any], fakes: list[FakeEncoder]) -> None:
    """The deadline is the call's, over all of its attempts."""
    full = ItemFailed("full", reason="QUEUE_FULL", status=8, retryable=True, retry_after_ms=150)
    for one in fakes:
        one.script.call_failures["Encode"] = (grpc.StatusCode.RESOURCE_EXHAUSTED, full)
    settings = FleetSettings(max_attempts=32, max_hedges=0, retry_reserve_per_s=100, check_timeout_s=1.0)
    with face(targets(fakes), settings=settings) as client:
        client.wait_ready(10)
        begun_s = time.monotonic()
        (outcome,) = client.encode([image()], timeout_s=0.8)
        took_s = time.monotonic() - begun_s
    assert outcome.reason == "DEADLINE_EXCEEDED"
    assert outcome.status == 4
    assert "0.8 s; before it" in outcome.message
    assert int(outcome.details["num_attempts"]) > 3
    assert 0.5 < took_s < 3


def test_a_late_item_comes_from_another_replica(face: Callable[..., Any], fakes: list[FakeEncoder]) -> None:
    settings = FleetSettings(hedge_min_s=0.05, hedge_max_s=0.1, check_timeout_s=1.0)
    with face(targets(fakes), settings=settings) as client:
        client.wait_ready(10, num_replicas=3)
        item = homes_of(client, 3)[fakes[2].target]
        assert item.digest is not None
        fakes[2].script.faults[item.digest] = Fault.HANG
        assert is_right(client.encode_one(item, timeout_s=20), item)
        assert client.counts.hedges == client.counts.hedges_won == 1
    ends_s = time.monotonic() + 10
    while not fakes[2].num_cancelled["Encode"]:
        assert time.monotonic() < ends_s, "the attempt that was late was left running"
        time.sleep(0.01)


def test_buffers_of_the_caller_are_written_by_one_attempt_only(
    face: Callable[..., Any], fakes: list[FakeEncoder]
) -> None:
    settings = FleetSettings(hedge_min_s=0.0, hedge_max_s=0.0, check_timeout_s=1.0)
    for one in fakes:
        one.script.latency_s = 0.05
    items = [image() for _ in range(6)]
    out = [np.zeros(64 * 128 * 4, np.uint8) for _ in items]
    with face(targets(fakes), settings=settings) as client:
        outcomes = client.encode(items, out=out)
        assert client.counts.hedges == 0
        with pytest.raises(InvalidRequest, match="out has 1 buffers, the call 6 items"):
            client.encode(items, out=out[:1])
    for item, outcome, buffer in zip(items, outcomes, out, strict=True):
        assert is_right(outcome, item)
        assert np.shares_memory(outcome.payload, buffer)


def test_the_fallback_serves_what_no_replica_can(face: Callable[..., Any], fakes: list[FakeEncoder]) -> None:
    bad, lost = image(), [image() for _ in range(3)]
    threads: list[str] = []
    with face(targets(fakes)) as other:
        made = dict(zip((one.digest for one in lost), other.encode(lost), strict=True))

    def tower(item: Any, failure: ItemFailed) -> EncodedRows:
        assert failure.reason in ("UNAVAILABLE", "DRAINING", "NO_ENDPOINTS")
        threads.append(threading.current_thread().name)
        rows = made[item.digest]
        assert isinstance(rows, EncodedRows)
        return rows

    settings = FleetSettings(check_interval_s=0.1, backoff_s=0.01, patience_s=0.1, check_timeout_s=1.0)
    with face(targets(fakes), settings=settings, fallback=tower) as client:
        client.wait_ready(10, num_replicas=3)
        assert bad.digest is not None
        for one in fakes:
            one.script.failures[bad.digest] = ItemFailed("no image", reason="UNDECODABLE_IMAGE", status=3)
        assert client.encode([bad])[0].reason == "UNDECODABLE_IMAGE", "a bad item is bad for every tower"
        for one in fakes:
            one.stop()
        assert all(map(is_right, client.encode(lost, timeout_s=20), lost))
        assert client.counts.fallbacks == 3
        broken = client.encode([image()], timeout_s=20)[0]
    assert broken.reason == "FALLBACK_FAILED"
    assert "KeyError" in broken.message
    assert threading.main_thread().name not in threads


def test_rows_of_a_digest_are_found_where_they_lived_before_a_scale_up(face: Callable[..., Any]) -> None:
    with contextlib.ExitStack() as stack:
        fakes = [stack.enter_context(FakeEncoder(f"127.0.0.{number}:0")) for number in (2, 3)]
        listed = targets(fakes)[:1]
        items = [image() for _ in range(30)]
        with face(lambda: listed, settings=NO_HEDGES) as client:
            client.wait_ready(10)
            client.encode(items)
            listed += targets(fakes)[1:]
            client.wait_ready(10, num_replicas=2)
            moved = [one for one in items if client.home(one.digest) == fakes[1].target]
            found = client.encode([DigestItem(one.digest or b"") for one in items])
            assert moved
            assert all(map(is_right, found, items))
            assert client.counts.moves == len(moved)
            assert client.encode([DigestItem(secrets.token_bytes(32))])[0].reason == "UNKNOWN_KEY"


def test_prefetch_lookup_and_fetch_find_what_lies_anywhere(
    face: Callable[..., Any], fakes: list[FakeEncoder]
) -> None:
    items = [image() for _ in range(20)]
    with face(targets(fakes), settings=NO_HEDGES) as client:
        statuses = client.prefetch(items)
        keys = [status.key for status in statuses]
        absent = secrets.token_bytes(32)
        assert [one.state for one in client.lookup([*keys, absent])] == [KeyState.RESIDENT] * 20 + [
            KeyState.ABSENT
        ]
        outcomes = client.fetch([*keys, absent])
        assert client.lookup([]) == client.fetch([]) == client.prefetch([]) == []
        assert sum(one.num_calls["Prefetch"] for one in fakes) == 3
    assert all(map(is_right, outcomes, items))
    assert outcomes[-1].reason == "UNKNOWN_KEY"


def test_an_item_without_a_digest_goes_where_its_blake3_says_and_keeps_the_services_key(
    face: Callable[..., Any], fakes: list[FakeEncoder]
) -> None:
    from blake3 import blake3

    data = secrets.token_bytes(1000)
    pixels = PixelItem(np.ones((16, fake_model().patch_dim), np.float32), Grid(1, 4, 4))
    with face(targets(fakes), settings=NO_HEDGES) as client:
        client.wait_ready(10, num_replicas=3)
        for _ in range(3):
            rows, _ = client.encode([ImageItem(data), pixels])
        home = client.home(blake3(data).digest())
        info = client.info()
    assert rows.content_digest == blake3(data).digest()
    model = info.models[0]
    assert rows.key == embedding_key(
        blake3(data).digest(),
        model_fingerprint=model.model_fingerprint,
        preprocess_fingerprint=model.preprocess_fingerprint,
        dtype=model.dtype,
    )
    assert next(one for one in fakes if one.target == home).num_calls["Encode"] >= 3
    assert rows.tier.value == "host"


def test_replicas_of_other_weights_are_not_asked(face: Callable[..., Any]) -> None:
    """In the middle of a roll-out of new weights, one caller's rows are all of one model."""
    old, new = fake_model(), fake_model(model_fingerprint=b"n" * 32)
    scripts = [FakeScript(model=old), FakeScript(model=new)]
    with contextlib.ExitStack() as stack:
        fakes = [stack.enter_context(FakeEncoder(script=script)) for script in scripts]
        with face(targets(fakes), fingerprint=old.model_fingerprint) as client:
            client.wait_ready(10)
            assert all(isinstance(one, EncodedRows) for one in client.encode([image() for _ in range(20)]))
            why = {one.target: one.why for one in client.replicas}
    assert fakes[1].num_calls["Encode"] == 0
    assert "other weights" in why[fakes[1].target]


def test_a_fleet_of_nobody_says_so_within_its_patience(face: Callable[..., Any]) -> None:
    async def nobody() -> list[str]:
        raise EncoderError("the name server is away")

    settings = FleetSettings(patience_s=0.2, refresh_s=0.05)
    with face(nobody, settings=settings) as client:
        (outcome,) = client.encode([image()], timeout_s=20)
        assert outcome.reason == "NO_ENDPOINTS"
        with pytest.raises(DeadlineExceeded, match=r"0 replicas were up within 0\.3 s, 1 were to be"):
            client.wait_ready(0.3)


def test_a_name_server_that_fails_takes_no_replica_away(
    face: Callable[..., Any], fakes: list[FakeEncoder]
) -> None:
    answers = [targets(fakes)]

    async def names() -> list[str]:
        if not answers:
            raise EncoderError("the name server is away")
        return answers[-1]

    with face(names, settings=NO_HEDGES) as client:
        client.wait_ready(10, num_replicas=3)
        answers.append([])
        client.wait_ready(1)
        answers.clear()
        item = image()
        for _ in range(10):
            assert is_right(client.encode_one(item), item)
            client.wait_ready(1, num_replicas=3)


def test_a_closed_client_says_so_and_leaves_no_thread(fakes: list[FakeEncoder]) -> None:
    client = FleetClient(targets(fakes))
    item = image()
    for one in fakes:
        one.script.latency_s = 5.0
    failure: list[BaseException] = []

    def call() -> None:
        try:
            client.encode_one(item)
        except BaseException as error:
            failure.append(error)

    client.wait_ready(10)
    caller = threading.Thread(target=call)
    caller.start()
    ends_s = time.monotonic() + 10
    while not sum(one.num_calls["Encode"] for one in fakes):
        assert time.monotonic() < ends_s
        time.sleep(0.01)
    begun_s = time.monotonic()
    client.close()
    client.close()
    caller.join(10)
    assert time.monotonic() - begun_s < 4, "closing waited for the encode"
    assert isinstance(failure[0], CallCancelled)
    with pytest.raises(CallCancelled):
        client.encode([item])
    ends_s = time.monotonic() + 10
    while any("fleet-client" in one.name for one in threading.enumerate()):
        assert time.monotonic() < ends_s


@pytest.mark.anyio
async def test_a_cancelled_task_leaves_nothing_running(fakes: list[FakeEncoder]) -> None:
    for one in fakes:
        one.script.latency_s = 5.0
    async with AsyncFleetClient(targets(fakes), settings=QUICK) as client, asyncio.TaskGroup() as group:
        await client.wait_ready(10, num_replicas=3)
        task = group.create_task(client.encode([image() for _ in range(9)], timeout_s=30))
        ends_s = time.monotonic() + 10
        while sum(one.num_calls["Encode"] for one in fakes) < 3:
            assert time.monotonic() < ends_s
            await asyncio.sleep(0.01)
        task.cancel()
        (ended,) = await asyncio.gather(task, return_exceptions=True)
        assert isinstance(ended, asyncio.CancelledError)
        assert [one.num_items for one in client.replicas] == [0, 0, 0]
        while sum(one.num_cancelled["Encode"] for one in fakes) < 3:
            assert time.monotonic() < ends_s
            await asyncio.sleep(0.01)
