"""Two encoders behind a real Envoy, as in `bench/harness/fleet`."""

from __future__ import annotations

import secrets
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from bench.harness.fleet.encoders import Encoder, EncoderProcesses
from bench.harness.fleet.fleet import SETTINGS
from bench.harness.fleet.gateway import NAME, Gateway
from bench.harness.fleet.names import NameServer
from tests.programs import program


class Replicas:
    """The gateway, and encoders that stop and start again at the same addresses; none runs at first."""

    def __init__(self, checkpoint: Path, dtype: str, folder: Path) -> None:
        program("envoy")
        network = f"127.{secrets.randbelow(200) + 20}.{secrets.randbelow(250) + 1}"
        self._addresses = f"{network}.1", f"{network}.2"
        self._running: dict[str, Encoder] = {}
        with ExitStack() as stack:
            names = stack.enter_context(NameServer(NAME))
            names.addresses = self._addresses
            settings = {**SETTINGS, "model": str(checkpoint), "dtype": dtype}
            self._processes = stack.enter_context(EncoderProcesses(folder, settings))
            self.gateway = stack.enter_context(Gateway(folder, names.port))
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def target(self) -> str:
        return self.gateway.target

    def start(self) -> None:
        """Those that do not run."""
        started = [self._processes.start(one) for one in self._addresses if one not in self._running]
        for encoder in started:
            encoder.wait_ready()
            self._running[encoder.address] = encoder
        self.gateway.wait_members(len(self._addresses))

    def stop(self) -> None:
        for address in list(self._running):
            self.kill(address)

    def kill(self, address: str) -> None:
        """kill -9."""
        encoder = self._running.pop(address)
        encoder.send(signal.SIGKILL)
        encoder.wait_ended()
