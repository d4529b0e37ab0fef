"""The command line: serve, encode, bench, info, health, download, make-checkpoint.

Owns arguments, output and exit codes; one module a command or two. A command imports what it needs when it
runs, so that a probe stays quick. Tokens also come from the environment or a file, since every process of a
host can read the arguments of the others.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from encoder_service import __version__
from encoder_service.cli.bench import bench
from encoder_service.cli.checkpoints import download, make_checkpoint
from encoder_service.cli.encode import encode
from encoder_service.cli.info import health, info

__all__ = ["app"]


class Commands(TyperGroup):
    """All commands. The options of ``serve`` are made only when they are needed: the settings take 0.3 s to
    import, for which a probe should not wait."""

    def list_commands(self, ctx: Any) -> list[str]:
        return ["serve", *super().list_commands(ctx)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name != "serve":
            return super().get_command(ctx, cmd_name)
        from encoder_service.cli.serve import serve_command

        return serve_command()


app = typer.Typer(
    name="vision-encoder",
    cls=Commands,
    help="A vision encoder as its own service: image in, visual tokens out, addressed by content.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"vision-encoder {__version__}")
        raise typer.Exit


@app.callback()
def options(
    _: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Shows the version.")
    ] = False,
) -> None:
    pass


for command in (encode, bench, info, health, download, make_checkpoint):
    app.command()(command)
