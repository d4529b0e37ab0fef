"""Runs long functions on daemon threads, which nothing waits for when the process ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


async def on_own_thread(function: Callable[..., Result], *arguments: object) -> Result:
    """Runs a function on a thread of its own and returns its result. If the caller is cancelled, for example
    by a signal while the model loads, neither the loop nor the interpreter waits for the function to end, as
    they would with an executor."""
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
