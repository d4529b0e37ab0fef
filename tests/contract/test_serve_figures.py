"""What documents say of the service under load is what its result file says."""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_shares_of_the_towers_throughput_are_those_of_the_file() -> None:
    text = " ".join((ROOT / "docs" / "deploy.md").read_text().split())
    found = re.search(
        r"came to (\d+) % of its tower's own throughput with images mostly of 448 pixels and to (\d+) % with "
        r"a chat's photographs \(`(\S+)`\), taking about two cores",
        text,
    )
    assert found is not None
    records = json.loads((ROOT / found[3]).read_text())["records"]
    by_mix = {one["mix"]: one for one in records if one["server"] == "service" and one["load"] == 1.1}
    assert round(100 * by_mix["448-heavy"]["tower_share"]) == int(found[1])
    assert round(100 * by_mix["chat"]["tower_share"]) == int(found[2])
    assert all(1.5 < one["cores"] < 2.5 and not one["failures"] for one in by_mix.values())
