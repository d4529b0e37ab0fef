"""docs/positions.md: its code runs, its table names tests that are there."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
DOCUMENT = (ROOT / "docs" / "positions.md").read_text()


def test_its_code_runs_from_top_to_bottom() -> None:
    blocks = re.findall(r"```python\n(.*?)```", DOCUMENT, flags=re.DOTALL)
    assert len(blocks) >= 4
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", "\n".join(blocks)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_p01_to_p09_each_have_the_tests_that_the_table_names() -> None:
    table = DOCUMENT.partition("| pitfall | tests |")[2]
    rows = re.findall(r"^\| (\d) .*?\| (.*) \|$", table, flags=re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, 10))
    there = {
        node.name
        for path in (ROOT / "tests").rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    for number, cell in rows:
        names = re.findall(r"`(test_\w+)`", cell)
        assert names, number
        assert all(name.startswith(f"test_p0{number}_") for name in names)
        assert set(names) <= there
