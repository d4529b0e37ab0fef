"""``vision-encoder encode``: files to rows."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from encoder_service.cli.connection import Connection, calls_a_service
from encoder_service.cli.output import complain, fail, plain

if TYPE_CHECKING:
    from lm_adapter import ClipItem, EncodedRows, EncoderError, ImageItem

# How a clip's file begins: Matroska and WebM; boxes of MP4 and MOV, of which one names what follows.
EBML, FIRST_BOXES = b"\x1aE\xdf\xa3", frozenset((b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip"))
STILL_BRANDS = frozenset((b"avif", b"avis", b"mif1", b"msf1", b"heic", b"heix", b"heim", b"heis"))
ROWS_FORMAT = "vision_encoder.rows.v1"


@calls_a_service
def encode(
    connection: Connection,
    images: Annotated[list[Path], typer.Argument(help="Image files, and clips: MP4, MOV, WebM, Matroska.")],
    out: Annotated[Path | None, typer.Option(help="Writes rows.<i> and grid_thw.<i> as safetensors.")] = None,
    min_pixels: Annotated[int | None, typer.Option(help="Qwen: smallest target area.")] = None,
    max_pixels: Annotated[int | None, typer.Option(help="Qwen: largest target area.")] = None,
    clip: Annotated[bool, typer.Option(help="All files are clips, animated GIF too.")] = False,
    fps: Annotated[float | None, typer.Option(help="Clips: frames sampled a second.")] = None,
    max_frames: Annotated[int | None, typer.Option(help="Clips: the most frames sampled.")] = None,
    fleet: Annotated[bool, typer.Option(help="The server is a gateway: one call an item, routed.")] = False,
    timeout_s: Annotated[float, typer.Option(help="Seconds for the whole call.")] = 300.0,
) -> None:
    """Encodes image files and clips and shows what came back; exits with 1 when any failed."""
    from lm_adapter import ClipItem, EncodedRows, ImageItem, PreprocessOptions

    of_images = PreprocessOptions(min_pixels=min_pixels, max_pixels=max_pixels)
    of_clips = replace(of_images, fps=fps, max_frames=max_frames)
    items: dict[int, ImageItem | ClipItem] = {}
    failures: dict[int, str] = {}
    for index, path in enumerate(images):
        try:
            data = path.read_bytes()
        except OSError as error:
            failures[index] = f"cannot read {path}: {error.strerror or error}"
            continue
        is_clip = clip or begins_as_clip(data)
        items[index] = ClipItem(data, options=of_clips) if is_clip else ImageItem(data, options=of_images)

    encoded: dict[int, EncodedRows] = {}
    for index, outcome in zip(
        items, outcomes_of(connection, [*items.values()], timeout_s, fleet), strict=True
    ):
        if isinstance(outcome, EncodedRows):
            encoded[index] = outcome
        else:
            failures[index] = f"{images[index]}: {outcome.reason}: {outcome.message}"
    # Before anything is shown: a terminal that is gone costs no rows.
    unwritten = "" if out is None or not encoded else write_rows(out, encoded, images)
    show_rows(encoded, images)
    for _, failure in sorted(failures.items()):
        complain(failure)
    if unwritten:
        fail(unwritten)
    if failures:
        fail(f"{len(failures)} of {len(images)} images failed")


def begins_as_clip(data: bytes) -> bool:
    """Whether a file is MP4, MOV, WebM or Matroska, whatever its name. A GIF or WebP is an image unless
    --clip is given."""
    return data.startswith(EBML) or (data[4:8] in FIRST_BOXES and data[8:12] not in STILL_BRANDS)


def outcomes_of(
    connection: Connection, items: list[ImageItem | ClipItem], timeout_s: float, fleet: bool
) -> list[EncodedRows | EncoderError]:
    """Of each item. Ends the command if nothing came at all."""
    from rich.console import Console

    from lm_adapter import CallFailed, EncoderError

    if not items:
        return []
    try:
        status = Console(stderr=True).status(f"encoding {len(items)}")
        with connection.client(timeout_s, fleet=fleet) as client, status:
            return list(client.encode(items))
    except CallFailed as error:
        if error.completed:
            return [error.completed.get(index, error) for index in range(len(items))]
        fail(f"{connection.server}: {error}")
    except EncoderError as error:
        fail(f"{connection.server}: {error}")


def show_rows(encoded: dict[int, EncodedRows], images: list[Path]) -> None:
    """A table of all files. Those of the same name are shown by their paths."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    num_of_name = Counter(path.name for path in images)
    table = Table("image", "grid", "rows", "width", "dtype", "tier", "ms", "key")
    for index, path in enumerate(images):
        name = plain(path.name if num_of_name[path.name] == 1 else str(path))
        rows = encoded.get(index)
        if rows is None:
            table.add_row(name, "-", "-", "-", "-", Text("failed", "red"), "-", "-")
            continue
        table.add_row(
            name,
            "x".join(str(side) for side in rows.grid_thw),
            str(rows.num_rows),
            str(rows.width),
            rows.dtype,
            rows.tier.value,
            f"{rows.timings.total_ms:.1f}",
            rows.key.hex()[:12],
        )
    Console(markup=False, emoji=False).print(table)  # names are no markup


def write_rows(out: Path, encoded: dict[int, EncodedRows], images: list[Path]) -> str:
    """A safetensors file with, for item i, ``rows.<i>`` [rows, width] and ``grid_thw.<i>`` int64 [3]; of a
    clip also ``timestamps_s.<i>`` float64 [frames] and, for rows in chunks, ``chunk_grids.<i>`` int64
    [chunks, 3]. Metadata of an item: ``key.<i>`` and ``content_digest.<i>`` (hexadecimal), ``image.<i>``, the
    file's name, escaped where it is no text; of the file: ``format``, ``dtype``, ``num_deepstack_levels``,
    ``num_items``. Returns why it could not be written, or ""."""
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import save, save_file

    tensors: dict[str, torch.Tensor] = {}
    metadata = {"format": ROWS_FORMAT, "num_items": str(len(images))}
    for index, rows in encoded.items():
        tensors[f"rows.{index}"] = rows.torch()
        tensors[f"grid_thw.{index}"] = torch.tensor(rows.grid_thw, dtype=torch.int64)
        if rows.timestamps_s:
            tensors[f"timestamps_s.{index}"] = torch.tensor(rows.timestamps_s, dtype=torch.float64)
        if rows.chunk_grids:
            tensors[f"chunk_grids.{index}"] = torch.tensor(rows.chunk_grids, dtype=torch.int64)
        metadata[f"key.{index}"] = rows.key.hex()
        metadata[f"content_digest.{index}"] = rows.content_digest.hex()
        metadata[f"image.{index}"] = images[index].name.encode("utf-8", "backslashreplace").decode()
        metadata["dtype"] = rows.dtype
        metadata["num_deepstack_levels"] = str(rows.num_deepstack_levels)
    try:
        if plain(str(out)) == str(out):
            save_file(tensors, out, metadata)
        else:  # the library refuses paths that are no UTF-8
            out.write_bytes(save(tensors, metadata))
    except OSError as error:
        return f"cannot write {out}: {error.strerror or error}"
    except SafetensorError as error:  # the library's error for a missing folder or a full disk
        return f"cannot write {out}: {error}"
    return ""
