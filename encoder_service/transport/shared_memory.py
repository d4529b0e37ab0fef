"""Delivery by shared memory: who may read which slot of which arena, from grant to upkeep.

Owns the lease table, the broker and what keeps both right: times that run out, connections that end, the
arenas' heartbeats. Which rows are in the arenas is the store's, how a lease is written on the wire is
``rpc``'s. Used from the event loop that made it.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
import traceback
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TypeAlias

import structlog
import torch

from encoder_service.config import Settings
from encoder_service.errors import ConfigurationError, Overloaded, TransportUnavailable
from encoder_service.store.arena import ArenaGeometry
from encoder_service.store.embedding_store import Held, Tier
from encoder_service.store.leases import LeaseTable
from encoder_service.store.partitions import (
    PartitionedStore,
    open_device_partitions,
    open_host_partitions,
)
from encoder_service.store.tiers import TieredStore
from encoder_service.tokens import NamespaceTokens
from encoder_service.transport.access import BrokerAccess
from encoder_service.transport.broker import Broker
from encoder_service.transport.broker_fetch import FetchDesk
from encoder_service.transport.broker_options import BrokerOptions
from encoder_service.transport.idle_check import IdleCheck
from encoder_service.transport.offers import ArenaOffer, OfferBook, ProbeSlot, close_all

log = structlog.get_logger(__name__)

SharedStore: TypeAlias = PartitionedStore | TieredStore

DEVICE_ARENA_BYTES = 2 << 30
"""Of a GPU's memory where the settings say nothing."""

BEAT_S = 1.0
"""How often readers see that the service lives."""
DRAIN_POLL_S = 0.05
DEVICE_STOP_S = 5.0
"""How long work on the device may take to end before the process leaves it."""


@dataclass(frozen=True)
class LeaseTerms:
    """What a caller asks a lease for. owner_id: its connection to the broker, as the broker named it. ttl_s:
    None for the server's default. kind: of the memory that it can read; None for any."""

    owner_id: str
    num_readers: int = 1
    ttl_s: float | None = None
    kind: Tier | None = None


@dataclass(frozen=True)
class LeasedRows:
    """Where an item's rows may be read, and until when."""

    lease_id: bytes
    arena: ArenaGeometry
    slot_index: int
    offset_bytes: int
    generation: int
    expires_at_unix_ms: int


@dataclass
class DeliveryCounters:
    """shared: items delivered by lease. not_held: asked for by lease and delivered inline, since the store
    had no room for their rows. too_many: the same, since their caller had too many leases. no_owner: refused,
    their caller has no connection to the broker."""

    shared: int = 0
    not_held: int = 0
    too_many: int = 0
    no_owner: int = 0


class SharedMemory:
    """``start``, any number of leases, ``drain`` and ``stop``."""

    def __init__(
        self,
        store: SharedStore,
        options: BrokerOptions,
        *,
        default_lease_s: float,
        max_lease_s: float,
        max_leases_per_client: int,
        max_lease_age_s: float = math.inf,
        is_idle: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
        unix_clock: Callable[[], float] = time.time,
    ) -> None:
        """Takes the store over: ``stop`` closes it. is_idle: asked before the store is checked. Needs a
        running event loop."""
        self.store = store
        self.options = options
        self.counters = DeliveryCounters()
        self.num_integrity_failures = 0
        self.is_idle = is_idle
        self.leases = LeaseTable(clock, max_lease_s, max_leases_per_client, max_age_s=max_lease_age_s)
        self._default_lease_s = default_lease_s
        self._clock = clock
        self._unix_clock = unix_clock
        self._loop = asyncio.get_running_loop()
        isolated = {name for name, _ in store.named_parts() if name is not None}
        self.broker = Broker(options, OfferBook(isolated), on_disconnect=self._when_owner_leaves())
        self.fetches = FetchDesk(self._loop, self.broker.counters, take_back=self.leases.take_back)
        self.broker.take_fetches(self.fetches)
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = 0.0  # of the timer; uvloop's handle of a time that has passed tells none
        self._upkeep: asyncio.Task[None] | None = None
        self._idle_check: IdleCheck | None = None

    # -- life ------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Offers every arena to whoever may see it. Raises ConfigurationError for a socket that cannot be
        bound."""
        self.broker.start()
        for namespace, part in self.store.named_parts():
            descriptors = part.arena.export_all()
            data_fd, page_fd, directory_fd = descriptors
            try:
                offer = offer_of(part.arena.geometry)
                self.broker.offer(offer, data_fd, page_fd, namespace, directory_fd=directory_fd)
            finally:
                close_all(descriptors)
        is_wrong = self._bookkeeping_is_wrong
        self._idle_check = IdleCheck(self._integrity_steps, self._stamp, lambda: self.is_idle(), is_wrong)
        self._upkeep = self._loop.create_task(self._keep_up(self._idle_check))

    async def drain(self, grace_s: float) -> bool:
        """Waits for the leases that are out. False when some outlived the grace: they end with ``stop``."""
        ends_s = self._clock() + grace_s
        while True:
            self.leases.expire()
            if not len(self.leases):
                return True
            if self._clock() >= ends_s:
                log.warning("leases are cut off", leases=len(self.leases), waited_s=round(grace_s, 1))
                return False
            await asyncio.sleep(DRAIN_POLL_S)

    async def stop(self) -> None:
        """Tells readers, ends every lease, gives the memory up. Twice is once."""
        self.fetches.answer = None
        if self._idle_check is not None:
            self._idle_check.stop()
            self._idle_check = None  # it refers to this object, whose memory goes with the last reference
        if self._upkeep is not None:
            self._upkeep.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._upkeep
            self._upkeep = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not await asyncio.to_thread(self.broker.stop):
            log.error("the broker did not stop", path=self.options.path)
        if isinstance(self.store, TieredStore):
            self.store.refuse_copies()
            if not await ends_within(DEVICE_STOP_S, self.store.wait_for_copies):
                log.error(
                    "work on the device goes on; its memory goes with the process", waited_s=DEVICE_STOP_S
                )
                return
        self.store.close()

    def kinds(self) -> list[ArenaGeometry]:
        """One arena of each kind that there is."""
        found = {
            (part.arena.geometry.kind, part.arena.geometry.device_uuid): part for part in self.store.parts()
        }
        return [part.arena.geometry for part in found.values()]

    # -- leases ----------------------------------------------------------------------------------------

    def check_owner(self, owner_id: str, namespace: str) -> None:
        """Raises TransportUnavailable unless this connection lives and is the namespace's."""
        if not self.broker.is_connected(owner_id, namespace):
            self.counters.no_owner += 1
            raise TransportUnavailable(
                f"no connection to the broker in namespace {namespace!r} has the owner id that was given; "
                "connect, or ask for inline rows"
            )

    def lease(self, held: Held, namespace: str, terms: LeaseTerms) -> LeasedRows | None:
        """A lease on rows that the caller holds, or None when they have to be delivered inline: the store
        had no room for them, or the owner has too many leases. Raises TransportUnavailable when the owner's
        connection is gone, InvalidRequest for a time or number of readers out of bounds."""
        self.check_owner(terms.owner_id, namespace)
        if held.arena is None or held.slot is None or terms.kind not in (None, held.arena.geometry.kind):
            self.counters.not_held += 1
            return None
        ttl_s = self._default_lease_s if terms.ttl_s is None else terms.ttl_s
        try:
            lease = self.leases.grant(
                held.arena, held.slot, terms.owner_id, ttl_s=ttl_s, num_readers=terms.num_readers
            )
        except Overloaded:
            self.counters.too_many += 1
            return None
        try:
            # An owner that left since the first look may have been forgotten before this lease was made.
            self.check_owner(terms.owner_id, namespace)
        except TransportUnavailable:
            self.leases.release_all(terms.owner_id)
            raise
        self._arm()
        self.counters.shared += 1
        return LeasedRows(
            lease.lease_id,
            held.arena.geometry,
            held.slot.index,
            held.slot.offset_bytes,
            lease.generation,
            self._unix_ms(lease.expires_at_s),
        )

    def renew(self, lease_id: bytes, ttl_s: float | None, owner_id: str | None = None) -> int:
        """When the lease ends now, in milliseconds of Unix time. owner_id: see ``release``. Raises
        StaleLease, UnknownLease."""
        lease = self.leases.renew(lease_id, self._default_lease_s if ttl_s is None else ttl_s, owner_id)
        self._arm()
        return self._unix_ms(lease.expires_at_s)

    def release(self, lease_id: bytes, reader: int | None, owner_id: str | None = None) -> bool:
        """Whether this released anything. owner_id: whom the lease was granted to, where the caller says.
        Raises UnknownLease, for another owner's lease too, and InvalidRequest."""
        return self.leases.release(lease_id, reader, owner_id)

    # -- upkeep ----------------------------------------------------------------------------------------

    def _when_owner_leaves(self) -> Callable[[str], None]:
        """For the broker's thread. Does not refer to this object, whose arenas go with its last reference."""
        loop, release_all = self._loop, self.leases.release_all

        def owner_left(owner_id: str) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and with it every lease
                loop.call_soon_threadsafe(release_all, owner_id)

        return owner_left

    def _arm(self) -> None:
        """Sees to it that ``expire`` runs when the next lease ends."""
        expires_s = self.leases.next_expiry_s()
        if expires_s is None:
            return
        when_s = self._loop.time() + max(0.0, expires_s - self._clock())
        if self._timer is not None and not self._timer.cancelled() and self._due_s <= when_s:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._due_s = self._loop.call_at(when_s, self._expire), when_s

    def _expire(self) -> None:
        self._timer = None
        self.leases.expire()
        self._arm()

    async def _keep_up(self, idle_check: IdleCheck) -> None:
        while True:
            for part in self.store.parts():
                part.arena.page.beat()
            idle_check.beat()
            await asyncio.sleep(BEAT_S)

    def _integrity_steps(self) -> Iterator[None]:
        return chain(self.store.integrity_steps(), self.leases.integrity_steps())

    def _stamp(self) -> Hashable:
        parts = tuple((part.arena.num_changes, part.counters.hits) for part in self.store.parts())
        return parts, self.leases.stamp()

    def _bookkeeping_is_wrong(self, error: Exception) -> None:
        self.num_integrity_failures += 1
        # As text: a renderer that shows the frames' variables would show every item.
        log.error("the arenas' bookkeeping is wrong", found="".join(traceback.format_exception(error)))

    def _unix_ms(self, at_s: float) -> int:
        """Rounded down: a reader never believes in more time than there is."""
        return math.floor((self._unix_clock() + at_s - self._clock()) * 1e3)


def open_shared_store(settings: Settings) -> SharedStore:
    """The arenas that the settings ask for: on the host, and in front of them on the device where that can be
    had. Takes long: not for the event loop. Raises ConfigurationError."""
    host = settings.arena_bytes, settings.isolated_namespaces, settings.namespace_shares
    on_device = _open_device_partitions(settings)
    if on_device is None:
        return open_host_partitions(*host)
    try:
        pin = torch.device(settings.device).type == "cuda"
        return TieredStore(
            open_host_partitions(*host, pin=pin), on_device, max_unkept_bytes=settings.max_undelivered_bytes
        )
    except BaseException:
        on_device.close()
        raise


def _open_device_partitions(settings: Settings) -> PartitionedStore | None:
    """None where no device memory is to be shared, or where none can be and nobody insists."""
    device, wanted_bytes = torch.device(settings.device), settings.device_arena_bytes
    # A CUDA device that is not there is the model's loader to report.
    if device.type != "cuda" or wanted_bytes == 0 or not torch.cuda.is_available():
        return None
    try:
        return open_device_partitions(
            device,
            DEVICE_ARENA_BYTES if wanted_bytes is None else wanted_bytes,
            settings.isolated_device_bytes,
            settings.namespace_shares,
        )
    except ConfigurationError as error:
        if wanted_bytes is not None or settings.isolated_device_bytes:
            raise
        log.warning("rows are not shared in device memory", reason=error.message)
        return None


def share(settings: Settings, store: SharedStore, instance_id: str, calls_name: str = "") -> SharedMemory:
    """Delivery as the settings say; not started. calls_name: see ``BrokerOptions``."""
    return SharedMemory(
        store,
        BrokerOptions(
            settings.broker_path,
            instance_id,
            host_id(),
            access=BrokerAccess(
                opens=NamespaceTokens(
                    settings.namespace_tokens(),
                    file=settings.tokens_file,
                    open_namespaces=settings.open_namespaces and settings.broker_open_namespaces,
                ).opens,
                allowed_uids=frozenset(settings.broker_allowed_uids) or None,
            ),
            mode=int(settings.broker_mode, 8),
            gid=settings.broker_gid,
            calls_name=calls_name,
        ),
        default_lease_s=settings.lease_default_ms / 1e3,
        max_lease_s=settings.lease_limit_ms / 1e3,
        max_leases_per_client=settings.max_leases_per_client,
        max_lease_age_s=settings.lease_max_age_ms / 1e3,
    )


async def ends_within(timeout_s: float, wait: Callable[[], None]) -> bool:
    """Whether a wait that blocks has ended in time, in whichever way; else it goes on, on a thread that the
    interpreter's end does not wait for."""
    ended: Future[None] = Future()

    def run() -> None:
        try:
            wait()
        except Exception:
            log.exception("what was waited for at the end failed")
        ended.set_result(None)

    ended.set_running_or_notify_cancel()
    threading.Thread(target=run, name="shared-memory-stop", daemon=True).start()
    done, _ = await asyncio.wait([asyncio.wrap_future(ended)], timeout=timeout_s)
    return bool(done)


def offer_of(arena: ArenaGeometry) -> ArenaOffer:
    """What the broker tells of an arena."""
    assert arena.kind in ("host", "device")
    return ArenaOffer(
        arena.arena_id,
        "device" if arena.kind == "device" else "host",
        arena.size_bytes,
        arena.page_bytes,
        arena.device_uuid,
        ProbeSlot(arena.probe.offset_bytes, arena.probe.num_bytes, arena.probe.sha256),
        arena.directory_bytes,
    )


def host_id() -> str:
    """Equal for all processes of one running kernel, in whichever containers, and for no others."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
