"""Long functions beside the event loop, on threads that nothing waits for at the end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


async def on_own_thread(function: Callable[..., Result], *arguments: object) -> Result:
    """Runs a long function beside the loop. The thread is a daemon: if the caller is cancelled (a signal
    while loading), neither the loop nor the interpreter waits for it, as they would for an executor's."""
    future: Future[Result] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            result = function(*arguments)
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name=f"service-{function.__name__}", daemon=True).start()
    return await asyncio.wrap_future(future)
