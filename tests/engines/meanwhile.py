"""Text requests at vLLM while something else goes wrong."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor

from tests.engines.pictures import TEXT
from tests.engines.processes import Stack


class Others:
    """Text requests all the while: each must be answered, and soon."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._stop = threading.Event()
        self.num_answered = 0
        self._pool = ThreadPoolExecutor(1)
        self._future: Future[None] = self._pool.submit(self._ask)

    def _ask(self) -> None:
        while not self._stop.is_set():
            response = self._stack.chat(TEXT, direct=True, max_tokens=4)
            assert response.status_code == 200, response.text
            self.num_answered += 1

    def end(self) -> None:
        self._stop.set()
        self._future.result(60)
        self._pool.shutdown()
        assert self.num_answered > 0
