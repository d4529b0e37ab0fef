"""What a launch spends in calls of the driver and its runtime, as opposed to Python.

Owns the clock around those calls. It costs Python time of its own: a launch under it is not timed as a whole.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from encoder_service.engine.graphs import GraphRunner
from encoder_service.engine.launch import TowerLauncher


class DriverClock:
    """Times what the host spends in calls of the driver and its runtime. Calls within calls count once."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._is_running = False
        self._restored: list[Callable[[], None]] = []

    def wrap(self, owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def timed(*arguments: Any) -> Any:
            if self._is_running:
                return original(*arguments)
            self._is_running = True
            started_s = time.perf_counter()
            try:
                return original(*arguments)
            finally:
                self.seconds += time.perf_counter() - started_s
                self._is_running = False

        setattr(owner, name, timed)
        self._restored.append(lambda: delattr(owner, name))

    def wrap_launch(self, launcher: TowerLauncher, runner: GraphRunner) -> None:
        """Everything that a replayed launch asks of the driver: streams' copies and events, and replays."""
        streams = runner.streams
        for stream in {streams.compute, streams.upload, streams.download, streams.place}:
            for name in ("copy", "copy_many", "record", "wait"):
                self.wrap(stream, name)
        assert launcher._cuts is not None
        graphs = [captured.graph for captured in runner._graphs.values()]
        for graph in [*graphs, *launcher._cuts._graphs.values()]:
            self.wrap(graph, "replay")

    def unwrap(self) -> None:
        for restore in self._restored:
            restore()
        self._restored.clear()
