"""What commands print: one line a message, safe on any terminal, JSON, and how a command fails."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import TYPE_CHECKING, Any, NoReturn

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from lm_adapter import EncoderError

EXIT_FAILED = 1
EXIT_CANNOT_START = 2
EXIT_INTERRUPTED = 130
FULL_WIDTH = 10_000
"""Columns of a table that is read by a program or from a file."""


def plain(text: str) -> str:
    """The text on one line of any terminal: what it would interpret, or cannot show, is escaped. File names
    and a server's messages may hold line breaks, escape codes, and bytes that are no text."""
    shown = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
    encoding = sys.stdout.encoding or "utf-8"
    return shown.encode(encoding, "backslashreplace").decode(encoding)


def as_text(name: str) -> str:
    """A file's name as text that any file or message can hold: bytes that are no UTF-8 are escaped."""
    return name.encode("utf-8", "backslashreplace").decode()


def complain(message: str) -> None:
    """One line on standard error. Without a reader it is lost."""
    with contextlib.suppress(OSError):
        print(f"vision-encoder: {plain(message)}", file=sys.stderr)


def fail(message: str, code: int = EXIT_FAILED) -> NoReturn:
    """One line on standard error, then the exit code."""
    complain(message)
    raise typer.Exit(code)


def print_json(value: dict[str, Any]) -> None:
    """One object on one line of standard output, at once."""
    print(json.dumps(value), flush=True)


def print_table(table: Table) -> None:
    """On standard output, in full if that is no terminal. Names in it are no markup."""
    from rich.console import Console

    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else FULL_WIDTH
    Console(markup=False, emoji=False, highlight=False, width=width).print(table)


def error_fields(error: EncoderError) -> dict[str, Any]:
    """An error as it stands in JSON."""
    return {
        "error": {
            "reason": error.reason,
            "message": as_text(error.message),
            "retryable": error.retryable,
            "retry_after_ms": error.retry_after_ms,
            "details": error.details,
        }
    }


def fail_at(server: str, error: EncoderError, *, as_json: bool = False) -> NoReturn:
    """Ends the command with an error of the service at an address."""
    if as_json:
        print_json({"server": server} | error_fields(error))
    fail(str(error) if server in str(error) else f"{server}: {error}")
