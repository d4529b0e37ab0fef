"""The message with rows that SGLang expects. ``zmq_push`` sends it.

A message has two frames (SGLang 0.5.23, ``disaggregation/encoder``): a pickled ``EmbeddingData`` without its
tensor, and the bytes of the rows. This module writes the pickle opcode by opcode (Python's ``pickletools``
documents them); it unpickles nothing and does not import SGLang. SGLang unpickles messages with a list of
allowed classes; the pickle names three of them.

Shape legend: R rows (visual tokens), W their width: the language model's times (1 + deepstack levels).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from encoder_service.errors import UnsupportedContent
from encoder_service.types import EncodedItem, Grid, Modality

Field: TypeAlias = "int | float | str | Global | Sequence[Field] | None"

PROTOCOL_3 = b"\x80\x03"
NONE, MARK, STOP = b"N", b"(", b"."
EMPTY_LIST, APPENDS = b"]", b"e"
EMPTY_DICT, SETITEMS = b"}", b"u"
EMPTY_TUPLE, NEW_OBJECT, BUILD = b")", b"\x81", b"b"
ONE_TUPLE, CALL = b"\x85", b"R"


@dataclass(frozen=True)
class Global:
    """A class or object of a module. It is called with ``argument`` unless that is None."""

    module: str
    name: str
    argument: int | None = None


EMBEDDING_DATA = Global("sglang.srt.disaggregation.encoder.receiver", "EmbeddingData")
# Members of SGLang's enum. An enum is pickled as a call of its class with the member's value.
MODALITIES = {
    Modality.IMAGE: Global("sglang.srt.multimodal.modality", "Modality", 1),
    Modality.VIDEO: Global("sglang.srt.multimodal.modality", "Modality", 2),
}


@dataclass(frozen=True)
class Part:
    """The items of one request that one encoder encodes."""

    req_id: str
    num_parts: int
    part_idx: int
    modality: Modality


def head_frame(
    part: Part, grids: Sequence[Grid], timestamps_s: Sequence[Sequence[float]], rows: torch.Tensor
) -> bytes:
    """The pickled EmbeddingData of rows [R, W]. grids: of the part's items. timestamps_s: ``clip_times_s`` of
    each clip; empty for images."""
    fields: dict[str, Field] = {
        "req_id": part.req_id,
        "num_parts": part.num_parts,
        "part_idx": part.part_idx,
        "grid_dim": [list(grid) for grid in grids],
        "modality": MODALITIES[part.modality],
        "embedding": None,
        "send_time": None,
        "dtype": Global("torch", str(rows.dtype).removeprefix("torch.")),
        "shape": list(rows.shape),
        "_mr_ptr": None,
        "error_msg": None,
        "error_code": None,
        "video_timestamps": timestamps_s or None,
        "second_per_grid_ts": None,
    }
    state = b"".join(pickled(name) + pickled(value) for name, value in fields.items())
    return b"".join(
        (
            *(PROTOCOL_3, pickled(EMBEDDING_DATA), EMPTY_TUPLE, NEW_OBJECT),
            *(EMPTY_DICT, MARK, state, SETITEMS, BUILD, STOP),
        )
    )


def pickled(value: Field) -> bytes:
    """The opcodes that push a value."""
    match value:
        case None:
            return NONE
        case int():
            return b"J" + struct.pack("<i", value)
        case float():
            return b"G" + struct.pack(">d", value)
        case str():
            text = value.encode("utf-8", "surrogatepass")
            return b"X" + struct.pack("<I", len(text)) + text
        case Global():
            name = f"c{value.module}\n{value.name}\n".encode()
            return name if value.argument is None else name + pickled(value.argument) + ONE_TUPLE + CALL
        case _:
            return EMPTY_LIST + MARK + b"".join(map(pickled, value)) + APPENDS


def clip_times_s(item: EncodedItem, family: str) -> list[float]:
    """One time for each step t of a clip's grid: the middle of its first and last frame (SGLang's
    ``_calculate_timestamps``). Raises UnsupportedContent for a family whose clips SGLang does not take."""
    clip = item.clip
    if clip is None or clip.chunk_grids or family.startswith("glm"):  # GLM's would lack their times
        raise UnsupportedContent("SGLang takes no clips of this model from an encoder")
    frames_s, num_steps = list(clip.timestamps_s), item.grid.t
    num_frames = -(-len(frames_s) // num_steps)
    frames_s += frames_s[-1:] * (num_frames * num_steps - len(frames_s))
    return [
        (frames_s[first] + frames_s[first + num_frames - 1]) / 2
        for first in range(0, len(frames_s), num_frames)
    ]


def payload(rows: torch.Tensor) -> memoryview:
    """The bytes of rows [R, W] in host memory, not copied."""
    return rows.reshape(-1).view(torch.uint8).numpy().data
