"""``make-checkpoint``: works on files alone, without a service."""

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
