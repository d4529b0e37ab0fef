"""How the list of replicas and what is known of each is kept up, whatever names, checks and callers do."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

import pytest

from lm_adapter.errors import EncoderOverloaded, EncoderUnavailable, InvalidRequest, RequestRefused
from lm_adapter.fleet import directory as directory_module
from lm_adapter.fleet.holders import find_holders
from lm_adapter.fleet.replica import Check, Replica
from lm_adapter.session import Deadline
from lm_adapter.types import KeyState, KeyStatus
from tests.unit.lm_adapter.fleet_kit import SETTINGS, StubClient, StubFleet, until

pytestmark = pytest.mark.anyio


def states(fleet: StubFleet) -> dict[str, str]:
    return {one.target: one.state for one in fleet.directory.views()}


@pytest.mark.parametrize(
    "error",
    [KeyError("items"), TimeoutError("slow"), OSError("away"), InvalidRequest("odd")],
    ids=lambda error: type(error).__name__,
)
async def test_a_lookup_may_fail_in_any_way_and_is_tried_again(error: Exception) -> None:
    async with StubFleet("a:1") as fleet:
        fleet.listed = error
        await until(lambda: fleet.directory.last_error is not None)
        assert str(error) in str(fleet.directory.last_error)
        assert states(fleet) == {"a:1": "up"}
        fleet.listed = ["a:1", "b:1"]
        await until(lambda: states(fleet) == {"a:1": "up", "b:1": "up"})
        assert fleet.directory.last_error is None


async def test_a_lookup_that_hangs_is_given_up_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory_module, "LOOKUP_S", 0.05)
    async with StubFleet("a:1") as fleet:
        fleet.lookups_go_on.clear()
        await until(lambda: fleet.directory.last_error is not None)
        assert "no answer within 0.05 s" in str(fleet.directory.last_error)
        fleet.listed = ["b:1"]
        fleet.lookups_go_on.set()
        await until(lambda: states(fleet) == {"b:1": "up"})


async def test_the_first_look_goes_on_when_the_caller_that_began_it_leaves() -> None:
    fleet = StubFleet("a:1", refresh_s=60.0)
    fleet.lookups_go_on.clear()
    await fleet.directory.start(0.02)
    assert fleet.directory.members == []
    task = asyncio.ensure_future(fleet.directory.start(5))
    await asyncio.sleep(0)
    task.cancel()
    fleet.lookups_go_on.set()
    async with fleet:
        assert states(fleet) == {"a:1": "up"}
        assert fleet.num_lookups == 1


async def test_a_replica_that_does_not_answer_holds_up_no_caller_beyond_its_time() -> None:
    def prepare(client: StubClient) -> None:
        if client.target == "b:1":
            client.answers.clear()

    fleet = StubFleet("a:1", "b:1", prepare=prepare, check_timeout_s=30.0)
    await asyncio.wait_for(fleet.directory.start(0.05), 2)
    assert [one.target for one in fleet.directory.order(b"key")] == ["a:1"]
    await fleet.directory.close()


async def test_closed_in_the_first_look_it_leaves_nothing() -> None:
    before = asyncio.all_tasks()
    fleet = StubFleet("a:1")
    fleet.lookups_go_on.clear()
    starting = asyncio.ensure_future(fleet.directory.start(30))
    await until(lambda: fleet.num_lookups == 1)
    await asyncio.wait_for(fleet.directory.close(), 2)
    fleet.lookups_go_on.set()
    await asyncio.wait_for(starting, 2)
    await asyncio.sleep(0.05)
    assert fleet.clients == []
    assert asyncio.all_tasks() == before


@pytest.mark.parametrize("num_turns", range(6))
async def test_closing_ends_though_a_check_is_asked_for_in_the_same_moment(num_turns: int) -> None:
    fleet = StubFleet("a:1", refresh_s=60.0, check_interval_s=60.0)
    async with fleet:
        client, wanted = fleet.client("a:1"), fleet.member("a:1").wanted
        await until(lambda: bool(wanted._waiters))
        fleet.directory.has_failed(fleet.member("a:1"))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        await asyncio.wait_for(fleet.directory.close(), 2)
        assert client.closed.is_set()


async def test_a_close_that_is_cancelled_goes_on() -> None:
    fleet = StubFleet("a:1")
    await fleet.directory.start(5)
    (client,) = fleet.clients
    closing = asyncio.ensure_future(fleet.directory.close())
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.wait_for(fleet.directory.close(), 2)
    assert client.closed.is_set()


async def test_failing_calls_do_not_make_a_replica_be_checked_all_the_time() -> None:
    async with StubFleet("a:1", check_interval_s=1.0) as fleet:
        member, client = fleet.member("a:1"), fleet.client("a:1")
        begun = client.num_checks
        ends_s = asyncio.get_running_loop().time() + 0.5
        while asyncio.get_running_loop().time() < ends_s:
            fleet.directory.has_failed(member)
            await asyncio.sleep(0.001)
        assert 1 <= client.num_checks - begun <= 7


@pytest.mark.parametrize(
    ("health", "state", "why"),
    [
        (RequestRefused("no such token"), "down", "no such token"),
        (ValueError("a defect"), "down", "a defect"),
        (EncoderOverloaded("64 of 64"), "up", ""),
    ],
    ids=["refused", "a defect", "full"],
)
async def test_a_check_that_fails_says_why_and_is_not_the_last(
    health: Exception, state: str, why: str
) -> None:
    async with StubFleet("a:1") as fleet:
        client = fleet.client("a:1")
        client.health = health
        begun = client.num_checks
        await until(lambda: client.num_checks >= begun + 3)
        (view,) = fleet.directory.views()
        assert view.state == state
        assert why in view.why
        client.health = Check.SERVING
        await until(lambda: states(fleet) == {"a:1": "up"})


async def test_replicas_of_other_weights_are_not_the_last_resort() -> None:
    def prepare(client: StubClient) -> None:
        client.health = Check.MISFIT if client.target == "b:1" else Check.UNREACHABLE

    async with StubFleet("a:1", "b:1", prepare=prepare) as fleet:
        assert states(fleet) == {"a:1": "down", "b:1": "down"}
        assert [one.target for one in fleet.directory.order(b"key")] == ["a:1"]
        fleet.listed = ["b:1"]
        await until(lambda: list(states(fleet)) == ["b:1"])
        assert fleet.directory.order(b"key") == []
        assert "other weights" in fleet.directory.why_nobody()


async def test_a_draining_replica_that_misses_one_check_keeps_what_it_accepted() -> None:
    one = Replica("a:1", SETTINGS)
    one.checked(Check.SERVING, 0.0)
    one.checked(Check.NOT_SERVING, 1.0)
    one.checked(Check.SILENT, 2.0)
    assert one.state.value == "leaving"
    one.checked(Check.SILENT, 3.0)
    assert one.state.value == "down"


async def test_a_replica_that_left_the_list_keeps_its_leases_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory_module, "LINGER_S", 0.2)
    async with StubFleet("a:1", "b:1") as fleet:
        client = fleet.client("b:1")
        fleet.listed = ["a:1"]
        await until(lambda: list(states(fleet)) == ["a:1"])
        left_s = asyncio.get_running_loop().time()
        await asyncio.wait_for(client.closed.wait(), 2)
        assert asyncio.get_running_loop().time() - left_s > 0.1


async def test_homes_may_be_asked_for_while_the_list_changes() -> None:
    """From another thread, as the blocking client's callers do."""
    async with StubFleet("a:1", "b:1", refresh_s=60.0, check_interval_s=60.0) as fleet:
        directory = fleet.directory

        class Joins(directory_module.Member):
            @property
            def is_up(self) -> bool:
                directory._members.setdefault(f"{len(directory._members)}:1", fleet.member("b:1"))
                return True

        directory._members["a:1"].__class__ = Joins
        assert directory.order(b"key")


async def test_what_runs_at_a_silent_replica_is_told_so() -> None:
    async def never() -> None:
        await asyncio.Event().wait()

    async with StubFleet("a:1", check_timeout_s=0.05) as fleet:
        member = fleet.member("a:1")
        asking = asyncio.ensure_future(fleet.directory.run_at(member, never()))
        await until(lambda: bool(member.attempts))
        for task in set(member.attempts):
            task.cancel()  # as the check that finds it silent does
        with pytest.raises(EncoderUnavailable, match="a:1 no longer answers"):
            await asking


async def test_what_runs_at_a_replica_is_over_before_its_caller_is() -> None:
    copied, copying = asyncio.Event(), asyncio.Event()

    async def copy() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            copying.set()
            await asyncio.shield(asyncio.ensure_future(copied.wait()))

    async with StubFleet("a:1") as fleet:
        asking = asyncio.ensure_future(fleet.directory.run_at(fleet.member("a:1"), copy()))
        await until(lambda: bool(fleet.member("a:1").attempts))
        asking.cancel()
        await copying.wait()
        asking.cancel()
        for _ in range(5):
            await asyncio.sleep(0)
        assert asking.done() == (not fleet.member("a:1").attempts)
        copied.set()
        with pytest.raises(asyncio.CancelledError):
            await asking


async def test_nobody_to_ask_is_explained() -> None:
    fleet = StubFleet()
    fleet.lookups_go_on.clear()
    await fleet.directory.start(0.01)
    assert "still being looked up" in fleet.directory.why_nobody()
    fleet.lookups_go_on.set()
    async with fleet:
        assert "the endpoints are none" in fleet.directory.why_nobody()


def holds(state: KeyState, *, after: asyncio.Event | None = None) -> Any:
    async def lookup(keys: Sequence[bytes], *, timeout_s: float) -> list[KeyStatus]:
        if after is not None:
            await after.wait()
        return [KeyStatus(key, state) for key in keys]

    return lookup


@pytest.mark.parametrize("state", [KeyState.RESIDENT, KeyState.ABSENT], ids=["found", "absent"])
async def test_one_replica_that_says_nothing_does_not_hold_up_a_round_of_lookups(state: KeyState) -> None:
    async with StubFleet("a:1", "b:1", check_timeout_s=0.2, check_interval_s=60.0) as fleet:
        fleet.client("a:1").lookup = holds(state)  # type: ignore[attr-defined]
        fleet.client("b:1").lookup = holds(state, after=asyncio.Event())  # type: ignore[attr-defined]
        begun = fleet.client("b:1").num_checks
        asked: Coroutine[Any, Any, Any] = find_holders(fleet.directory, [b"k" * 32], Deadline(60))
        (found,) = await asyncio.wait_for(asked, 2)
        assert [(member.target, status.state) for member, status in found] == [("a:1", state)]
        await until(lambda: fleet.client("b:1").num_checks > begun)
