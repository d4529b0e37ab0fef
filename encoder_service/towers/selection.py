"""Chooses the fastest correct kernel of an operation for each shape: checked against float32, then timed.

Owns the measurement, the check of a former start's choices, and the lookup of a choice by shape.
``attention/cases.py`` and ``gemm/cases.py`` say what is measured. The engine measures before the service is
ready, and keeps the names of the choices.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Generic, Protocol, TypeAlias, TypeVar

import structlog
import torch

from encoder_service.errors import ConfigurationError
from encoder_service.ops.progress import Progress

log = structlog.get_logger(__name__)

Shape: TypeAlias = tuple[int, ...]
# Why a candidate is not chosen, by its name and the case.
Excluded: TypeAlias = dict[tuple[str, Shape], str]
# Returns the milliseconds of one run of a function.
TimeMs: TypeAlias = Callable[[Callable[[], object]], float]

# Weights of a shape's numbers in the distance between shapes: patches, then the longest sequence.
SHAPE_WEIGHTS = (1, 2)


class Candidate(Protocol):
    """A kernel, or a library's version of an operation."""

    @property
    def name(self) -> str: ...


C = TypeVar("C", bound=Candidate)


class WrongResult(Exception):
    """A candidate's result is wrong. Raised by trials and caught in this module."""


@dataclass(frozen=True)
class Trial(Generic[C]):
    """A case with random inputs on the device.

    error: the relative Frobenius error of a candidate's result against float32; raises WrongResult for any
    other fault. tolerance: the largest error that rounding explains. run: calls a candidate num_calls times,
    as the blocks of a tower do.
    """

    error: Callable[[C], float]
    run: Callable[[C], object]
    tolerance: float
    num_calls: int

    def check(self, candidate: C) -> None:
        """Raises WrongResult, or the candidate's own error."""
        error = self.error(candidate)
        if not error <= self.tolerance:
            raise WrongResult(
                f"relative error {error:.1e} against float32, at most {self.tolerance:.0e} passes"
            )


@dataclass(frozen=True)
class Case(Generic[C]):
    """A shape of an operation. open: makes the trial, which takes device memory until it is dropped."""

    shape: Shape
    open: Callable[[], Trial[C]]

    @property
    def name(self) -> str:
        return name_of(self.shape)


@dataclass(frozen=True)
class Choices(Generic[C]):
    """by_shape: the candidate that was chosen for each measured shape; at least one."""

    by_shape: Mapping[Shape, C]

    def nearest(self, *shape: int) -> C:
        """The choice of the measured shape that is nearest by the ratios of its numbers."""

        def distance(measured: Shape) -> float:
            return sum(
                weight * abs(math.log(max(number, 1) / other))
                for number, other, weight in zip(shape, measured, SHAPE_WEIGHTS, strict=False)
            )

        return self.by_shape[min(self.by_shape, key=distance)]

    @property
    def names(self) -> dict[str, str]:
        """The candidates' names by case, for logs, results and files."""
        return {name_of(shape): candidate.name for shape, candidate in self.by_shape.items()}


@dataclass(frozen=True)
class Selection(Generic[C]):
    """An operation, the candidates for it, and the shapes for which one of them is chosen.

    operation: its name in logs and errors. candidates: the preferred first. tie_share: candidates within this
    share of the fastest count as equally fast, and the preferred one of them is chosen. checks: cases that
    every candidate has to pass before it is timed. num_rounds: how often each candidate is timed in a case;
    candidates alternate, because the device becomes warmer and slower. one_for_all: one candidate for all
    cases. errors_are_local: a candidate that raises in one case is excluded from that case only, instead of
    all. fallback: chosen where no candidate is left, instead of an error.
    """

    operation: str
    candidates: Sequence[C]
    cases: Sequence[Case[C]]
    tie_share: float
    checks: Sequence[Case[C]] = ()
    num_rounds: int = 1
    one_for_all: bool = False
    errors_are_local: bool = False
    fallback: C | None = None

    def measure(self, time_ms: TimeMs, progress: Progress | None = None) -> Choices[C]:
        """The fastest correct candidate for each case. A candidate with a wrong result in one case is
        excluded from all, because a choice is also used for shapes between the measured ones. Raises
        ConfigurationError if no candidate is left for a case and there is no fallback. progress: takes a step
        a case."""
        excluded: Excluded = {}
        for case in self.checks:
            self._check(case, case.open(), self.candidates, excluded)
        times = {}
        for case in self.cases:
            times[case.shape] = self._times(case, time_ms, excluded)
            if progress is not None:
                progress.step()
        groups = [list(times)] if self.one_for_all else [[shape] for shape in times]
        choices = Choices(
            {shape: self._fastest(group, times, excluded) for group in groups for shape in group}
        )
        for shape, candidate in choices.by_shape.items():
            log.debug(
                "kernel selected",
                operation=self.operation,
                case=name_of(shape),
                kernel=candidate.name,
                microseconds={name: round(ms * 1e3, 1) for name, ms in times[shape].items()},
            )
        return choices

    def check(self, names: Mapping[str, str], progress: Progress | None = None) -> Choices[C]:
        """The candidates that ``names`` gives by case, checked as in ``measure`` but not timed. Raises
        ConfigurationError for a case without a known candidate, and for a candidate that fails."""
        known = {candidate.name: candidate for candidate in self.candidates}
        stated = {case.name: names.get(case.name) for case in self.cases}
        unknown = {case: name for case, name in stated.items() if name not in known}
        if unknown or (self.one_for_all and len({*stated.values()}) > 1):
            raise ConfigurationError(
                f"{self.operation} cannot use {unknown or stated}; available are {sorted(known)}"
                + (", one for all cases" if self.one_for_all else "")
            )
        choices = Choices({case.shape: known[names[case.name]] for case in self.cases})
        excluded: Excluded = {}
        for case in self.checks:
            self._check(case, case.open(), [*dict.fromkeys(choices.by_shape.values())], excluded)
        for case in self.cases:
            self._check(case, case.open(), [choices.by_shape[case.shape]], excluded)
            if progress is not None:
                progress.step()
        if excluded:
            raise ConfigurationError(f"{self.operation} fails by {reasons_in(excluded)}")
        return choices

    def _times(self, case: Case[C], time_ms: TimeMs, excluded: Excluded) -> dict[str, float]:
        """Milliseconds of one call by the candidate's name, of those that can be chosen so far."""
        trial = case.open()
        self._check(case, trial, self.candidates, excluded)
        samples: dict[str, list[float]] = {}
        for _ in range(self.num_rounds):
            for candidate in self.candidates:
                with self._excluding(candidate, case, excluded):
                    if (candidate.name, case.shape) not in excluded:
                        ms = time_ms(partial(trial.run, candidate)) / trial.num_calls
                        samples.setdefault(candidate.name, []).append(ms)
        return {
            name: statistics.median(values)
            for name, values in samples.items()
            if (name, case.shape) not in excluded
        }

    def _check(self, case: Case[C], trial: Trial[C], candidates: Sequence[C], excluded: Excluded) -> None:
        for candidate in candidates:
            with self._excluding(candidate, case, excluded):
                if (candidate.name, case.shape) not in excluded:
                    trial.check(candidate)

    @contextmanager
    def _excluding(self, candidate: C, case: Case[C], excluded: Excluded) -> Iterator[None]:
        """If the block raises, adds the candidate to ``excluded``, with the reason."""
        try:
            yield
        except Exception as error:  # a library may raise any error
            reason = f"{reason_of(error)} (case {case.name})"
            is_local = self.errors_are_local and case in self.cases and not isinstance(error, WrongResult)
            for other in [case] if is_local else self.cases:
                excluded[candidate.name, other.shape] = reason
            log.warning(
                "kernel excluded",
                operation=self.operation,
                kernel=candidate.name,
                cases=case.name if is_local else "all",
                reason=reason,
            )

    def _fastest(
        self,
        shapes: Sequence[Shape],
        times: Mapping[Shape, Mapping[str, float]],
        excluded: Excluded,
    ) -> C:
        """The candidate with the least total time over ``shapes``, among those that serve all of them."""
        totals = {
            candidate.name: sum(times[shape][candidate.name] for shape in shapes)
            for candidate in self.candidates
            if not any((candidate.name, shape) in excluded for shape in shapes)
        }
        if totals:
            limit = min(totals.values()) * (1 + self.tie_share)
            return next(
                candidate for candidate in self.candidates if totals.get(candidate.name, math.inf) <= limit
            )
        if self.fallback is not None:
            return self.fallback
        what = f"case {name_of(shapes[0])}" if len(shapes) == 1 else f"all {len(shapes)} cases"
        raise ConfigurationError(
            f"0 of {len(self.candidates)} kernels for {self.operation} serve {what}: {reasons_in(excluded)}",
            found=0,
            tried=len(self.candidates),
        )


def name_of(shape: Shape) -> str:
    return "x".join(map(str, shape))


def reasons_in(excluded: Excluded) -> str:
    return "; ".join(sorted({f"{name}: {reason}" for (name, _), reason in excluded.items()}))


def reason_of(error: Exception) -> str:
    """The error's type and first line; libraries append pages of generated code."""
    if isinstance(error, WrongResult):
        return str(error)
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The Frobenius norm of the difference, relative to that of ``expected``, which is float32."""
    return float((actual.float() - expected).norm() / expected.norm())


def graph_time_ms(run: Callable[[], object], *, repeats: int = 5) -> float:
    """Median time of a few replays of a CUDA graph of the run, by device events, after one warm-up replay."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    samples = []
    for _ in range(repeats):
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(float(start.elapsed_time(end)))
    return statistics.median(samples)
