"""The RPCs of an asyncio call, for callers of all rows and of each: follow-ups, failures, cancellations."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import aclosing
from typing import Any

import pytest

from lm_adapter import AsyncVisionEncoderClient, CallFailed, EncodedRows, Outcome
from lm_adapter.transport.chooser import TransportChooser
from tests.unit.lm_adapter.shared_rig import SharingFake, sharing_fake
from tests.unit.lm_adapter.test_client import assert_rows_of, digest_of, image

pytestmark = pytest.mark.anyio


@pytest.fixture
def encoder() -> Iterator[SharingFake]:
    with sharing_fake() as found:
        yield found


async def as_they_come(client: AsyncVisionEncoderClient, indices: list[int], **options: Any) -> list[Outcome]:
    found: dict[int, Outcome] = {}
    async with aclosing(client.encode_iter([image(index) for index in indices], **options)) as stream:
        async for finished in stream:
            found.update([finished])
    return [found[position] for position in range(len(indices))]


async def whole(client: AsyncVisionEncoderClient, indices: list[int], **options: Any) -> list[Outcome]:
    return await client.encode([image(index) for index in indices], **options)


WAYS = (whole, as_they_come)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("borrow", [False, True])
async def test_what_is_refused_for_its_transport_follows_inline(
    encoder: SharingFake, way: Any, borrow: bool
) -> None:
    encoder.refuse = {digest_of(1)}
    async with AsyncVisionEncoderClient(encoder.target, timeout_s=20.0, max_rows_bytes=1 << 20) as client:
        await client.wait_transport()
        outcomes = await way(client, [0, 1, 2], borrow=borrow)
        for index, outcome in enumerate(outcomes):
            assert_rows_of(outcome, digest_of(index))
            assert (outcome.reading is not None) == (borrow and index != 1)
            outcome.confirm()
        rows = await client.encode_one(image(1), borrow=borrow)
        assert_rows_of(rows, digest_of(1))
        assert encoder.num_placed == 2
        del outcome, outcomes, rows


@pytest.mark.parametrize("way", WAYS)
async def test_a_call_that_breaks_keeps_what_had_come(encoder: SharingFake, way: Any) -> None:
    """The second of two calls, which the server's limit makes of these items."""
    async with AsyncVisionEncoderClient(encoder.target, timeout_s=20.0) as client:
        info = await client.info()
        assert info.limits.max_items_per_request == 0 or info.limits.max_items_per_request > 2
        await client.wait_transport()
        real, begun = client._session.local.begin_on_loop, []

        def begin(*args: Any) -> Any:
            begun.append(args)
            if len(begun) > 1:
                client._line.is_closed = True
                client._line.check_open("Encode")
            return real(*args)

        client._session.local.begin_on_loop = begin  # type: ignore[method-assign]
        encoder.refuse = {digest_of(1)}  # asked for once more: the call that does not begin
        with pytest.raises(CallFailed) as failed:
            await way(client, [0, 1])
        if way is whole:
            assert list(failed.value.completed) == [0]
            assert isinstance(failed.value.completed[0], EncodedRows)
        client._line.is_closed = False


async def test_a_cancelled_call_gives_its_connection_up_and_the_next_goes_on(encoder: SharingFake) -> None:
    async with AsyncVisionEncoderClient(encoder.target, timeout_s=20.0) as client:
        await client.wait_transport()
        for turns in range(12):
            task = asyncio.ensure_future(client.encode_one(image(turns)))
            for _ in range(turns):
                await asyncio.sleep(0)
            if task.cancel():
                with pytest.raises(asyncio.CancelledError):
                    await task
        assert_rows_of(await client.encode_one(image(0)), digest_of(0))


async def test_who_uses_cuda_later_is_noticed(encoder: SharingFake, monkeypatch: pytest.MonkeyPatch) -> None:
    """The short way past the chooser's lock looks at it."""
    async with AsyncVisionEncoderClient(encoder.target, timeout_s=20.0) as client:
        await client.wait_transport()
        chooser = client._session.transports
        assert chooser.current() is chooser.current() is not None
        started: list[None] = []
        monkeypatch.setattr(TransportChooser, "_start_probe", lambda _: started.append(None))
        monkeypatch.setattr("lm_adapter.transport.chooser.device_in_use", lambda: 0)
        assert chooser.current() is not None
        assert len(started) == 1
