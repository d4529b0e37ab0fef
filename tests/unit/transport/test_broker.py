"""The broker: who may connect, what a client gets, the limits of bad clients, and the socket's file."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import socket
import stat
import struct
import subprocess
import sys
import threading
from asyncio.selector_events import BaseSelectorEventLoop
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from bench.harness.waiting import wait_until
from encoder_service import broker as broker_module
from encoder_service.broker import BrokerLimits, ListeningSocket
from encoder_service.errors import ConfigurationError
from encoder_service.ops import addresses
from encoder_service.store.arena import Arena
from tests.unit.transport.broker_rig import (
    RawClient,
    hello,
    num_descriptors,
    running_broker,
    small_arena,
    socket_folder,
)
from vision_encoder.layout import LAYOUT_VERSION
from vision_encoder.layout.control_page import read_header
from vision_encoder.layout.frames import FrameError, FrameReader, encode_frame
from vision_encoder.v1 import broker_pb2 as pb


@pytest.fixture
def arena() -> Iterator[Arena]:
    with small_arena() as arena:
        yield arena


@pytest.fixture
def folder() -> Iterator[Path]:
    with socket_folder() as folder:
        yield folder


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "DYING_S", 0.1)


# -- what a client gets ----------------------------------------------------------------------------------


def test_an_arena_is_attached_probed_and_read(arena: Arena) -> None:
    with running_broker((None, arena)) as broker, RawClient(broker.options.path, namespace="any") as client:
        assert client.welcome.instance_id == "one"
        assert client.welcome.layout_version == LAYOUT_VERSION
        (geometry,) = client.welcome.arenas
        reply = client.attach(geometry.arena_id)
        assert reply.attached.geometry == geometry
        data_fd, page_fd, directory_fd = client.descriptors
        sizes = [os.fstat(descriptor).st_size for descriptor in client.descriptors]
        assert sizes == [geometry.size_bytes, geometry.page_bytes, geometry.directory_bytes]
        header = read_header(os.pread(page_fd, geometry.page_bytes, 0), geometry.page_bytes)
        assert header.arena_id == geometry.arena_id == os.pread(directory_fd, 32, 0)[16:32]
        probe = client.ask(probe=pb.BrokerProbe(arena_id=geometry.arena_id)).probe_slot
        assert header.probe == (probe.offset_bytes, probe.num_bytes, probe.sha256)
        assert header.probe.matches(os.pread(data_fd, probe.num_bytes, probe.offset_bytes))
        with pytest.raises(OSError, match="Permission"):
            mmap.mmap(data_fd, geometry.size_bytes)
        assert broker.num_connections == 1


def test_p18_a_namespace_sees_its_own_arenas_only(arena: Arena) -> None:
    with small_arena() as own, running_broker((None, arena), ("tenant", own)) as broker:
        path = broker.options.path
        with RawClient(path, namespace="tenant") as tenant, RawClient(path, namespace="other") as other:
            assert [geometry.arena_id for geometry in tenant.welcome.arenas] == [own.arena_id]
            assert [geometry.arena_id for geometry in other.welcome.arenas] == [arena.arena_id]
            for client, hidden in ((tenant, arena), (other, own)):
                for reply in (
                    client.attach(hidden.arena_id),
                    client.attach(bytes(16)),
                    client.ask(probe=pb.BrokerProbe(arena_id=hidden.arena_id)),
                ):
                    assert reply.failure.reason == "UNKNOWN_ARENA", "the same as for one that does not exist"
                assert client.descriptors == []


@pytest.mark.parametrize("version", [0, LAYOUT_VERSION - 1, LAYOUT_VERSION + 1])
def test_p35_another_layout_version_is_refused(arena: Arena, version: int) -> None:
    with running_broker((None, arena)) as broker, RawClient(broker.options.path) as client:
        reply = client.attach(arena.arena_id, version)
        assert reply.failure.reason == "LAYOUT_MISMATCH"
        assert f"{version}, the arenas have {LAYOUT_VERSION}" in reply.failure.message
        assert client.descriptors == []
        assert broker.refused == {"LAYOUT_MISMATCH": 1}
        assert client.attach(arena.arena_id).HasField("attached"), "the connection goes on"


def test_a_request_of_a_later_version_fails_alone(arena: Arena) -> None:
    with running_broker((None, arena)) as broker, RawClient(broker.options.path) as client:
        assert client.ask().failure.reason == "UNKNOWN_REQUEST"
        assert client.attach(arena.arena_id).HasField("attached")


def test_the_end_of_the_broker_ends_its_connections(arena: Arena) -> None:
    before = num_descriptors()
    with running_broker((None, arena)) as broker:
        clients = [RawClient(broker.options.path) for _ in range(3)]
    for client in clients:
        with client:
            assert client.ended()
    assert num_descriptors() == before
    assert not broker.is_serving()


# -- who may connect -------------------------------------------------------------------------------------


def refused(path: str, message: pb.BrokerHello) -> pb.BrokerRefused:
    with RawClient(path, greet=False) as client:
        reply = client.ask(hello=message)
        assert client.ended()
        return reply.refused


@pytest.mark.parametrize(("newest", "oldest"), [(0, 0), (9, 2)])
def test_p35_versions_must_overlap(newest: int, oldest: int) -> None:
    with running_broker() as broker:
        refusal = refused(broker.options.path, hello(protocol_version=newest, min_protocol_version=oldest))
        assert (refusal.reason, refusal.retryable) == ("PROTOCOL_MISMATCH", False)
        assert (refusal.protocol_version, refusal.min_protocol_version) == (1, 1)
        with RawClient(broker.options.path, greet=False) as client:
            assert client.ask(hello=hello(protocol_version=9)).welcome.protocol_version == 1


def test_p18_an_unknown_namespace_and_a_wrong_token_get_the_same_words() -> None:
    with running_broker(opens=lambda namespace, token: (namespace, token) == ("a", "right")) as broker:
        path = broker.options.path
        wrong, unknown = (refused(path, hello(namespace=name, token="x")) for name in ("a", "b"))
        assert wrong.reason == unknown.reason == "UNAUTHENTICATED"
        assert wrong.message.replace("'a'", "'b'") == unknown.message
        assert broker.refused == {"UNAUTHENTICATED": 2}
        with RawClient(path, namespace="a", token="right"):
            assert broker.num_connections == 1


def test_a_token_that_is_withdrawn_ends_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_module, "TICK_S", 0.02)
    tokens = {"right"}
    with (
        running_broker(opens=lambda namespace, token: token in tokens) as broker,
        RawClient(broker.options.path, token="right") as client,
    ):
        tokens.clear()
        assert client.ended()


def test_user_ids_are_those_of_the_kernel(arena: Arena) -> None:
    uid = os.getuid()
    with (
        running_broker(allowed_uids=frozenset({uid + 1})) as broker,
        RawClient(broker.options.path, greet=False) as client,
    ):
        reply = client.reply()
        assert reply is not None
        assert reply.refused.reason == "UID_NOT_ALLOWED"
        assert f"user id {uid} may not connect, allowed: {uid + 1}" in reply.refused.message
        assert client.ended()
    with running_broker(allowed_uids=frozenset({uid})) as broker, RawClient(broker.options.path):
        pass


def test_long_names_are_refused_with_both_numbers() -> None:
    with running_broker() as broker:
        refusal = refused(broker.options.path, hello(client_name="n" * 129))
        assert (refusal.reason, refusal.message.split()[2]) == ("INVALID_REQUEST", "129")


# -- bad clients -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def users(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The user id and process id that the kernel reports of clients that connect from now on."""
    ids = [1000, 1]
    with monkeypatch.context() as patched:
        patched.setattr(broker_module, "peer_of", lambda _: (ids[1], ids[0]))
        yield ids


def test_p69_connections_are_bounded_and_shared_by_user_namespace_and_process(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        running_broker(
            (None, arena),
            limits=BrokerLimits(connections=64),
            opens=lambda namespace, token: namespace != "closed" or token == "right",
        ) as broker,
        users(monkeypatch) as user,
        contextlib.ExitStack() as stack,
    ):
        path = broker.options.path

        def fill(namespace: Callable[[int], str]) -> int:
            for number in range(200):
                with RawClient(path, greet=False) as client:
                    reply = client.ask(hello=hello(namespace=namespace(number)))
                    if reply.HasField("welcome"):
                        stack.enter_context(contextlib.closing(socket.socket(fileno=client.socket.detach())))
                        continue
                    assert (reply.refused.reason, reply.refused.retryable) == ("TOO_MANY_CONNECTIONS", True)
                    assert "at most 64" in reply.refused.message
                    assert "user id 1000 has" in reply.refused.message
                    return number
            pytest.fail("no limit")

        in_one = fill(lambda _: "a")
        assert in_one < 64 / 2
        user[1] = 2
        stack.enter_context(RawClient(path, namespace="a"))  # another process
        fill(lambda number: f"made up {number}")
        stack.enter_context(RawClient(path, namespace="closed", token="right"))
        user[0] = 1001
        with RawClient(path, namespace="a") as other:
            assert other.attach(arena.arena_id).HasField("attached")


def test_p17_clients_without_a_hello_do_not_keep_others_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_module, "TICK_S", 0.02)
    with (
        running_broker(limits=BrokerLimits(pending=4, hello_s=1.5)) as broker,
        contextlib.ExitStack() as stack,
    ):
        path = broker.options.path
        silent = [stack.enter_context(RawClient(path, greet=False)) for _ in range(9)]
        assert all(client.ended() for client in silent[:5]), "the oldest go"
        stack.enter_context(RawClient(path))
        silent[-1].socket.sendall(b"VEBR")
        assert all(client.ended() for client in silent[5:]), "the others have a time"


BAD_BYTES: dict[str, Callable[[RawClient], bytes]] = {
    "garbage": lambda _: b"GET / HTTP/1.1\r\n\r\n",
    "a frame too large": lambda _: struct.pack(">4sI", b"VEBR", 65537),
    "a payload that is no message": lambda _: encode_frame(b"\xff\xff\xff"),
    "a request without an id": lambda _: encode_frame(pb.BrokerRequest(hello=hello()).SerializeToString()),
    "a second Hello": lambda client: client.frame(hello=hello()),
}


@pytest.mark.parametrize("name", BAD_BYTES)
def test_p33_bad_bytes_end_that_connection_only(arena: Arena, name: str) -> None:
    with running_broker((None, arena)) as broker, RawClient(broker.options.path) as good:
        with RawClient(broker.options.path) as bad:
            bad.socket.sendall(BAD_BYTES[name](bad))
            wait_until(lambda: broker.num_connections == 1)
        assert good.attach(arena.arena_id).HasField("attached")


def test_a_request_before_hello_ends_the_connection(arena: Arena) -> None:
    with running_broker((None, arena)) as broker, RawClient(broker.options.path, greet=False) as client:
        client.socket.sendall(client.frame(attach=pb.BrokerAttach(arena_id=arena.arena_id)))
        assert client.ended()


def test_descriptors_of_a_client_are_not_taken(arena: Arena) -> None:
    with running_broker((None, arena)) as broker, RawClient(broker.options.path) as client:
        before = num_descriptors()
        with open(os.devnull) as extra:
            attach = pb.BrokerAttach(arena_id=arena.arena_id, layout_version=LAYOUT_VERSION)
            frame = client.frame(attach=attach)
            socket.send_fds(client.socket, [frame], [extra.fileno()] * 10)
            reply = client.reply()
        assert reply is not None
        assert reply.HasField("attached")
        assert num_descriptors() == before + 3


def test_p17_what_a_client_does_not_read_is_bounded(arena: Arena) -> None:
    """Bytes in this process, and descriptors in the kernel."""
    limits = BrokerLimits(attaches=5)
    with running_broker((None, arena), limits=limits) as broker, RawClient(broker.options.path) as client:
        for _ in range(5):
            assert client.attach(arena.arena_id).HasField("attached")
        assert client.attach(arena.arena_id).failure.reason == "TOO_MANY_ATTACHES"
        frame = client.frame(probe=pb.BrokerProbe(arena_id=arena.arena_id))
        client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        with contextlib.suppress(OSError):
            for _ in range(2000):
                client.socket.sendall(frame * 100)
        wait_until(lambda: broker.num_connections == 0)


def test_a_defect_in_one_request_ends_that_connection_only(
    arena: Arena,
) -> None:
    def opens(namespace: str, token: str) -> bool:
        return bool(1 // (namespace != "defect"))

    with running_broker((None, arena), opens=opens) as broker, RawClient(broker.options.path) as other:
        with RawClient(broker.options.path, greet=False) as client:
            client.socket.sendall(client.frame(hello=hello(namespace="defect")))
            assert client.ended()
        assert other.attach(arena.arena_id).HasField("attached")


def test_p71_without_descriptors_accepting_pauses_with_one_line(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker_module, "TICK_S", 0.05)
    accept, failures = socket.socket.accept, [0]

    def failing(listener: socket.socket) -> object:
        failures[0] += 1
        if failures[0] < 4:
            raise OSError(24, "Too many open files")
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", failing)
    with (
        capture_logs() as logs,
        running_broker((None, arena)) as broker,
        RawClient(broker.options.path) as client,
    ):
        assert client.attach(arena.arena_id).HasField("attached")
    failures_logged = [entry for entry in logs if "accept" in entry["event"]]
    assert [entry["cause"] for entry in failures_logged] == ["Too many open files"]


# -- clients that do not read ------------------------------------------------------------------------------


UNREAD_ATTACHES = """
import contextlib, os, resource, time
from encoder_service.broker import BrokerLimits
from tests.unit.transport.broker_rig import RawClient, running_broker, small_arena
if os.getuid() == 0:
    os.setresuid(65534, 65534, 65534)
resource.setrlimit(resource.RLIMIT_NOFILE, (192, 192))
limits = BrokerLimits.within(192)
with small_arena() as arena, running_broker((None, arena), limits=limits) as broker:
    with contextlib.ExitStack() as stack:
        path = broker.options.path
        for number in range(8):
            bad = stack.enter_context(RawClient(path, namespace=f"bad {number % 2}"))
            bad.socket.sendall(b"".join(bad.attach_frame(arena.arena_id) for _ in range(60)))
        time.sleep(0.3)
        for _ in range(5):
            with RawClient(path, namespace="good") as good:
                assert good.attach(arena.arena_id).HasField("attached")
print("attached")
"""


def test_p69_attaches_that_are_not_read_keep_no_other_client_out() -> None:
    """In a process that the kernel's limit holds for: it counts descriptors of all processes of a user, and
    not for the capabilities that tests may have."""
    root = Path(__file__).parents[3]
    ended = subprocess.run(
        [sys.executable, "-c", UNREAD_ATTACHES],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(root / "proto")])},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert ended.stdout.endswith("attached\n"), ended.stderr


def test_p69_a_pipelined_attach_waits_for_its_reader(arena: Arena) -> None:
    with running_broker((None, arena)) as broker, RawClient(broker.options.path) as client:
        client.socket.sendall(b"".join(client.attach_frame(arena.arena_id) for _ in range(5)))
        for _ in range(5):
            reply = client.reply()
            assert reply is not None
            assert reply.HasField("attached")
        assert len(client.descriptors) == 15


@pytest.mark.parametrize("kind", ["attach", "probe"])
def test_p69_a_client_that_does_not_read_is_ended_in_time(
    arena: Arena, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its attach counts until it reads or closes, also after its connection has ended."""
    monkeypatch.setattr(broker_module, "TICK_S", 0.02)
    limits = BrokerLimits(unread_s=0.1)
    before = num_descriptors()
    with running_broker((None, arena), limits=limits) as broker, RawClient(broker.options.path) as idle:
        with RawClient(broker.options.path) as client:
            probe = client.frame(probe=pb.BrokerProbe(arena_id=arena.arena_id))
            client.socket.sendall(client.attach_frame(arena.arena_id) if kind == "attach" else probe)
            wait_until(lambda: broker.num_connections == 1)
            assert broker.num_unread_attaches == (kind == "attach")
            if kind == "attach":
                assert client.reply() is not None
                assert client.reply() is None
        wait_until(lambda: broker.num_unread_attaches == 0)
        assert idle.attach(arena.arena_id).HasField("attached"), "idle is not unread"
    assert num_descriptors() <= before


def test_p69_a_client_that_sends_without_a_pause_delays_nobody(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client's next bytes have always arrived, and it always reads."""
    receive, send = BaseSelectorEventLoop.sock_recv, socket.socket.sendmsg
    frame = encode_frame(pb.BrokerRequest(request_id=1).SerializeToString())
    accepted, flooding = list[socket.socket](), list[socket.socket]()

    async def receive_at_once(loop: BaseSelectorEventLoop, client: socket.socket, size: int) -> bytes:
        accepted.append(client)
        return frame if client in flooding else await receive(loop, client, size)

    def send_or_lose(client: socket.socket, buffers: list[bytes], *options: Any) -> int:
        return len(buffers[0]) if client in flooding else send(client, buffers, *options)

    monkeypatch.setattr(BaseSelectorEventLoop, "sock_recv", receive_at_once)
    monkeypatch.setattr(socket.socket, "sendmsg", send_or_lose)
    with running_broker((None, arena)) as broker, RawClient(broker.options.path) as bad:
        flooding.append(accepted[0])
        try:
            bad.socket.sendall(frame)
            for _ in range(3):
                with RawClient(broker.options.path) as good:
                    assert good.attach(arena.arena_id).HasField("attached")
        finally:
            flooding.clear()


def test_p69_a_user_without_a_hello_crowds_out_its_own_connections_only(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        running_broker((None, arena), limits=BrokerLimits(pending=8)) as broker,
        contextlib.ExitStack() as stack,
    ):
        peers = itertools.chain([(1, 1000)], itertools.repeat((1, 1001)))
        monkeypatch.setattr(broker_module, "peer_of", lambda _: next(peers))
        other = stack.enter_context(RawClient(broker.options.path, greet=False))
        flood = [stack.enter_context(RawClient(broker.options.path, greet=False)) for _ in range(40)]
        assert flood[0].ended()
        assert other.ask(hello=hello()).HasField("welcome")


def test_p71_the_limits_fit_into_the_process_descriptors() -> None:
    usual = BrokerLimits()
    assert BrokerLimits.within(1 << 20) == usual
    for num_descriptors_allowed in (64, 256, 1024):
        assert BrokerLimits.within(num_descriptors_allowed).num_descriptors < num_descriptors_allowed / 2


# -- frames ----------------------------------------------------------------------------------------------


@given(st.lists(st.binary(max_size=300), max_size=6), st.lists(st.integers(min_value=0), max_size=40))
def test_frames_cut_anywhere_are_read(payloads: list[bytes], cuts: list[int]) -> None:
    data = b"".join(map(encode_frame, payloads))
    edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    reader, read = FrameReader(), list[bytes]()
    for start, end in itertools.pairwise(edges):
        reader.feed(data[start:end])
        while (payload := reader.next_payload()) is not None:
            read.append(payload)
    assert read == payloads
    reader.feed(encode_frame(b"next"))
    assert reader.next_payload() == b"next"


@given(st.binary(min_size=1, max_size=64))
def test_garbage_is_refused_at_its_first_wrong_byte(data: bytes) -> None:
    reader = FrameReader()
    reader.feed(data)
    if b"VEBR".startswith(data[:4]):
        return
    with pytest.raises(FrameError, match="VEBR"):
        reader.next_payload()


def test_the_largest_frame_is_written_and_a_larger_one_is_not() -> None:
    reader = FrameReader()
    reader.feed(encode_frame(bytes(65536)))
    assert reader.next_payload() == bytes(65536)
    with pytest.raises(ValueError, match="65537 bytes, at most 65536"):
        encode_frame(bytes(65537))


# -- the socket's file -----------------------------------------------------------------------------------


def path_refusal(path: Path) -> str:
    with pytest.raises(ConfigurationError) as caught:
        ListeningSocket(str(path))
    return caught.value.message


@pytest.mark.parametrize("mode", [0o600, 0o660, 0o666])
def test_permissions_do_not_depend_on_the_umask(folder: Path, mode: int) -> None:
    before = os.umask(0o077)
    try:
        listener = ListeningSocket(str(folder / "s"), mode=mode)
    finally:
        os.umask(before)
    assert stat.S_IMODE(os.lstat(folder / "s").st_mode) == mode
    listener.close()


def test_the_socket_of_a_dead_broker_is_replaced(folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(folder / "s"))
        dead.listen()
    assert (folder / "s").exists()
    with running_broker(path=str(folder / "s")) as broker, RawClient(broker.options.path):
        pass


def test_p21_the_socket_of_a_dying_broker_is_waited_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed process listens until it has ended."""
    monkeypatch.setattr(addresses, "DYING_S", 30.0)
    path = str(folder / "s")
    dying = socket.socket(socket.AF_UNIX)
    dying.bind(path)
    dying.listen(1)
    gone = threading.Timer(0.3, dying.close)
    gone.start()
    listener = ListeningSocket(path)
    gone.join()
    assert listener.is_in_place()
    listener.close()


@pytest.mark.usefixtures("impatient")
def test_a_live_socket_is_left_alone_and_named_also_with_a_full_queue(folder: Path) -> None:
    first = ListeningSocket(str(folder / "s"), backlog=1)
    assert f"{folder / 's'}: another process listens" in path_refusal(folder / "s")
    with contextlib.ExitStack() as stack:
        for _ in range(50):
            client = stack.enter_context(socket.socket(socket.AF_UNIX))
            client.setblocking(False)
            try:
                client.connect(str(folder / "s"))
            except BlockingIOError:
                break
        else:
            pytest.fail("the queue never filled")
        assert "another process listens" in path_refusal(folder / "s")
    assert first.is_in_place()
    first.close()


def test_a_file_that_is_not_a_socket_is_left_alone(folder: Path) -> None:
    (folder / "s").write_text("precious")
    assert "not a socket" in path_refusal(folder / "s")
    assert (folder / "s").read_text() == "precious"


def test_a_close_does_not_remove_a_successors_socket(folder: Path) -> None:
    first = ListeningSocket(str(folder / "s"))
    (folder / "s").unlink()
    second = ListeningSocket(str(folder / "s"))
    assert not first.is_in_place()
    first.close()
    assert second.is_in_place()
    second.close()
    second.close()


@pytest.mark.parametrize(("mode", "is_said"), [(0o777, True), (0o1777, False), (0o775, False)])
def test_p69_a_folder_that_everybody_can_write_to_is_warned_of(
    folder: Path, mode: int, is_said: bool
) -> None:
    os.chmod(folder, mode)
    with capture_logs() as logs, running_broker(path=str(folder / "s")):
        pass
    assert [str(folder) in entry.get("folder", "") for entry in logs].count(True) == is_said


def test_a_folder_that_is_not_there_is_named() -> None:
    assert "/nowhere/at/all does not exist" in path_refusal(Path("/nowhere/at/all/s"))
