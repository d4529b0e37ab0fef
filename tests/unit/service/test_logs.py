"""Logs: what never enters them."""

from __future__ import annotations

import pytest
import structlog

from encoder_service.logs import configure_logs


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
