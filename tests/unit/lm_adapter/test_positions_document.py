"""The code of docs/positions.md runs."""

from __future__ import annotations

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
