"""The ways in which ``testing.FakeEncoder`` misbehaves, each a rewriting of one item's events."""

from __future__ import annotations

import enum
from collections.abc import Sequence

from vision_encoder.v1 import encoder_pb2 as pb

__all__ = ["Fault", "faulty"]


class Fault(enum.Enum):
    """What a misbehaving server does to one item. Those marked so break the whole call from there on."""

    WRONG_WIDTH = "width"
    WRONG_DTYPE = "dtype"
    WRONG_LEVELS = "num_deepstack_levels"
    WRONG_NUM_ROWS = "num_rows"
    WRONG_GRID = "grid_thw"
    SHORT_KEY = "key"
    WRONG_DIGEST = "content_digest"
    WRONG_ROWS_BYTES = "rows_bytes"
    OTHER_DELIVERY = "delivery"
    ZERO_CHUNKS = "num_chunks"
    CHUNK_BEFORE_RESULT = "chunk before result"
    SECOND_RESULT = "second result"
    MISORDERED_CHUNKS = "misordered chunks"
    SHORT_CHUNK = "short chunk"
    LONG_CHUNK = "long chunk"
    NON_FINITE = "not finite"  # passes unless the caller looks at the elements
    UNKNOWN_EVENT = "unknown event"  # of a newer protocol; must be let pass
    MISSING_ITEM = "missing item"  # the stream ends OK without it: breaks the call
    MISSING_CHUNK = "missing chunk"  # the same, without its last chunk
    EXTRA_CHUNK = "extra chunk"  # after the item is whole: breaks the call
    UNKNOWN_INDEX = "unknown index"  # breaks the call
    GARBAGE = "garbage"  # bytes that are no message: breaks the call
    HANG = "hang"  # the stream stands still before this item until ``resume`` or the server's end
    ABORT = "abort"  # the call ends with INTERNAL before this item


_RESULT_EDITS: dict[Fault, pb.ItemResult] = {
    Fault.SHORT_KEY: pb.ItemResult(key=b"short"),
    Fault.WRONG_DIGEST: pb.ItemResult(content_digest=b"\xff" * 32),
    Fault.WRONG_ROWS_BYTES: pb.ItemResult(rows_bytes=12),
    Fault.WRONG_DTYPE: pb.ItemResult(dtype=pb.DTYPE_UINT8),
    Fault.OTHER_DELIVERY: pb.ItemResult(host=pb.HostRows(segment="elsewhere")),
}


def faulty(fault: Fault, events: Sequence[pb.ItemEvent]) -> list[pb.ItemEvent | bytes]:
    """One item's events (its result, then its chunks) as a server with this fault sends them.

    HANG and ABORT change no event; the service acts on them.
    """
    result, chunks = events[0], list(events[1:])
    edit = _RESULT_EDITS.get(fault)
    if edit is not None:
        result.result.MergeFrom(edit)
        return [result, *chunks]
    last = chunks[-1].chunk
    rows = result.result
    match fault:
        case Fault.WRONG_WIDTH:
            rows.width += rows.num_deepstack_levels + 1
            rows.rows_bytes += rows.rows_bytes // (rows.width - rows.num_deepstack_levels - 1)
        case Fault.WRONG_LEVELS:
            rows.num_deepstack_levels += 1
        case Fault.WRONG_NUM_ROWS:
            rows.num_rows += 1
        case Fault.WRONG_GRID:
            rows.grid_thw.h += 1
        case Fault.ZERO_CHUNKS:
            rows.inline.num_chunks = 0
        case Fault.CHUNK_BEFORE_RESULT:
            return [*chunks, result]
        case Fault.SECOND_RESULT:
            return [result, result, *chunks]
        case Fault.MISORDERED_CHUNKS:
            # A single chunk is misplaced by its offset.
            if len(chunks) == 1:
                last.offset_bytes += 1
            chunks.reverse()
        case Fault.SHORT_CHUNK:
            last.data = last.data[:-1]
        case Fault.LONG_CHUNK:
            last.data = last.data + b"\0"
        case Fault.NON_FINITE:
            # All bits set is NaN in every floating dtype.
            last.data = last.data[:-8] + b"\xff" * 8
        case Fault.UNKNOWN_EVENT:
            # Field 15 of ItemEvent, length-delimited.
            return [b"\x7a\x03new", result, *chunks]
        case Fault.MISSING_ITEM:
            return []
        case Fault.MISSING_CHUNK:
            return [result, *chunks[:-1]]
        case Fault.EXTRA_CHUNK:
            return [result, *chunks, chunks[-1]]
        case Fault.UNKNOWN_INDEX:
            return [pb.ItemEvent(item_index=1_000_000, chunk=last)]
        case Fault.GARBAGE:
            return [b"\xff\xff\xff not a message"]
        case Fault.HANG | Fault.ABORT:
            pass
    return [result, *chunks]
