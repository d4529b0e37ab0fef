"""Ports for servers that start later than their address is chosen, or again at the same address."""

from __future__ import annotations

import contextlib
import socket

# Below those that the kernel gives to connections and to servers that ask for any port (from 32768 on).
FIRST, END = 20_000, 32_000
_reserved: list[int] = []
"""Descriptors, which stay open until this process ends."""


def free_port(number: int = 1) -> int:
    """The first of so many in a row. Nobody listens there, and no other call in any process gets one of them
    before this process has ended."""
    for first in range(FIRST, END - number + 1):
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            names = [stack.enter_context(_free(port)) for port in range(first, first + number)]
            _reserved.extend(name.detach() for name in names)
            return first
    raise AssertionError(f"no {number} ports in a row are free from {FIRST} to {END}")


def _free(port: int) -> socket.socket:
    """Reserves the port by a name that one socket of this machine can have. Raises OSError."""
    name = socket.socket(socket.AF_UNIX)
    try:
        name.bind(f"\0vision-encoder-test-port-{port}")
        with socket.socket() as listener:
            listener.bind(("", port))
    except OSError:
        name.close()
        raise
    return name
