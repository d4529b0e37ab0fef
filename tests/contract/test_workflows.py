"""What workflows, hooks and documents for contributors call is a target of the Makefile. ``make lint`` checks
their schemas."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
CALLERS = [
    *sorted((ROOT / ".github").rglob("*.*")),
    *(ROOT / name for name in (".ci/run", ".pre-commit-config.yaml", "ARCHITECTURE.md", "CONTRIBUTING.md")),
]


def called(caller: Path) -> set[str]:
    """The targets that a file names, as code or in a workflow's matrix."""
    text = caller.read_text()
    names = set(re.findall(r"(?:`|: |step )make(?: -\w+)* ([a-z][a-z-]*)", text))
    if caller.parent.name == "workflows":
        jobs = yaml.safe_load(text)["jobs"].values()
        names.update(*(job.get("strategy", {}).get("matrix", {}).get("target", []) for job in jobs))
    return names


@pytest.mark.parametrize("caller", CALLERS, ids=lambda path: path.name)
def test_targets_that_are_called_exist(caller: Path) -> None:
    assert called(caller) <= TARGETS


def test_a_change_runs_what_a_developer_runs() -> None:
    """CI leaves out only what needs a GPU, or takes hours."""
    of_changes = called(ROOT / ".github" / "workflows" / "ci.yml")
    assert {
        "lint",
        "test",
        "test-engines",
        "test-engines-next",
        "test-sglang",
        "test-tokenspeed",
        "test-fleet",
    } <= of_changes
