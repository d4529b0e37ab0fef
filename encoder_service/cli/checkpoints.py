"""``tune`` and ``make-checkpoint``: what works on files alone, without a service."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

from encoder_service.cli.exits import fail


class Family(enum.StrEnum):
    QWEN3_VL = "qwen3_vl"
    QWEN3_5 = "qwen3_5"
    KIMI_K25 = "kimi_k25"


class Size(enum.StrEnum):
    TINY = "tiny"
    SMALL = "small"
    FULL = "full"


def tune(
    traffic: Annotated[Path, typer.Option(help="CSV with the columns width, height in pixels [, count].")],
    model: Annotated[Path, typer.Option(help="Checkpoint whose processor settings decide the grids.")],
    max_patches: Annotated[int, typer.Option(help="Patches of the largest bucket.")] = 16_384,
    max_items: Annotated[int, typer.Option(help="Items in one batch.")] = 64,
    num_sizes: Annotated[
        int | None, typer.Option(help="Sizes to propose; as many as the default ladder when not given.")
    ] = None,
) -> None:
    """Proposes bucket sizes for the image sizes that a service sees, with the waste they would leave."""
    from rich.console import Console

    from encoder_service.errors import StartupError
    from encoder_service.ingest.decode import DecodeLimits
    from encoder_service.ingest.registry import load_preprocessor
    from encoder_service.towers.checkpoint import read_config
    from encoder_service.towers.config import parse_config
    from encoder_service.tune import tune as propose
    from encoder_service.types import PreprocessOptions

    try:
        family, config = parse_config(read_config(model))
        preprocessor = load_preprocessor(model, family, DecodeLimits(1 << 30, 1 << 30))
        propose(
            traffic,
            lambda height, width: preprocessor.target_grid(height, width, PreprocessOptions()),
            max_patches=max_patches,
            max_items=max_items,
            num_sizes=num_sizes,
            merge_size=config.merge_size,
            console=Console(),
        )
    except StartupError as error:
        fail(error.message)


def make_checkpoint(
    out: Annotated[Path, typer.Argument(help="Directory to write; must not exist or be empty.")],
    family: Annotated[Family, typer.Option(help="Which model family.")],
    size: Annotated[Size, typer.Option(help="full has the real tower's dimensions.")] = Size.TINY,
    seed: Annotated[int, typer.Option(help="The same seed gives the same weights.")] = 0,
    with_lm: Annotated[bool, typer.Option("--with-lm", help="A small language model too.")] = False,
) -> None:
    """Writes a random-weight checkpoint in the hub's layout: for tests, demos and benchmarks."""
    from encoder_service.errors import StartupError
    from encoder_service.towers.synthetic import make_checkpoint as write

    try:
        write(out, family.value, size.value, seed, with_lm=with_lm)
    except StartupError as error:
        fail(error.message)
    except OSError as error:
        fail(f"cannot write {out}: {error.strerror or error}")
    print(f"wrote {out}")
