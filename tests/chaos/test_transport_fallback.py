"""Brokers, arenas and encoders that go away under clients; clients that are forked, or closed under reads."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lm_adapter import CallFailed, ImageItem, StaleRows, TransportUnavailable, VisionEncoderClient
from lm_adapter.transport import arenas
from tests.unit.lm_adapter.shared_rig import SharingFake, break_off, num_mappings, sharing_fake
from tests.unit.lm_adapter.test_client import assert_rows_of, digest_of, image
from tests.unit.transport.broker_rig import wait_until


@pytest.fixture
def encoder() -> Iterator[SharingFake]:
    with sharing_fake() as running:
        yield running


@pytest.fixture
def client(encoder: SharingFake) -> Iterator[VisionEncoderClient]:
    with VisionEncoderClient(encoder.target, timeout_s=20) as client:
        assert client.wait_transport().name == "host"
        yield client


def until_host(client: VisionEncoderClient) -> None:
    wait_until(lambda: client.transport.name == "host", "the way back to host memory")


def test_the_broker_dies_and_comes_back_under_calls(
    encoder: SharingFake, client: VisionEncoderClient
) -> None:
    encoder.stop_sharing()
    for index in range(5):
        assert_rows_of(client.encode_one(image(index)), digest_of(index))
    wait_until(lambda: client.transport.name == "inline")
    assert "lost" in client.transport.reason
    encoder.start_sharing()
    until_host(client)
    before = encoder.num_placed
    assert_rows_of(client.encode_one(image(1)), digest_of(1))
    assert encoder.num_placed == before + 1
    assert arenas.num_attached() <= 2


def test_the_encoder_restarts_and_clients_map_again_by_themselves(
    encoder: SharingFake, client: VisionEncoderClient
) -> None:
    assert_rows_of(client.encode_one(image(0)), digest_of(0))
    old = encoder.arena.arena_id
    encoder.stop()
    with pytest.raises(CallFailed):
        client.encode_one(image(0), timeout_s=1)
    encoder.start()
    client.wait_ready(20)

    def came_by_host() -> bool:
        before = encoder.num_placed
        assert_rows_of(client.encode_one(image(0)), digest_of(0))
        return encoder.num_placed > before

    wait_until(came_by_host, "rows from the new arena")
    wait_until(lambda: arenas.num_attached() == 1, "the end of the old mapping")
    assert encoder.arena.arena_id != old


def test_an_encoder_that_comes_back_at_another_path_leaves_no_mapping(
    encoder: SharingFake, client: VisionEncoderClient
) -> None:
    """A socket may be named after its pod, and pods come and go."""
    for turn in range(3):
        assert_rows_of(client.encode_one(image(turn)), digest_of(turn))
        old = encoder.arena.arena_id
        encoder.stop()
        encoder.path = str(Path(encoder.path).with_name(f"pod-{turn}.sock"))
        encoder.start()
        client.wait_ready(20)

        def came_by_host(index: int = turn) -> bool:
            before = encoder.num_placed
            assert_rows_of(client.encode_one(image(index)), digest_of(index))
            return encoder.num_placed > before

        wait_until(came_by_host, "rows from the new arena")
        wait_until(lambda: arenas.num_attached() == 1, "the end of the old mapping")
        assert encoder.arena.arena_id != old


def test_an_encoder_that_stops_is_not_kept_in_memory(
    encoder: SharingFake, client: VisionEncoderClient
) -> None:
    assert_rows_of(client.encode_one(image(0)), digest_of(0))
    encoder.stop_sharing()
    wait_until(lambda: not arenas.num_attached(), "the end of the mapping")
    encoder.start_sharing()
    until_host(client)


def test_an_encoder_that_is_gone_is_kept_for_a_grace_alone(
    encoder: SharingFake, client: VisionEncoderClient
) -> None:
    client._session.transports.lost_grace_s = 0.5
    assert_rows_of(client.encode_one(image(0)), digest_of(0))
    away = break_off(client, encoder)
    wait_until(lambda: client.transport.name == "inline")
    assert arenas.num_attached() == 1, "a broker that was busy comes back within the grace"
    wait_until(lambda: not arenas.num_attached(), "the end of the mapping")
    away.rename(encoder.path)
    until_host(client)
    before = encoder.num_placed
    assert_rows_of(client.encode_one(image(1)), digest_of(1))
    assert (encoder.num_placed, arenas.num_attached()) == (before + 1, 1)


def test_an_encoder_that_is_back_within_the_grace_stays_mapped(
    encoder: SharingFake, client: VisionEncoderClient
) -> None:
    client._session.transports.lost_grace_s = 0.5
    (before,) = client._session.transports._arenas.of("host")
    away = break_off(client, encoder)
    wait_until(lambda: client.transport.name == "inline")
    away.rename(encoder.path)
    until_host(client)
    time.sleep(0.7)
    (after,) = client._session.transports._arenas.of("host")
    assert after is before


def test_an_arena_closes_under_its_readers(encoder: SharingFake, client: VisionEncoderClient) -> None:
    borrowed = client.encode_one(image(0), borrow=True)
    view = borrowed.payload
    held = bytes(view)  # type: ignore[arg-type]
    encoder.replace_arena()
    assert_rows_of(client.encode_one(image(1)), digest_of(1))
    until_host(client)
    wait_until(lambda: encoder.num_placed >= 2 or client.encode_one(image(2)) is None)
    assert bytes(view) == held, "mapped memory does not go under a reader"  # type: ignore[arg-type]
    with pytest.raises(StaleRows, match="changed while"):
        borrowed.confirm()
    del borrowed, view
    wait_until(lambda: arenas.num_attached() == 1)


def test_calls_never_fail_while_the_broker_comes_and_goes(encoder: SharingFake) -> None:
    stop = threading.Event()
    failures: list[BaseException] = []
    num_rows = [0] * 4

    def read(worker: int, client: VisionEncoderClient) -> None:
        index = worker
        while not stop.is_set():
            try:
                for outcome, item in zip(
                    client.encode([image(index), image(index + 1)]), (0, 1), strict=True
                ):
                    assert_rows_of(outcome, digest_of(index + item))
            except BaseException as error:
                failures.append(error)
                return
            num_rows[worker] += 1
            index = (index + 3) % 9

    with VisionEncoderClient(encoder.target, timeout_s=20) as client:
        client.wait_transport()
        threads = [threading.Thread(target=read, args=(worker, client)) for worker in range(4)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(6):
                time.sleep(0.1)
                with encoder.lock:
                    encoder.stop_sharing()
                time.sleep(0.05)
                with encoder.lock:
                    encoder.start_sharing()
        finally:
            stop.set()
            for thread in threads:
                thread.join(30)
    assert failures == []
    assert min(num_rows) > 0


def test_a_forced_way_fails_clearly_while_it_is_away(encoder: SharingFake) -> None:
    with VisionEncoderClient(encoder.target, timeout_s=20, transports=("host",)) as client:
        assert_rows_of(client.encode_one(image(0)), digest_of(0))
        encoder.stop_sharing()
        wait_until(lambda: client.transport.name == "none")
        with pytest.raises(TransportUnavailable, match="lost") as failed:
            client.encode_one(image(0))
        assert failed.value.retryable
        encoder.start_sharing()
        until_host(client)
        assert_rows_of(client.encode_one(image(0)), digest_of(0))


def in_child(work: Callable[[], None]) -> int:
    """The exit status of a forked child that does this."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_forked_child_leaves_its_parents_session_alone(
    encoder: SharingFake, client: VisionEncoderClient
) -> None:
    rows = client.encode_one(image(0), borrow=True)
    chooser = client._session.transports

    def work() -> None:
        assert client.transport.name == "inline"
        assert arenas.num_attached() == 0
        assert_rows_of(rows, digest_of(0))
        rows.reading.abandon()  # type: ignore[union-attr]
        assert chooser.current() is None
        # The child probes for itself, with a session of its own.
        wait_until(lambda: chooser.current() is not None)
        arena = chooser.arena("host", encoder.arena.arena_id)
        arena.check_probe()
        arena.drop()
        chooser.close()
        assert arenas.num_attached() == 0

    assert in_child(work) == 0
    assert len(encoder.leases) == 1, "the child gave nothing back that is its parent's"
    rows.confirm()
    assert_rows_of(client.encode_one(image(1)), digest_of(1))
    assert client.transport.name == "host"


def test_a_client_closed_under_reads_leaves_nothing(encoder: SharingFake) -> None:
    for _ in range(20):
        mappings = num_mappings()
        client = VisionEncoderClient(encoder.target, timeout_s=20)
        client.wait_transport()
        threads = [threading.Thread(target=lambda: swallow(client)) for _ in range(3)]  # noqa: B023
        for thread in threads:
            thread.start()
        client.close()
        client.close()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()
        assert num_mappings() == mappings
        assert arenas.num_attached() == 0


def swallow(client: VisionEncoderClient) -> None:
    """Calls until the client is closed."""
    try:
        while True:
            client.encode([image(0), ImageItem(b"x", digest=digest_of(9))])
    except CallFailed:
        return


def test_a_client_closed_while_it_probes_leaves_nothing(encoder: SharingFake) -> None:
    mappings = num_mappings()
    for pause_s in (0.0, 0.001, 0.003, 0.01):
        client = VisionEncoderClient(encoder.target, timeout_s=20)
        client.info()
        time.sleep(pause_s)
        client.close()
        assert num_mappings() == mappings
        assert [t for t in threading.enumerate() if t.name in ("transport-probe", "broker-client")] == []


def test_leases_that_run_out_are_read_anew(encoder: SharingFake, client: VisionEncoderClient) -> None:
    """The slot is revoked between the answer and the copy, as an expired lease's is."""
    revoked: list[Any] = []
    encoder.before_answer = lambda slot: revoked.append(encoder.arena.page.revoke(slot.index))
    for index in range(3):
        assert_rows_of(client.encode_one(image(index)), digest_of(index))
    assert len(revoked) == 9, "three attempts each, then inline"
