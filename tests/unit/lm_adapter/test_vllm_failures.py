"""Reasons of failed requests on their way from the scheduler's process to the API server."""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import time
from collections.abc import Iterator

import pytest

from bench.harness.waiting import PATIENCE_S, wait_until
from lm_adapter.engines.shared.error_text import MAX_MESSAGE_CHARS, status_of
from lm_adapter.engines.vllm import failures as failures_module
from lm_adapter.engines.vllm.failures import MAX_KEPT, Failures, send_report
from lm_adapter.errors import (
    DeadlineExceeded,
    EncoderError,
    EncoderFault,
    EncoderOverloaded,
    EncoderUnavailable,
    InvalidRequest,
    InvalidRows,
    ItemFailed,
    RequestRefused,
    StreamViolation,
)

ERROR = ItemFailed("the file is no image", reason="UNDECODABLE_IMAGE", status=3)


@pytest.fixture
def failures() -> Iterator[Failures]:
    found = Failures()
    yield found
    found.close()


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ERROR, 400),
        (ItemFailed("too large", reason="IMAGE_TOO_LARGE", status=9), 400),
        (ItemFailed("too large", reason="MESSAGE_TOO_LARGE", status=8), 400),
        (InvalidRequest("no file"), 400),
        (InvalidRows("width", "width is 9", found=9, expected=12), 502),
        (ItemFailed("fault"), 502),
        (EncoderFault("fault"), 502),
        (RequestRefused("who", reason="UNAUTHENTICATED"), 502),
        (StreamViolation("no"), 502),
        (EncoderUnavailable("gone"), 503),
        (EncoderOverloaded("full"), 503),
        (EncoderOverloaded("full", reason="QUEUE_FULL", retryable=False), 503),
        (ItemFailed("gone", reason="UNKNOWN_KEY", status=5), 503),
        (ItemFailed("draining", reason="DRAINING", status=14, retryable=True), 503),
        (DeadlineExceeded("late"), 504),
        (ItemFailed("late", reason="DEADLINE_EXCEEDED", status=4), 504),
    ],
)
def test_the_http_status_says_whose_fault_it_is(error: EncoderError, status: int) -> None:
    assert status_of(error) == status


@pytest.mark.parametrize(
    ("request_id", "in_engine"),
    [
        ("chatcmpl-1", "{}"),
        ("chatcmpl-1", "{}-4f2c9b1a"),
        ("chatcmpl-1", "0_{}"),
        ("chatcmpl-1", "1_{}-4f2c9b1a"),
        ("chatcmpl-1", "{}-0b7e1f2d-beam-3-4f2c9b1a"),
        ("chatcmpl-1", "{}_2-4f2c9b1a"),
        ("resp_1", "{}_0-4f2c9b1a"),
        ("resp_1", "0_{}-4f2c9b1a"),
        ("cmpl-1", "{}-3-4f2c9b1a"),
        ("cmpl-1", "1_{}-3-4f2c9b1a"),
    ],
)
def test_p32_a_report_is_taken_once_by_an_id_that_the_engines_contains(
    request_id: str, in_engine: str, failures: Failures
) -> None:
    """Of several turns, prompts and samples. Another request's id may begin alike."""
    send_report(failures.name, in_engine.format(request_id), ERROR)
    send_report(failures.name, f"{request_id}0-4f2c9b1a", InvalidRequest("no file"))
    assert failures.take(f"{request_id}1") is None
    assert failures.take(request_id) == (400, "UNDECODABLE_IMAGE: the file is no image")
    assert failures.take(request_id) is None
    assert failures.take(f"{request_id}0") == (400, "INVALID_REQUEST: no file")


def test_of_two_reports_on_one_request_the_last_counts(failures: Failures) -> None:
    send_report(failures.name, "chatcmpl-1", ERROR)
    send_report(failures.name, "chatcmpl-1", EncoderUnavailable("gone"))
    assert failures.take("chatcmpl-1") == (503, "UNAVAILABLE: gone")


def test_p17_reports_are_bounded_in_number_and_length(failures: Failures) -> None:
    for number in range(MAX_KEPT + 3):
        send_report(failures.name, f"chatcmpl-{number:06}", ItemFailed("\U0001f5bc" * 100_000))
        assert failures.take("chatcmpl-unknown") is None  # the socket's own queue is short
    assert [failures.take(f"chatcmpl-{number:06}") for number in range(3)] == [None] * 3
    for number in (3, MAX_KEPT + 2):
        found = failures.take(f"chatcmpl-{number:06}")
        assert found is not None
        assert found == (502, f"INTERNAL: {MAX_MESSAGE_CHARS * chr(0x1F5BC)}")


def test_a_report_to_nobody_is_logged_and_dropped(
    failures: Failures, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING", "vllm.vision_encoder"):
        send_report(f"{failures.name}-of-nobody", "chatcmpl-1", ERROR)
    assert "does not learn why request chatcmpl-1 failed" in caplog.text


@pytest.fixture
def full_server() -> Iterator[str]:
    """The name of an API server's socket that has no room, and never will."""
    name = f"vision-encoder-{secrets.token_hex(16)}"
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender,
    ):
        server.bind(f"\0{name}")
        sender.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                sender.sendto(b"", f"\0{name}")
        yield name


def test_p32_an_api_server_that_stands_still_delays_no_other_and_takes_no_processor_time(
    full_server: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Reports that find no room are sent once there is some, without a wait of the scheduler."""
    monkeypatch.setattr(failures_module, "SEND_S", 1.0)
    begun_cpu_s = time.process_time()
    send_report(full_server, "chatcmpl-0", ERROR)
    wait_until(lambda: "chatcmpl-0 failed: timed out" in caplog.text, "the end of the wait")
    assert time.process_time() - begun_cpu_s < 0.5
    monkeypatch.setattr(failures_module, "SEND_S", PATIENCE_S)
    send_report(full_server, "chatcmpl-1", ERROR)
    num_reports = 600  # more than the kernel keeps for a socket
    name = f"vision-encoder-{secrets.token_hex(16)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        server.bind(f"\0{name}")
        server.settimeout(PATIENCE_S / 2)
        for number in range(num_reports):  # would take half a minute and more
            send_report(name, f"chatcmpl-{number}", ERROR)
        received = [json.loads(server.recv(1 << 16))["request_id"] for _ in range(num_reports)]
    assert received == [f"chatcmpl-{number}" for number in range(num_reports)]


OTHERS = ItemFailed("another client's", reason="X", status=3)


def test_p32_another_clients_id_may_continue_this_ones(failures: Failures) -> None:
    send_report(failures.name, "chatcmpl-a-1-4f2c9b1a", OTHERS)
    assert failures.take("chatcmpl-a") is None
    send_report(failures.name, "cmpl-a-1-0-4f2c9b1a", OTHERS)
    assert failures.take("cmpl-a") is None
    send_report(failures.name, "chatcmpl-a_1-4f2c9b1a", OTHERS)
    send_report(failures.name, "chatcmpl-a-4f2c9b1a", ERROR)
    assert failures.take("chatcmpl-a") == (400, "UNDECODABLE_IMAGE: the file is no image")
    for request_id in ("chatcmpl-a-1", "cmpl-a-1", "chatcmpl-a_1"):
        assert failures.take(request_id) == (400, "X: another client's")


def test_p32_reports_on_several_prompts_count_where_they_agree(failures: Failures) -> None:
    for number in range(2):
        send_report(failures.name, f"cmpl-a-{number}-4f2c9b1a", ERROR)
        send_report(failures.name, f"cmpl-b-{number}-4f2c9b1a", (ERROR, OTHERS)[number])
    assert failures.take("cmpl-a") == (400, "UNDECODABLE_IMAGE: the file is no image")
    assert failures.take("cmpl-b") is None


def test_requests_without_an_api_server_are_reported_to_nobody(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failures_module, "socket", None)
    send_report("", "request", ERROR)
    assert caplog.records == []
