"""How a command ends when it fails: one clear line, and its exit code."""

from __future__ import annotations

import sys
from typing import NoReturn

import typer

EXIT_FAILED = 1
EXIT_CANNOT_START = 2


def fail(message: str, code: int = EXIT_FAILED) -> NoReturn:
    """One clear line on standard error, then the exit code."""
    print(f"vision-encoder: {message}", file=sys.stderr)
    raise typer.Exit(code)
