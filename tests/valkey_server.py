"""A real server for tests of the shared tier: Valkey's, or Redis's where that is what is installed.

``REQUIRE_VALKEY=1`` makes a missing server a failure instead of a skip.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

PROGRAMS = ("valkey-server", "redis-server")


def find_program() -> str:
    """Skips, or fails where a server is required."""
    for name in PROGRAMS:
        if (found := shutil.which(name)) is not None:
            return found
    reason = f"needs {' or '.join(PROGRAMS)} on PATH (apt-get install valkey-server, or redis-server)"
    if os.environ.get("REQUIRE_VALKEY") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


class ValkeyProcess:
    """One server on a unix socket in a folder of its own, nothing on disk. options: of its command line."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.path = folder / "valkey.sock"
        self._command = [
            find_program(), "--port", "0", "--unixsocket", str(self.path), "--save", "",
            "--appendonly", "no", "--dir", str(folder), *options,
        ]  # fmt: skip
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"unix://{self.path}"

    def start(self) -> None:
        self.path.unlink(missing_ok=True)
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)
        ends_s = time.monotonic() + 20
        while True:
            try:
                if self.call("PING") == b"+PONG\r\n":
                    return
            except OSError:
                pass
            assert self._process.poll() is None, "the server ended while it started"
            assert time.monotonic() < ends_s, "the server did not start"
            time.sleep(0.01)

    def call(self, *words: str | bytes) -> bytes:
        """The raw reply to one command, by a socket of its own: no code under test is in between."""
        parts = [word.encode() if isinstance(word, str) else word for word in words]
        command = b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%s\r\n" % (len(each), each) for each in parts)
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(10)
            connection.connect(str(self.path))
            connection.sendall(command)
            reply = connection.recv(1 << 16)
            if reply[:1] == b"$" and not reply.startswith(b"$-1"):
                size = int(reply[1 : reply.index(b"\r\n")]) + reply.index(b"\r\n") + 4
                while len(reply) < size:
                    reply += connection.recv(1 << 20)
            return reply

    def names(self) -> list[bytes]:
        lines = self.call("KEYS", "*").split(b"\r\n")
        return [line for line in lines[1:] if line[:1] not in (b"$", b"")]

    def value(self, key: bytes) -> bytes:
        reply = self.call("GET", key)
        return reply[reply.index(b"\r\n") + 2 : -2]

    def stall(self) -> None:
        """It answers nothing, and its connections stay."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """As when its host lost power. Twice is once."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(20)
            self._process = None
