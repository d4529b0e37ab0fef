"""What commands print: one line a message, safe on any terminal, and how a command fails."""

from __future__ import annotations

import sys
from typing import NoReturn

import typer

EXIT_FAILED = 1
EXIT_CANNOT_START = 2


def plain(text: str) -> str:
    """The text on one line of any terminal: what it would interpret, or cannot show, is escaped. File names
    and a server's messages may hold line breaks, escape codes, and bytes that are no text."""
    shown = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
    encoding = sys.stdout.encoding or "utf-8"
    return shown.encode(encoding, "backslashreplace").decode(encoding)


def complain(message: str) -> None:
    """One line on standard error."""
    print(f"vision-encoder: {plain(message)}", file=sys.stderr)


def fail(message: str, code: int = EXIT_FAILED) -> NoReturn:
    """One line on standard error, then the exit code."""
    complain(message)
    raise typer.Exit(code)
