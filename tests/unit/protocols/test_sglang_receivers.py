"""Receivers by request: named before or after its ``/encode``, and forgotten with it."""

from __future__ import annotations

import asyncio

import pytest

from encoder_service.errors import DeadlineExceeded, InvalidRequest, TooManyCalls
from encoder_service.protocols.sglang.receivers import AwaitedReceivers

pytestmark = pytest.mark.anyio


async def test_processes_of_a_request_state_one_number() -> None:
    """Which is how many get the rows: the first ones, each once."""
    awaited = AwaitedReceivers()
    awaited.add("r", "198.51.100.66:9", 2)
    with pytest.raises(InvalidRequest, match="receive_count is 1, another process stated 2"):
        awaited.add("r", "198.51.100.67:9", 1)
    for url in ("198.51.100.66:9", "198.51.100.67:9", "198.51.100.68:9"):
        awaited.add("r", url, 2)
    with awaited.encoding("r") as group:
        assert await group.complete() == ["198.51.100.66:9", "198.51.100.67:9"]
    assert not len(awaited)


async def test_an_id_is_encoded_once_at_a_time() -> None:
    awaited = AwaitedReceivers()
    with awaited.encoding("twice"):
        with pytest.raises(InvalidRequest, match="'twice' is being encoded"), awaited.encoding("twice"):
            pass
        assert len(awaited) == 1
    with awaited.encoding("twice"):
        pass


@pytest.mark.parametrize(("num_named", "text"), [(0, "0 of an unknown number of"), (1, "1 of 2")])
async def test_receivers_that_nobody_names(num_named: int, text: str) -> None:
    awaited = AwaitedReceivers(wait_s=0.01)
    with awaited.encoding("r") as group:
        if num_named:
            awaited.add("r", "127.0.0.1:9", 2)
        with pytest.raises(DeadlineExceeded, match=f"{text} receivers were named within 0.01 s"):
            await group.complete()


async def test_receivers_are_forgotten_without_an_encode_and_kept_during_one() -> None:
    awaited = AwaitedReceivers(wait_s=0.01)
    awaited.add("never", "127.0.0.1:9", 1)
    awaited.add("encoded", "127.0.0.1:9", 1)
    with awaited.encoding("encoded") as group:
        async with asyncio.timeout(10):
            while len(awaited) > 1:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        await asyncio.sleep(0.02)
        assert await group.complete() == ["127.0.0.1:9"]
        assert len(awaited) == 1


async def test_p46_receivers_without_a_request_have_a_limit_and_keep_no_encode_out() -> None:
    awaited = AwaitedReceivers(max_requests=1)
    awaited.add("first", "127.0.0.1:9", 1)
    with pytest.raises(TooManyCalls, match="receivers of 1 requests are awaited, at most 1 may be"):
        awaited.add("second", "127.0.0.1:9", 1)
    with awaited.encoding("second") as group:
        awaited.add("second", "127.0.0.1:9", 1)
        assert await group.complete() == ["127.0.0.1:9"]
