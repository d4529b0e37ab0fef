"""A running service per family, in this process, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import TypeAlias

import grpc
import pytest
import torch

from encoder_service.checkpoints.synthetic import make_checkpoint
from encoder_service.config import parse_settings
from encoder_service.serve import Service
from lm_adapter import VisionEncoderClient
from tests.families import REPRESENTATIVE
from vision_encoder.v1 import encoder_pb2_grpc


class RunningService:
    """A service on an event loop of its own thread. ``call`` runs a function on that loop."""

    def __init__(self, **settings: object) -> None:
        self._settings = parse_settings(**settings)
        self._ready = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True)
        self.service: Service
        self.loop: asyncio.AbstractEventLoop

    async def _main(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.service = Service(self._settings)
        try:
            await self.service.start()
        except BaseException as error:
            self._error = error
            self._ready.set()
            return
        self._ready.set()
        await self.service.wait()
        await self.service.stop()

    def start(self) -> RunningService:
        self._thread.start()
        assert self._ready.wait(120)
        if self._error is not None:
            raise self._error
        return self

    def stop(self) -> None:
        with contextlib.suppress(RuntimeError):  # the service has ended by itself, and its loop is closed
            self.loop.call_soon_threadsafe(self.service.request_stop)
        self._thread.join(60)
        assert not self._thread.is_alive()

    @property
    def target(self) -> str:
        return self.service.listen[0]

    def metric(self, line: str) -> float:
        """The value of a metric with its labels, as its text begins; of several lines their sum."""
        rows = self.service.metrics.exposition().decode().splitlines()
        return sum(float(row.rpartition(" ")[2]) for row in rows if row.startswith(line))

    def on_loop(self, function: object) -> object:
        async def call() -> object:
            return function()  # type: ignore[operator]

        return asyncio.run_coroutine_threadsafe(call(), self.loop).result(30)


@contextmanager
def running(model: Path, device: torch.device, **settings: object) -> Iterator[RunningService]:
    given: dict[str, object] = {
        "model": model,
        "device": str(device),
        "dtype": "float32",
        "listen": ("127.0.0.1:0",),
        "admin_listen": "127.0.0.1:0",
        "broker_path": "",
        "drain_grace_s": 10,
        **settings,
    }
    service = RunningService(**given).start()
    try:
        yield service
    finally:
        service.stop()


Serve: TypeAlias = Callable[..., AbstractContextManager[RunningService]]


@pytest.fixture(scope="session")
def serve(checkpoints: dict[str, Path], device: torch.device) -> Serve:
    """Runs a Qwen3-VL service with the given settings: a context manager."""
    return partial(running, checkpoints["qwen3_vl"], device)


def tokens_file(folder: Path, *lines: str) -> Path:
    """lines: namespace=token."""
    file = folder / "tokens"
    file.write_text("".join(f"{line}\n" for line in lines))
    return file


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny checkpoint with its language model, per family."""
    root = tmp_path_factory.mktemp("checkpoints")
    for family in REPRESENTATIVE:
        make_checkpoint(root / family, family, "tiny", 5, with_lm=True)
    return {family: root / family for family in REPRESENTATIVE}


@pytest.fixture(scope="session")
def shared_kind(device: torch.device) -> str:
    """Where a service with a broker keeps rows at first, and how clients that may read there get them."""
    has_bindings = importlib.util.find_spec("cuda") is not None and importlib.util.find_spec("cuda.bindings")
    return "device" if device.type == "cuda" and has_bindings else "host"


@pytest.fixture(scope="session")
def service(serve: Serve) -> Iterator[RunningService]:
    """A Qwen3-VL service that tests share; each test uses content of its own."""
    with serve() as found:
        yield found


@pytest.fixture
def client(service: RunningService) -> Iterator[VisionEncoderClient]:
    with VisionEncoderClient(service.target, timeout_s=60) as found:
        yield found


@contextmanager
def connected(service: RunningService) -> Iterator[encoder_pb2_grpc.VisionEncoderStub]:
    """The generated stub on a connection, for messages that the adapter would not send."""
    with grpc.insecure_channel(service.target) as channel:
        yield encoder_pb2_grpc.VisionEncoderStub(channel)
