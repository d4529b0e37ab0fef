"""A vision encoder for tests: real sockets, the whole v1 service, made-up rows. No torch, no model.

Owns the fake's life: start, stop, restart at the same address. What it answers is ``fake_service``'s, how it
misbehaves ``fake_faults``'. Rows are a function of the content digest alone (``fake_rows``), so that a test
can say beforehand what must arrive::

    with FakeEncoder() as fake, VisionEncoderClient(fake.target) as client:
        rows = client.encode_one(ImageItem(jpeg_bytes, digest=digest))
        assert (rows.numpy() == fake_rows(digest, rows.num_rows, rows.width)).all()

Items sent without a digest are hashed with BLAKE3, which needs the package ``blake3``; without it they fail.
"""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self

import grpc

from lm_adapter.fake_faults import Fault
from lm_adapter.fake_script import CallRecord, FakeScript, FakeSharing, fake_model, fake_rows
from lm_adapter.fake_service import FakeService
from lm_adapter.types import ModelInfo

__all__ = ["CallRecord", "FakeEncoder", "FakeScript", "FakeSharing", "Fault", "fake_model", "fake_rows"]

MAX_CONCURRENT_CALLS = 128
DEFAULT_MAX_MESSAGE_BYTES = 4 << 20


class FakeEncoder:
    """An in-process gRPC server. A context manager; ``script`` may be changed while it runs.

    target: where it listens, with the real port. Counters start anew at ``restart``.
    """

    def __init__(
        self,
        listen: str = "127.0.0.1:0",
        *,
        model: ModelInfo | None = None,
        script: FakeScript | None = None,
    ) -> None:
        """listen: ``host:port`` (port 0 picks one) or ``unix:/path``; model: short for a script with it."""
        self.script = script or FakeScript()
        if model is not None:
            self.script.model = model
        self.target = listen
        self._service = FakeService(self.script)
        self._server: grpc.Server | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Binds and answers. The message limit is the script's at this moment. Raises RuntimeError when the
        address is taken or the fake runs already."""
        if self._server is not None:
            raise RuntimeError(f"the fake runs already at {self.target}")
        limit_bytes = self.script.limits.max_message_bytes or DEFAULT_MAX_MESSAGE_BYTES
        self._service = FakeService(self.script)
        server = grpc.server(
            ThreadPoolExecutor(MAX_CONCURRENT_CALLS, thread_name_prefix="fake-encoder"),
            handlers=self._service.handlers(),
            options=[("grpc.max_receive_message_length", limit_bytes), ("grpc.so_reuseport", 0)],
        )
        port = server.add_insecure_port(self.target)
        if not self.target.startswith("unix:"):
            self.target = f"{self.target.rpartition(':')[0]}:{port}"
        server.start()
        self._server = server

    def stop(self, grace_s: float | None = None) -> None:
        """Ends the server; calls in progress are cut at once, or after ``grace_s``. Harmless when stopped."""
        if self._server is None:
            return
        if grace_s is None:
            self._service.stopping.set()
        self._server.stop(grace_s).wait()
        self._service.stopping.set()
        self._server = None

    def restart(self) -> None:
        """Stops and starts at the same address: a new instance that holds nothing."""
        self.stop()
        self.start()

    def resume(self) -> None:
        """Lets streams that stand still (Fault.HANG) go on."""
        self._service.resumed.set()

    @property
    def instance_id(self) -> str:
        return self._service.instance_id

    @property
    def num_calls(self) -> Counter[str]:
        """Calls begun, by method name."""
        return self._service.num_calls

    @property
    def num_cancelled(self) -> Counter[str]:
        """Encode and Fetch calls that ended before their stream did, by method name."""
        return self._service.num_cancelled

    @property
    def calls(self) -> list[CallRecord]:
        """The latest calls, oldest first."""
        return list(self._service.calls)
