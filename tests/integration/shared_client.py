"""A client of shared memory out of the adapter's low-level parts, in this process or as one of its own.

As a process (``python -m tests.integration.shared_client TARGET SOCKET``) it reads one command in JSON from
each line of its input and answers with one line.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc

from lm_adapter.transport.broker_client import BrokerClient
from lm_adapter.transport.control_page import ControlPageReader
from lm_adapter.transport.mapping import Mapping, map_host
from vision_encoder.v1 import encoder_pb2 as pb
from vision_encoder.v1 import encoder_pb2_grpc

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 60


class SharedClient:
    """Calls with leases, and what it has mapped."""

    def __init__(self, target: str, broker_path: str, *, namespace: str = "", token: str = "") -> None:
        self.namespace = namespace
        self.channel = grpc.insecure_channel(target)
        self.stub = encoder_pb2_grpc.VisionEncoderStub(self.channel)
        self._bearer = (("authorization", f"Bearer {token}"),) if token else ()
        self.broker = BrokerClient(broker_path, namespace=namespace, token=token)
        self.broker.connect(TIMEOUT_S)
        self._mapped: dict[bytes, tuple[Mapping, ControlPageReader]] = {}

    def __enter__(self) -> SharedClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for mapping, page in self._mapped.values():
            page.close()
            mapping.close()
        self.broker.close()
        self.channel.close()

    def lease_options(self, **given: Any) -> pb.LeaseOptions:
        session = self.broker.wait_for_session(TIMEOUT_S)
        return pb.LeaseOptions(**{"owner_id": session.owner_id.encode(), **given})

    def encode(
        self, images: Iterable[bytes], delivery: Any = pb.DELIVERY_HOST_SHM, **lease: Any
    ) -> list[Outcome]:
        request = pb.EncodeRequest(
            items=[pb.Item(modality=pb.MODALITY_IMAGE, encoded=image) for image in images],
            namespace=self.namespace,
            delivery=delivery,
            lease=self.lease_options(**lease),
        )
        return gathered(self.stub.Encode(request, timeout=TIMEOUT_S, metadata=self._bearer))

    def fetch(
        self, keys: Iterable[bytes], delivery: Any = pb.DELIVERY_HOST_SHM, **lease: Any
    ) -> list[Outcome]:
        request = pb.FetchRequest(
            keys=list(keys),
            namespace=self.namespace,
            delivery=delivery,
            lease=self.lease_options(**lease),
        )
        return gathered(self.stub.Fetch(request, timeout=TIMEOUT_S, metadata=self._bearer))

    def read(self, result: pb.ItemResult) -> bytes | None:
        """The rows through the mapping; None when they are stale."""
        rows = result.lease if result.WhichOneof("rows") == "lease" else result.host
        mapping, page = self.mapped(rows.arena_id)
        data = mapping.tensor[rows.offset_bytes : rows.offset_bytes + result.rows_bytes].numpy().tobytes()
        return data if page.unchanged(rows.slot_index, rows.generation) else None

    def mapped(self, arena_id: bytes) -> tuple[Mapping, ControlPageReader]:
        if arena_id not in self._mapped:
            with self.broker.attach(arena_id) as attachment:
                geometry = attachment.geometry
                mapping = map_host(attachment.data_fd, geometry.size_bytes)
                page = ControlPageReader(attachment.page_fd, geometry.page_bytes, arena_id=arena_id)
            probe = page.probe
            end = probe.offset_bytes + probe.num_bytes
            assert probe.matches(mapping.tensor[probe.offset_bytes : end].numpy().tobytes())
            self._mapped[arena_id] = mapping, page
        return self._mapped[arena_id]

    def release(self, *lease_ids: bytes, reader: int | None = None) -> pb.ReleaseResponse:
        return self.stub.Release(pb.ReleaseRequest(lease_ids=lease_ids, reader=reader), timeout=TIMEOUT_S)

    def renew(self, *lease_ids: bytes, extend_ms: int = 0) -> list[pb.LeaseStatus]:
        request = pb.RenewRequest(lease_ids=lease_ids, extend_ms=extend_ms)
        return list(self.stub.Renew(request, timeout=TIMEOUT_S).statuses)


@dataclass(frozen=True)
class Outcome:
    """What came of one item. inline: its rows when they came in the stream."""

    result: pb.ItemResult
    failure: pb.ItemFailure
    inline: bytes


def gathered(events: Iterable[pb.ItemEvent]) -> list[Outcome]:
    """One for each item, in their order."""
    found: dict[int, pb.ItemEvent] = {}
    rows: dict[int, bytes] = {}
    for event in events:
        if event.WhichOneof("event") == "chunk":
            rows[event.item_index] = rows.get(event.item_index, b"") + event.chunk.data
        else:
            found[event.item_index] = event
    return [
        Outcome(event.result, event.failure, rows.get(index, b"")) for index, event in sorted(found.items())
    ]


class ClientProcess:
    """The same in a process of its own."""

    def __init__(self, target: str, broker_path: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", __name__, target, broker_path],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/proto", "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def send(self, **command: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the client's process has ended"
        return json.loads(line)  # type: ignore[no-any-return]

    def ask(self, **command: Any) -> dict[str, Any]:
        self.send(**command)
        return self.answer()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.process.wait(30) == 0
        assert self.process.stdout is not None
        self.process.stdout.close()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=30)


def main(target: str, broker_path: str) -> None:
    """encode: an image, for a lease; read: a result that anybody was given, then released as ``reader``."""
    with SharedClient(target, broker_path) as client:
        for line in sys.stdin:
            command = json.loads(line)
            if command["do"] == "encode":
                (outcome,) = client.encode([base64.b64decode(command["image"])], lease_ms=command["lease_ms"])
                answer = {"result": base64.b64encode(outcome.result.SerializeToString()).decode()}
            else:
                result = pb.ItemResult.FromString(base64.b64decode(command["result"]))
                data = client.read(result)
                released = client.release(result.host.lease_id, reader=command["reader"]).num_released
                answer = {
                    "sha256": "" if data is None else hashlib.sha256(data).hexdigest(),
                    "released": released,
                }
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
