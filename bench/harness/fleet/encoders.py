"""Encoders of a fleet as processes, each at an address of its own.

Owns their start through ``encoder_main`` (one fork each), their signals, and the network namespace of those
that a test cuts off. All listen on the port that the gateway's shipped configuration names.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from bench.harness.pods import environment
from bench.harness.processes import ROOT
from bench.harness.ready import ready_in
from bench.harness.waiting import wait_until

PORT = 50051
STOP_S = 30.0


@dataclass(frozen=True)
class Encoder:
    """One process. pidfd: names it without confusion with a later process of the same id."""

    address: str
    pid: int
    pidfd: int
    log: Path

    @property
    def target(self) -> str:
        return f"{self.address}:{PORT}"

    @property
    def has_ended(self) -> bool:
        return bool(select.select([self.pidfd], [], [], 0)[0])

    def send(self, number: signal.Signals) -> None:
        """Harmless for a process that has ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def wait_ended(self) -> None:
        ended = select.select([self.pidfd], [], [], STOP_S)[0]
        assert ended, f"the encoder at {self.address} has not ended after {STOP_S:g} s: {self.tail()}"

    def wait_ready(self) -> None:
        wait_until(lambda: self.has_ended or self.is_ready(), f"the encoder at {self.address}")
        assert not self.has_ended, f"the encoder at {self.address} has ended: {self.tail()}"

    def is_ready(self) -> bool:
        return bool(ready_in(self.text().splitlines(keepends=True)))

    def text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def tail(self) -> str:
        return self.text()[-2000:]


class EncoderProcesses:
    """Starts encoders in one network namespace; a context manager that ends them all."""

    def __init__(self, folder: Path, settings: dict[str, Any], *, namespace: str = "") -> None:
        """settings: of every encoder. namespace: of ``ip netns``; empty for this process's own."""
        self._folder = folder
        self._settings = settings
        within = ["ip", "netns", "exec", namespace] if namespace else []
        with (folder / f"encoder-main{namespace}.log").open("ab") as errors:
            self._process = subprocess.Popen(
                [*within, sys.executable, "-m", "bench.harness.fleet.encoder_main"],
                cwd=ROOT,
                env=environment(""),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self.started: list[Encoder] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(STOP_S)
        self._process.stdout.close()
        for encoder in self.started:
            os.close(encoder.pidfd)

    def start(self, address: str, **settings: Any) -> Encoder:
        """A new process, which is not ready yet."""
        log = self._folder / f"encoder-{address}-{len(self.started)}.log"
        given = {
            **self._settings,
            "listen": [f"{address}:{PORT}"],
            "admin_listen": "",
            **settings,
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"log": str(log), "settings": given}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the process that starts encoders has ended"
        pid = json.loads(line)["pid"]
        encoder = Encoder(address, pid, os.pidfd_open(pid), log)
        self.started.append(encoder)
        return encoder


class CutOffNetwork:
    """A network namespace with one address, joined to this host by a pair of devices; a context manager.
    ``cut`` loses all packets that leave it, as a failing switch does: neither side is informed."""

    def __init__(self) -> None:
        token = secrets.token_hex(3)
        self.name = f"fleet-{token}"
        self._device = f"vef{token}"
        network = f"10.{secrets.randbelow(100) + 100}.{secrets.randbelow(250) + 1}"
        self.host_address, self.address = f"{network}.1", f"{network}.2"

    def __enter__(self) -> Self:
        ip("netns", "add", self.name)
        try:
            inside = ("-n", self.name)
            ip("link", "add", self._device, "type", "veth", "peer", "name", "eth0", "netns", self.name)
            ip("address", "add", f"{self.host_address}/30", "dev", self._device)
            ip("link", "set", self._device, "up")
            ip(*inside, "address", "add", f"{self.address}/30", "dev", "eth0")
            ip(*inside, "link", "set", "lo", "up")
            ip(*inside, "link", "set", "eth0", "up")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """The pair of devices goes with the namespace."""
        ip("netns", "delete", self.name)

    def cut(self) -> None:
        ip("-n", self.name, "route", "add", "blackhole", f"{self.host_address}/32")

    def mend(self) -> None:
        ip("-n", self.name, "route", "delete", "blackhole", f"{self.host_address}/32")


def ip(*arguments: str) -> None:
    """Needs to be root."""
    ended = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, f"ip {' '.join(arguments)}: {ended.stderr.strip()}"
