"""Logs: what never enters them."""

from __future__ import annotations

import io
import re
import sys

import pytest
import structlog

from encoder_service.ops.logs import configure_logs, request_id_of


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_traceback_shows_no_callers_bytes(log_format: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The default of structlog shows every frame's locals."""

    def decode(content: bytes) -> None:
        raise ValueError("a defect")

    configure_logs(log_format, "info")  # type: ignore[arg-type]
    try:
        try:
            decode(b"private" * 3)
        except ValueError:
            structlog.get_logger("test").exception("item failed")
    finally:
        structlog.reset_defaults()
    shown = capsys.readouterr().err
    assert "a defect" in shown
    assert "privateprivate" not in shown


@pytest.mark.parametrize("given", ["abc-123", "a" * 128, "A.b:c/d+e=f@g_h"])
def test_a_callers_request_id_is_kept(given: str) -> None:
    assert request_id_of([("other", "x"), ("x-request-id", given)]) == given


@pytest.mark.parametrize(
    "metadata",
    [[], [("x-request-id", "")], [("x-request-id", "a" * 129)], [("x-request-id", "a\nlevel=error")],
     [("x-request-id", b"bytes")], [("x-request-id", "caf\u00e9")], [("x-request-id", "two words")]],
)  # fmt: skip
def test_what_no_log_should_repeat_is_replaced(metadata: list[tuple[str, str | bytes]]) -> None:
    first, second = request_id_of(metadata), request_id_of(metadata)
    assert re.fullmatch(r"[0-9a-f]{32}", first)
    assert first != second


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ValueError("closed file")])
def test_a_line_that_cannot_be_written_fails_nobody(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise error

    monkeypatch.setattr(sys, "stderr", Full())
    configure_logs("json", "info")
    try:
        structlog.get_logger("test").warning("item failed")
        structlog.get_logger("test").exception("item failed")
    finally:
        structlog.reset_defaults()
