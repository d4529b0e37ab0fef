"""What a test tells ``testing.FakeEncoder`` to do, and what it can expect of it.

Owns the fake's script, its models and its rows. numpy only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import grpc
import numpy as np
import numpy.typing as npt

from lm_adapter.errors import ItemFailed
from lm_adapter.fake_faults import Fault
from lm_adapter.types import Grid, Limits, Modality, ModelInfo
from vision_encoder.v1 import encoder_pb2 as pb

__all__ = ["CallRecord", "FakeScript", "FakeSharing", "fake_model", "fake_rows"]


def fake_rows(digest: bytes, num_rows: int, width: int) -> npt.NDArray[np.float32]:
    """float32 [num_rows, width] that the fake gives to a digest: multiples of 1/128 in [-1, 1), from
    SHAKE-128 of the digest, so that float16 and bfloat16 hold them exactly."""
    noise = np.frombuffer(hashlib.shake_128(digest).digest(num_rows * width), dtype=np.uint8)
    return ((noise.astype(np.float32) - 128.0) / 128.0).reshape(num_rows, width)


def fake_model(family: str = "qwen3_vl", **changes: Any) -> ModelInfo:
    """A small model with a family's geometry: ``qwen3_vl`` (deepstack), ``qwen3_5`` (none) or ``kimi_k25``
    (averages time). changes: fields of ModelInfo; ``width`` follows from out_width and levels."""
    levels = 3 if family == "qwen3_vl" else 0
    is_kimi = family == "kimi_k25"
    patch_size, temporal_patch_size = (14, 1) if is_kimi else (16, 2)
    model = ModelInfo(
        name=f"fake-{family}",
        family=family,
        model_fingerprint=hashlib.sha256(f"weights of {family}".encode()).digest(),
        preprocess_fingerprint=hashlib.sha256(f"settings of {family}".encode()).digest(),
        dtype="float32",
        out_width=32,
        num_deepstack_levels=levels,
        width=0,
        patch_size=patch_size,
        spatial_merge_size=2,
        temporal_patch_size=temporal_patch_size,
        patch_dim=3 * temporal_patch_size * patch_size**2,
        merges_time=is_kimi,
        modalities=(Modality.IMAGE, Modality.VIDEO),
    )
    model = replace(model, **changes)
    return replace(model, width=model.out_width * (1 + model.num_deepstack_levels))


class FakeSharing(Protocol):
    """What a fake needs to deliver rows by shared memory: a test's own arenas and broker. Rows come inline
    where ``place`` leaves the result's place open."""

    def transports(self) -> Sequence[pb.TransportInfo]:
        """What is announced beside inline."""

    def place(
        self, delivery: pb.Delivery.ValueType, lease: pb.LeaseOptions, result: pb.ItemResult, rows: bytes
    ) -> None:
        """Puts the rows where the reader finds them and says so in the result. Raises ItemFailed."""

    def release(self, lease_id: bytes, reader: int | None) -> bool:
        """Whether the lease is known."""


class CallRecord(NamedTuple):
    """One call as the fake saw it. metadata: the textual headers."""

    method: str
    num_items: int
    metadata: dict[str, str]


@dataclass
class FakeScript:
    """What the fake does; may be changed between calls.

    grids: the grid of a digest, else one of up to 4x4 merged patches that follows from the digest.
    latency_s: wait before each item. order: ``forward``, ``reverse`` or ``interleaved`` events of items.
    failures: digest to failure. faults: digest to misbehaviour. call_failures: method name to the status
    and the account with which every such call ends. leases: id to expiry, in Unix milliseconds. sharing: for
    rows in shared memory.
    """

    model: ModelInfo = field(default_factory=fake_model)
    limits: Limits = field(
        default_factory=lambda: Limits(
            max_items_per_request=256, max_message_bytes=64 << 20, chunk_bytes=1 << 20
        )
    )
    protocol_version: int = 1
    min_protocol_version: int = 1
    serving: bool = True
    grids: dict[bytes, Grid] = field(default_factory=dict)
    latency_s: float = 0.0
    order: str = "forward"
    failures: dict[bytes, ItemFailed] = field(default_factory=dict)
    faults: dict[bytes, Fault] = field(default_factory=dict)
    call_failures: dict[str, tuple[grpc.StatusCode, ItemFailed]] = field(default_factory=dict)
    leases: dict[bytes, int] = field(default_factory=dict)
    sharing: FakeSharing | None = None
