"""The adapter's client of the broker: requests, lost connections, restarts, forks, brokers that misbehave."""

from __future__ import annotations

import contextlib
import hashlib
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from encoder_service.transport.access import BrokerAccess
from encoder_service.transport.broker_options import ConnectionLimits
from encoder_service.transport.framing import FrameReader, encode_frame
from lm_adapter.errors import EncoderError, InvalidRequest
from lm_adapter.transport.broker_client import BrokerClient
from lm_adapter.transport.broker_errors import (
    BrokerError,
    BrokerRefused,
    BrokerRequestFailed,
    BrokerUnavailable,
    BrokerViolation,
)
from lm_adapter.transport.broker_records import BrokerSession
from tests.unit.transport.broker_rig import num_descriptors, running_broker, socket_folder, wait_until
from vision_encoder.v1 import broker_pb2 as pb
from vision_encoder.v1 import encoder_pb2


@pytest.fixture(autouse=True)
def no_descriptor_and_no_thread_is_left() -> Iterator[None]:
    before = num_descriptors()
    yield
    wait_until(lambda: num_descriptors() == before, "every descriptor's close")
    assert [thread.name for thread in threading.enumerate() if thread.name == "broker-client"] == []


def failure_of(action: Callable[[], object]) -> BrokerError:
    with pytest.raises(BrokerError) as failed:
        action()
    return failed.value


def test_an_arena_is_attached_probed_and_read() -> None:
    content = os.urandom(4096)
    with running_broker() as rig:
        arena = rig.offer(content, probe=512)
        with BrokerClient(rig.path, name="test") as client:
            session = client.connect()
            assert client.session is session
            assert (session.instance_id, session.host_id, session.number) == ("one", "host-1", 1)
            assert not session.restarted
            assert rig.broker.is_connected(session.owner_id, "")
            assert [each.arena_id for each in session.arenas] == [arena]
            assert client.list_arenas() == session.arenas
            assert client.connect() is session, "connected is connected"
            probe = client.probe(arena)
            with client.attach(arena) as attached:
                assert (attached.geometry.kind, attached.geometry.size_bytes) == ("host", 4096)
                read = os.pread(attached.data_fd, probe.num_bytes, probe.offset_bytes)
                assert hashlib.sha256(read).digest() == probe.sha256
                assert os.pread(attached.data_fd, 9999, 0) == content
                assert os.pread(attached.page_fd, 20, 0) == b"page" + arena
                assert not os.get_inheritable(attached.data_fd)
            attached.close()
            client.ping()
        wait_until(lambda: rig.gone == [session.owner_id])


def test_requests_fail_alone_with_the_brokers_reasons() -> None:
    with running_broker() as rig, BrokerClient(rig.path) as client:
        client.connect()
        arena = rig.offer(b"x", probe=0)
        assert failure_of(lambda: client.attach(bytes(16))).reason == "UNKNOWN_ARENA"
        failure = failure_of(lambda: client.probe(arena))
        assert isinstance(failure, BrokerRequestFailed)
        assert isinstance(failure, EncoderError)
        assert (failure.reason, failure.retryable) == ("NO_PROBE_SLOT", False)
        client.ping()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"namespace": "a", "token": "wrong"}, "UNAUTHENTICATED"),
        ({"namespace": "b"}, "UNAUTHENTICATED"),
        ({"namespace": "a" * 200}, "INVALID_REQUEST"),
    ],
)
def test_refusals_are_permanent_and_say_both_versions(options: dict[str, str], reason: str) -> None:
    with running_broker(access=BrokerAccess(tokens={"a": "right"})) as rig:
        with BrokerClient(rig.path, **options) as client:  # type: ignore[arg-type]
            failure = failure_of(client.connect)
            assert isinstance(failure, BrokerRefused)
            assert (failure.reason, failure.retryable) == (reason, False)
            assert (failure.details["protocol_version"], failure.details["client_protocol_version"]) == (
                "1",
                "1",
            )
            assert client.session is None
        with BrokerClient(rig.path, namespace="a", token="right") as client:
            client.connect()


def test_p35_a_later_client_is_told_the_brokers_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lm_adapter.transport.broker_client.PROTOCOL_VERSION", 7)
    monkeypatch.setattr("lm_adapter.transport.broker_client.MIN_PROTOCOL_VERSION", 6)
    with running_broker() as rig, BrokerClient(rig.path) as client:
        failure = failure_of(client.connect)
        assert failure.reason == "PROTOCOL_MISMATCH"
        assert "6 to 7" in failure.message
        assert "1 to 1" in failure.message


def test_user_ids_that_may_not_connect_are_told_so() -> None:
    access = BrokerAccess(open_namespaces=True, allowed_uids=frozenset())
    with running_broker(access=access) as rig, BrokerClient(rig.path) as client:
        for _ in range(20):  # the refusal may come before the Hello is sent, or while it is
            assert failure_of(client.connect).reason == "UID_NOT_ALLOWED"


def test_where_nobody_listens_the_reason_says_what_is_missing() -> None:
    with socket_folder() as folder:
        path = str(folder / "s")
        with BrokerClient(path) as client:
            failure = failure_of(client.connect)
            assert (failure.reason, failure.retryable) == ("NO_SOCKET", True)
            assert path in failure.message
            with socket.socket(socket.AF_UNIX) as dead:
                dead.bind(path)
                assert failure_of(client.connect).reason == "NOT_LISTENING"
            (folder / "file").write_text("")
        with BrokerClient(str(folder / "file")) as client:
            assert failure_of(client.connect).reason == "NOT_LISTENING"
        with BrokerClient(str(folder / ("x" * 100))) as client:
            refused = failure_of(client.connect)
            assert refused.reason == "PATH_TOO_LONG"
            assert "at most 107" in refused.message


@pytest.mark.parametrize("path", ["relative", "\0abstract", "@abstract", "/a\0b", ""])
def test_paths_that_are_none_are_refused_at_once(path: str) -> None:
    with pytest.raises(InvalidRequest):
        BrokerClient(path)


def test_texts_that_no_frame_holds_are_refused_at_once() -> None:
    with pytest.raises(InvalidRequest, match="at most 32768"):
        BrokerClient("/s", token="t" * 40_000)


def test_without_a_session_requests_say_why() -> None:
    client = BrokerClient("/nowhere/s")
    assert failure_of(client.ping).reason == "NOT_CONNECTED"
    client.close()
    client.close()
    for action in (client.ping, client.connect, client.start):
        assert failure_of(action).reason == "CLOSED"


def test_p25_many_threads_get_their_own_replies_and_descriptors() -> None:
    wrong: list[str] = []
    limits = ConnectionLimits(requests_per_s=1e6, request_burst=1_000_000)
    with running_broker(limits=limits) as rig, BrokerClient(rig.path) as client:
        arenas = {rig.offer(content): content for content in (b"first", b"second", b"third")}
        client.connect()

        def work(number: int) -> None:
            for turn in range(40):
                arena = list(arenas)[(number + turn) % 3]
                try:
                    with client.attach(arena) as attached:
                        if os.pread(attached.data_fd, 9, 0) != arenas[arena]:
                            wrong.append("content")
                except BrokerRequestFailed as error:
                    if error.reason != "DESCRIPTORS_UNREAD":  # all of them at once may be too many
                        wrong.append(error.reason)
                if client.probe(arena).arena_id != arena:
                    wrong.append("probe")

        threads = [threading.Thread(target=work, args=(number,)) for number in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


def test_notices_reach_the_callback() -> None:
    closed: list[tuple[bytes, bytes]] = []
    with running_broker() as rig:
        arena, heir = rig.offer(b"x"), os.urandom(16)
        with BrokerClient(rig.path, on_arena_closed=lambda *ids: closed.append(ids)) as client:
            client.connect()
            rig.broker.withdraw(arena, replaced_by=heir)
            wait_until(lambda: closed == [(arena, heir)])


def test_a_callback_that_raises_does_not_end_the_client(caplog: pytest.LogCaptureFixture) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    with running_broker() as rig:
        arena = rig.offer(b"x")
        with BrokerClient(rig.path, on_arena_closed=broken) as client:
            client.connect()
            rig.broker.withdraw(arena)
            wait_until(lambda: "callback" in caplog.text)
            client.ping()


def test_heartbeats_keep_a_quiet_client_connected() -> None:
    limits = ConnectionLimits(idle_s=1.5)
    with running_broker(limits=limits, heartbeat_s=0.1) as rig, BrokerClient(rig.path) as client:
        session = client.connect()
        time.sleep(2.5)
        assert client.session is session
        client.ping()
        assert rig.gone == []


# -- restarts --------------------------------------------------------------------------------------------


class Watcher:
    """Records what a client reports."""

    def __init__(self) -> None:
        self.sessions: list[BrokerSession] = []
        self.lost: list[tuple[BrokerSession, BrokerError]] = []

    def client(self, path: str, **options: object) -> BrokerClient:
        return BrokerClient(
            path,
            on_session=self.sessions.append,
            on_lost=lambda *lost: self.lost.append(lost),
            min_pause_s=0.01,
            max_pause_s=0.1,
            **options,  # type: ignore[arg-type]
        )


def test_a_restarted_broker_is_found_again_and_arenas_are_attached_anew() -> None:
    watcher = Watcher()
    with socket_folder() as folder, watcher.client(str(folder / "s")) as client:
        path = str(folder / "s")
        with running_broker(path, instance_id="one") as rig:
            old = rig.offer(b"old")
            first = client.connect()
        wait_until(lambda: client.session is None)
        assert failure_of(client.ping).reason == "NOT_CONNECTED"
        with running_broker(path, instance_id="two") as rig:
            new = rig.offer(b"new")
            second = client.wait_for_session(10)
            assert (second.instance_id, second.number, second.restarted) == ("two", 2, True)
            assert second.owner_id != first.owner_id
            assert failure_of(lambda: client.attach(old)).reason == "UNKNOWN_ARENA"
            with client.attach(new) as attached:
                assert os.pread(attached.data_fd, 9, 0) == b"new"
        wait_until(lambda: client.session is None)
        with running_broker(path, instance_id="two"):
            third = client.wait_for_session(10)
            assert (third.number, third.restarted) == (3, False), "the same process: arenas are the same"
            wait_until(lambda: len(watcher.sessions) == 2)
    assert [lost.number for lost, _ in watcher.lost[:2]] == [1, 2]
    assert watcher.lost[0][1].reason == "BROKER_STOPPING"
    assert [(each.number, each.restarted) for each in watcher.sessions] == [(2, True), (3, False)]


def test_a_client_started_before_its_broker_finds_it() -> None:
    watcher = Watcher()
    with socket_folder() as folder, watcher.client(str(folder / "s")) as client:
        client.start()
        client.start()
        assert failure_of(lambda: client.wait_for_session(0.05)).reason in ("NO_SOCKET", "NOT_CONNECTED")
        with running_broker(str(folder / "s")):
            session = client.wait_for_session(10)
            assert session.number == 1
            client.ping()
            wait_until(lambda: watcher.sessions == [session])


def test_requests_under_way_fail_when_the_broker_goes() -> None:
    with (
        fake_broker(lambda end: (welcome(end), end.recv(1 << 16))) as path,
        BrokerClient(path, request_timeout_s=20, min_pause_s=5, max_pause_s=5) as client,
    ):
        client.connect()
        started_s = time.monotonic()
        failure = failure_of(client.ping)
        assert isinstance(failure, BrokerUnavailable)
        assert failure.reason == "CONNECTION_LOST"
        assert time.monotonic() - started_s < 5


# -- brokers that misbehave ------------------------------------------------------------------------------


@contextlib.contextmanager
def fake_broker(serve: Callable[[socket.socket], object]) -> Iterator[str]:
    """Serves each connection with the function, on one thread, and closes it after."""
    with socket_folder() as folder, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "s"))
        listener.listen()
        ended = threading.Event()

        def run() -> None:
            while not ended.is_set():
                end, _ = listener.accept()
                with end, contextlib.suppress(OSError):
                    end.settimeout(20)
                    if not ended.is_set():
                        serve(end)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield str(folder / "s")
        finally:
            ended.set()
            with socket.socket(socket.AF_UNIX) as last:
                last.connect(str(folder / "s"))
            thread.join()


def say(end: socket.socket, reply: pb.BrokerReply) -> None:
    end.sendall(encode_frame(reply.SerializeToString()))


def welcome(end: socket.socket, **given: object) -> None:
    end.recv(1 << 16)
    fields = {"protocol_version": 1, "instance_id": "i", "heartbeat_ms": 1000, "idle_timeout_ms": 9000}
    say(end, pb.BrokerReply(request_id=1, welcome=pb.BrokerWelcome(**{**fields, **given})))  # type: ignore[arg-type]


def request_id(end: socket.socket) -> int:
    return pb.BrokerRequest.FromString(end.recv(1 << 16)[8:]).request_id


PONG = pb.BrokerReply(request_id=1, pong=pb.BrokerPong())
LATER = pb.BrokerReply(request_id=1, welcome=pb.BrokerWelcome(protocol_version=9))


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "PROTOCOL_VIOLATION"),
        (b"VEBR\xff\xff\xff\xff", "PROTOCOL_VIOLATION"),
        (encode_frame(b"\xff" * 9), "PROTOCOL_VIOLATION"),
        (encode_frame(PONG.SerializeToString()), "PROTOCOL_VIOLATION"),
        (encode_frame(LATER.SerializeToString()), "PROTOCOL_VIOLATION"),
        (b"", "CONNECTION_LOST"),
        (b"VEBR\0\0", "CONNECTION_LOST"),
    ],
)
def test_a_handshake_that_is_none_fails_with_its_reason(said: bytes, reason: str) -> None:
    serve = fake_broker(lambda end: (end.recv(1 << 16), end.sendall(said)))
    with serve as path, BrokerClient(path) as client:
        assert failure_of(client.connect).reason == reason


def test_a_broker_that_never_answers_costs_the_time_given_and_no_more() -> None:
    with fake_broker(lambda end: (end.recv(1 << 16), end.recv(1))) as path, BrokerClient(path) as client:
        started_s = time.monotonic()
        assert failure_of(lambda: client.connect(timeout_s=0.2)).reason == "TIMEOUT"
        assert time.monotonic() - started_s < 5


def test_a_request_that_is_never_answered_times_out_and_its_late_reply_is_dropped() -> None:
    asked = threading.Event()
    release = threading.Event()

    def serve(end: socket.socket) -> None:
        welcome(end)
        number = request_id(end)
        asked.set()
        release.wait(20)
        fds = [os.memfd_create("late") for _ in range(2)]
        reply = pb.BrokerReply(request_id=number, num_descriptors=2, attached=pb.BrokerAttached())
        socket.send_fds(end, [encode_frame(reply.SerializeToString())], fds)
        for descriptor in fds:
            os.close(descriptor)
        say(end, pb.BrokerReply(request_id=request_id(end), pong=pb.BrokerPong()))
        end.recv(1)

    with fake_broker(serve) as path, BrokerClient(path, request_timeout_s=0.2) as client:
        client.connect()
        assert failure_of(lambda: client.attach(bytes(16))).reason == "TIMEOUT"
        assert asked.is_set()
        release.set()
        client.ping()


def test_a_silent_broker_is_taken_for_dead() -> None:
    watcher = Watcher()

    def serve(end: socket.socket) -> None:
        welcome(end, heartbeat_ms=50, idle_timeout_ms=300)
        while end.recv(1 << 16):
            pass

    with fake_broker(serve) as path, watcher.client(path) as client:
        client.connect()
        wait_until(lambda: bool(watcher.lost))
        assert watcher.lost[0][1].reason == "BROKER_SILENT"


def test_a_client_that_only_says_what_nobody_answers_still_asks_whether_the_broker_lives() -> None:
    """Releases, as they come from a client whose rows are all leased over gRPC, are not answered."""
    watcher = Watcher()
    num_pings: list[int] = [0]

    def serve(end: socket.socket) -> None:
        """Answers pings alone."""
        welcome(end, heartbeat_ms=100, idle_timeout_ms=1000, max_fetch_keys=8)
        reader = FrameReader()
        while data := end.recv(1 << 16):
            reader.feed(data)
            while (payload := reader.next_payload()) is not None:
                request = pb.BrokerRequest.FromString(payload)
                if request.HasField("ping"):
                    num_pings[0] += 1
                    pong = pb.BrokerReply(request_id=request.request_id, pong=pb.BrokerPong())
                    end.sendall(encode_frame(pong.SerializeToString()))

    with fake_broker(serve) as path, watcher.client(path) as client:
        client.connect()
        ends_s = time.monotonic() + 3.0
        while time.monotonic() < ends_s:
            assert client.release(encoder_pb2.ReleaseRequest(lease_ids=[bytes(16)])) or watcher.lost
            time.sleep(0.01)
        assert watcher.lost == []
        assert 3 <= num_pings[0] <= 31, "one for each heartbeat"


def test_garbage_in_mid_life_ends_the_session_only() -> None:
    watcher = Watcher()
    served = []

    def serve(end: socket.socket) -> None:
        welcome(end)
        served.append(1)
        if len(served) == 1:
            end.sendall(b"garbage")
        end.recv(1)

    with fake_broker(serve) as path, watcher.client(path) as client:
        client.connect()
        wait_until(lambda: bool(watcher.sessions))
        assert watcher.lost[0][1].reason == "PROTOCOL_VIOLATION"
        assert watcher.sessions[0].number == 2


@pytest.mark.parametrize("num", [0, 1, 3])
def test_an_attachment_with_the_wrong_number_of_descriptors_is_refused(num: int) -> None:
    def serve(end: socket.socket) -> None:
        welcome(end)
        geometry = pb.ArenaGeometry(arena_id=bytes(16), kind=pb.ARENA_KIND_HOST, size_bytes=1)
        attached = pb.BrokerAttached(geometry=geometry)
        reply = pb.BrokerReply(request_id=request_id(end), num_descriptors=num, attached=attached)
        fds = [os.memfd_create("x") for _ in range(num)]
        socket.send_fds(end, [encode_frame(reply.SerializeToString())], fds)
        for descriptor in fds:
            os.close(descriptor)
        end.recv(1)

    with fake_broker(serve) as path, BrokerClient(path) as client:
        client.connect()
        failure = failure_of(lambda: client.attach(bytes(16)))
        assert isinstance(failure, BrokerViolation)
        assert f"2 descriptors, got {bytes(16).hex()} and {num}" in failure.message


def test_arenas_of_a_later_kind_are_not_seen_and_do_no_harm() -> None:
    known = pb.ArenaGeometry(arena_id=b"k" * 16, kind=pb.ARENA_KIND_HOST)
    later = pb.ArenaGeometry(arena_id=b"l" * 16, kind=9)  # type: ignore[arg-type]
    serve = fake_broker(lambda end: (welcome(end, arenas=[later, known]), end.recv(1)))
    with serve as path, BrokerClient(path) as client:
        assert [each.arena_id for each in client.connect().arenas] == [b"k" * 16]


def test_a_broker_that_takes_clients_and_drops_them_is_not_hammered() -> None:
    connects = []
    serve = fake_broker(lambda end: (connects.append(1), welcome(end)))
    with serve as path, BrokerClient(path, min_pause_s=0.05, max_pause_s=0.4) as client:
        client.connect()
        time.sleep(1.5)
        num_connects = len(connects)
        wait_until(lambda: len(connects) >= 3)
    assert num_connects <= 16


@pytest.mark.parametrize("room", [0, 1])
def test_descriptors_that_this_process_has_no_room_for_are_reported_and_none_leaks(room: int) -> None:
    fds = [os.memfd_create("x") for _ in range(2)]

    def serve(end: socket.socket) -> None:
        welcome(end)
        geometry = pb.ArenaGeometry(arena_id=bytes(16), kind=pb.ARENA_KIND_HOST, size_bytes=1)
        for _ in range(2):
            reply = pb.BrokerReply(
                request_id=request_id(end), num_descriptors=2, attached=pb.BrokerAttached(geometry=geometry)
            )
            socket.send_fds(end, [encode_frame(reply.SerializeToString())], fds)
        end.recv(1)

    with fake_broker(serve) as path, BrokerClient(path) as client:
        session = client.connect()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest_free = os.dup(0)
        os.close(lowest_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free + room, hard))
        try:
            failure = failure_of(lambda: client.attach(bytes(16)))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert (failure.reason, failure.retryable) == ("DESCRIPTORS_LOST", True)
        assert f"{room} of 2 descriptors" in failure.message
        client.attach(bytes(16)).close()
        assert client.session is session
    for descriptor in fds:
        os.close(descriptor)


# -- forks -----------------------------------------------------------------------------------------------


def in_child(action: Callable[[], bool]) -> bool:
    """Whether the action said yes in a forked child, which leaves without any clean-up."""
    pid = os.fork()
    if pid == 0:
        status = 1
        with contextlib.suppress(BaseException):
            signal.alarm(20)
            status = 0 if action() else 2
        os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_does_not_touch_its_parents_session() -> None:
    with running_broker() as rig, BrokerClient(rig.path) as client:
        arena = rig.offer(b"rows")
        session = client.connect()

        def child() -> bool:
            refused = failure_of(client.ping).reason == "FORKED" and client.session is None
            own = client.connect()
            with client.attach(arena) as attached:
                read = os.pread(attached.data_fd, 4, 0) == b"rows"
            client.close()
            return refused and read and own.owner_id != session.owner_id

        assert in_child(child)
        wait_until(lambda: len(rig.gone) == 1)
        assert rig.gone != [session.owner_id]
        assert client.session is session
        client.ping()


def num_sockets() -> int:
    """Of this process."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
    return found


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_p21_a_fork_in_the_middle_of_a_handshake_does_not_inherit_the_socket() -> None:
    greeted, release = threading.Event(), threading.Event()

    def serve(end: socket.socket) -> None:
        if end.recv(1 << 16):
            greeted.set()
            release.wait(20)

    with fake_broker(serve) as path, BrokerClient(path) as client:
        before = num_sockets()
        connecting = threading.Thread(target=lambda: failure_of(lambda: client.connect(20)))
        connecting.start()
        assert greeted.wait(20)
        # The client's end and the broker's are both in this process.
        assert num_sockets() == before + 2
        assert in_child(lambda: num_sockets() == before + 1)
        release.set()
        connecting.join()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_p21_a_child_that_outlives_its_parent_does_not_keep_the_parents_leases() -> None:
    with running_broker() as rig:
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:  # the parent of the test: connects, forks, is killed
            os.close(read_end)
            signal.alarm(60)
            client = BrokerClient(rig.path)
            client.connect()
            grandchild = os.fork()
            if grandchild == 0:
                signal.alarm(60)
                signal.pause()
            os.write(write_end, f"{grandchild}\n".encode())
            signal.pause()
        os.close(write_end)
        grandchild = int(os.read(read_end, 99))
        os.close(read_end)
        try:
            assert rig.gone == []
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            wait_until(lambda: len(rig.gone) == 1)
            assert os.path.exists(f"/proc/{grandchild}"), "the child still lives"
        finally:
            os.kill(grandchild, signal.SIGKILL)
