"""Which way rows come: by device lease, through shared host memory, or in the stream.

Owns the choice, from the first probe to the client's end: probes run on a thread of their own, never under a
call; until one has succeeded, and whenever the broker is away, rows come inline, so that nothing here ever
fails a client that allows inline. What a probe looks at is ``probe``'s, how rows are read ``reading``'s, how
long the choice is inline because the server refuses anything else ``backoff``'s.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from lm_adapter.errors import EncoderError, TransportUnavailable
from lm_adapter.leases import LeaseReturns
from lm_adapter.transport import probe
from lm_adapter.transport.arenas import AttachedArena
from lm_adapter.transport.backoff import RefusalBackoff
from lm_adapter.transport.broker_client import BrokerClient
from lm_adapter.transport.broker_errors import BrokerError
from lm_adapter.transport.broker_records import BrokerSession
from lm_adapter.transport.device_lease import device_in_use, resolve_device
from lm_adapter.transport.mapped_arenas import MappedArenas
from lm_adapter.transport.mapping import device_uuid
from lm_adapter.transport.settings import TransportChoice, TransportSettings
from lm_adapter.transport.shared_transport import SharedTransport
from lm_adapter.types import ServerInfo
from vision_encoder.v1 import encoder_pb2 as pb

if TYPE_CHECKING:
    import torch

__all__ = ["TransportChooser"]

CONNECT_TIMEOUT_S = 2.0
RETRY_S = 5.0
"""Between probes that failed for a reason that may pass."""
LOST_GRACE_S = 10.0
"""How long arenas stay mapped without a broker: one that is gone leaves memory that others wait for."""

_log = logging.getLogger(__name__)


class TransportChooser:
    """Thread-safe. After a fork, the child starts anew."""

    def __init__(
        self,
        settings: TransportSettings,
        returns: LeaseReturns,
        *,
        namespace: str = "",
        on_replaced: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """on_replaced: what is known of the server is of an instance that is gone."""
        self.settings = settings
        self._wants_gpu = "device" in settings.transports
        self.returns = returns
        self.clock = clock
        self.lost_grace_s = LOST_GRACE_S
        self._namespace = namespace
        self._on_replaced = on_replaced
        self._broker: BrokerClient | None = None
        self._closed = False
        self._info: ServerInfo | None = None
        self._start_anew("not probed yet")
        _choosers[id(self)] = weakref.ref(self)

    def _start_anew(self, reason: str) -> None:
        self._changed = threading.Condition()
        self._arenas = MappedArenas()
        self._current: SharedTransport | None = None
        self._thread: threading.Thread | None = None
        self._probe_again = False
        self._retry_at_s: float | None = 0.0
        self._device_index: int | None = None
        self._backoff = RefusalBackoff()
        self._choice = self._without_shared(reason)

    def __del__(self) -> None:
        _choosers.pop(id(self), None)

    @property
    def choice(self) -> TransportChoice:
        """The way in use now, and why."""
        return self._choice

    def offer(self, info: ServerInfo) -> None:
        """What the server said of itself. Starts a probe when it is news; returns at once."""
        with self._changed:
            if self._closed:
                return
            known, self._info = self._info, info
            if known is None or not _same_server(known, info):
                self._backoff.forget()
            elif self._choice.is_shared or self._backoff.paused(self.clock()):
                return
            self._find_device()
            self._start_probe()

    def current(self) -> SharedTransport | None:
        """For a call that begins now; None for inline."""
        found = self._current
        # Nothing to look for, and nothing has changed: the common case, for which no lock is taken.
        same = found is not None and found.turn == self._backoff.turn and self._retry_at_s is None
        if same and (self._device_index is not None or not self._wants_gpu or device_in_use() is None):
            return found
        with self._changed:
            self._retry_when_due()
            session = None if self._broker is None else self._broker.session
            if self._closed or session is None or not self._choice.is_shared:
                return None
            owner_id, turn = session.owner_id.encode(), self._backoff.turn
            found = self._current
            if found is None or (found.owner_id, found.turn) != (owner_id, turn):
                name, unleased, settings = self._choice.name, None, self.settings
                if self._broker is not None and self._choice.resident == "directory":
                    link = self._broker.fetch_link(owner_id)
                    unleased = self._arenas.unleased(name, self._namespace, link)
                path = session.calls_path if settings.local_calls else ""
                found = self._current = SharedTransport(
                    name, owner_id, settings.lease_ms, self.returns, self, turn, self._broker, unleased, path
                )
            return found

    def note(self, name: str, turn: int, num_shared: int, refusal: str) -> None:
        """What became of a call in a way that ``current`` gave: items read, and why others were refused. What
        keeps being refused is not asked for, until a probe after a pause succeeds; pauses grow."""
        if num_shared and self._backoff.is_calm:
            return
        with self._changed:
            if num_shared:
                self._backoff.worked(turn)
            elif refusal and self.settings.inline_allowed:
                pause_s = self._backoff.refused(turn, self.clock())
                if pause_s is not None:
                    self._retry_at_s = self.clock() + pause_s
                    self._decide(self._without_shared(self._backoff.why(name, refusal), {name: refusal}))

    def ready(self) -> bool:
        """Whether a call may go now: always where inline is allowed."""
        return self.settings.inline_allowed or self._choice.is_shared

    def wait(self, timeout_s: float) -> TransportChoice:
        """The choice once no probe is under way, or when the time is over."""
        with self._changed:
            self._retry_when_due()
            self._changed.wait_for(lambda: self._thread is None or self._closed, timeout_s)
            return self._choice

    def require(self, timeout_s: float) -> None:
        """Waits for a probe where inline is not allowed. Raises TransportUnavailable with the reasons."""
        if self.ready():
            return
        choice = self.wait(timeout_s)
        if not self.ready():
            raise TransportUnavailable(
                f"no way of delivery out of {', '.join(self.settings.transports)} is possible: "
                f"{choice.reason}",
                details=dict(choice.rejected),
            )

    def arena(self, name: str, arena_id: bytes) -> AttachedArena:
        """A mapped arena with one more use, mapped now where it is new. Raises EncoderError."""
        found = self._arenas.used(name, arena_id)
        if found is not None:
            return found
        broker = self._broker
        if broker is None or self._closed:
            raise probe.NotPossible("the client is closed")
        found = self._attach(broker, name, arena_id)
        if not found.use():
            raise probe.NotPossible(f"arena {arena_id.hex()} was given up", retryable=True)
        return found

    def renew(self, request: pb.RenewRequest) -> pb.RenewResponse | None:
        """Extends leases over the broker's socket; None where that is not possible now."""
        broker = self._broker
        return None if broker is None else broker.renew(request)

    def close(self) -> None:
        """Ends the session and gives up the mappings. Twice is once."""
        with self._changed:
            self._closed = True
            broker, thread = self._broker, self._thread
            self._choice = self._without_shared("the client is closed")
            self._changed.notify_all()
        if broker is not None:
            broker.close()
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        self._current = None
        self._arenas.close()

    def _retry_when_due(self) -> None:
        """With the lock held. Also takes note that the process has begun to use a GPU."""
        if self._closed or self._info is None or self._thread is not None:
            return
        now_s = self.clock()
        if self._backoff.paused(now_s):
            return
        due = self._retry_at_s is not None and now_s >= self._retry_at_s
        if due or (self._device_index is None and self._find_device()):
            self._start_probe()

    def _find_device(self) -> bool:
        """Whether the calling thread's GPU is known now; another thread's would be another."""
        if self._wants_gpu and self._device_index is None:
            self._device_index = device_in_use()
        return self._device_index is not None

    def _start_probe(self) -> None:
        """With the lock held."""
        if self._closed or self._info is None:
            return
        offered = {each.delivery for each in self._info.transports}
        if not any(probe.DELIVERIES.get(name) in offered for name in self.settings.transports):
            self._retry_at_s = None
            self._decide(self._without_shared("the server offers nothing else"))
            return
        self._probe_again = True
        if self._thread is None:
            self._thread = threading.Thread(target=self._run_probes, name="transport-probe", daemon=True)
            self._thread.start()

    def _run_probes(self) -> None:
        while True:
            with self._changed:
                if not self._probe_again or self._closed or self._info is None:
                    self._thread = None
                    self._changed.notify_all()
                    return
                self._probe_again, info = False, self._info
            choice, may_pass = self._probe_all(info)
            with self._changed:
                if self._backoff.paused(self.clock()):
                    continue  # begun before the pause
                self._retry_at_s = self.clock() + RETRY_S if may_pass else None
                if not self._probe_again:
                    self._decide(choice)

    def _probe_all(self, info: ServerInfo) -> tuple[TransportChoice, bool]:
        """The best way that works, and whether a better one may work later."""
        rejected: dict[str, str] = {}
        may_pass = False
        for name in self.settings.transports:
            if name == "inline":
                break
            try:
                reason = self._probe(name, info)
            except EncoderError as error:
                rejected[name] = error.message
                may_pass |= error.retryable
                if error.reason == "OTHER_INSTANCE":
                    self._on_replaced()
            except Exception as error:
                _log.exception("the probe of rows by %s failed", name)
                rejected[name] = f"{type(error).__name__}: {error}"
            else:
                by_directory = self.settings.directory and self._arenas.have_directory(name)
                resident = "directory" if by_directory else "lease"
                return TransportChoice(name, reason, rejected, resident), may_pass
        return self._without_shared(
            "; ".join(f"{name}: {why}" for name, why in rejected.items()), rejected
        ), may_pass

    def _probe(self, name: str, info: ServerInfo) -> str:
        """What speaks for this way. Raises EncoderError for what speaks against it."""
        transport = probe.announced(info, name)
        device = self._device() if name == "device" else None
        broker = self._connected(self.settings.broker_path or transport.broker_path)
        session = broker.connect(CONNECT_TIMEOUT_S)
        probe.check_instance(info, session)
        attached = [self._attach(broker, name, each.arena_id) for each in probe.arenas_of(broker, name)]
        found = probe.check_all(attached)
        for arena in attached:
            arena.memory.warm()
        if device is not None:
            same = (
                "this GPU itself" if device_uuid(device) == transport.device_uuid else "another GPU's memory"
            )
            found = f"{found}, for {device}, {same}"
        return found

    def _device(self) -> torch.device:
        wanted = self.settings.device
        if wanted is None:
            wanted = self._device_index
        if wanted is None and "host" not in self.settings.transports and not self.settings.inline_allowed:
            wanted = "cuda"  # asked for in so many words
        if wanted is None:
            raise probe.NotPossible("this process does not use CUDA, and the client was given no device")
        return resolve_device(wanted)

    def _connected(self, path: str) -> BrokerClient:
        with self._changed:
            broker = self._broker
            if self._closed:
                raise probe.NotPossible("the client is closed")
            if broker is not None and broker.path == path:
                return broker
        if broker is not None:
            broker.close()
            self._drop_arenas()  # of an encoder elsewhere: nobody would hear of their end
        made = BrokerClient(
            path,
            namespace=self._namespace,
            token=self.settings.token_now,
            name=f"lm_adapter pid {os.getpid()}",
            request_timeout_s=CONNECT_TIMEOUT_S,
            on_session=self._on_session,
            on_lost=self._on_lost,
            on_arena_closed=self._on_arena_closed,
        )
        with self._changed:
            if not self._closed:
                self._broker = made
                self.returns.post = made.release
                return made
        made.close()
        raise probe.NotPossible("the client is closed")

    def _attach(self, broker: BrokerClient, name: str, arena_id: bytes) -> AttachedArena:
        """Mapped and known to this chooser, with no use for the caller."""
        device = self._device() if name == "device" else None
        return self._arenas.attach(broker, name, arena_id, device)

    # On the broker client's thread.

    def _on_session(self, session: BrokerSession) -> None:
        """Connected again. What was mapped of another instance is void."""
        self._arenas.keep()
        if session.restarted:
            self._drop_arenas()
        with self._changed:
            self._backoff.forget()
            self._start_probe()

    def _on_lost(self, _session: BrokerSession, error: BrokerError) -> None:
        self._arenas.drop_soon(0.0 if error.reason == "BROKER_STOPPING" else self.lost_grace_s)
        with self._changed:
            self._decide(self._without_shared(f"the broker was lost: {error.message}"))

    def _on_arena_closed(self, arena_id: bytes, _replaced_by: bytes) -> None:
        self._drop_arenas(arena_id)
        with self._changed:
            self._backoff.forget()
            self._start_probe()

    def _drop_arenas(self, arena_id: bytes | None = None) -> None:
        """Those who read go on, each with its own use."""
        self._current = None
        self._arenas.drop(arena_id)

    def _without_shared(self, reason: str, rejected: dict[str, str] | None = None) -> TransportChoice:
        name = "inline" if self.settings.inline_allowed else "none"
        return TransportChoice(name, reason or "as asked for", rejected or {})

    def _decide(self, choice: TransportChoice) -> None:
        """With the lock held."""
        self._current = None
        if self._closed or choice == self._choice:
            return
        self._choice = choice
        level = logging.WARNING if choice.name == "none" else logging.INFO
        _log.log(level, "rows come by %s: %s", choice.name, choice.reason, extra=choice.log_fields)

    def _forget_in_child(self) -> None:
        """The child connects, maps and decides for itself; its parent's arenas are ``arenas``' to forget."""
        abandoned.append(self._arenas)
        self._start_anew("a forked process probes anew")


abandoned: list[object] = []
"""What a forked child inherited; never ended, since its end belongs to the parent."""

# By id, because a forked child walks it: a WeakSet may be in the middle of a change then.
_choosers: dict[int, weakref.ref[TransportChooser]] = {}


def _same_server(known: ServerInfo, info: ServerInfo) -> bool:
    return known.instance_id == info.instance_id and known.transports == info.transports


def _forget_all_in_child() -> None:
    for reference in list(_choosers.values()):
        chooser = reference()
        if chooser is not None:
            chooser._forget_in_child()


os.register_at_fork(after_in_child=_forget_all_in_child)
