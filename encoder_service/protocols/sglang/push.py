"""Rows on their way to SGLang: the frames that it expects. ``zmq_push`` sends them.

A message has two frames (SGLang 0.5.23, ``disaggregation/encoder``): a pickled ``EmbeddingData`` without its
tensor, and the rows' bytes. The pickle is written here, opcode by opcode (Python's ``pickletools`` documents
them); nothing is ever unpickled, and SGLang is not imported. SGLang unpickles what it receives with a list of
allowed classes, of which this names three.

Shape legend: R rows (visual tokens), W their width, the language model's times (1 + deepstack levels).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from encoder_service.types import Grid, Modality

Field: TypeAlias = "int | float | str | Global | Sequence[Field] | None"

PROTOCOL_3 = b"\x80\x03"
NONE, MARK, STOP = b"N", b"(", b"."
EMPTY_LIST, APPENDS = b"]", b"e"
EMPTY_DICT, SETITEMS = b"}", b"u"
EMPTY_TUPLE, NEW_OBJECT, BUILD = b")", b"\x81", b"b"
ONE_TUPLE, CALL = b"\x85", b"R"


@dataclass(frozen=True)
class Global:
    """A class or object of a module; called with ``argument`` unless that is None."""

    module: str
    name: str
    argument: int | None = None


EMBEDDING_DATA = Global("sglang.srt.disaggregation.encoder.receiver", "EmbeddingData")
# Members of SGLang's enum by value, as enums are pickled.
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
    """The pickled EmbeddingData of rows [R, W]. grids: of the part's items. timestamps_s: for each clip one
    for each step of its grid's t; empty for images."""
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
            named = f"c{value.module}\n{value.name}\n".encode()
            return named if value.argument is None else named + pickled(value.argument) + ONE_TUPLE + CALL
        case _:
            return EMPTY_LIST + MARK + b"".join(map(pickled, value)) + APPENDS


def payload(rows: torch.Tensor) -> memoryview:
    """The bytes of rows [R, W] in host memory, not copied."""
    return rows.reshape(-1).view(torch.uint8).numpy().data
