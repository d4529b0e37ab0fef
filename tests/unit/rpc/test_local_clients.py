"""Clients of calls without gRPC whose encoder, process or request is odd: nothing is sent twice, nothing is
left behind, and what cannot go this way goes by gRPC."""

from __future__ import annotations

import errno
import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from lm_adapter.transport import local_calls
from lm_adapter.transport.local_calls import LocalCalls
from tests.unit.rpc.local_rig import (
    ASKS,
    PREAMBLE,
    Ask,
    LocalRig,
    ask,
    frame,
    message,
    no_grpc,
    until,
)
from vision_encoder.v1 import broker_pb2 as pb

END = frame(pb.LOCAL_FRAME_END, b"")


class Encoder:
    """One that answers each connection as it is told to: bytes by turn, None for a close."""

    def __init__(self, path: str, *connections: tuple[bytes | None, ...]) -> None:
        self.heard: list[bytes] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(path)
        self._listener.listen()
        self._listener.settimeout(5)
        self._connections = connections
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with self._listener:
            for answers in self._connections:
                try:
                    connection, _ = self._listener.accept()
                except TimeoutError:
                    return
                with connection:
                    connection.settimeout(5)
                    for answer in answers:
                        self.heard.append(connection.recv(1 << 20))
                        if answer is None or not self.heard[-1]:
                            break
                        connection.sendall(answer)

    def end(self) -> None:
        self._thread.join(20)
        assert not self._thread.is_alive()


@pytest.mark.parametrize("ask", ASKS)
def test_a_call_that_was_taken_is_not_sent_again(folder: Path, calls: LocalCalls, ask: Ask) -> None:
    """Whoever took the whole request on a kept connection, and died of it, gets it once."""
    path = str(folder / "calls")
    encoder = Encoder(path, (PREAMBLE + END, None), (PREAMBLE + END,))
    assert ask(calls, path, "Echo").code is grpc.StatusCode.OK
    assert ask(calls, path, "Echo", b"poison").code is grpc.StatusCode.UNAVAILABLE
    assert sum(b"poison" in heard for heard in encoder.heard) == 1
    assert ask(calls, path, "Echo").code is grpc.StatusCode.OK
    encoder.end()


@pytest.mark.parametrize("ask", ASKS)
@pytest.mark.parametrize("bad", [END + b"\x02", frame(pb.LOCAL_FRAME_END, b"\xff")], ids=["more", "no-end"])
def test_a_connection_whose_answer_was_none_is_not_kept(
    folder: Path, calls: LocalCalls, ask: Ask, bad: bytes
) -> None:
    path = str(folder / "calls")
    encoder = Encoder(path, (PREAMBLE + bad, END), (PREAMBLE + message(b"good") + END,))
    assert ask(calls, path, "Echo").code is grpc.StatusCode.INTERNAL
    assert ask(calls, path, "Echo").messages == [b"good"]
    encoder.end()


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("ask", ASKS)
def test_calls_of_a_client_that_closes_are_not_begun_anew(folder: Path, ask: Ask, kept: bool) -> None:
    """Neither here nor by gRPC, whose channel closes next; also where nothing has come of them yet."""
    path, calls, otherwise = str(folder / "calls"), LocalCalls(), []
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener, ThreadPoolExecutor(1) as threads:
        listener.bind(path)
        listener.listen()
        if kept:
            first = threads.submit(ask, calls, path, "Echo")
            connection, _ = listener.accept()
            connection.recv(1 << 16)
            connection.sendall(PREAMBLE + END)
            assert first.result(20).code is grpc.StatusCode.OK
        # More than the kernel takes: it is being sent when the client closes.
        under_way = threads.submit(ask, calls, path, "Echo", bytes(8 << 20), otherwise=otherwise.append)
        if not kept:
            connection, _ = listener.accept()
        assert connection.recv(1, socket.MSG_PEEK)
        calls.close()
        assert under_way.result(20).code is grpc.StatusCode.UNAVAILABLE
        assert otherwise == []
        connection.close()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_that_closes_its_client_ends_no_call_of_its_parent(
    rig: LocalRig, calls: LocalCalls
) -> None:
    with ThreadPoolExecutor(1) as threads:
        under_way = threads.submit(ask, calls, rig.path, "Wait")
        until(lambda: rig.handlers.events == ["waits"])
        child = os.fork()
        if not child:
            try:
                calls.close()
            finally:
                os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        rig.handlers.go_on.set()
        assert under_way.result(20).messages == [b"went on"]


def test_a_process_without_a_descriptor_left_calls_by_grpc(
    rig: LocalRig, calls: LocalCalls, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_socket(*_: object) -> socket.socket:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(socket, "socket", no_socket)
        assert calls.begin(rig.path, "Echo", b"", 1, (), lambda left_s: left_s) == 1


@pytest.mark.parametrize("ask", ASKS)
@pytest.mark.parametrize("timeout_s", [3e9, 1e30, float("inf")], ids=str)
def test_a_deadline_may_be_as_far_as_it_likes(
    rig: LocalRig, calls: LocalCalls, ask: Ask, timeout_s: float
) -> None:
    assert ask(calls, rig.path, "Echo", timeout_s=timeout_s).messages == [b"question"]


def test_a_call_that_cannot_be_written_leaves_no_connection(rig: LocalRig, calls: LocalCalls) -> None:
    for begin in (calls.begin, calls.begin_on_loop):
        with pytest.raises(UnicodeEncodeError):
            begin(rig.path, "Echo", b"", 20, (("name", "\u0100"),), no_grpc)
    assert not calls._in_use
    until(lambda: rig.server.num_connections == 0)


def test_threads_that_begin_at_once_keep_to_the_bound(
    rig: LocalRig, calls: LocalCalls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_calls, "MAX_IN_USE", 4)
    together, real = threading.Barrier(12), LocalCalls.connect

    def connect(self: LocalCalls, path: str) -> Any:
        together.wait(20)
        return real(self, path)

    monkeypatch.setattr(LocalCalls, "connect", connect)
    with ThreadPoolExecutor(12) as threads:
        taken = list(threads.map(lambda _: calls.take(rig.path), range(12)))
    found = [each for each in taken if each is not None]
    assert len(found) == len(calls._in_use) == 4
    for each in found:
        calls.give_back(each, reusable=False)
