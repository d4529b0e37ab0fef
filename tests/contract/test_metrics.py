"""Metrics: each says what it is and in which unit, and is in the document and known to the dashboard."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import Counter, Gauge

from encoder_service.ops.metrics import Metrics
from tests.contract.metric_table import (
    DOCUMENT,
    full_registry,
    names_with_series,
    rows_of,
    split_document,
    table_of,
    unit_of,
)

ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "deploy" / "grafana" / "vision-encoder.json"
ROWS = rows_of(full_registry())


def test_every_metric_has_a_text_and_a_unit() -> None:
    wanting = [row.name for row in ROWS if not re.fullmatch(r"\S.{8,}\.", row.text) or not row.unit]
    assert wanting == []
    assert all(row.name.startswith("ve_") for row in ROWS)
    assert len({row.name for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize(
    ("name", "kind", "unit"),
    [
        ("ve_x_seconds", "gauge", "seconds"),
        ("ve_x_bytes_total", "counter", "bytes"),
        ("ve_x_lost_total", "counter", "events"),
        ("ve_something", "gauge", ""),
    ],
)
def test_a_name_without_a_unit_is_noticed(name: str, kind: str, unit: str) -> None:
    assert unit_of(name, kind) == unit


def test_the_document_has_the_table_of_the_registry() -> None:
    """Written by ``tests/contract/metric_table.py``."""
    _, table, _ = split_document(DOCUMENT.read_text())
    assert table == table_of(ROWS)


def test_a_metric_that_is_added_changes_the_table() -> None:
    metrics = Metrics()
    before = rows_of(metrics)
    Counter("ve_new_total", "Something new.", ["what"], registry=metrics.registry)
    Gauge("ve_newer_bytes", "Something newer.", registry=metrics.registry)
    added = [(row.name, row.labels) for row in rows_of(metrics) if row not in before]
    assert added == [("ve_new_total", ("what",)), ("ve_newer_bytes", ())]


def metric_literals() -> Iterator[tuple[str, str]]:
    """Every text of the service's code that is a metric's name, or the beginning of one."""
    for path in sorted((ROOT / "encoder_service").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            text = node.value if isinstance(node, ast.Constant) else None
            if isinstance(text, str) and re.fullmatch(r"ve_[a-z0-9_]+", text):
                yield path.name, text


def test_the_registry_of_this_test_has_all_that_the_code_names() -> None:
    names = [row.name for row in ROWS]
    literals = list(metric_literals())
    assert len(literals) > 60
    missing = [
        (file, literal)
        for file, literal in literals
        if literal not in names
        and literal + "_total" not in names
        and not any(name.startswith(literal) for name in names if literal.endswith("_"))
        and not any(name.startswith(literal + "_") for name in names)
    ]
    assert missing == []


# -- the dashboard -------------------------------------------------------------------------------------


def panels_of(dashboard: dict) -> Iterator[dict]:
    for panel in dashboard["panels"]:
        yield panel
        yield from panel.get("panels", ())


def expressions() -> list[tuple[str, str]]:
    dashboard = json.loads(DASHBOARD.read_text())
    found = [
        (panel["title"], target["expr"])
        for panel in panels_of(dashboard)
        for target in panel.get("targets", ())
    ]
    found += [
        (variable["name"], variable["query"])
        for variable in dashboard["templating"]["list"]
        if variable["type"] == "query"
    ]
    return found


def strangers(expression: str) -> list[str]:
    """Metrics and labels of an expression that do not exist."""
    known = names_with_series(ROWS)
    found = []
    for name, selector in re.findall(r"\b(ve_[a-z0-9_]+)(?:\{([^}]*)\})?", expression):
        if name not in known:
            found.append(name)
            continue
        used = re.findall(r"([a-z_]+)\s*(?:=~|!~|!=|=)", selector)
        found += [f"{name}{{{label}}}" for label in used if label not in (*known[name], "job", "instance")]
    return found


@pytest.mark.parametrize(("title", "expression"), expressions())
def test_every_expression_of_the_dashboard_is_of_metrics_that_exist(title: str, expression: str) -> None:
    assert "ve_" in expression
    assert strangers(expression) == []
    assert expression.count("(") == expression.count(")")
    if "histogram_quantile" in expression:
        assert re.search(r"by \(le(, [a-z]+)?\)", expression)


def test_a_metric_or_label_that_does_not_exist_is_noticed() -> None:
    assert strangers('rate(ve_no_such_total[1m]) + ve_items_total{teir="x", job="y"}') == [
        "ve_no_such_total",
        "ve_items_total{teir}",
    ]


def test_the_dashboards_panels_do_not_overlap_and_name_their_source() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    taken: set[tuple[int, int]] = set()
    ids = [panel["id"] for panel in panels_of(dashboard)]
    assert len(set(ids)) == len(ids)
    for panel in panels_of(dashboard):
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
        if panel["type"] != "row":
            assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
            assert panel["description"]
