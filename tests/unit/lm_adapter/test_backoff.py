"""Back-off from shared deliveries that the server keeps refusing: the counting, and the client doing it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from lm_adapter.transport.backoff import RefusalBackoff
from tests.unit.lm_adapter.client_drivers import DRIVERS, Driver
from tests.unit.lm_adapter.shared_rig import SharingFake, sharing_fake
from tests.unit.lm_adapter.test_client import assert_rows_of, digest_of, image


def refused(backoff: RefusalBackoff, now_s: float) -> float | None:
    return backoff.refused(backoff.turn, now_s)


def test_a_few_refusals_in_a_row_begin_a_pause_and_pauses_grow() -> None:
    backoff = RefusalBackoff(max_refusals=3, first_pause_s=5.0, max_pause_s=30.0)
    assert [refused(backoff, 0.0) for _ in range(3)] == [None, None, 5.0]
    assert (backoff.paused(4.9), backoff.paused(5.0)) == (True, False)
    assert [refused(backoff, 100.0 * count) for count in range(1, 5)] == [10.0, 20.0, 30.0, 30.0]
    assert "7 times in a row" in backoff.why("host", "full")
    backoff.worked(backoff.turn)
    assert [refused(backoff, 900.0) for _ in range(3)] == [None, None, 5.0]


def test_rows_that_were_read_in_between_begin_the_count_again() -> None:
    backoff = RefusalBackoff()
    for _ in range(5):
        assert [refused(backoff, 0.0), refused(backoff, 0.0)] == [None, None]
        backoff.worked(backoff.turn)


def test_calls_from_before_a_pause_say_nothing_of_what_comes_after() -> None:
    backoff = RefusalBackoff()
    old = backoff.turn
    assert [backoff.refused(old, 0.0) for _ in range(6)] == [None, None, 5.0, None, None, None]
    backoff.worked(old)
    assert backoff.paused(1.0)
    backoff.forget()
    assert not backoff.paused(1.0)


# The client


@dataclass
class Clock:
    now_s: float = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def encoder() -> Iterator[SharingFake]:
    with sharing_fake() as running:
        yield running


@pytest.fixture(params=sorted(DRIVERS))
def open_client(
    request: pytest.FixtureRequest, encoder: SharingFake
) -> Iterator[Callable[..., tuple[Driver, Clock]]]:
    drivers: list[Driver] = []

    def opener(**settings: Any) -> tuple[Driver, Clock]:
        driver, clock = DRIVERS[request.param](encoder.target, timeout_s=20.0, **settings), Clock()
        drivers.append(driver)
        driver.client._session.transports.clock = clock  # type: ignore[attr-defined]
        driver.call("wait_transport")
        return driver, clock

    yield opener
    for driver in drivers:
        driver.call("close")
        driver.close()


def num_calls(encoder: SharingFake) -> int:
    return sum(call.method == "Encode" for call in encoder.fake.calls)


def choice_of(driver: Driver) -> Any:
    return driver.client.transport  # type: ignore[attr-defined]


def test_refused_deliveries_end_in_inline_calls_until_a_probe_after_a_pause(
    encoder: SharingFake, open_client: Callable[..., tuple[Driver, Clock]]
) -> None:
    client, clock = open_client()
    encoder.refuse = {digest_of(0)}

    def encode(index: int = 0) -> int:
        before = num_calls(encoder)
        assert_rows_of(client.call("encode_one", image(index)), digest_of(index))
        return num_calls(encoder) - before

    assert [encode() for _ in range(5)] == [2, 2, 2, 1, 1]
    choice = choice_of(client)
    assert choice.name == "inline"
    assert "host were refused 3 times in a row, the next probe is 5 s after" in choice.reason
    assert "no room in the arena" in choice.reason
    assert choice.rejected == {"host": "no room in the arena"}
    clock.now_s += 4.9
    client.call("info")  # the same server's word again is no reason to try earlier
    assert client.call("wait_transport") == choice
    assert encode(1) == 1
    assert encoder.num_placed == 0

    clock.now_s += 0.2
    assert client.call("wait_transport").name == "host", "the probe is fine"
    assert encode() == 2
    assert "refused 4 times in a row, the next probe is 10 s after" in choice_of(client).reason
    clock.now_s += 9.0
    assert client.call("wait_transport").name == "inline"
    clock.now_s += 1.1
    assert client.call("wait_transport").name == "host"
    assert encode(1) == 1, "read out of shared memory: what was refused is forgotten"
    assert encoder.num_placed == 1
    assert [encode() for _ in range(4)] == [2, 2, 2, 1]
    assert "5 s after" in choice_of(client).reason


def test_a_call_of_which_some_rows_are_read_is_no_refusal(
    encoder: SharingFake, open_client: Callable[..., tuple[Driver, Clock]]
) -> None:
    client, _ = open_client()
    encoder.refuse = {digest_of(0)}
    for _ in range(6):
        client.call("encode", [image(0), image(1)])
    assert choice_of(client).name == "host"
    assert encoder.num_placed == 6


def test_stale_leases_are_no_refusal(
    encoder: SharingFake, open_client: Callable[..., tuple[Driver, Clock]]
) -> None:
    client, _ = open_client()
    encoder.before_answer = lambda slot: encoder.arena.page.revoke(slot.index) and None
    for _ in range(4):
        assert_rows_of(client.call("encode_one", image(0)), digest_of(0))
    assert choice_of(client).name == "host"


def test_a_new_arena_is_tried_at_once(
    encoder: SharingFake, open_client: Callable[..., tuple[Driver, Clock]]
) -> None:
    client, _ = open_client()
    encoder.refuse = {digest_of(0)}
    for _ in range(3):
        client.call("encode_one", image(0))
    assert choice_of(client).name == "inline"
    encoder.refuse = set()
    encoder.replace_arena()
    chooser = client.client._session.transports  # type: ignore[attr-defined]
    with chooser._changed:
        assert chooser._changed.wait_for(lambda: chooser._choice.is_shared, 20)
    assert_rows_of(client.call("encode_one", image(0)), digest_of(0))
    assert encoder.num_placed == 1


def test_a_client_that_allows_no_other_way_goes_on_asking(
    encoder: SharingFake, open_client: Callable[..., tuple[Driver, Clock]]
) -> None:
    client, _ = open_client(transports=("host",))
    encoder.refuse = {digest_of(0)}
    for count in range(5):
        (outcome,) = client.call("encode", [image(0)])
        assert outcome.reason == "TRANSPORT_UNAVAILABLE"
        assert num_calls(encoder) == count + 1
    assert choice_of(client).name == "host"


def test_a_probe_that_began_before_the_pause_does_not_end_it(
    encoder: SharingFake, open_client: Callable[..., tuple[Driver, Clock]]
) -> None:
    client, clock = open_client()
    chooser = client.client._session.transports  # type: ignore[attr-defined]
    real = chooser._probe_all

    def refused_meanwhile(info: Any) -> Any:
        for _ in range(3):
            chooser.note("host", chooser._backoff.turn, 0, "full")
        return real(info)

    chooser._probe_all = refused_meanwhile
    with chooser._changed:
        chooser._start_probe()
    assert client.call("wait_transport").name == "inline"
    chooser._probe_all = real
    clock.now_s += 5.0
    assert client.call("wait_transport").name == "host"


def test_another_server_is_asked_at_once(
    encoder: SharingFake, open_client: Callable[..., tuple[Driver, Clock]]
) -> None:
    client, _ = open_client()
    chooser = client.client._session.transports  # type: ignore[attr-defined]
    for _ in range(3):
        chooser.note("host", chooser._backoff.turn, 0, "full")
    info = client.call("info")
    assert client.call("wait_transport").name == "inline"
    chooser.offer(replace(info, instance_id="another"))
    assert not chooser._backoff.paused(chooser.clock())
