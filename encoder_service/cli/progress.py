"""How far ``encode`` is: a bar on a terminal, a line every few seconds elsewhere, both on standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, Self

from encoder_service.cli.output import complain, plain

LINE_S = 5.0


class Progress:
    """Of a number of items. A context manager. note: prints a line without disturbing the bar."""

    def __init__(self, num_items: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_items = num_items
        self.num_done = 0
        self.num_failed = 0
        self._clock = clock
        self._start_s = self._line_s = clock()
        self._bar: Any = None
        self._task: Any = None

    @property
    def elapsed_s(self) -> float:
        return self._clock() - self._start_s

    def __enter__(self) -> Self:
        self._start_s = self._line_s = self._clock()
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            self._bar = Progress(
                TextColumn("encoding"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[rate]:.1f}/s"),
                TextColumn("{task.fields[failed]} failed"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._bar.start()
            self._task = self._bar.add_task("", total=self.num_items, rate=0.0, failed=0)
        return self

    def __exit__(self, *_exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, *, failed: bool = False) -> None:
        """One more item has its outcome."""
        self.num_done += 1
        self.num_failed += failed
        rate = self.num_done / max(self.elapsed_s, 1e-3)
        if self._bar is not None:
            self._bar.update(self._task, completed=self.num_done, rate=rate, failed=self.num_failed)
        elif self._clock() - self._line_s >= LINE_S:
            self._line_s = self._clock()
            complain(f"{self.num_done} of {self.num_items} done, {rate:.1f}/s, {self.num_failed} failed")

    def note(self, message: str) -> None:
        """One line on standard error."""
        if self._bar is None:
            complain(message)
        else:
            self._bar.console.print(
                f"vision-encoder: {plain(message)}",
                markup=False,
                emoji=False,
                highlight=False,
                soft_wrap=True,
            )
