"""Runs an implementation against the golden vectors.

    python -m tests.conformance.run                                        # this project's own
    python -m tests.conformance.run --implementation package.module:factory
    python -m tests.conformance.run --command ./their-engine --conformance
    python -m tests.conformance.run --subject positions --subject splice --command ./their-engine

Owns the command and its report. Exit status: 0 when every case that was asked passed, 1 when one did not, 2
when nothing could be asked. A subject that the implementation does not do is reported and counts as neither,
unless ``--subject`` named it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from tests.conformance.protocol import Failed, Implementation, InProcess, Subprocess, Unsupported
from tests.conformance.vectors import VERSION, Vectors, difference, load

OWN = "tests.conformance.ours:implementation"
MAX_SHOWN = 5


@dataclass
class Report:
    """Of one subject. failures: what was wrong, by case."""

    subject: str
    num_cases: int = 0
    num_passed: int = 0
    supported: bool = True
    failures: list[str] = field(default_factory=list)


def check(implementation: Implementation, vectors: Sequence[Vectors]) -> list[Report]:
    """Asks every case; a subject is unsupported when its first case is."""
    reports = []
    for one in vectors:
        report = Report(one.subject, len(one.cases))
        for place, case in enumerate(one.cases):
            try:
                wrong = difference(implementation.ask(case.subject, case.asked), case.expected)
            except Unsupported:
                if place == 0:
                    report.supported = False
                    break
                wrong = "unsupported, though other cases of the subject were answered"
            except Failed as failure:
                wrong = str(failure)
            if wrong is None:
                report.num_passed += 1
            else:
                report.failures.append(f"{case.name}: {wrong}")
        reports.append(report)
    return reports


def status(reports: Sequence[Report], required: Collection[str]) -> int:
    if any(report.failures or (not report.supported and report.subject in required) for report in reports):
        return 1
    return 0 if any(report.num_passed for report in reports) else 2


def lines_of(reports: Sequence[Report], version: str) -> list[str]:
    lines = [f"golden vectors {version}"]
    for report in reports:
        result = f"{report.num_passed}/{report.num_cases}" if report.supported else "not supported"
        lines.append(
            f"{'FAIL' if report.failures else '  ok' if report.supported else '   -'}  "
            f"{report.subject:<18} {result}"
        )
        lines += [f"        {failure}" for failure in report.failures[:MAX_SHOWN]]
        if len(report.failures) > MAX_SHOWN:
            lines.append(f"        and {len(report.failures) - MAX_SHOWN} more")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--implementation", default=OWN, help="module:factory in this process")
    parser.add_argument("--vectors", default=VERSION, help="which version")
    parser.add_argument("--subject", action="append", default=[], help="only this one; may be given again")
    parser.add_argument("--timeout-s", type=float, default=30.0, help="of one answer of a command")
    parser.add_argument(
        "--command", nargs=argparse.REMAINDER, help="another process and its arguments; the last option"
    )
    options = parser.parse_args(arguments)
    try:
        vectors = load(options.vectors)
        known = {one.subject for one in vectors}
        if unknown := sorted(set(options.subject) - known):
            raise Failed(f"no subject {', '.join(unknown)}; there are {', '.join(sorted(known))}")
        if options.subject:
            vectors = [one for one in vectors if one.subject in options.subject]
        implementation: Implementation
        if options.command:
            implementation = Subprocess(options.command, timeout_s=options.timeout_s)
        else:
            implementation = InProcess.load(options.implementation)
    except (Failed, FileNotFoundError, ImportError, AttributeError) as failure:
        print(failure, file=sys.stderr)
        return 2
    try:
        reports = check(implementation, vectors)
    finally:
        implementation.close()
    print("\n".join(lines_of(reports, options.vectors)))
    return status(reports, options.subject)


if __name__ == "__main__":
    sys.exit(main())
