"""A fleet on one machine: encoders, the name that lists them, gateways before them, callers.

Owns which replicas there are and what is done to them: started, killed, drained, replaced. A replica is
listed under the name until it drains, as a pod of a headless Service is.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import signal
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from bench.harness.fleet.callers import Callers, Run
from bench.harness.fleet.encoders import CutOffNetwork, Encoder, EncoderProcesses
from bench.harness.fleet.gateway import CONFIG, NAME, AccessLog, Change, Gateway
from bench.harness.fleet.images import image_file
from bench.harness.fleet.names import NameServer
from bench.harness.waiting import wait_until
from lm_adapter import AsyncVisionEncoderClient, EncodedRows, ImageItem, VisionEncoderClient

NUM_IMAGES = 128
NUM_PROBES = 3000
"""Fewer would show more keys that move than a bound of 10 % above their share allows, by chance."""
PROBES_AT_ONCE = 250
READY_S = 60.0
SETTINGS = {
    "device": "cpu",
    "dtype": "float32",
    "torch_threads": 1,
    "ingest_threads": 1,
    "drain_grace_s": 10,
    "broker_path": "",
}


class Fleet:
    """A context manager. Replicas are at 127.x.y.1, 127.x.y.2, ..., each fleet in a network of its own."""

    def __init__(
        self,
        folder: Path,
        checkpoint: Path,
        *,
        num_replicas: int = 4,
        num_gateways: int = 2,
        num_callers: int = 2,
        concurrency: int = 6,
        config: Path = CONFIG,
        change: Change | None = None,
    ) -> None:
        """concurrency: calls at a time of one caller process."""
        self.folder = folder
        self._concurrency = concurrency
        self._num_replicas = num_replicas
        self._network = f"127.{secrets.randbelow(200) + 20}.{secrets.randbelow(250) + 1}"
        self._numbers = itertools.count(1)
        self._settings = {**SETTINGS, "model": str(checkpoint)}
        self._stack = ExitStack()
        self.replicas: list[Encoder] = []
        with ExitStack() as stack:
            self.names = stack.enter_context(NameServer(NAME))
            self._encoders = stack.enter_context(EncoderProcesses(folder, self._settings))
            self._callers = stack.enter_context(Callers(folder, num_processes=num_callers))
            self.gateways = [
                Gateway(folder, self.names.port, config=config, change=change) for _ in range(num_gateways)
            ]
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        with self._stack:
            self.add(self._num_replicas)
            self._write_expected_rows()
            for gateway in self.gateways:
                self._stack.enter_context(gateway)
            self.wait_members()
            self._stack = self._stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    # -- calls -----------------------------------------------------------------------------------------

    @property
    def target(self) -> str:
        """Of clients: all gateways, taken in turns."""
        return "ipv4:" + ",".join(gateway.target for gateway in self.gateways)

    def run(self, *, num_images: int = NUM_IMAGES, num_bytes: int = 0, concurrency: int = 0) -> Run:
        """Callers that send without a pause. num_bytes: of each image's file. concurrency: calls at a time of
        one caller, if not the fleet's."""
        return self._callers.run(
            target=self.target,
            expected=str(self.folder / "expected.npy"),
            num_images=num_images,
            num_bytes=num_bytes,
            concurrency=concurrency or self._concurrency,
        )

    def warm_up(self) -> None:
        """Every image is with its replica afterwards."""
        self.encode([image_file(number) for number in range(NUM_IMAGES)])

    def encode(self, files: Sequence[bytes], timeout_s: float = READY_S) -> list[EncodedRows]:
        """Raises what the adapter raises."""

        async def send() -> list[EncodedRows]:
            async with AsyncVisionEncoderClient(self.target, fleet=True, timeout_s=timeout_s) as client:
                return [await client.encode_one(ImageItem(file)) for file in files]

        return asyncio.run(send())

    def active_calls(self, encoder: Encoder) -> int:
        """Calls that it has from all gateways."""
        return sum(gateway.active_calls(encoder.address) for gateway in self.gateways)

    def wait_busy(self) -> Encoder:
        """A replica that has a call."""
        found: list[Encoder] = []

        def is_busy() -> bool:
            found.extend(encoder for encoder in self.replicas if self.active_calls(encoder))
            return bool(found)

        wait_until(is_busy, "a call at any replica")
        return found[0]

    def num_held(self) -> int:
        """Files whose decoding an encoder has held, or holds now."""
        return len(list(self.folder.glob("*.held")))

    def counters(self) -> Counter[str]:
        """Envoy's counters of the cluster of encoders, summed over the gateways."""
        total: Counter[str] = Counter()
        for gateway in self.gateways:
            total.update(gateway.counters())
        return total

    def access_logs(self) -> list[AccessLog]:
        """Of all gateways, from now on."""
        return [gateway.access_log() for gateway in self.gateways]

    def owners(self, gateway: Gateway | None = None) -> dict[str, str]:
        """The replica that this gateway, or any of them, chooses, by digest, for digests that are always the
        same."""
        target = self.target if gateway is None else gateway.target
        digests = [number.to_bytes(32, "big") for number in range(NUM_PROBES)]
        logs = self.access_logs()

        async def ask() -> None:
            async with AsyncVisionEncoderClient(target, fleet=True, timeout_s=READY_S) as client:
                for start in range(0, NUM_PROBES, PROBES_AT_ONCE):
                    portion = digests[start : start + PROBES_AT_ONCE]
                    await client.lookup(portion, routing_digests=portion)

        asyncio.run(ask())
        found: dict[str, str] = {}

        def all_logged() -> bool:
            for log in logs:
                found.update((one["digest"], one["replica"]) for one in log.read() if one["digest"])
            return len(found) >= NUM_PROBES and all(digest.hex() in found for digest in digests)

        wait_until(all_logged, "the access log's entries")
        return {digest.hex(): found[digest.hex()] for digest in digests}

    # -- replicas --------------------------------------------------------------------------------------

    def wait_members(self) -> None:
        """Until every gateway takes all listed replicas for healthy."""
        for gateway in self.gateways:
            gateway.wait_members(len(self.names.addresses))

    def add(self, number: int) -> list[Encoder]:
        """New replicas, listed once they are ready."""
        started = [self._encoders.start(f"{self._network}.{next(self._numbers)}") for _ in range(number)]
        for encoder in started:
            encoder.wait_ready()
        self.replicas += started
        self.list_replicas()
        return started

    def list_replicas(self) -> None:
        self.names.addresses = tuple(encoder.address for encoder in self.replicas)

    def drain(self, encoder: Encoder) -> float:
        """As the end of a pod: no longer listed, SIGTERM, exit. Returns the seconds until it has ended."""
        self.replicas.remove(encoder)
        self.list_replicas()
        started_s = time.monotonic()
        encoder.send(signal.SIGTERM)
        encoder.wait_ended()
        assert "in_time=True" in encoder.text(), encoder.tail()
        return time.monotonic() - started_s

    def scale(self, number: int) -> None:
        """Adds replicas, or drains the latest ones at once."""
        if number > len(self.replicas):
            self.add(number - len(self.replicas))
        leaving = self.replicas[number:]
        del self.replicas[number:]
        self.list_replicas()
        for encoder in leaving:
            encoder.send(signal.SIGTERM)
        for encoder in leaving:
            encoder.wait_ended()
        self.wait_members()

    def kill(self, encoder: Encoder) -> None:
        """kill -9 while it has calls."""
        wait_until(lambda: self.active_calls(encoder), f"a call at {encoder.address}")
        encoder.send(signal.SIGKILL)

    def start_again(self, encoder: Encoder) -> Encoder:
        """A new process in the place of one that has ended, as a container that is started again."""
        started = self._encoders.start(encoder.address)
        started.wait_ready()
        self.replicas[self.replicas.index(encoder)] = started
        return started

    def processes_in(self, network: CutOffNetwork) -> EncoderProcesses:
        """A context manager."""
        return EncoderProcesses(self.folder, self._settings, namespace=network.name)

    def add_cut_off(self, network: CutOffNetwork, processes: EncoderProcesses) -> Encoder:
        """A replica in a network namespace of its own."""
        encoder = processes.start(network.address)
        encoder.wait_ready()
        self.replicas.append(encoder)
        self.list_replicas()
        return encoder

    def _write_expected_rows(self) -> None:
        """From one encoder, without a gateway."""
        items = [ImageItem(image_file(number)) for number in range(NUM_IMAGES)]
        with VisionEncoderClient(self.replicas[0].target, transports=("inline",)) as client:
            client.wait_ready(READY_S)
            outcomes = client.encode(items)
        rows = [one.numpy() for one in outcomes if isinstance(one, EncodedRows)]
        assert len(rows) == NUM_IMAGES, outcomes
        np.save(self.folder / "expected.npy", np.stack(rows))
