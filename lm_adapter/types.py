"""Records that come back from the service: rows, failures, server information, states of keys.

Owns these records and the views of a payload as numpy and torch arrays. ``convert`` makes them from messages;
``items`` holds what is sent. torch is imported by ``EncodedRows.torch`` alone.

Shape legend: R rows (visual tokens), D language-model width, L deepstack levels.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from lm_adapter.errors import InvalidRequest, ItemFailed, MissingDependency
from lm_adapter.items import Grid, Modality, ShortRepr

if TYPE_CHECKING:
    import torch


ITEMSIZE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1}
ROW_DTYPES = ("float32", "bfloat16", "float16")


class CacheTier(enum.Enum):
    """Where an item's rows came from; UNKNOWN for a tier that this version does not know."""

    UNKNOWN = "unknown"
    MISS = "miss"
    IN_FLIGHT = "in_flight"
    DEVICE = "device"
    HOST = "host"


class KeyState(enum.Enum):
    UNKNOWN = "unknown"
    ABSENT = "absent"
    IN_FLIGHT = "in_flight"
    RESIDENT = "resident"


@dataclass(frozen=True)
class StageTimings:
    """Milliseconds that one item spent in each stage of the service; see the wire contract."""

    identify_ms: float = 0.0
    admit_ms: float = 0.0
    decode_ms: float = 0.0
    resize_ms: float = 0.0
    queue_ms: float = 0.0
    tower_ms: float = 0.0
    store_ms: float = 0.0
    total_ms: float = 0.0
    delivery_ms: float = 0.0


def upcast_bfloat16(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """The float32 values of bfloat16 bit patterns, exactly: a bfloat16 is the upper half of a float32."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


@dataclass(frozen=True, eq=False, repr=False)
class EncodedRows(ShortRepr):
    """One item's visual tokens, validated. Layout [num_rows, width], width = D * (1 + L), main level first,
    then the deepstack levels in order.

    payload: uint8 [num_rows * width * itemsize], contiguous and owned by this record: a numpy array, or a
    torch tensor on the GPU that the rows were copied to. timestamps_s: of the sampled frames, for clips.
    chunk_grids: for a clip of a model that merges time, the chunks whose rows follow one another. transport:
    how they came, ``device``, ``host`` or ``inline``. was_lost: a first copy from shared memory was lost.
    """

    key: bytes
    content_digest: bytes
    grid_thw: Grid
    num_rows: int
    width: int
    dtype: str
    num_deepstack_levels: int
    payload: npt.NDArray[np.uint8] | torch.Tensor = field(repr=False)
    tier: CacheTier = CacheTier.UNKNOWN
    timings: StageTimings = field(default_factory=StageTimings, repr=False)
    timestamps_s: tuple[float, ...] = field(default=(), repr=False)
    chunk_grids: tuple[Grid, ...] = field(default=(), repr=False)
    transport: str = field(default="inline", repr=False)
    was_lost: bool = field(default=False, repr=False)

    @property
    def num_bytes(self) -> int:
        return self.payload.nbytes

    def raw(self) -> npt.NDArray[Any]:
        """[num_rows, width] in the wire's dtype, without a copy but for rows on a GPU; bfloat16 shows as its
        uint16 bits."""
        numpy_dtype = {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}[self.dtype]
        payload = self.payload if isinstance(self.payload, np.ndarray) else self.payload.cpu().numpy()
        return payload.view(numpy_dtype).reshape(self.num_rows, self.width)

    def numpy(self) -> npt.NDArray[np.float32]:
        """float32 [num_rows, width]: a view of float32 rows, an exact widening of the others."""
        raw = self.raw()
        if self.dtype == "bfloat16":
            return upcast_bfloat16(raw)
        return raw.astype(np.float32, copy=False)

    def torch(self) -> torch.Tensor:
        """[num_rows, width] in the rows' own dtype, where the payload is, sharing its memory.

        Raises MissingDependency without torch.
        """
        try:
            import torch
        except ImportError as error:
            raise MissingDependency("torch", "EncodedRows.torch()") from error
        dtype: torch.dtype = getattr(torch, self.dtype)
        flat = torch.from_numpy(self.payload) if isinstance(self.payload, np.ndarray) else self.payload
        return flat.view(dtype).reshape(self.num_rows, self.width)


Outcome: TypeAlias = EncodedRows | ItemFailed


@dataclass(frozen=True, repr=False)
class ModelInfo(ShortRepr):
    """A served model: its name, its fingerprints and the geometry of its rows."""

    name: str
    family: str
    model_fingerprint: bytes
    preprocess_fingerprint: bytes
    dtype: str
    out_width: int
    num_deepstack_levels: int
    width: int
    patch_size: int
    spatial_merge_size: int
    temporal_patch_size: int
    patch_dim: int
    merges_time: bool
    modalities: tuple[Modality, ...] = (Modality.IMAGE,)

    def num_rows(self, grid: Grid) -> int:
        """Visual tokens of one item of this grid."""
        return grid.num_rows(self.spatial_merge_size, merges_time=self.merges_time)


@dataclass(frozen=True)
class Limits:
    """The server's limits; 0 means that it announces none."""

    max_items_per_request: int = 0
    max_message_bytes: int = 0
    max_encoded_bytes: int = 0
    max_image_pixels: int = 0
    max_patches_per_item: int = 0
    max_queued_patches: int = 0
    max_queued_bytes: int = 0
    store_bytes: int = 0
    chunk_bytes: int = 0
    max_clip_bytes: int = 0
    max_clip_duration_s: float = 0.0
    max_clip_frames: int = 0
    max_clip_patches: int = 0


@dataclass(frozen=True)
class TransportInfo:
    """A way of delivery that the server offers. delivery: ``inline``, ``host`` or ``device``."""

    delivery: str
    broker_path: str
    host_id: str
    device_uuid: str


@dataclass(frozen=True)
class ServerInfo:
    """The answer to GetServerInfo. instance_id is new at every start. unusable_kernels: the optional kernel
    libraries that cannot be used on the encoder's device, with the reason."""

    protocol_version: int
    min_protocol_version: int
    server_version: str
    instance_id: str
    device: str
    models: tuple[ModelInfo, ...]
    limits: Limits
    transports: tuple[TransportInfo, ...]
    unusable_kernels: Mapping[str, str] = field(default_factory=dict)

    def model(self, name: str = "") -> ModelInfo:
        """The model of this name; with an empty name the server's only one. Raises InvalidRequest."""
        matches = [model for model in self.models if not name or model.name == name]
        if len(matches) != 1:
            served = ", ".join(model.name for model in self.models) or "none"
            raise InvalidRequest(f"model {name!r} names {len(matches)} models, needs 1; served: {served}")
        return matches[0]


CheckServer: TypeAlias = Callable[[str, ServerInfo], None]
"""Gets a server's address and information. Raises CallFailed for a server that must not be used."""


@dataclass(frozen=True, repr=False)
class KeyStatus(ShortRepr):
    """grid_thw and num_rows are set when the rows are resident."""

    key: bytes
    state: KeyState
    grid_thw: Grid | None = None
    num_rows: int = 0
    tier: CacheTier = CacheTier.UNKNOWN


@dataclass(frozen=True, repr=False)
class PrefetchStatus(ShortRepr):
    """An item that is resident or being encoded. grid_thw and, of a clip, timestamps_s of the sampled frames
    are known as soon as the file's header was read. routing_digest: for ``fetch`` and ``lookup`` of a fleet,
    else empty."""

    key: bytes
    content_digest: bytes
    state: KeyState
    grid_thw: Grid | None = None
    num_rows: int = 0
    routing_digest: bytes = b""
    timestamps_s: tuple[float, ...] = field(default=(), repr=False)
