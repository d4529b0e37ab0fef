"""Figures of ``epd.py`` from the times of its requests: shares within bounds, goodput, and tables.

    python -m bench.epd_figures bench/results/epd-....json   # the tables again

Owns what is computed from records; ``epd_rates`` makes them.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.measurement import percentile

BOUNDS = ((150.0, 10.0), (250.0, 15.0), (500.0, 25.0))
"""Most milliseconds to the first token, and between the tokens of a request in the mean."""
GOOD_SHARE = 0.9
AT, FIRST, BETWEEN, LONGEST, TOTAL, FAILURE = range(6)
"""Places in the record of a request, a list, in files a line with spaces: the second at which it was sent;
milliseconds to the first token, between tokens in the mean and at most, and to the end; why it failed."""


def figures(requests: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """Of one point. A request that failed is outside of all bounds."""
    good = [one for one in requests if not one[FAILURE]]
    return {
        "num_failed": len(requests) - len(good),
        "failures": sorted({one[FAILURE] for one in requests if one[FAILURE]})[:3],
        "first_token_ms": percentiles([one[FIRST] for one in good]),
        "between_tokens_ms": percentiles([one[BETWEEN] for one in good]),
        "within": {
            label(bound): sum(one[FIRST] <= bound[0] and one[BETWEEN] <= bound[1] for one in good)
            / len(requests)
            for bound in BOUNDS
        },
    }


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    return {"p50": percentile(values, 0.5), "p99": percentile(values, 0.99)} if values else None


def label(bound: tuple[float, float]) -> str:
    return "{:g}/{:g}".format(*bound)


def goodput(shares: Mapping[float, float]) -> float:
    """Requests a second up to which GOOD_SHARE of them are within a bound, from the share at each rate,
    interpolated. 0 if it is less at the lowest rate, infinite if it is as much at the highest: what lies
    beyond was not measured."""
    kept = 0.0, 1.0
    for rate, share in sorted(shares.items()):
        if share < GOOD_SHARE:
            if not kept[0]:
                return 0.0
            return kept[0] + (rate - kept[0]) * (kept[1] - GOOD_SHARE) / (kept[1] - share)
        kept = rate, share
    return math.inf


def summary(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each mix, rate and peer the median over the rounds, with the minimum and the maximum; then the
    goodput of each mix and peer in every bound, as text of its least and greatest round."""
    rows: list[dict[str, Any]] = []
    for mix, rate, peer in dict.fromkeys((one["mix"], one["rate"], one["peer"]) for one in records):
        mine = [one for one in records if (one["mix"], one["rate"], one["peer"]) == (mix, rate, peer)]
        row: dict[str, Any] = {"mix": mix, "rate": rate, "peer": peer}
        row["num_failed"] = sum(one["num_failed"] for one in mine)
        row["requests_per_s"] = spread([one["requests_per_s"] for one in mine])
        for name in ("first_token_ms", "between_tokens_ms", "gaps_ms"):
            for part in ("p50", "p99"):
                row[f"{name} {part}"] = spread([one[name][part] for one in mine if one[name]])
        for name in ("within", "cpu_ms", "encoder"):
            row[name] = {
                key: spread([one[name][key] for one in mine if key in one[name]]) for key in mine[0][name]
            }
        rows.append(row)
    for mix, peer in dict.fromkeys((one["mix"], one["peer"]) for one in records if one["rate"]):
        mine = [one for one in records if (one["mix"], one["peer"]) == (mix, peer)]
        rows.append({"mix": mix, "peer": peer, "goodput": goodput_texts(mine)})
    return rows


def goodput_texts(records: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Of one mix and peer, by bound. A round that was cut short does not count."""
    rates = sorted({one["rate"] for one in records})
    texts = {}
    for bound in records[0]["within"]:
        by_round: dict[int, dict[float, float]] = {}
        for one in records:
            by_round.setdefault(one["round"], {})[one["rate"]] = one["within"][bound]
        found = [goodput(shares) for shares in by_round.values() if len(shares) == len(rates)]
        ends = (min(found), max(found)) if found else ()
        texts[bound] = " to ".join(dict.fromkeys(goodput_text(end, rates) for end in ends))
    return texts


def goodput_text(value: float, rates: Sequence[float]) -> str:
    """In requests a second. rates: that were measured."""
    if value in (0.0, math.inf):
        return f"under {rates[0]:g}" if not value else f"over {rates[-1]:g}"
    return f"{value:.1f}"


def spread(values: Sequence[float]) -> list[float] | None:
    return [statistics.median(values), min(values), max(values)] if values else None


# Tables ---------------------------------------------------------------------------------------------------


def tables(result: Mapping[str, Any]) -> str:
    """In Markdown: goodput of all mixes, then the times of each mix."""
    rows = summary(result["records"])
    parts = list(goodput_table([row for row in rows if "goodput" in row]))
    for mix in dict.fromkeys(row["mix"] for row in rows):
        parts += times_table(mix, [row for row in rows if row["mix"] == mix and "goodput" not in row])
    parts += [f"- {name}: {reason}" for name, reason in result["left_out"].items()]
    return "\n".join(parts)


def goodput_table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    columns = [(row["mix"], bound) for row in rows for bound in row["goodput"]]
    columns = list(dict.fromkeys(columns))
    if not columns:
        return
    names = [f"{mix}, {bound}" for mix, bound in columns]
    yield from head(f"requests a second with {GOOD_SHARE:.0%} in bounds", *names)
    for peer in dict.fromkeys(row["peer"] for row in rows):
        own = {row["mix"]: row["goodput"] for row in rows if row["peer"] == peer}
        yield line(peer, *(own.get(mix, {}).get(bound, "") for mix, bound in columns))


def times_table(mix: str, rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Medians over the rounds, with the least and greatest of the first column."""
    bounds = list(rows[0]["within"]) if rows[0]["rate"] else []
    programs = list(dict.fromkeys(name for row in rows for name in row["cpu_ms"]))
    encoder = list(dict.fromkeys(name for row in rows for name in row["encoder"]))
    yield ""
    yield from head(
        *(f"{mix}, a second" if bounds else mix, "requests a second", "first token p50, ms", "p99"),
        *("between tokens p50", "p99", "p99 of all gaps", *bounds),
        *(f"CPU of {name}, ms a request" for name in programs),
        *(f"encoder: {name.replace('_', ' ')}" for name in encoder),
        "failed",
    )
    for row in rows:
        name = f"{row['rate']:g}: {row['peer']}" if bounds else row["peer"]
        rate = row["requests_per_s"]
        times = ("first_token_ms p50", "first_token_ms p99", "between_tokens_ms p50", "between_tokens_ms p99")
        yield line(
            name,
            "{:.1f} ({:.1f} to {:.1f})".format(*rate),
            *(cell(row[part], "{:.1f}") for part in (*times, "gaps_ms p99")),
            *(cell(row["within"][bound], "{:.0%}") for bound in bounds),
            *(cell(row["cpu_ms"].get(program), "{:.1f}") for program in programs),
            *(cell(row["encoder"].get(part), "{:.3g}") for part in encoder),
            str(row["num_failed"]),
        )


def cell(values: Sequence[float] | None, form: str) -> str:
    return form.format(values[0]) if values else ""


def head(*names: str) -> Iterator[str]:
    yield line(*names)
    yield "|---" * len(names) + "|"


def line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    for path in sys.argv[1:]:
        print(tables(json.loads(Path(path).read_text())))
