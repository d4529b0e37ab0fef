"""``vision-encoder download`` and ``make-checkpoint``: checkpoints from the hub, and random ones."""

from __future__ import annotations

import enum
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from encoder_service.checkpoints.families import Family
from encoder_service.cli.output import fail, plain


def download(
    model: Annotated[str, typer.Argument(help="Model on the hub: ORG/NAME or ORG/NAME@REVISION.")],
    revision: Annotated[str, typer.Option(help="Branch, tag or commit.")] = "",
) -> None:
    """Fetches a model's vision tensors and settings ahead of ``serve --model ORG/NAME``; prints their folder.

    The cache, the token and the hub are those of HF_HOME, HF_TOKEN and HF_ENDPOINT."""
    from encoder_service.checkpoints.hub_id import hub_id

    found = hub_id(Path(f"{model}@{revision}" if revision else model))
    if found is None:
        fail(f"{model} is a folder here, or no model's id: needs ORG/NAME or ORG/NAME@REVISION")
    # As a container's first process it would ignore a signal without a handler.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))

    from encoder_service.checkpoints.hub import fetch
    from encoder_service.errors import StartupError
    from encoder_service.ops.logs import configure_logs

    configure_logs("text", "info", sys.stderr)  # standard output has the folder
    try:
        folder = fetch(found)
    except StartupError as error:
        fail(error.message)
    print(plain(str(folder)))


class Size(enum.StrEnum):
    TINY = "tiny"
    SMALL = "small"
    FULL = "full"


def make_checkpoint(
    out: Annotated[Path, typer.Argument(help="Folder to write; it is made, or is empty.")],
    family: Annotated[Family, typer.Option(help="Model family whose layout and processor it has.")],
    size: Annotated[
        Size,
        typer.Option(help="tiny: for tests; small: a CPU serves it well; full: the real tower's."),
    ] = Size.TINY,
    seed: Annotated[int, typer.Option(help="The same seed gives the same weights.")] = 0,
    with_lm: Annotated[
        bool, typer.Option("--with-lm", help="With a small language model, for engines and the demo.")
    ] = False,
) -> None:
    """Makes a model with random weights, to try the service without a download.

    A folder as the hub has it, for `serve --model` and engines. Its rows have
    the right shapes and mean nothing: for tests, demos and benchmarks."""
    from encoder_service.checkpoints.synthetic import make_checkpoint as write
    from encoder_service.errors import StartupError

    try:
        write(out, family.value, size.value, seed, with_lm=with_lm)
    except StartupError as error:
        fail(error.message)
    except OSError as error:
        fail(f"cannot write {out}: {error.strerror or error}")
    print(f"wrote {plain(str(out))}")
