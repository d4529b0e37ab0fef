"""An engine's start: its first question to the encoder, and the line that says why a start ends.

Owns which failures end a start. ``agreement`` owns the comparison.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from lm_adapter.engines.shared.encoder_thread import DISAGREEMENTS, EncoderThread
from lm_adapter.errors import EncoderError

ANSWER_S = 3.0
"""How long a start waits for an encoder that does not answer."""


def check_encoder(thread: EncoderThread, target: str, logger: logging.Logger) -> None:
    """Asks the encoder once, for at most ANSWER_S. Raises ModelMismatch and ProtocolMismatch, and ends the
    thread then. Other failures are logged: the encoder may start later, and the thread compares it before its
    first image."""
    error = thread.contact(ANSWER_S)
    if isinstance(error, DISAGREEMENTS):
        thread.close()
        raise error
    if error is not None:
        logger.warning(
            "the encoder at %s cannot be asked yet whether it serves the rows that this model takes, which "
            "is checked with the first image: %s",
            target,
            error.message,
        )


@contextlib.contextmanager
def start_of(engine: str, logger: logging.Logger) -> Iterator[None]:
    """Logs the EncoderError that ends the start in a line of its own: the engine logs only a traceback."""
    try:
        yield
    except EncoderError as error:
        logger.error("%s does not start: %s", engine, error.message)
        raise
