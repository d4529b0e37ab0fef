"""Writes messages to callers, with a limit on the time that a caller may leave one unread."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from encoder_service.errors import DeadlineExceeded

Context = grpc.aio.ServicerContext[Any, Any]

# Messages have at most about a megabyte.
UNREAD_S = 30.0


async def write(context: Context, message: object) -> None:
    """Returns when gRPC has taken the message. Raises DeadlineExceeded if the caller does not read for
    UNREAD_S: rows that wait for it count against the limit of all callers."""
    try:
        async with asyncio.timeout(UNREAD_S):
            await context.write(message)
    except TimeoutError:
        raise DeadlineExceeded(f"the caller has read nothing for {UNREAD_S} s") from None
