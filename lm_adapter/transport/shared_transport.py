"""One call's way to rows in shared memory, once it has been chosen.

Owns what a call takes along: whom its leases belong to and where they go back. The choice is ``chooser``'s,
reading ``reading``'s.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lm_adapter.errors import EncoderError
from lm_adapter.leases import LeaseRecord, LeaseReturns
from lm_adapter.transport.broker_client import BrokerClient
from lm_adapter.transport.buffers import Bytes, RowsHandling
from lm_adapter.transport.reading import Reading, Unreadable, read_rows
from lm_adapter.transport.unleased import UnleasedRows

if TYPE_CHECKING:
    from lm_adapter.transport.chooser import TransportChooser

__all__ = ["SharedTransport"]


@dataclass(frozen=True)
class SharedTransport:
    """A way of delivery that was chosen, for one call. owner_id: of the session that its leases end with.
    turn: see ``RefusalBackoff``. broker: the connection, for pixels on their way in. unleased: rows that need
    no lease; None where all do. calls_path: of the socket for calls without gRPC; empty for none."""

    name: str
    owner_id: bytes
    lease_ms: int
    returns: LeaseReturns
    chooser: TransportChooser
    turn: int = 0
    broker: BrokerClient | None = None
    unleased: UnleasedRows | None = None
    calls_path: str = ""

    def read(
        self, record: LeaseRecord, handling: RowsHandling, out: Bytes | None
    ) -> tuple[Bytes, Reading | None]:
        """See ``reading.read_rows``. Raises Unreadable, InvalidRows."""
        try:
            arena = self.chooser.arena(record.transport, record.arena_id)
        except EncoderError as error:
            self.give_back(record, handling)
            raise Unreadable(f"rows by {record.transport}: {error.message}", stale=False) from error
        return read_rows(arena, record, self.returns, handling, out)

    def give_back(self, record: LeaseRecord, handling: RowsHandling) -> None:
        """A lease whose rows this reader does not read."""
        reader = handling.reader if record.num_readers > 1 else None
        self.returns.give_back(record.lease_id, reader, owner_id=record.owner_id)

    def note(self, num_shared: int, refusal: str) -> None:
        """What became of a call: items read in this way, and why one was refused."""
        self.chooser.note(self.name, self.turn, num_shared, refusal)
