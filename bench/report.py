"""What a run of the tower bench says: records of the result, the table, and what was left out.

Owns the form of a record and of the table. Measuring is tower.py's.
"""

from __future__ import annotations

import statistics
from typing import Any

from cases import KNOWN_CASES
from rich.table import Table
from variants import Case

from encoder_service.towers.synthetic import FAMILIES


def records_of(
    family: str, case: Case, samples: dict[str, list[float]], host_us: dict[str, float]
) -> list[dict[str, Any]]:
    """One record for each variant of a case. padding_share: of the bucket's patches; variants other than
    ``graph`` and ``fp8`` run exact shapes. host_us: only of those two."""
    records = []
    for variant, values in samples.items():
        median_ms = statistics.median(values)
        ordered = sorted(values)
        record = {
            "family": family,
            "case": case.name,
            "variant": variant,
            "median_ms": median_ms,
            "useful_tflops": case.flops / median_ms / 1e9,
            "padding_share": case.padding_shares.get(variant, 0.0),
            "num_runs": len(values),
            "min_ms": ordered[0],
            "max_ms": ordered[-1],
            "num_patches": case.inputs.num_patches,
        }
        if variant in host_us:
            record["host_us"] = host_us[variant]
        if variant in case.notes:
            record["note"] = case.notes[variant]
        records.append(record)
    return records


def table_of(result: dict[str, Any]) -> Table:
    limits = result["ceilings"]
    table = Table(
        title=f"Tower forward on {result['device']}, {result['settings']['size']} size,"
        f" {result['settings']['dtype']}" + ("" if result["complete"] else " (cut short)"),
        caption=f"ceilings: product {limits['matmul_tflops']:.2f} TFLOP/s, copy"
        f" {limits['copy_gb_per_s']:.1f} GB/s",
    )
    for name in ("family", "case", "variant"):
        table.add_column(name)
    for name in ("median ms", "useful TFLOP/s", "of ceiling", "padding", "host us", "runs"):
        table.add_column(name, justify="right")
    places = {
        (family, case): (f, c) for f, family in enumerate(FAMILIES) for c, case in enumerate(KNOWN_CASES)
    }
    for record in sorted(result["records"], key=lambda one: places[one["family"], one["case"]]):
        table.add_row(
            record["family"],
            record["case"],
            record["variant"],
            f"{record['median_ms']:.2f}",
            f"{record['useful_tflops']:.2f}",
            f"{record['useful_tflops'] / limits['matmul_tflops']:.0%}",
            f"{record['padding_share']:.1%}" if record["padding_share"] else "",
            f"{record['host_us']:.0f}" if "host_us" in record else "",
            str(record["num_runs"]),
        )
    return table


def left_out_lines(left_out: list[dict[str, Any]]) -> list[str]:
    """One line for each variant and reason, with the cases it is missing from."""
    cases: dict[tuple[str, str], list[str]] = {}
    for one in left_out:
        cases.setdefault((one["variant"] or "everything", one["reason"]), []).append(
            f"{one['family']} {one['case']}"
        )
    return [
        f"left out: {variant}, {len(names)} cases ({names[0]}{', ...' if len(names) > 1 else ''}): {reason}"
        for (variant, reason), names in cases.items()
    ]
