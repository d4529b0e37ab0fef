"""The broker: passes the file descriptors of the arenas to clients on the same host, over a unix socket.

Owns the socket's file, one thread with its own event loop, and the limits on what a client can make it hold
or do. A client sends a Hello (version, namespace, token), attaches arenas and requests their probe. When the
process ends, its connections close; readers then know that the arenas are gone.

An isolated namespace sees only its own arenas. All other namespaces see the shared arenas.

The kernel counts descriptors that were sent and not read, over all processes of the service's user. It sends
none above the limit on open files. Descriptors of a connection that the broker closed count until the client
reads them or closes its end. The broker therefore has a lower limit, and divides each limit into shares.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import errno
import fcntl
import functools
import os
import resource
import socket
import stat
import struct
import sys
import termios
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import structlog
from google.protobuf.message import DecodeError

from encoder_service.config import Settings
from encoder_service.errors import ConfigurationError
from encoder_service.ops.addresses import remove_dead_socket
from encoder_service.ops.logs import RepeatedLines
from encoder_service.ops.shares import Holder, Shares
from encoder_service.store.arena import Arena
from vision_encoder.layout import LAYOUT_VERSION
from vision_encoder.layout.frames import FrameError, FrameReader, encode_frame
from vision_encoder.layout.host import host_id
from vision_encoder.v1 import broker_pb2 as pb

log = structlog.get_logger(__name__)

PROTOCOL_VERSION = 1
MIN_PROTOCOL_VERSION = 1
MAX_NAME_CHARS = 128
POLL_S = 0.02
TICK_S = 0.5
"""Interval of the checks of tokens and unread replies, and the pause after a client could not be accepted."""
WAIT_S = 1.0
"""Time that an attach waits for other clients to read their descriptors."""
NUM_ATTACHED = 3
"""Descriptors of one attach."""
RECEIVE_BYTES = 16 * 1024

_KINDS = {"host": pb.ARENA_KIND_HOST, "device": pb.ARENA_KIND_DEVICE}


@dataclass(frozen=True)
class BrokerLimits:
    """The limits of one broker.

    connections: clients after their Hello. pending: clients before their Hello; one more closes the oldest
    of the same user. unread: attaches whose descriptors were sent and not read, at most one per connection.
    These three are shared by user, namespace and process. hello_s: time from the connect to the complete
    Hello. unread_s: time that a reply may stay unread. attaches: attaches per connection."""

    connections: int = 640
    pending: int = 128
    unread: int = 80
    hello_s: float = 5.0
    unread_s: float = 10.0
    attaches: int = 64

    @classmethod
    def within(cls, num_descriptors: int) -> BrokerLimits:
        """The limits of a process that may open this many descriptors."""
        return cls(
            connections=max(1, min(cls.connections, num_descriptors // 4)),
            pending=max(1, min(cls.pending, num_descriptors // 16)),
            unread=max(2, min(cls.unread, num_descriptors // (8 * NUM_ATTACHED))),
        )

    @property
    def num_descriptors(self) -> int:
        """Descriptors that clients can make the broker hold. An ended client counts until it reads."""
        return self.connections + self.pending + self.unread


@dataclass(frozen=True)
class BrokerOptions:
    """path, mode: the socket's file. allowed_uids: users that may connect; None allows every user."""

    path: str
    instance_id: str
    host_id: str
    mode: int = 0o660
    allowed_uids: frozenset[int] | None = None
    limits: BrokerLimits = field(default_factory=BrokerLimits)


def broker_options(settings: Settings, instance_id: str) -> BrokerOptions:
    """The broker's options from the settings. instance_id: as GetServerInfo reports it."""
    return BrokerOptions(
        settings.broker_path,
        instance_id,
        host_id(),
        mode=int(settings.broker_mode, 8),
        allowed_uids=frozenset(settings.broker_allowed_uids) or None,
        limits=BrokerLimits.within(resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
    )


class _ClientEnded(Exception):
    """Ends the connection. The text is the cause."""


class _Refused(Exception):
    """Refuses a request. A refused Hello also closes the connection. reason: a stable code."""

    def __init__(self, reason: str, message: str, retryable: bool = False) -> None:
        super().__init__(message)
        self.reason, self.message, self.retryable = reason, message, retryable


@dataclass(eq=False)
class _Client:
    """One connection. namespace: None before its Hello. counted: the limit that it counts towards.
    is_attaching: whether it has descriptors that it has not read. unread_since_s: when the checks first saw
    an unread reply. cause: why it ended."""

    socket: socket.socket
    pid: int
    uid: int
    namespace: str | None = None
    token: str = field(default="", repr=False)
    name: str = ""
    holder: Holder = ()
    counted: Shares | None = None
    num_attaches: int = 0
    is_attaching: bool = False
    unread_since_s: float | None = None
    cause: str = "the broker stops"
    reader: FrameReader = field(default_factory=FrameReader)

    def has_read_all(self) -> bool:
        """Whether the client has read everything that was sent."""
        answer = fcntl.ioctl(self.socket, termios.TIOCOUTQ, bytes(4))
        return not int.from_bytes(answer, sys.byteorder)


@dataclass(frozen=True)
class _SharedArena:
    """An arena and the descriptors that clients get: memory, control page, directory. namespace: the only
    namespace that sees it; None for an arena that all namespaces without arenas of their own share."""

    namespace: str | None
    geometry: pb.ArenaGeometry
    probe: pb.BrokerProbeSlot
    descriptors: tuple[int, int, int]


class Broker:
    """Serves one socket. Call ``start`` once, then ``stop`` once, from any thread. Both block."""

    def __init__(
        self,
        options: BrokerOptions,
        arenas: Sequence[tuple[str | None, Arena]],
        opens: Callable[[str, str], bool],
    ) -> None:
        """arenas: see ``EmbeddingStore.arenas``. opens: whether a token opens a namespace; called on the
        broker's thread at each Hello, and repeatedly while the client is connected."""
        self.options = options
        self.refused: Counter[str] = Counter()
        """Refused Hellos and attaches by reason. Written by the broker's thread only; any thread may read."""
        self._arenas = arenas
        self._isolated = {namespace for namespace, _ in arenas if namespace is not None}
        self._opens = opens
        self._shared: dict[bytes, _SharedArena] = {}
        self._clients: dict[_Client, asyncio.Task[None]] = {}
        self._ended: set[_Client] = set()
        """Ended clients with unread descriptors."""
        limits = options.limits
        self._connected, self._pending = Shares(limits.connections), Shares(limits.pending)
        self._unread = Shares(limits.unread)
        self._repeated = RepeatedLines()
        self._listener: ListeningSocket | None = None
        self._loop: asyncio.AbstractEventLoop  # set by ``start``, as is ``_main``
        self._main: asyncio.Task[None]
        self._thread: threading.Thread | None = None

    # -- other threads ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Binds the socket and starts the thread. Blocks as ``remove_dead_socket``. Raises
        ConfigurationError."""
        if self._thread is not None:
            raise RuntimeError("the broker was started before")
        options = self.options
        warn_of_folder(options.path)
        self._listener = ListeningSocket(options.path, mode=options.mode)
        try:
            for namespace, arena in self._arenas:
                self._shared[arena.arena_id] = share(namespace, arena)
        except OSError as error:
            self._close()
            raise ConfigurationError(f"broker socket {options.path}: {error.strerror}") from error
        self._loop = asyncio.new_event_loop()
        self._main = self._loop.create_task(self._work(self._listener.socket))
        self._thread = threading.Thread(target=self._run, name="broker", daemon=True)
        self._thread.start()
        log.info("broker listens", path=options.path, mode=oct(options.mode))

    def stop(self, timeout_s: float = 5.0) -> bool:
        """Closes every connection and removes the socket's file. Returns False if the thread did not end in
        time."""
        if self._thread is None:
            return True
        with contextlib.suppress(RuntimeError):  # the thread has ended by itself
            self._loop.call_soon_threadsafe(self._main.cancel)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def is_serving(self) -> bool:
        """Whether the thread runs and the path still names its socket."""
        thread, listener = self._thread, self._listener
        return thread is not None and thread.is_alive() and listener is not None and listener.is_in_place()

    @property
    def num_connections(self) -> int:
        """Number of clients that have completed their Hello."""
        return sum(client.namespace is not None for client in list(self._clients))

    @property
    def num_unread_attaches(self) -> int:
        """Number of attaches whose descriptors were sent and not read, ended clients included."""
        return self._unread.num_used

    # -- the thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._main)
        except asyncio.CancelledError:
            pass
        except Exception:
            log.exception("the broker failed", path=self.options.path)
        finally:
            assert self._listener is not None
            self._listener.close()  # first, so that no client connects to a broker that stops
            if tasks := asyncio.all_tasks(self._loop):
                for task in tasks:
                    task.cancel()
                self._loop.run_until_complete(asyncio.wait(tasks))
            self._loop.close()
            self._close()

    async def _work(self, listener: socket.socket) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._accept(listener))
            group.create_task(self._check_clients())

    def _close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        for client in self._ended:
            client.socket.close()
        for shared in self._shared.values():
            for descriptor in shared.descriptors:
                os.close(descriptor)
        self._shared.clear()

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                accepted, _ = await self._loop.sock_accept(listener)
            except OSError as error:  # pauses, because the listener stays readable
                if (more := self._repeated.due(error.errno)) is not None:
                    log.error("no client can be accepted", cause=error.strerror, retried_in_s=TICK_S, **more)
                await asyncio.sleep(TICK_S)
                continue
            pid, uid = peer_of(accepted)
            client = _Client(accepted, pid, uid, holder=(f"uid {uid}",))
            while not self._count(client, self._pending):
                pending = [waiting for waiting in self._clients if waiting.namespace is None]
                oldest = next((waiting for waiting in pending if waiting.uid == uid), pending[0])
                self._end(oldest, "crowded out before its Hello")
            task = self._clients[client] = self._loop.create_task(self._serve(client))
            task.add_done_callback(functools.partial(self._close_client, client))
            await asyncio.sleep(0)  # data that has arrived is read before newer clients crowd this one out

    def _count(self, client: _Client, shares: Shares | None) -> bool:
        """Moves the client's count to ``shares``. Returns False, and changes nothing, if they are full."""
        if shares is not None and not shares.take(client.holder):
            return False
        if client.counted is not None:
            client.counted.give_back(client.holder[:1] if client.counted is self._pending else client.holder)
        client.counted = shares
        return True

    async def _check_clients(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._note_reads()
            now_s, unread_s = self._loop.time(), self.options.limits.unread_s
            for client in list(self._clients):
                if client.namespace is not None and not self._opens(client.namespace, client.token):
                    self._end(client, "its token does not open the namespace any more")
                elif client.has_read_all():
                    client.unread_since_s = None
                elif client.unread_since_s is None:
                    client.unread_since_s = now_s
                elif now_s - client.unread_since_s >= unread_s:
                    self._end(client, f"it has not read a reply for {unread_s:g} s")

    def _note_reads(self) -> None:
        """Stops counting attaches that clients have read, and those of clients that are gone."""
        for client in [*self._clients, *self._ended]:
            if client.is_attaching and client.has_read_all():
                self._unread.give_back(client.holder)
                client.is_attaching = False
                if client in self._ended:
                    self._ended.remove(client)
                    client.socket.close()

    def _end(self, client: _Client, cause: str) -> None:
        client.cause = cause
        self._count(client, None)
        self._clients.pop(client).cancel()

    # -- one client ------------------------------------------------------------------------------------

    async def _serve(self, client: _Client) -> None:
        """Serves one connection until its end. A failure ends this connection only."""
        hello_s = self.options.limits.hello_s
        try:
            self._check_uid(client)
            async with asyncio.timeout(hello_s) as until_hello:
                while data := await self._loop.sock_recv(client.socket, RECEIVE_BYTES):
                    client.reader.feed(data)
                    while (payload := client.reader.next_payload()) is not None:
                        await self._answer(client, pb.BrokerRequest.FromString(payload))
                    if client.namespace is not None:
                        until_hello.reschedule(None)
                    await asyncio.sleep(0)  # lets other clients run while this one sends without a pause
            client.cause = "the client closed the connection"
        except TimeoutError:
            client.cause = f"no Hello within {hello_s:g} s"
        except (_ClientEnded, FrameError, DecodeError, ConnectionError) as error:
            client.cause = str(error)
        except Exception as error:
            log.exception("a client's request failed", client=client.name)
            client.cause = type(error).__name__

    def _close_client(self, client: _Client, _: asyncio.Task[None]) -> None:
        self._clients.pop(client, None)
        self._count(client, None)
        if client.is_attaching:
            with contextlib.suppress(OSError):  # the client is gone
                client.socket.shutdown(socket.SHUT_RDWR)
            self._ended.add(client)
        else:
            client.socket.close()
        more = {} if client.namespace is not None else self._repeated.due(client.cause)
        if more is not None:  # a hostile client can make many connections without a Hello
            log.debug(
                "client left", client=client.name, pid=client.pid, uid=client.uid, cause=client.cause, **more
            )

    def _check_uid(self, client: _Client) -> None:
        allowed = self.options.allowed_uids
        if allowed is not None and client.uid not in allowed:
            names = ", ".join(str(uid) for uid in sorted(allowed))
            refusal = _Refused("UID_NOT_ALLOWED", f"user id {client.uid} may not connect, allowed: {names}")
            self._refuse(client, 0, refusal)

    async def _answer(self, client: _Client, request: pb.BrokerRequest) -> None:
        kind, request_id = request.WhichOneof("request"), request.request_id
        if request_id == 0:
            raise _ClientEnded("a request without an id")
        if (kind == "hello") != (client.namespace is None):
            when = "before" if client.namespace is None else "after"
            raise _ClientEnded(f"the request {kind} {when} Hello")
        try:
            match kind:
                case "hello":
                    welcome = self._hello(client, request.hello)
                    self._send(client, pb.BrokerReply(request_id=request_id, welcome=welcome))
                case "attach":
                    await self._attach(client, request_id, request.attach)
                case "probe":
                    probe = self._find(client, request.probe.arena_id).probe
                    self._send(client, pb.BrokerReply(request_id=request_id, probe_slot=probe))
                case _:
                    raise _Refused("UNKNOWN_REQUEST", "the broker does not know this request")
        except _Refused as error:
            if kind == "hello":
                self._refuse(client, request_id, error)
            if kind == "attach":
                self.refused[error.reason] += 1
            failure = pb.BrokerFailure(reason=error.reason, message=error.message, retryable=error.retryable)
            self._send(client, pb.BrokerReply(request_id=request_id, failure=failure))

    def _hello(self, client: _Client, hello: pb.BrokerHello) -> pb.BrokerWelcome:
        """Raises _Refused. Compares versions first, because another version may have other fields."""
        if hello.protocol_version < MIN_PROTOCOL_VERSION or hello.min_protocol_version > PROTOCOL_VERSION:
            raise _Refused(
                "PROTOCOL_MISMATCH",
                f"the client speaks versions {hello.min_protocol_version} to {hello.protocol_version}, "
                f"the broker {MIN_PROTOCOL_VERSION} to {PROTOCOL_VERSION}",
            )
        for name in ("namespace", "client_name"):
            num_chars = len(getattr(hello, name))
            if num_chars > MAX_NAME_CHARS:
                raise _Refused(
                    "INVALID_REQUEST",
                    f"{name} has {num_chars} characters, at most {MAX_NAME_CHARS} are allowed",
                )
        namespace = hello.namespace
        if not self._opens(namespace, hello.token):
            # The same answer for an unknown namespace and a wrong token, so that names cannot be probed.
            raise _Refused("UNAUTHENTICATED", f"namespace {namespace!r}: the token does not open it")
        # Namespaces without a token can be invented, so together they get one share of their user's.
        kind = "open" if self._opens(namespace, "") else "closed"
        former = client.holder
        client.holder = (*former, kind, f"namespace {namespace}", f"pid {client.pid}")
        if not self._count(client, self._connected):
            num_of_user, num_here = map(self._connected.held_by, (former, client.holder[:-1]))
            text = (
                f"the broker has {self._connected.num_used} connections, at most {self._connected.limit} are "
                f"allowed; user id {client.uid} has {num_of_user} of them, {num_here} in namespace "
                f"{namespace!r}; the rest is reserved for others"
            )
            client.holder = former
            raise _Refused("TOO_MANY_CONNECTIONS", text, retryable=True)
        client.namespace, client.token, client.name = namespace, hello.token, hello.client_name
        log.debug("client connected", client=client.name, namespace=namespace, pid=client.pid, uid=client.uid)
        return pb.BrokerWelcome(
            protocol_version=min(PROTOCOL_VERSION, hello.protocol_version),
            instance_id=self.options.instance_id,
            host_id=self.options.host_id,
            layout_version=LAYOUT_VERSION,
            arenas=[shared.geometry for shared in self._shared.values() if self._sees(client, shared)],
        )

    async def _attach(self, client: _Client, request_id: int, attach: pb.BrokerAttach) -> None:
        """Sends the arena's geometry and descriptors. Raises _Refused."""
        if attach.layout_version != LAYOUT_VERSION:
            raise _Refused(
                "LAYOUT_MISMATCH",
                f"the client reads layout version {attach.layout_version}, the arenas have {LAYOUT_VERSION}",
            )
        shared = self._find(client, attach.arena_id)
        if client.num_attaches >= self.options.limits.attaches:
            raise _Refused("TOO_MANY_ATTACHES", f"at most {client.num_attaches} in one connection", True)
        client.num_attaches += 1
        await self._begin_attach(client)
        reply = pb.BrokerReply(
            request_id=request_id,
            num_descriptors=len(shared.descriptors),
            attached=pb.BrokerAttached(geometry=shared.geometry),
        )
        self._send(client, reply, shared.descriptors)

    async def _begin_attach(self, client: _Client) -> None:
        """Waits until the client has read its previous attach, and until there is room for another. A client
        that does not read is ended by ``_check_clients``. Raises _Refused if there is no room in time."""
        waits_until_s = self._loop.time() + WAIT_S
        while True:
            self._note_reads()
            if not client.is_attaching:
                if self._unread.take(client.holder):
                    client.is_attaching = True
                    return
                if self._loop.time() >= waits_until_s:
                    raise _Refused(
                        "TOO_MANY_ATTACHES",
                        f"{self._unread.num_used} attaches are unread, at most {self._unread.limit} are "
                        "allowed, and each user, namespace and process has a share; read replies sooner",
                        retryable=True,
                    )
            await asyncio.sleep(POLL_S)

    def _find(self, client: _Client, arena_id: bytes) -> _SharedArena:
        shared = self._shared.get(arena_id)
        if shared is None or not self._sees(client, shared):
            raise _Refused("UNKNOWN_ARENA", f"no arena {arena_id.hex()} here")
        return shared

    def _sees(self, client: _Client, shared: _SharedArena) -> bool:
        owner = client.namespace if client.namespace in self._isolated else None
        return shared.namespace == owner

    def _refuse(self, client: _Client, request_id: int, refusal: _Refused) -> None:
        """Sends the refusal with the broker's versions, then raises _ClientEnded."""
        self.refused[refusal.reason] += 1
        refused = pb.BrokerRefused(
            reason=refusal.reason,
            message=refusal.message,
            retryable=refusal.retryable,
            protocol_version=PROTOCOL_VERSION,
            min_protocol_version=MIN_PROTOCOL_VERSION,
            layout_version=LAYOUT_VERSION,
        )
        self._send(client, pb.BrokerReply(request_id=request_id, refused=refused))
        raise _ClientEnded(refusal.message)

    def _send(self, client: _Client, reply: pb.BrokerReply, descriptors: tuple[int, ...] = ()) -> None:
        """Sends a reply, with the descriptors attached to its first byte. Raises _ClientEnded if the client
        has left so many replies unread that the kernel does not take all of this one."""
        data = encode_frame(reply.SerializeToString())
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
        try:
            num_sent = client.socket.sendmsg([data], rights if descriptors else [], socket.MSG_NOSIGNAL)
        except BlockingIOError:
            num_sent = 0
        except OSError as error:
            if error.errno == errno.ETOOMANYREFS:  # counts all processes of this user
                raise _Refused(
                    "TOO_MANY_ATTACHES", "the kernel holds too many descriptors that were not read", True
                ) from error
            raise _ClientEnded(f"sending failed: {error.strerror}") from error
        if num_sent < len(data):
            raise _ClientEnded(f"it does not read: {num_sent} of {len(data)} bytes of a reply could be sent")


def peer_of(connected: socket.socket) -> tuple[int, int]:
    """The process id and user id of the other end of a unix socket, as the kernel reports them."""
    credentials = struct.Struct("3i")  # pid, uid, gid
    pid, uid, _ = credentials.unpack(
        connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size)
    )
    return pid, uid


def warn_of_folder(path: str) -> None:
    """Logs a warning if every user can write to the socket's folder, and so replace the socket."""
    folder = os.path.dirname(path)
    with contextlib.suppress(OSError):
        mode = os.stat(folder).st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            log.warning("every user can replace the broker's socket", folder=folder, mode=oct(mode & 0o7777))


def share(namespace: str | None, arena: Arena) -> _SharedArena:
    """Exports an arena's descriptors. Raises OSError if the process has no descriptors left."""
    geometry = pb.ArenaGeometry(
        arena_id=arena.arena_id,
        kind=_KINDS[arena.kind],
        size_bytes=arena.size_bytes,
        page_bytes=arena.page.size_bytes,
        device_uuid=arena.device_uuid,
        directory_bytes=arena.directory.size_bytes,
    )
    offset_bytes, num_bytes, sha256 = arena.probe
    probe = pb.BrokerProbeSlot(
        arena_id=arena.arena_id, offset_bytes=offset_bytes, num_bytes=num_bytes, sha256=sha256
    )
    return _SharedArena(namespace, geometry, probe, arena.export_all())


class ListeningSocket:
    """A unix socket at a path. Its permissions are set before the first client can connect."""

    def __init__(self, path: str, *, mode: int = 0o660, backlog: int = 1024) -> None:
        """Replaces the socket of a process that has ended. Raises ConfigurationError if the path cannot be
        used or another process listens on it."""
        self.path = path
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._identity: tuple[int, int] | None = None
        try:
            self.socket.setblocking(False)
            remove_dead_socket(path)
            self.socket.bind(path)
            status = os.lstat(path)
            self._identity = (status.st_dev, status.st_ino)
            os.chmod(path, mode)
            self.socket.listen(backlog)
        except OSError as error:
            self.close()
            raise ConfigurationError(f"broker socket {path}: {error.strerror or error}") from error
        except BaseException:
            self.close()
            raise

    def is_in_place(self) -> bool:
        """Whether the path names this socket."""
        try:
            status = os.lstat(self.path)
        except OSError:
            return False
        return (status.st_dev, status.st_ino) == self._identity

    def close(self) -> None:
        """Closes the socket and removes its file, unless the file is another socket's. Idempotent."""
        if self.is_in_place():
            with contextlib.suppress(OSError):
                os.unlink(self.path)
        self._identity = None  # another file may get the inode's number
        self.socket.close()
