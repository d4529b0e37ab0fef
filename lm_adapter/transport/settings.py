"""What a client wishes of the ways in which rows come, and what it is told of the one in use."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypedDict

from lm_adapter.errors import InvalidRequest, MissingDependency
from lm_adapter.transport.followed import Token, token_source

if TYPE_CHECKING:
    import torch

__all__ = [
    "HASHING",
    "PIXELS",
    "TRANSPORTS",
    "PixelInput",
    "TransportChoice",
    "TransportOptions",
    "TransportSettings",
    "blake3_is_installed",
]

TRANSPORTS = ("device", "host", "inline")
"""Every way there is, in the order in which they are preferred."""
PIXELS = ("auto", "memfd", "shm", "inline")
HASHING = ("auto", "on", "off")


class TransportOptions(TypedDict, total=False):
    """Arguments of a client.

    transports: the ways in which rows may come, the best first; by default all: by lease on device memory,
    through shared host memory, inline. Without ``inline`` there is no fallback, and calls raise
    TransportUnavailable where nothing else is possible. broker_path: of the broker's socket as this process
    sees it, when it is not as the server announces. token: opens the namespace, over gRPC and at the broker;
    a TokenFile is followed. device: the GPU that rows go to by lease; by default the caller's current one,
    once the process uses CUDA. lease_ms: how long leases are asked for; 0 for the server's default.
    directory: whether rows that are resident are looked up and copied without asking the encoder, where they
    come in shared memory; otherwise each is leased.
    local_calls: whether calls whose rows come in shared memory go over a unix socket of their own, where the
    encoder has one beside the broker's; otherwise by gRPC.
    hash_items: whether items without a digest are hashed here, so that they too are looked for where rows
    come in shared memory; nowhere else is anything hashed. ``auto``: where the package blake3 is installed,
    and as far as it costs little beside the call that it may save (``hashing``); ``on``: whatever its size
    and memory, and MissingDependency without the package; ``off``.
    pixels: how pixel tensors go to the service, ``inline``, ``shm`` (named segments in shm_dir, a folder that
    both sides see), ``memfd`` (through the broker), or ``auto``, a memfd for large ones where rows come in
    shared memory too. What the service does not take in this way goes inline.
    """

    transports: Sequence[str]
    broker_path: str
    token: Token
    device: str | int | torch.device | None
    lease_ms: int
    directory: bool
    local_calls: bool
    hash_items: str
    pixels: str
    shm_dir: str


@dataclass(frozen=True)
class PixelInput:
    """What a server takes of pixel tensors in shared memory. name_prefixes: of named segments; published:
    memfds through the broker; max_tensor_bytes: of one tensor."""

    host_id: str
    name_prefixes: tuple[str, ...]
    published: bool
    max_tensor_bytes: int


@dataclass(frozen=True)
class TransportSettings:
    """``TransportOptions``, checked."""

    transports: Sequence[str] = TRANSPORTS
    broker_path: str = ""
    token: Token = field(default="", repr=False)
    token_now: Callable[[], str] = field(init=False, repr=False, compare=False)
    device: str | int | torch.device | None = None
    lease_ms: int = 0
    directory: bool = True
    local_calls: bool = True
    hash_items: str = "auto"
    pixels: str = "auto"
    shm_dir: str = "/dev/shm"  # noqa: S108

    def __post_init__(self) -> None:
        """Raises InvalidRequest, and MissingDependency where items are to be hashed and cannot be."""
        names = self.transports
        if isinstance(names, str) or not names or len(set(names)) != len(names):
            raise InvalidRequest(f"transports is a sequence of different names, found {names!r}")
        for name in names:
            if name not in TRANSPORTS:
                raise InvalidRequest(f"transports has {name!r}, possible are {', '.join(TRANSPORTS)}")
        if self.broker_path and not self.broker_path.startswith("/"):
            raise InvalidRequest(f"broker_path is an absolute path, found {self.broker_path!r}")
        for name in ("directory", "local_calls"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequest(f"{name} is {getattr(self, name)!r}, possible are True and False")
        if self.hash_items not in HASHING:
            raise InvalidRequest(f"hash_items is {self.hash_items!r}, possible are {', '.join(HASHING)}")
        if self.hash_items == "on" and not blake3_is_installed():
            raise MissingDependency("blake3", "hash_items='on'")
        if self.pixels not in PIXELS:
            raise InvalidRequest(f"pixels is {self.pixels!r}, possible are {', '.join(PIXELS)}")
        if not self.shm_dir.startswith("/"):
            raise InvalidRequest(f"shm_dir is an absolute path, found {self.shm_dir!r}")
        if not 0 <= self.lease_ms < 1 << 32:
            raise InvalidRequest(f"lease_ms is {self.lease_ms}, 0 to {(1 << 32) - 1} are possible")
        object.__setattr__(self, "token_now", token_source(self.token))

    @property
    def inline_allowed(self) -> bool:
        return "inline" in self.transports


@dataclass(frozen=True)
class TransportChoice:
    """How rows come to a client now: ``device``, ``host``, ``inline``, or ``none`` where no way that the
    client allows is possible. rejected: the ways that it would prefer, and why not. resident: how rows that
    are in that memory already are read, ``directory`` or ``lease``; empty for inline."""

    name: str
    reason: str
    rejected: Mapping[str, str] = field(default_factory=dict)
    resident: str = ""

    @property
    def log_fields(self) -> dict[str, object]:
        """For a log record."""
        return {
            "transport": self.name,
            "reason": self.reason,
            "rejected": dict(self.rejected),
            "resident": self.resident,
        }

    @property
    def is_shared(self) -> bool:
        """Whether rows come through shared memory."""
        return self.name in ("device", "host")


def blake3_is_installed() -> bool:
    """Whether content can be hashed; nothing is imported to find out."""
    try:
        return importlib.util.find_spec("blake3") is not None
    except ImportError:  # an importer of somebody's own that keeps it out of reach
        return False
