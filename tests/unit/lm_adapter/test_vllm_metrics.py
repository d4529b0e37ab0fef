"""The plugin's part of vLLM's ``/metrics`` and of its log, without vLLM: records, their sum, labels."""

from __future__ import annotations

import json
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from lm_adapter.engines.shared.rank_socket import RowsRead
from lm_adapter.engines.vllm.api_server import metrics as metrics_module
from lm_adapter.engines.vllm.api_server.metrics import MAX_REASONS, EncoderMetrics
from lm_adapter.engines.vllm.stats import MAX_WAITS, RowStats
from lm_adapter.errors import (
    CallCancelled,
    DeadlineExceeded,
    EncoderError,
    EncoderOverloaded,
    EncoderUnavailable,
    ItemFailed,
    ModelMismatch,
    RequestRefused,
)

LABELS = {0: ["model", "0"], 1: ["model", "1"]}


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def metrics(registry: CollectorRegistry) -> EncoderMetrics:
    """Of two engines, with the arguments of vLLM."""

    def typed(kind: Any) -> Any:
        return lambda **arguments: kind(**arguments, registry=registry)

    kinds: Any = {kind: typed(kind) for kind in (Gauge, Counter, Histogram)}
    return EncoderMetrics(kinds, ["model_name", "engine"], LABELS)


def values(registry: CollectorRegistry, name: str) -> dict[tuple[str, ...], float]:
    """By the labels behind the model's."""
    return {
        tuple(text for label, text in sample.labels.items() if label != "model_name"): sample.value
        for metric in registry.collect()
        for sample in metric.samples
        if sample.name == f"vllm:vision_encoder_{name}"
    }


def failures(registry: CollectorRegistry) -> dict[tuple[str, ...], float]:
    """Without the reasons that were only made known."""
    return {labels: number for labels, number in values(registry, "failures_total").items() if number}


def a_record() -> RowStats:
    stats = RowStats()
    stats.waited(0.2)
    stats.looked_up(3, is_hit=False)
    stats.looked_up(2, is_hit=True)
    stats.got(3_000_000, RowsRead(1, "host"))
    stats.got(1_500_000, RowsRead(2, "inline", was_lost=True))
    stats.failed("UNAVAILABLE")
    return stats


def test_records_are_counted_for_the_engine_that_sent_them(
    metrics: EncoderMetrics, registry: CollectorRegistry
) -> None:
    """In the form in which they pass between processes."""
    assert values(registry, "cache_hits_total") == {("0",): 0, ("1",): 0}
    assert values(registry, "failures_total")["0", "UNAVAILABLE"] == 0, "a rate sees the first one"
    for engine in (1, 1, 0):
        metrics.observe(json.loads(json.dumps(a_record().data)), engine)
    assert values(registry, "cache_queries_total") == {("0",): 5, ("1",): 10}
    assert values(registry, "cache_hits_total") == {("0",): 2, ("1",): 4}
    assert values(registry, "lost_reads_total") == {("0",): 1, ("1",): 2}
    assert failures(registry) == {("0", "UNAVAILABLE"): 1, ("1", "UNAVAILABLE"): 2}
    assert values(registry, "rows_wait_seconds_count") == {("0",): 1, ("1",): 2}
    found = values(registry, "rows_bytes_total")
    assert (found["1", "host"], found["1", "inline"]) == (6_000_000, 3_000_000)
    assert found["0", "device"] == 0


def test_a_request_that_no_engine_had_counts_for_the_first(
    metrics: EncoderMetrics, registry: CollectorRegistry
) -> None:
    metrics.failed(ItemFailed("no clip", reason="UNDECODABLE_CLIP"))
    assert failures(registry) == {("0", "UNDECODABLE_CLIP"): 1}


@pytest.mark.parametrize(
    ("error", "is_reachable"),
    [
        (None, True),
        (EncoderUnavailable("it is away"), False),
        (DeadlineExceeded("it stands still"), False),
        (ItemFailed("the token's file is gone"), False),
        (CallCancelled("its connection broke"), False),
        (EncoderOverloaded("it is full"), True),
        (RequestRefused("it wants a token", reason="UNAUTHENTICATED"), True),
        (ModelMismatch("it has another model"), True),
    ],
)
def test_an_encoder_that_answers_is_reachable(
    error: EncoderError | None, is_reachable: bool, metrics: EncoderMetrics, registry: CollectorRegistry
) -> None:
    for outcome in (None if not is_reachable else EncoderUnavailable("before"), error):
        metrics.asked(outcome)
    assert values(registry, "reachable") == {("0",): is_reachable, ("1",): is_reachable}


def test_p33_an_encoder_cannot_make_labels_without_end(
    metrics: EncoderMetrics, registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_module, "MAX_REASONS", 3)
    assert MAX_REASONS > 50, "more than the service and the adapter have"
    for reason in ("one", "A" * 41, 'A"', "", "FIRST", "SECOND", "THIRD", "FOURTH", "FIRST"):
        metrics.observe({"failures": {reason: 1}})
    found = {labels[1]: number for labels, number in failures(registry).items()}
    assert found == {"OTHER": 5, "FIRST": 2, "SECOND": 1, "THIRD": 1}


def test_the_line_of_an_interval_has_what_happened_in_it() -> None:
    interval = a_record().aggregate(a_record()).aggregate(RowStats({"waits_s": [0.5]}))
    assert interval.reduce() == {
        "Num waits for rows": 3,
        "Avg wait (ms)": 300.0,
        "P90 wait (ms)": 500.0,
        "MB by host": 6.0,
        "MB by inline": 3.0,
        "Num items": 10,
        "Num items in cache": 4,
        "Num lost reads": 2,
        "Num failed UNAVAILABLE": 2,
    }
    hit = RowStats()
    hit.looked_up(1, is_hit=True)
    assert hit.reduce() == {"Num items": 1, "Num items in cache": 1}
    assert not hit.is_empty()
    hit.reset()
    assert hit.is_empty()


def test_p17_a_logger_that_never_logs_keeps_a_bounded_record() -> None:
    interval = RowStats()
    for _ in range(3):
        interval = interval.aggregate(RowStats({"waits_s": [0.1] * MAX_WAITS}))
    assert interval.reduce()["Num waits for rows"] == MAX_WAITS
