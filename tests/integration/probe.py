"""A second caller that behaves well, beside one that does not."""

from __future__ import annotations

import threading
import time
from collections import Counter

import grpc

from vision_encoder.v1 import encoder_pb2 as pb
from vision_encoder.v1 import encoder_pb2_grpc


class Probe:
    """Calls on a connection of its own, one after the other, while the block runs. outcomes: "ok", or the
    code and text of a failure. slowest_s: of all calls."""

    def __init__(self, target: str, *, token: str = "", namespace: str = "", pause_s: float = 0.002) -> None:
        self.outcomes: Counter[str] = Counter()
        self.slowest_s = 0.0
        self._target, self._namespace, self._pause_s = target, namespace, pause_s
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    @property
    def num_failed(self) -> int:
        return self.outcomes.total() - self.outcomes["ok"]

    def wait_for(self, num_calls: int, timeout_s: float = 60) -> None:
        """Returns after that many calls."""
        ends_s = time.monotonic() + timeout_s
        while self.outcomes.total() < num_calls:
            assert time.monotonic() < ends_s, self.outcomes
            time.sleep(0.01)

    def _run(self) -> None:
        options = [("grpc.use_local_subchannel_pool", 1)]
        request = pb.LookupRequest(keys=[bytes(32)], namespace=self._namespace)
        with grpc.insecure_channel(self._target, options=options) as channel:
            stub = encoder_pb2_grpc.VisionEncoderStub(channel)
            while not self._stop.is_set():
                started_s = time.monotonic()
                try:
                    stub.Lookup(request, timeout=20, metadata=self._metadata)
                    outcome = "ok"
                except grpc.RpcError as error:
                    outcome = f"{error.code().name} {error.details()}"
                self.slowest_s = max(self.slowest_s, time.monotonic() - started_s)
                self.outcomes[outcome] += 1
                self._stop.wait(self._pause_s)

    def __enter__(self) -> Probe:
        self._thread.start()
        self.wait_for(3)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(30)
        assert not self._thread.is_alive()
