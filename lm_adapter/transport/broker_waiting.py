"""A request on its way to the broker, and what its reply comes to."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from lm_adapter.transport.broker_errors import BrokerError, BrokerRequestFailed
from lm_adapter.transport.broker_frames import ReceivedReply, close_descriptors

__all__ = ["Waiting", "checked", "fresh"]


@dataclass(eq=False)
class Waiting:
    """on_done: called when there is a reply or an error, in place of the event."""

    done: threading.Event = field(default_factory=threading.Event)
    reply: ReceivedReply | None = None
    error: BrokerError | None = None
    on_done: Callable[[], None] | None = None

    def finish(self) -> None:
        if self.on_done is None:
            self.done.set()
        else:
            self.on_done()

    def result(self) -> ReceivedReply:
        """Raises BrokerError."""
        if self.error is not None:
            raise fresh(self.error)
        assert self.reply is not None
        return checked(self.reply)


def fresh(error: BrokerError) -> BrokerError:
    """The same error for another raise: one exception's traceback belongs to one thread."""
    return type(error)(
        error.message, reason=error.reason, retryable=error.retryable, details=dict(error.details)
    )


def checked(reply: ReceivedReply) -> ReceivedReply:
    """The reply where it is one, with all its descriptors. Raises BrokerRequestFailed."""
    message, descriptors = reply.message, reply.descriptors
    if message.HasField("failure"):
        close_descriptors(descriptors)
        failure = message.failure
        raise BrokerRequestFailed(
            f"the broker: {failure.message}", reason=failure.reason or None, retryable=failure.retryable
        )
    if len(descriptors) != message.num_descriptors:
        close_descriptors(descriptors)
        raise BrokerRequestFailed(
            f"{len(descriptors)} of {message.num_descriptors} descriptors arrived: this process has no room "
            "for more open files",
            reason="DESCRIPTORS_LOST",
            retryable=True,
        )
    return reply
