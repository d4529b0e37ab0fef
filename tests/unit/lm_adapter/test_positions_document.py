"""The code of docs/positions.md runs."""

from __future__ import annotations

import re

from tests.unit.lm_adapter.interpreter import ROOT, output_of


def test_its_code_runs_from_top_to_bottom() -> None:
    document = (ROOT / "docs" / "positions.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", document, flags=re.DOTALL)
    assert len(blocks) >= 4
    output_of("\n".join(blocks))
