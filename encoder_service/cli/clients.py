"""``encode``, ``info``, ``health``: clients of a running service.

Owns what they show and write. How they reach the service is ``connection``'s.
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from encoder_service.cli.connection import (
    DEFAULT_SERVER,
    CaOption,
    CertOption,
    Connection,
    KeyOption,
    NamespaceOption,
    ServerNameOption,
    ServerOption,
    TlsOption,
    TokenFileOption,
    TokenOption,
)
from encoder_service.cli.exits import EXIT_FAILED, fail

if TYPE_CHECKING:
    from lm_adapter import ModelInfo, ServerInfo

# Of files that are clips whatever is in them; a GIF or WebP is a picture unless the caller says otherwise.
CLIP_SUFFIXES = frozenset({".mp4", ".m4v", ".mov", ".webm", ".mkv"})
ROWS_FORMAT = "vision_encoder.rows.v1"


def encode(
    images: Annotated[list[Path], typer.Argument(help="Image files, and clips: .mp4, .mov, .webm, .mkv.")],
    server: ServerOption = DEFAULT_SERVER,
    tls: TlsOption = False,
    ca: CaOption = None,
    cert: CertOption = None,
    key: KeyOption = None,
    server_name: ServerNameOption = "",
    token: TokenOption = "",
    token_file: TokenFileOption = None,
    namespace: NamespaceOption = "",
    out: Annotated[Path | None, typer.Option(help="Writes rows.<i> and grid_thw.<i> as safetensors.")] = None,
    min_pixels: Annotated[int | None, typer.Option(help="Qwen: smallest target area.")] = None,
    max_pixels: Annotated[int | None, typer.Option(help="Qwen: largest target area.")] = None,
    clip: Annotated[bool, typer.Option(help="All files are clips, animated GIF and WebP too.")] = False,
    fps: Annotated[float | None, typer.Option(help="Clips: frames sampled a second.")] = None,
    max_frames: Annotated[int | None, typer.Option(help="Clips: the most frames sampled.")] = None,
    timeout_s: Annotated[float, typer.Option(help="Seconds for the whole call.")] = 300.0,
) -> None:
    """Encodes image files and clips and shows what came back; exits with 1 when any failed."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Table

    from lm_adapter import (
        ClipItem,
        EncodedRows,
        EncoderError,
        ImageItem,
        ItemFailed,
        PreprocessOptions,
    )

    connection = Connection(server, tls, ca, cert, key, server_name, token, token_file, namespace)
    options = PreprocessOptions(min_pixels=min_pixels, max_pixels=max_pixels)
    of_clips = replace(options, fps=fps, max_frames=max_frames)
    items: list[ImageItem | ClipItem] = []
    for path in images:
        is_clip = clip or path.suffix.lower() in CLIP_SUFFIXES
        try:
            data = path.read_bytes()
            items.append(ClipItem(data, options=of_clips) if is_clip else ImageItem(data, options=options))
        except OSError as error:
            fail(f"cannot read {path}: {error.strerror or error}")

    outcomes: dict[int, EncodedRows | ItemFailed] = {}
    progress = Progress(
        TextColumn("encoding"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
    )
    try:
        with connection.client(timeout_s) as client, progress:
            bar = progress.add_task("encode", total=len(items))
            for index, outcome in client.encode_iter(items):
                outcomes[index] = outcome
                progress.advance(bar)
    except EncoderError as error:
        fail(f"{server}: {error}")

    table = Table("image", "grid", "rows", "width", "dtype", "tier", "ms", "key")
    failures: list[str] = []
    for path, outcome in zip(images, (outcomes[index] for index in range(len(images))), strict=True):
        if not isinstance(outcome, EncodedRows):
            table.add_row(path.name, "-", "-", "-", "-", "[red]failed[/red]", "-", "-")
            failures.append(f"{path}: {outcome.reason}: {outcome.message}")
            continue
        table.add_row(
            path.name,
            "x".join(str(side) for side in outcome.grid_thw),
            str(outcome.num_rows),
            str(outcome.width),
            outcome.dtype,
            outcome.tier.value,
            f"{outcome.timings.total_ms:.1f}",
            outcome.key.hex()[:12],
        )
    Console().print(table)
    for failure in failures:
        print(f"vision-encoder: {failure}", file=sys.stderr)
    encoded = {index: rows for index, rows in sorted(outcomes.items()) if isinstance(rows, EncodedRows)}
    if out is not None and encoded:
        write_rows(out, encoded, images)
    if len(encoded) < len(images):
        fail(f"{len(images) - len(encoded)} of {len(images)} images failed")


def write_rows(out: Path, encoded: dict[int, Any], images: list[Path]) -> None:
    """Writes ``rows.<i>`` [rows, width] and ``grid_thw.<i>`` int64 [3] in input order, of clips also
    ``timestamps_s.<i>`` float64 [frames] and, where rows come by chunks, ``chunk_grids.<i>`` int64
    [chunks, 3], with the file metadata ``key.<i>``, ``content_digest.<i>`` (hexadecimal), ``image.<i>`` and,
    for the whole file, ``format``, ``dtype``, ``num_deepstack_levels``, ``num_items``."""
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import save_file

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
        metadata[f"image.{index}"] = images[index].name
        metadata["dtype"] = rows.dtype
        metadata["num_deepstack_levels"] = str(rows.num_deepstack_levels)
    try:
        save_file(tensors, out, metadata)
    except OSError as error:
        fail(f"cannot write {out}: {error.strerror or error}")
    except SafetensorError as error:  # how the library tells of a missing folder or a full disk
        fail(f"cannot write {out}: {error}")


def info(
    server: ServerOption = DEFAULT_SERVER,
    tls: TlsOption = False,
    ca: CaOption = None,
    cert: CertOption = None,
    key: KeyOption = None,
    server_name: ServerNameOption = "",
    token: TokenOption = "",
    token_file: TokenFileOption = None,
    namespace: NamespaceOption = "",
    timeout_s: Annotated[float, typer.Option(help="Seconds for the whole call.")] = 30.0,
) -> None:
    """Shows what a running service serves, its limits and its transports; with a namespace or a token,
    whether the one opens to the other."""
    from rich.console import Console
    from rich.table import Table

    from lm_adapter import EncoderError

    connection = Connection(server, tls, ca, cert, key, server_name, token, token_file, namespace)
    try:
        with connection.client(timeout_s) as client:
            answer: ServerInfo = client.info()
            is_named = bool(namespace or connection.read_token())
            if is_named:  # no key is all zeros: what is asked is whether the question is answered
                client.lookup([bytes(32)])
    except EncoderError as error:
        fail(f"{server}: {error}")

    table = Table(show_header=False, title=f"{server}")
    table.add_row("server", f"{answer.server_version} on {answer.device}, instance {answer.instance_id[:12]}")
    table.add_row("protocol", f"{answer.min_protocol_version} to {answer.protocol_version}")
    if is_named:
        table.add_row("namespace", f"{namespace!r} is open to this caller")
    for model in answer.models:
        for name, value in model_rows(model):
            table.add_row(name, value)
    for name, value in vars(answer.limits).items():
        table.add_row(name, f"{value:,}")
    for transport in answer.transports:
        table.add_row("transport", str(getattr(transport.delivery, "value", transport.delivery)))
    Console().print(table)


def model_rows(model: ModelInfo) -> list[tuple[str, str]]:
    """A model's lines of the ``info`` table."""
    return [
        ("model", f"{model.name} ({model.family}), {model.dtype}"),
        (
            "rows",
            f"width {model.width} = {model.out_width} x (1 + {model.num_deepstack_levels} deepstack), "
            f"{'h*w' if model.merges_time else 't*h*w'}/{model.spatial_merge_size**2} per item",
        ),
        (
            "patches",
            f"{model.patch_size} pixels, {model.temporal_patch_size} frame(s), {model.patch_dim} elements",
        ),
        ("model fingerprint", model.model_fingerprint.hex()),
        ("preprocess fingerprint", model.preprocess_fingerprint.hex()),
    ]


def health(
    server: ServerOption = DEFAULT_SERVER,
    tls: TlsOption = False,
    ca: CaOption = None,
    cert: CertOption = None,
    key: KeyOption = None,
    server_name: ServerNameOption = "",
    token: TokenOption = "",
    token_file: TokenFileOption = None,
    timeout_s: Annotated[float, typer.Option(help="Seconds to wait for the answer.")] = 3.0,
) -> None:
    """Exits with 0 when the service says SERVING, with 1 otherwise: for container probes. The service asks
    for no token here; what stands before it may."""
    from encoder_service.rpc.health_check import check_health
    from lm_adapter import EncoderError
    from lm_adapter.channel import bearer, channel_options

    connection = Connection(server, tls, ca, cert, key, server_name, token, token_file)
    try:
        secured = connection.client_tls()
        credentials = None if secured is None else secured.credentials()
        metadata = bearer(connection.read_token())
    except EncoderError as error:
        fail(f"{server}: {error}")
    serving = asyncio.run(
        check_health(
            server,
            timeout_s,
            credentials=credentials,
            options=channel_options(tls=secured),
            metadata=metadata,
        )
    )
    print("SERVING" if serving else "NOT SERVING")
    raise typer.Exit(0 if serving else EXIT_FAILED)
