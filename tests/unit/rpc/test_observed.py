"""What the log and the counts say about calls, whatever their protocol."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
from starlette.requests import ClientDisconnect
from structlog.testing import capture_logs

from encoder_service.errors import (
    DeadlineExceeded,
    InternalError,
    QueueFull,
    UndecodableImage,
    UnknownKey,
    UrlUnreachable,
)
from encoder_service.ops.logs import REPEAT_S, RepeatedLines
from encoder_service.ops.metrics import Metrics
from encoder_service.rpc import observed
from encoder_service.rpc.observed import MAX_FAILURES, Call, recorded


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Of the bound on lines, which starts anew."""
    now = [0.0]
    monkeypatch.setattr(observed, "failure_lines", RepeatedLines(lambda: now[0]))
    return now


def call_of(host: str = "10.0.0.7") -> Call:
    return Call("Encode", "id", peer=f"{host}:4711", host=host, namespace="tenant")


def shown(logs: Any) -> list[tuple[str, str]]:
    """Level and reason of the lines that are shown by default."""
    return [(line["log_level"], line["reason"]) for line in logs if line["log_level"] != "debug"]


def samples(metrics: Metrics, name: str) -> dict[str, float]:
    return {
        next(iter(sample.labels.values()), ""): sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.name == name
    }


def test_p71_a_flood_of_refusals_is_one_line_and_all_are_counted(
    metrics: Metrics, clock: list[float]
) -> None:
    with capture_logs() as logs:
        for number in range(200):
            call_of(f"10.0.0.{number}").item_failure(metrics, QueueFull("full"), 0, 1)
        clock[0] += REPEAT_S
        call_of().item_failure(metrics, QueueFull("full"), 0, 1)
    assert shown(logs) == [("warning", "QUEUE_FULL")] * 2
    assert logs[-1]["num_left_out"] == 199
    assert len(logs) == 201, "at debug all are there"
    assert samples(metrics, "ve_item_failures_total") == {"QUEUE_FULL": 201}
    assert samples(metrics, "ve_rejections_total") == {"QUEUE_FULL": 201}


def test_a_url_that_fails_is_no_lack_of_room(metrics: Metrics) -> None:
    call_of().item_failure(metrics, UrlUnreachable("the URL's server answers 503"), 0, 2)
    assert samples(metrics, "ve_item_failures_total") == {"URL_UNREACHABLE": 1}
    assert samples(metrics, "ve_rejections_total") == {}


def test_p71_a_callers_broken_files_hide_nobody_elses(metrics: Metrics, clock: list[float]) -> None:
    with capture_logs() as logs:
        for index in range(10 * MAX_FAILURES):
            call_of().item_failure(metrics, UndecodableImage("broken"), index, 256)
        call_of("10.0.0.8").item_failure(metrics, UndecodableImage("x" * 1000), 3, 256)
        call_of().item_failure(metrics, InternalError("a defect"), 3, 256)
    assert shown(logs) == [("warning", "UNDECODABLE_IMAGE")] * (MAX_FAILURES + 1) + [("error", "INTERNAL")]
    line = logs[-2]
    assert (line["peer"], line["namespace"], line["item"]) == ("10.0.0.8:4711", "tenant", 3)
    assert len(line["error"]) < 1000


def test_a_key_that_is_not_here_is_an_answer(metrics: Metrics, clock: list[float]) -> None:
    """As after a restart of the encoder, when clients ask for what the former one had."""
    with capture_logs() as logs:
        failure = call_of().item_failure(metrics, UnknownKey("unknown"), 0, 2)
    assert failure.reason == "UNKNOWN_KEY"
    assert shown(logs) == []
    assert samples(metrics, "ve_item_failures_total") == {}
    assert samples(metrics, "ve_unknown_keys_total") == {"": 1}


@pytest.mark.parametrize(
    ("failing", "status", "levels"),
    [
        (None, "OK", ["debug"]),
        (lambda: DeadlineExceeded("late"), "DEADLINE_EXCEEDED", ["warning", "debug"]),
        (lambda: ZeroDivisionError(), "INTERNAL", ["error", "debug"]),
        (lambda: ClientDisconnect(), "CANCELLED", ["debug"]),
    ],
    ids=["ok", "late", "defect", "left"],
)  # fmt: skip
def test_every_call_has_a_line_and_a_count(
    failing: Callable[[], Exception] | None,
    status: str,
    levels: list[str],
    metrics: Metrics,
    clock: list[float],
) -> None:
    call = call_of()
    call.num_items = 2
    raised = contextlib.nullcontext() if failing is None else pytest.raises(type(failing()))
    with capture_logs() as logs, raised, recorded(call, metrics):
        call.item_failure(metrics, UnknownKey("unknown"), 1, 2)
        logs.clear()
        if failing is not None:
            raise failing()
    assert [line["log_level"] for line in logs] == levels
    line = logs[-1]
    assert (line["event"], line["status"], line["items"]) == ("call ended", status, 2)
    assert line["failed"] == {"UNKNOWN_KEY": 1}
    (counted,) = (
        sample
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.name == "ve_requests_total"
    )
    assert counted.labels == {"method": "Encode", "status": status}
