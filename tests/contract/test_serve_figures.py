"""What documents say of the service under load is what its result file says."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

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


def records_of(path: str) -> dict[tuple[str, str, float], dict[str, Any]]:
    """By server, mix and load; those of a steady load."""
    records = json.loads((ROOT / path).read_text())["records"]
    return {(one["server"], one["mix"], one["load"]): one for one in records if not one["bursty"]}


def test_one_image_at_a_time_and_the_plain_loop_are_those_of_the_files() -> None:
    text = " ".join((ROOT / "docs" / "deploy.md").read_text().split())
    loop = re.search(
        r"with a chat's photographs \(`(\S+)`\).*came to (\d+) and (\d+) % in the same run", text
    )
    alone = re.search(
        r"took a median of (\S+) ms in that run beyond decoding and its (\S+) ms in the tower, and (\S+) ms "
        r"on another machine of the kind \(`(\S+)`\); nearly half",
        text,
    )
    assert loop is not None
    assert alone is not None
    found, other = records_of(loop[1]), records_of(f"bench/results/{alone[4]}")
    shares = [100 * found["baseline", mix, 0.6]["tower_share"] for mix in ("448-heavy", "chat")]
    assert [round(share) for share in shares] == [int(loop[2]), int(loop[3])]
    one = found["service", "448-heavy", 0.1]
    assert f"{one['overhead_ms']['p50']:.1f}" == alone[1]
    assert f"{one['stages']['tower_ms']['p50']:.1f}" == alone[2]
    assert f"{other['service', '448-heavy', 0.1]['overhead_ms']['p50']:.1f}" == alone[3]
    assert 0.4 < one["caller_overhead_ms"]["p50"] / one["overhead_ms"]["p50"] < 0.5


def test_the_notes_say_of_the_last_runs_what_their_files_say() -> None:
    text = (ROOT / "bench" / "NOTES.md").read_text()
    start = text.index("### What came out of the sixth and the seventh run")
    lines = [line for line in text[start:].splitlines() if line.startswith("| ")]
    rows = {cells[1]: cells[2:5] for line in lines if len(cells := re.split(r" ?\| ?", line)) > 4}
    runs = [records_of(f"bench/results/serve-nvidia-h200-2026-11-23-{number}.json") for number in (2, 5, 6)]
    for name, server, mix, figure in (
        ("`448-heavy`, without gRPC: beyond decode and tower", "service", "448-heavy", "overhead_ms"),
        ("of it the service's, queue included", "service", "448-heavy", "service_overhead_ms"),
        ("the caller's", "service", "448-heavy", "caller_overhead_ms"),
        ("`448-heavy` by gRPC: beyond decode and tower", "service by gRPC", "448-heavy", "overhead_ms"),
        ("`chat`, without gRPC: beyond decode and tower", "service", "chat", "overhead_ms"),
    ):
        assert rows[name] == [f"{run[server, mix, 0.1][figure]['p50']:.2f}" for run in runs], name


def test_the_rates_by_mix_are_those_of_the_file() -> None:
    text = (ROOT / "docs" / "deploy.md").read_text()
    found = re.search(r"<!-- figures: (\S+serve-\S+) -->\n\|.*\n\|[-|]+\n((?:\|.*\n)+)", text)
    assert found is not None
    result = json.loads((ROOT / found[1]).read_text())
    loaded = {
        one["mix"]: one for one in result["records"] if one["server"] == "service" and one["load"] == 1.1
    }
    expected = [
        f"| `{mix}` | {tower['mean_patches']:,.0f} | {tower['images_per_s']:.0f} |"
        f" {loaded[mix]['encoded_images_per_s']:.0f} | {loaded[mix]['images_per_s']:.0f} |"
        for mix, tower in result["tower"].items()
    ]
    assert found[2].splitlines() == expected
    assert (result["device"], result["settings"]["family"], result["settings"]["repeat_share"]) == (
        "NVIDIA H200",
        "qwen3_vl",
        0.3,
    )
    encodes = 64 * 8 * 1.5 * 0.7
    rate = loaded["chat"]["encoded_images_per_s"]
    num = math.ceil(encodes / (0.75 * rate)) + 1
    assert f"With the photographs of `chat`, {rate:.0f} a second, it would be {num}." in text
