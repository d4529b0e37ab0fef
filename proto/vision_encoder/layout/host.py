"""The identity of a host, by which a client knows whether it can map an encoder's memory."""

from __future__ import annotations

from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def host_id() -> str:
    """The kernel's boot id, which is equal in all containers of a host. Raises OSError."""
    return _BOOT_ID.read_text().strip()
