"""What the scheduler sends its workers with a step: which rows it computes with, and which leave."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class StepRows:
    """Travels with one of vLLM's steps. hand_over: (number, vLLM's identifier) of rows that the step computes
    with. drop: numbers of rows that only earlier steps computed with."""

    hand_over: list[tuple[int, str]] = field(default_factory=list)
    drop: list[int] = field(default_factory=list)
