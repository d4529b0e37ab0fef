"""ItemEvents as they come: raw bytes to what ``assembly`` takes.

Owns the parsing alone; what an event means, and whether it may come, is ``assembly``'s.
"""

from __future__ import annotations

from google.protobuf.message import DecodeError

from lm_adapter.errors import StreamViolation
from lm_adapter.transport.wire import ChunkView, find_chunk
from vision_encoder.v1 import encoder_pb2 as pb

__all__ = ["parsed", "shared_rows_bytes"]


def parsed(message: bytes) -> pb.ItemEvent | ChunkView:
    """A serialised ItemEvent; of rows chunks no copy is made. Raises StreamViolation."""
    chunk = find_chunk(message)
    if chunk is not None:
        return chunk
    try:
        return pb.ItemEvent.FromString(message)
    except DecodeError as error:
        raise StreamViolation(f"a message of {len(message)} bytes is no ItemEvent: {error}") from error


def shared_rows_bytes(event: pb.ItemEvent | ChunkView) -> int:
    """Bytes of the rows that an event says to lie in shared memory; 0 of any other."""
    if isinstance(event, ChunkView):
        return 0
    result = event.result
    return result.rows_bytes if result.WhichOneof("rows") in ("host", "lease") else 0
