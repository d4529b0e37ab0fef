"""The command line: serve, encode, info, health, make-checkpoint.

Owns the list of commands. ``serving`` runs the service; ``clients`` has the clients of one, ``connection``
how they reach it; ``checkpoints`` what works on files alone. Imports what a command needs when it runs, so
that a client starts quickly.
"""

from __future__ import annotations

import typer

from encoder_service.cli.checkpoints import make_checkpoint
from encoder_service.cli.clients import encode, health, info
from encoder_service.cli.serving import announce, serve

__all__ = ["announce", "app", "main"]

app = typer.Typer(
    name="vision-encoder",
    help="A vision encoder as its own service: image in, visual tokens out, addressed by content.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (serve, encode, info, health, make_checkpoint):
    app.command(command.__name__.replace("_", "-"))(command)


def main() -> None:
    """The console script."""
    app()
