"""Keeps a client attached to its encoder's shared memory for as long as the encoder runs.

Owns the thread that connects to the broker, maps the arenas, watches the connection, and unmaps when the
connection ends. Before and after an attachment, rows are delivered inline.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lm_adapter.errors import BrokerError, EncoderError, InvalidRequest, MappingFailed
from lm_adapter.shm import mapping
from lm_adapter.types import ServerInfo, TransportInfo
from vision_encoder.layout.host import host_id
from vision_encoder.v1 import broker_pb2
from vision_encoder.v1 import encoder_pb2 as pb

if TYPE_CHECKING:
    import torch

    from lm_adapter.shm.broker import BrokerConnection
    from lm_adapter.shm.reader import MappedArena
    from vision_encoder.layout.directory import Record


TRANSPORTS = ("device", "host", "inline")
"""All transports, in the default order of preference."""
CONNECT_TIMEOUT_S = 2.0
RETRY_S = 1.0
UNMAP_TIMEOUT_S = 10.0
_DELIVERIES: dict[str, pb.Delivery.ValueType] = {"device": pb.DELIVERY_DEVICE, "host": pb.DELIVERY_HOST}
_KINDS = {"device": broker_pb2.ARENA_KIND_DEVICE, "host": broker_pb2.ARENA_KIND_HOST}
# Conservative estimates: host memory to new pages; device memory over NVLink, including the launch.
_COPY_BYTES_PER_S = {"device": 200e9, "host": 8e9}

_log = logging.getLogger(__name__)


class Transport(NamedTuple):
    """How rows are delivered now. name: ``device``, ``host`` or ``inline``; reason: why, for logs."""

    name: str
    reason: str


class AttachedMemory:
    """The mapped arenas of one kind (device or host) that a namespace may read."""

    def __init__(self, name: str, arenas: Sequence[MappedArena]) -> None:
        self.name = name
        self.delivery = _DELIVERIES[name]
        self.num_bytes = sum(arena.size_bytes for arena in arenas)
        self._arenas = {arena.arena_id: arena for arena in arenas}

    def find(self, key: bytes) -> tuple[MappedArena, Record] | None:
        """The arena that lists a key, and the key's record; None if no arena does."""
        for arena in self._arenas.values():
            record = arena.find(key)
            if record is not None:
                return arena, record
        return None

    def read_place(
        self, place: pb.RowsPlace, num_bytes: int, *, stream: Any = None
    ) -> npt.NDArray[np.uint8] | torch.Tensor | None:
        """A private copy of placed rows; None if they were overwritten or their arena is not attached."""
        arena = self._arenas.get(place.arena_id)
        if arena is None or arena.instance != place.instance:
            return None
        return arena.read(place.slot_index, place.generation, place.offset_bytes, num_bytes, stream=stream)

    def copy_s(self, num_bytes: int) -> float:
        """The estimated time of a read, in seconds."""
        return num_bytes / _COPY_BYTES_PER_S[self.name]

    def unmap(self) -> None:
        """Unmaps all arenas. Raises MappingFailed; it can then be repeated."""
        for arena in self._arenas.values():
            arena.unmap(UNMAP_TIMEOUT_S)


class SharedMemory:
    """The shared-memory attachment of one client. Thread-safe. A forked child is never attached, because the
    mappings belong to the parent."""

    def __init__(
        self,
        transports: Sequence[str],
        *,
        namespace: str,
        token: Callable[[], str],
        broker_path: str,
        device: str | int | torch.device | None,
    ) -> None:
        """transports: already validated; token: returns the current token; broker_path: replaces the
        announced path, for a process that sees the socket at another path; device: see
        ``AsyncVisionEncoderClient``."""
        self._names = [name for name in transports if name != "inline"]
        self._allows_inline = "inline" in transports
        self._namespace = namespace
        self._token = token
        self._broker_path = broker_path
        self._device = device
        self._changed = threading.Condition()
        self._info: ServerInfo | None = None
        self._pid = os.getpid()
        self._current: AttachedMemory | None = None
        self._connection: BrokerConnection | None = None
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._num_attempts = 0
        self._refused: tuple[str, object] | None = None
        self.transport = Transport("inline", "not attached yet")

    @property
    def current(self) -> AttachedMemory | None:
        """The memory for a call that begins now; None: rows come inline."""
        return None if self._is_forked else self._current

    @property
    def _is_forked(self) -> bool:
        """Whether this is a forked child, where locks may be held by threads that are not there."""
        return os.getpid() != self._pid

    def offer(self, info: ServerInfo) -> None:
        """Takes the server's announcement and starts attaching in the background. Does not block."""
        with self._changed:
            if self._is_closed or not self._names:
                return
            self._info = info
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="encoder-memory", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def note_device(self) -> None:
        """Makes the calling thread's GPU the target of rows, unless the client was given a device."""
        if self._device is None and "device" in self._names and not self._is_forked:
            device = mapping.current_device()
            if device is not None:
                with self._changed:
                    self._device = device
                    self._changed.notify_all()
                    if self._connection is not None and self.transport.name != "device":
                        self._connection.close()  # attach again, this time to device memory

    @property
    def needs_wait(self) -> bool:
        """Whether no memory is attached and inline is excluded."""
        return not self._allows_inline and self.current is None

    @property
    def has_tried(self) -> bool:
        """Whether an attempt to attach has ended, or there will be none."""
        return bool(self._num_attempts) or self._thread is None

    @property
    def is_refused(self) -> bool:
        """Whether no further attempt is made before the server or the device changes."""
        return self._refused == self._target or self._thread is None

    def close(self) -> None:
        """Detaches and unmaps. Can be repeated."""
        if self._is_forked:
            return
        with self._changed:
            self._is_closed = True
            if self._connection is not None:
                self._connection.close()
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(UNMAP_TIMEOUT_S)

    def _run(self) -> None:
        """The thread's loop: attach, watch the connection, unmap, repeat."""
        while not self._is_closed:
            target = self._target
            try:
                connection, attached, reason = self._attach()
            except Exception as error:
                if not isinstance(error, EncoderError):
                    _log.exception("attaching to the encoder's memory failed")
                    error = BrokerError(f"{type(error).__name__}: {error}")
                self._note_failure(error, target)
                continue
            with self._changed:
                self._current = attached
                self._num_attempts += 1
                self._set_transport(Transport(attached.name, reason))
                self._changed.notify_all()
                if attached.name != "device" and self._target != target:
                    connection.close()
            connection.wait_end()
            with self._changed:
                self._current, self._connection = None, None
                self._set_transport(Transport("inline", "the encoder's broker closed the connection"))
            connection.close()
            while not _unmapped(attached) and not self._is_closed:
                with self._changed:
                    self._changed.wait_for(lambda: self._is_closed, RETRY_S)

    @property
    def _target(self) -> tuple[str, object]:
        return self._info.instance_id if self._info else "", self._device

    def _note_failure(self, error: EncoderError, target: tuple[str, object]) -> None:
        """Waits RETRY_S after a retryable error, else until the server or the device is another one."""
        with self._changed:
            self._num_attempts += 1
            self._refused = None if error.retryable else target
            self._set_transport(Transport("inline", error.message))
            self._changed.notify_all()
            if error.retryable:
                self._changed.wait_for(lambda: self._is_closed, RETRY_S)
            else:
                self._changed.wait_for(lambda: self._is_closed or self._refused != self._target)

    def _attach(self) -> tuple[BrokerConnection, AttachedMemory, str]:
        """Attaches the first kind that works. Raises EncoderError, retryable if any kind may work later."""
        failures: list[str] = []
        is_retryable = False
        for name in self._names:
            try:
                connection, attached = self._attach_kind(name)
            except EncoderError as error:
                failures.append(f"{name}: {error.message}")
                is_retryable |= error.retryable
            else:
                return connection, attached, "; ".join([f"{attached.num_bytes} bytes are mapped", *failures])
        raise BrokerError("; ".join(failures), retryable=is_retryable)

    def _attach_kind(self, name: str) -> tuple[BrokerConnection, AttachedMemory]:
        """Connects to the broker and maps all arenas of one kind. Raises EncoderError."""
        # A client without shared memory does not need these.
        from lm_adapter.shm.broker import BrokerConnection
        from lm_adapter.shm.reader import MappedArena

        info = self._info
        assert info is not None
        announced = _announced(info, name)
        device = self._resolve_device() if name == "device" else None
        with ExitStack() as undo:
            connection = BrokerConnection(
                self._broker_path or announced.broker_path,
                namespace=self._namespace,
                token=self._token(),
                timeout_s=CONNECT_TIMEOUT_S,
            )
            undo.callback(connection.close)
            with self._changed:
                if self._is_closed:
                    raise BrokerError("the client is closed", retryable=False)
                self._connection = connection
            welcome = connection.welcome
            if welcome.instance_id != info.instance_id:
                raise BrokerError(
                    f"the broker belongs to instance {welcome.instance_id!r}, the server is "
                    f"{info.instance_id!r}",
                    reason="OTHER_INSTANCE",
                )
            arenas: list[MappedArena] = []
            for geometry in welcome.arenas:
                if geometry.kind != _KINDS[name]:
                    continue
                with connection.attach(geometry.arena_id) as attachment:
                    arenas.append(MappedArena(attachment, self._namespace, device))
                undo.callback(arenas[-1].unmap, UNMAP_TIMEOUT_S)
                arenas[-1].check_probe(connection.probe(geometry.arena_id))
            if not arenas:
                raise BrokerError(f"the broker has no {name} arena for this namespace")
            undo.pop_all()
        return connection, AttachedMemory(name, arenas)

    def _resolve_device(self) -> torch.device:
        from lm_adapter.shm.device import resolve_device

        device = self._device
        if device is None and self._names == ["device"] and not self._allows_inline:
            device = "cuda"  # no other transport is allowed
        if device is None:
            raise MappingFailed("this process does not use CUDA, and the client was given no device")
        return resolve_device(device)

    def _set_transport(self, transport: Transport) -> None:
        """Sets ``transport`` and logs each change. The caller holds the lock."""
        if transport != self.transport:
            _log.info("rows come by %s: %s", transport.name, transport.reason)
        self.transport = transport


def check_transports(transports: Sequence[str], broker_path: str) -> tuple[str, ...]:
    """The transports as a tuple. Raises InvalidRequest for invalid transports or an invalid path."""
    if isinstance(transports, str) or not transports or len(set(transports)) != len(transports):
        raise InvalidRequest(f"transports is a sequence of different names, found {transports!r}")
    for name in transports:
        if name not in TRANSPORTS:
            raise InvalidRequest(f"transports has {name!r}, possible are {', '.join(TRANSPORTS)}")
    if broker_path and not broker_path.startswith("/"):
        raise InvalidRequest(f"broker_path is an absolute path, found {broker_path!r}")
    return tuple(transports)


def _announced(info: ServerInfo, name: str) -> TransportInfo:
    """The server's announcement of this kind of memory. Raises BrokerError if the server does not offer it or
    is on another host."""
    found = next((transport for transport in info.transports if transport.delivery == name), None)
    if found is None:
        raise BrokerError("the server does not offer it", retryable=False)
    try:
        own_id = host_id()
    except OSError as error:
        raise BrokerError(
            f"the id of this process's host cannot be read: {error}", retryable=False
        ) from error
    if found.host_id != own_id:
        raise BrokerError(
            f"the server is on host {found.host_id!r}, this process on {own_id!r}", retryable=False
        )
    return found


def _unmapped(memory: AttachedMemory) -> bool:
    """Unmaps the memory; False if that failed."""
    started_s = time.monotonic()
    try:
        memory.unmap()
    except MappingFailed as error:
        _log.warning("the encoder's memory stays mapped for now: %s", error.message)
        return False
    _log.info("the encoder's memory was unmapped in %.0f ms", 1e3 * (time.monotonic() - started_s))
    return True
