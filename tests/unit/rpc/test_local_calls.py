"""Calls without gRPC: both ends against each other, and each against an end that does anything."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from encoder_service.rpc import local_server
from encoder_service.rpc.local_connection import LocalBounds
from encoder_service.rpc.local_server import path_beside
from lm_adapter.transport import local_calls
from lm_adapter.transport.broker_records import path_beside as seen_beside
from lm_adapter.transport.local_calls import LocalCalls
from lm_adapter.transport.local_frames import PREAMBLE, LocalAnswer, LocalError, head_of
from tests.unit.rpc.local_rig import (
    ASKS,
    HEADER,
    Ask,
    LocalRig,
    ask,
    frame,
    head,
    local_rig,
    message,
    no_grpc,
    read_all,
    reply,
    until,
)
from tests.unit.transport.broker_rig import socket_folder
from vision_encoder.v1 import broker_pb2 as pb

# -- calls as they should be ---------------------------------------------------------------------------------


@pytest.mark.parametrize("ask", ASKS)
def test_an_answer_is_what_the_handler_wrote(rig: LocalRig, calls: LocalCalls, ask: Ask) -> None:
    found = ask(calls, rig.path, "Twice", b"x" * 40_000)
    assert found.messages == [b"x" * 40_000] * 2
    assert found.error is None
    found = ask(calls, rig.path, "Echo")
    assert found.messages == [b"question"]
    assert found.trailers == (("said", "so"), ("raw-bin", b"\xff\x00"))
    assert ask(calls, rig.path, "Unary", b"loud").messages == [b"LOUD"]


@pytest.mark.parametrize("ask", ASKS)
@pytest.mark.parametrize("num_bytes", [0, 1, (1 << 17) - 64, 1 << 17, (1 << 17) + 1, 20 << 20])
def test_messages_of_any_size(rig: LocalRig, calls: LocalCalls, ask: Ask, num_bytes: int) -> None:
    data = os.urandom(num_bytes)
    assert ask(calls, rig.path, "Echo", data).messages == [data]


@pytest.mark.parametrize("num_bytes", [0, 1, (1 << 16) - 1, (1 << 16) + 1, 20 << 20])
def test_a_last_message_goes_out_with_the_end(rig: LocalRig, calls: LocalCalls, num_bytes: int) -> None:
    data = os.urandom(num_bytes)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(rig.path)
        connection.sendall(PREAMBLE + head("Last") + message(data))
        until(lambda: rig.handlers.events == ["written"])
        assert connection.recv(1 << 16) == PREAMBLE
        connection.settimeout(0.05)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        connection.settimeout(20)
        rig.handlers.go_on.set()
        answer = LocalAnswer(is_greeted=True)
        answer.feed(connection.recv(1 << 17))
        if num_bytes > 1 << 16:
            while (found := answer.message()) is None:
                answer.feed(connection.recv(1 << 17))
        else:  # both in one
            found = answer.message()
        assert found == data
        while answer.message() is None and not answer.has_ended:
            assert num_bytes > 1 << 16
            answer.feed(connection.recv(1 << 17))
        assert answer.trailers == (("said", "so"),)


@pytest.mark.parametrize("ask", ASKS)
def test_a_last_message_comes_before_what_its_call_ends_with(
    rig: LocalRig, calls: LocalCalls, ask: Ask
) -> None:
    found = ask(calls, rig.path, "LastRefused")
    assert (found.messages, found.code) == ([b"question"], grpc.StatusCode.NOT_FOUND)
    assert ask(calls, rig.path, "Echo").messages == [b"question"]


@pytest.mark.parametrize("ask", ASKS)
def test_the_handler_learns_metadata_and_time(rig: LocalRig, calls: LocalCalls, ask: Ask) -> None:
    ask(
        calls,
        rig.path,
        "Tell",
        timeout_s=7.5,
        metadata=(("authorization", "Bearer x"), ("y-bin", b"\x00\xfe")),
    )
    ((metadata, left_s, peer),) = rig.handlers.events  # type: ignore[misc]
    assert metadata == (("authorization", "Bearer x"), ("y-bin", b"\x00\xfe"))
    assert 0 < left_s <= 7.5
    assert peer.startswith("unix:")


@pytest.mark.parametrize("ask", ASKS)
def test_statuses_come_with_their_text_and_metadata(rig: LocalRig, calls: LocalCalls, ask: Ask) -> None:
    found = ask(calls, rig.path, "RefuseUnread", b"x" * (8 << 20))
    assert found.error is not None
    assert (found.code, found.error.details()) == (grpc.StatusCode.PERMISSION_DENIED, "no")
    assert found.error.trailing_metadata() == (("why-bin", b"\x01\x80"), ("more", "text"))
    found = ask(calls, rig.path, "Refuse")
    assert (found.messages, found.code) == ([b"first"], grpc.StatusCode.NOT_FOUND)
    found = ask(calls, rig.path, "Fail")
    assert found.code is grpc.StatusCode.UNKNOWN
    assert found.error is not None
    assert found.error.details() == "ValueError: broken"
    assert ask(calls, rig.path, "Dance").code is grpc.StatusCode.UNIMPLEMENTED
    assert ask(calls, rig.path, "Echo").messages == [b"question"]


@pytest.mark.parametrize("ask", ASKS)
def test_a_message_that_is_too_long_is_refused_with_both_numbers(
    folder: Path, calls: LocalCalls, ask: Ask
) -> None:
    with local_rig(folder, LocalBounds(max_message_bytes=1000)) as rig:
        assert ask(calls, rig.path, "Echo", bytes(1000)).messages == [bytes(1000)]
        found = ask(calls, rig.path, "Echo", bytes(1001))
        assert found.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert found.error is not None
        assert "larger than max (1001 vs. 1000)" in found.error.details()
        assert ask(calls, rig.path, "Echo", bytes(20 << 20)).code is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_calls_of_many_threads_are_each_their_own(rig: LocalRig, calls: LocalCalls) -> None:
    def many(number: int) -> None:
        for turn in range(30):
            data = f"{number}.{turn}".encode() * (1 + 997 * (turn % 3))
            assert ask(calls, rig.path, "Echo", data).messages == [data]

    with ThreadPoolExecutor(16) as threads:
        list(threads.map(many, range(16)))
    assert rig.server.num_connections <= 16


# -- a connection's life -------------------------------------------------------------------------------------


@pytest.mark.parametrize("ask", ASKS)
def test_a_connection_is_used_again_unless_its_call_was_left(
    rig: LocalRig, calls: LocalCalls, ask: Ask
) -> None:
    for _ in range(5):
        ask(calls, rig.path, "Echo")
    assert rig.server.num_connections == 1
    call = calls.begin(rig.path, "Flood", b"1000000", 20, (), no_grpc)
    assert next(call) == bytes(1 << 16)
    call.cancel()
    until(lambda: rig.server.num_connections == 0)
    assert ask(calls, rig.path, "Echo").messages == [b"question"]


@pytest.mark.parametrize("ask", ASKS)
def test_the_deadline_ends_a_call_on_both_sides(rig: LocalRig, calls: LocalCalls, ask: Ask) -> None:
    started_s = time.monotonic()
    assert ask(calls, rig.path, "Wait", timeout_s=0.2).code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert time.monotonic() - started_s >= 0.2
    until(lambda: rig.handlers.events == ["waits", "cancelled"])


def test_the_service_ends_a_late_call_by_itself(rig: LocalRig) -> None:
    with rig.raw() as connection:
        connection.sendall(PREAMBLE + head("Wait", timeout_us=100_000) + message())
        found = reply(connection)
        kind, num_bytes = HEADER.unpack_from(found)
        assert kind == pb.LOCAL_FRAME_END
        end = pb.LocalCallEnd.FromString(found[HEADER.size :][:num_bytes])
        assert end.status == grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
        connection.sendall(head("Echo") + message(b"next"))
        assert reply(connection)[HEADER.size :].startswith(b"next")


@pytest.mark.parametrize("ask", ASKS)
def test_a_kept_connection_that_was_closed_meanwhile_is_replaced(
    rig: LocalRig, calls: LocalCalls, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where that happens between the look at it and the request."""
    for looks in (True, False):
        ask(calls, rig.path, "Echo")
        for connection in list(rig.server._connections):
            rig.on_loop(_finish(connection))
        until(lambda: rig.server.num_connections == 0)
        if not looks:
            monkeypatch.setattr(local_calls, "_is_quiet", lambda _: True)
        assert ask(calls, rig.path, "Echo", b"x" * 100_000).messages == [b"x" * 100_000]


async def _finish(connection: object) -> None:
    connection.finish()  # type: ignore[attr-defined]


class Fake:
    """A stream of gRPC's, of either kind."""

    def __init__(self, left_s: float) -> None:
        assert 0 < left_s <= 20
        self.is_cancelled = False
        self._messages = iter([b"by", b"grpc"])

    def __iter__(self) -> Iterator[bytes]:
        return self._messages

    def __next__(self) -> bytes:
        return next(self._messages)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for each in self._messages:
            yield each

    def cancel(self) -> None:
        self.is_cancelled = True


class SyncFake(Fake):
    def trailing_metadata(self) -> tuple[tuple[str, str], ...]:
        return (("by", "grpc"),)


class LoopFake(Fake):
    async def trailing_metadata(self) -> tuple[tuple[str, str], ...]:
        return (("by", "grpc"),)


@pytest.mark.parametrize("ask", ASKS)
@pytest.mark.parametrize("first", ["refused", "closed-later"])
def test_a_call_that_is_not_taken_goes_by_grpc(
    folder: Path, ask: Ask, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connection was one too many; or it was kept and closed, and there is no other."""
    now_s, made = [0.0], []
    calls = LocalCalls(clock=lambda: now_s[0])

    def by_grpc(left_s: float) -> Fake:
        made.append((SyncFake if ask is ASKS[0] else LoopFake)(left_s))
        return made[-1]

    with local_rig(folder, LocalBounds(max_connections=1)) as rig:
        if first == "refused":
            with rig.raw():
                until(lambda: rig.server.num_connections == 1)
                found = ask(calls, rig.path, "Echo", otherwise=by_grpc)
            until(lambda: rig.server.num_connections == 0)
        else:
            ask(calls, rig.path, "Echo")
            for connection in list(rig.server._connections):
                rig.on_loop(_finish(connection))
            until(lambda: rig.server.num_connections == 0)
            monkeypatch.setattr(local_calls, "_is_quiet", lambda _: True)
            with rig.raw():
                until(lambda: rig.server.num_connections == 1)
                found = ask(calls, rig.path, "Echo", b"x" * 100_000, otherwise=by_grpc)
            until(lambda: rig.server.num_connections == 0)
        assert (found.messages, found.trailers) == ([b"by", b"grpc"], (("by", "grpc"),))
        assert made[0].is_cancelled, "as every stream is by the client in the end"
        assert ask(calls, rig.path, "Echo", otherwise=by_grpc).messages == [b"by", b"grpc"], "the pause"
        now_s[0] += local_calls.PAUSE_S
        assert ask(calls, rig.path, "Echo", otherwise=by_grpc).messages == [b"question"]
        calls.close()


def test_calls_beyond_the_bound_of_a_client_go_by_grpc(
    rig: LocalRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_calls, "MAX_IN_USE", 2)
    calls = LocalCalls()
    held = [calls.begin(rig.path, "Flood", b"9999999", 20, (), no_grpc) for _ in range(2)]
    for call in held:
        next(call)
    assert ask(calls, rig.path, "Echo", otherwise=SyncFake).messages == [b"by", b"grpc"]
    held[0].cancel()
    assert ask(calls, rig.path, "Echo").messages == [b"question"]
    held[1].cancel()
    calls.close()


@pytest.mark.parametrize("ask", ASKS)
def test_a_service_that_dies_under_a_call_is_unavailable(folder: Path, calls: LocalCalls, ask: Ask) -> None:
    path = str(folder / "calls")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        listener.listen()

        def die() -> None:
            for answer in (PREAMBLE, PREAMBLE + message(b"first") + b"\x03\x00"):
                connection, _ = listener.accept()
                with connection:
                    connection.recv(1 << 16)
                    connection.sendall(answer)

        server = threading.Thread(target=die, daemon=True)
        server.start()
        for messages in ([], [b"first"]):
            found = ask(calls, path, "Echo")
            assert (found.messages, found.code) == (messages, grpc.StatusCode.UNAVAILABLE)
        server.join(20)


def test_without_a_socket_there_is_no_call_and_a_pause(folder: Path) -> None:
    now_s = [0.0]
    calls = LocalCalls(clock=lambda: now_s[0])
    path = str(folder / "calls")

    def goes_by_grpc(path: str) -> bool:
        return calls.begin(path, "Echo", b"", 1, (), lambda left_s: left_s) == 1

    assert goes_by_grpc("")
    assert goes_by_grpc(path)
    with local_rig(folder) as rig:
        assert goes_by_grpc(path), "not tried again within the pause"
        now_s[0] += local_calls.PAUSE_S
        assert ask(calls, rig.path, "Echo").messages == [b"question"]
        calls.close()
        assert goes_by_grpc(path)
        until(lambda: rig.server.num_connections == 0)


def test_closing_ends_calls_in_progress(rig: LocalRig, calls: LocalCalls) -> None:
    with ThreadPoolExecutor(1) as threads:
        under_way = threads.submit(ask, calls, rig.path, "Wait")
        until(lambda: rig.handlers.events == ["waits"])
        calls.close()
        calls.close()
        assert under_way.result(20).code is grpc.StatusCode.UNAVAILABLE
    until(lambda: rig.handlers.events == ["waits", "cancelled"])


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_leaves_its_parents_connections_alone(rig: LocalRig, calls: LocalCalls) -> None:
    ask(calls, rig.path, "Echo")
    call = calls.begin(rig.path, "Wait", b"", 20, (), no_grpc)
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(next, call)
        until(lambda: rig.handlers.events == ["waits"])
        child = os.fork()
        if not child:
            status = 1
            try:
                call.cancel()
                status = 0 if ask(calls, rig.path, "Echo", b"child").messages == [b"child"] else 2
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        rig.handlers.go_on.set()
        assert answer.result(20) == b"went on"
        assert list(call) == []
        call.cancel()
    assert ask(calls, rig.path, "Echo", b"parent").messages == [b"parent"]


# -- the server's end ----------------------------------------------------------------------------------------


def test_a_stop_lets_calls_finish_and_takes_no_more(rig: LocalRig, calls: LocalCalls) -> None:
    ask(calls, rig.path, "Echo")
    with ThreadPoolExecutor(2) as threads, rig.raw() as idle:
        under_way = threads.submit(ask, calls, rig.path, "Wait")
        until(lambda: rig.handlers.events == ["waits"])
        stopping = rig.later(rig.server.stop(20))
        assert read_all(idle) == b""
        assert not os.path.exists(rig.path)
        with pytest.raises(LocalError, match="by gRPC"):
            ask(LocalCalls(), rig.path, "Echo")
        rig.handlers.go_on.set()
        assert under_way.result(20).messages == [b"went on"]
        stopping.result(20)
    assert rig.server.num_connections == 0


def test_a_stop_cuts_off_what_outlives_its_grace(rig: LocalRig, calls: LocalCalls) -> None:
    with ThreadPoolExecutor(1) as threads:
        under_way = threads.submit(ask, calls, rig.path, "Wait")
        until(lambda: rig.handlers.events == ["waits"])
        rig.on_loop(rig.server.stop(0.05))
        found = under_way.result(20)
    assert found.code is grpc.StatusCode.UNAVAILABLE
    assert found.error is not None
    assert found.error.details() == "the service has stopped"
    assert rig.handlers.events == ["waits", "cancelled"]


# -- clients that do anything --------------------------------------------------------------------------------


def test_bytes_may_come_one_by_one(rig: LocalRig) -> None:
    with rig.raw() as connection:
        for byte in PREAMBLE + head("Echo") + message(b"slow"):
            connection.sendall(bytes([byte]))
        assert reply(connection).startswith(message(b"slow"))


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n",
        b"VELX",
        PREAMBLE + message(),
        PREAMBLE + frame(pb.LOCAL_FRAME_END, b""),
        PREAMBLE + frame(pb.LOCAL_FRAME_HEAD, b"\xff\xff\xff"),
        PREAMBLE + HEADER.pack(pb.LOCAL_FRAME_HEAD, 16385),
        PREAMBLE + head("Wait") + head("Wait"),
        PREAMBLE + head("Wait") + message() + b"\x00",
        PREAMBLE + head("Wait") + message() + head("Echo"),
    ],
    ids=[
        "http", "other-preamble", "message-first", "end", "garbage", "long-head", "two-heads", "one-more",
        "next-call-too-soon",
    ],
)  # fmt: skip
def test_what_is_no_call_ends_the_connection(rig: LocalRig, calls: LocalCalls, said: bytes) -> None:
    with rig.raw() as connection:
        connection.sendall(said)
        read_all(connection)
    until(lambda: rig.server.num_connections == 0)
    assert rig.closed_for("protocol_error") == 1
    assert ask(calls, rig.path, "Echo").messages == [b"question"]


def test_a_client_that_leaves_at_any_byte_leaves_nothing(rig: LocalRig) -> None:
    said = PREAMBLE + head("Wait") + message()
    for num_bytes in range(len(said) + 1):
        with rig.raw() as connection:
            connection.sendall(said[:num_bytes])
    until(lambda: rig.server.num_connections == 0)
    assert rig.handlers.events in ([], ["waits", "cancelled"])


@settings(deadline=None)
@given(st.binary(max_size=200), st.booleans())
def test_random_bytes_never_break_the_server(fuzzed: LocalRig, data: bytes, greets: bool) -> None:
    with fuzzed.raw() as connection:
        connection.sendall(PREAMBLE * greets + data)
        connection.shutdown(socket.SHUT_WR)
        read_all(connection)
    assert not fuzzed.errors


@pytest.fixture(scope="module")
def fuzzed() -> Iterator[LocalRig]:
    with socket_folder() as folder, local_rig(folder) as found:
        yield found
        calls = LocalCalls()
        assert ask(calls, found.path, "Echo").messages == [b"question"]
        calls.close()


@settings(deadline=None)
@given(st.lists(st.binary(max_size=64), max_size=8), st.booleans())
def test_random_answers_are_errors_or_messages(pieces: list[bytes], is_greeted: bool) -> None:
    answer = LocalAnswer(is_greeted=is_greeted)
    for piece in pieces:
        answer.feed(piece)
        try:
            while answer.message() is not None:
                pass
        except LocalError:
            return


def test_what_a_client_sends_is_what_the_contract_says() -> None:
    head = head_of("Encode", (("a", "b"), ("c-bin", b"\xff")), 1.5, 7)
    kind, num_bytes = HEADER.unpack_from(head)
    call = pb.LocalCall.FromString(head[HEADER.size :][:num_bytes])
    assert kind == pb.LOCAL_FRAME_HEAD
    assert (call.method, call.timeout_us) == ("Encode", 1_500_000)
    assert [(each.name, each.value) for each in call.metadata] == [("a", b"b"), ("c-bin", b"\xff")]
    assert head[HEADER.size + num_bytes :] == HEADER.pack(pb.LOCAL_FRAME_MESSAGE, 7)


# -- bounds --------------------------------------------------------------------------------------------------


def test_more_connections_than_allowed_are_closed_as_they_come(folder: Path) -> None:
    with local_rig(folder, LocalBounds(max_connections=2)) as rig, rig.raw() as first, rig.raw() as second:
        until(lambda: rig.server.num_connections == 2)
        with rig.raw() as third:
            assert read_all(third) == b""
        assert rig.closed_for("too_many") == 1
        for connection in (first, second):
            connection.sendall(PREAMBLE + head("Echo") + message(b"in"))
            assert reply(connection).startswith(message(b"in"))


def test_other_users_are_not_let_in(folder: Path, calls: LocalCalls) -> None:
    with local_rig(folder, allowed_uids=frozenset({os.getuid() + 1})) as rig:
        with rig.raw() as connection:
            assert read_all(connection) == b""
        assert rig.closed_for("uid_not_allowed") == 1
    with local_rig(folder, allowed_uids=frozenset({os.getuid()})) as rig:
        assert ask(calls, rig.path, "Echo").messages == [b"question"]


@pytest.mark.parametrize(
    "said", [b"", PREAMBLE, PREAMBLE + head("Echo")[:-1]], ids=["nothing", "preamble", "half"]
)
def test_a_client_that_does_not_go_on_is_left(
    folder: Path, monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    monkeypatch.setattr(local_server, "CHECK_S", 0.02)
    idle_s = 0.1 if said == PREAMBLE else 600
    with local_rig(folder, LocalBounds(head_s=0.1 if idle_s > 1 else 600, idle_s=idle_s)) as rig:
        with rig.raw() as connection:
            connection.sendall(said)
            assert read_all(connection) == said[: len(PREAMBLE)]
        assert rig.closed_for("idle") == 1


def test_a_call_in_progress_is_no_idle_connection(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_server, "CHECK_S", 0.02)
    with local_rig(folder, LocalBounds(head_s=0.1, idle_s=0.1)) as rig, rig.raw() as connection:
        connection.sendall(PREAMBLE + head("Wait") + message())
        until(lambda: rig.handlers.events == ["waits"])
        time.sleep(0.4)
        rig.handlers.go_on.set()
        assert reply(connection).startswith(message(b"went on"))


def test_a_client_that_does_not_read_holds_the_handler_back_and_is_left(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_server, "CHECK_S", 0.02)
    with local_rig(folder, LocalBounds(stuck_s=1.0)) as rig, rig.raw() as connection:
        connection.sendall(PREAMBLE + head("Flood") + message(b"1000"))
        until(lambda: rig.closed_for("not_reading") == 1)
        assert 0 < len(rig.handlers.events) < 50, "what it wrote waits for whoever reads"
        until(lambda: rig.server.num_connections == 0)


def test_a_slow_reader_gets_all_of_it(folder: Path, calls: LocalCalls) -> None:
    with local_rig(folder, LocalBounds(stuck_s=30)) as rig:
        call = calls.begin(rig.path, "Flood", b"100", 60, (), no_grpc)
        num_bytes = 0
        for number, data in enumerate(call):
            num_bytes += len(data)
            if number % 25 == 0:
                time.sleep(0.05)
        call.cancel()
        assert num_bytes == 100 << 16


# -- paths ---------------------------------------------------------------------------------------------------


def test_the_socket_lies_beside_the_brokers() -> None:
    path = path_beside("/run/ve/broker.sock")
    assert path == "/run/ve/broker.sock.calls"
    assert seen_beside("/mnt/ve/broker.sock", os.path.basename(path)) == "/mnt/ve/broker.sock.calls"
    assert path_beside("/" + "x" * 100) == "/" + "x" * 100 + ".calls"
    assert path_beside("/" + "x" * 101) == ""
    assert path_beside("") == ""
    for name in ("", "../other", "a/b"):
        assert seen_beside("/mnt/ve/broker.sock", name) == ""


def test_its_file_has_the_permissions_asked_for(folder: Path) -> None:
    with local_rig(folder, mode=0o600) as rig:
        assert os.stat(rig.path).st_mode & 0o777 == 0o600
