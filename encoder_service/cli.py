"""The command line: serve, encode, info, health, make-checkpoint.

Owns arguments, exit codes and what a person sees. ``serve`` runs the service; ``encode``, ``info`` and
``health`` are clients of one. Imports what a command needs when it runs, so that a client starts quickly.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    from encoder_service.app import Service
    from lm_adapter import ModelInfo, ServerInfo

app = typer.Typer(
    name="vision-encoder",
    help="A vision encoder as its own service: image in, visual tokens out, addressed by content.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

EXIT_FAILED = 1
EXIT_CANNOT_START = 2
ROWS_FORMAT = "vision_encoder.rows.v1"

ServerOption = Annotated[str, typer.Option(help="host:port or unix:/path of a running service.")]


class Family(enum.StrEnum):
    QWEN3_VL = "qwen3_vl"
    QWEN3_5 = "qwen3_5"
    KIMI_K25 = "kimi_k25"


class Size(enum.StrEnum):
    TINY = "tiny"
    SMALL = "small"
    FULL = "full"


class DType(enum.StrEnum):
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


def fail(message: str, code: int = EXIT_FAILED) -> NoReturn:
    """One clear line on standard error, then the exit code."""
    print(f"vision-encoder: {message}", file=sys.stderr)
    raise typer.Exit(code)


@app.command()
def serve(
    model: Annotated[
        Path | None, typer.Option(help="Checkpoint directory in the hub's layout (VE_MODEL).")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda:N (VE_DEVICE).")] = None,
    dtype: Annotated[
        DType | None, typer.Option(help="Of weights and rows; bfloat16 on a GPU, float32 on the CPU.")
    ] = None,
    listen: Annotated[
        list[str] | None, typer.Option(help="host:port or unix:/path; may be repeated (VE_LISTEN).")
    ] = None,
    admin_listen: Annotated[
        str | None, typer.Option(help="host:port of the admin plane, '' for none (VE_ADMIN_LISTEN).")
    ] = None,
    model_name: Annotated[str | None, typer.Option(help="Name that requests use.")] = None,
    precision: Annotated[
        str | None, typer.Option(help="Of the matrix products: dtype, or fp8 on a GPU that has it.")
    ] = None,
    tower: Annotated[str | None, typer.Option(help="auto, or plain: no fused kernels, no graphs.")] = None,
    attention: Annotated[
        str | None, typer.Option(help="Attention backend on a GPU; auto measures what is installed.")
    ] = None,
    deterministic: Annotated[
        bool,
        typer.Option(
            "--deterministic",
            help="Attention never depends on the rest of a batch; one attention and one library of products "
            "serve all shapes.",
        ),
    ] = False,
    bucket_sizes: Annotated[
        str | None, typer.Option(help="Patches of each graph, comma separated, as tune proposes them.")
    ] = None,
    store_bytes: Annotated[int | None, typer.Option(help="Rows kept for later requests.")] = None,
    broker_path: Annotated[
        str | None, typer.Option(help="Unix socket that hands out rows in shared memory (VE_BROKER_PATH).")
    ] = None,
    arena_bytes: Annotated[
        int | None, typer.Option(help="With a broker: shared memory for rows, in place of store-bytes.")
    ] = None,
    device_arena_bytes: Annotated[
        int | None, typer.Option(help="With a broker, on a GPU: shared device memory for rows; 0 for none.")
    ] = None,
    drain_grace_s: Annotated[float | None, typer.Option(help="Time for in-flight work at stop.")] = None,
    log_format: Annotated[str | None, typer.Option(help="text or json.")] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
) -> None:
    """Serves one checkpoint until SIGTERM. Every setting can also come from the environment as VE_NAME."""
    from encoder_service.app import serve as run
    from encoder_service.config import parse_settings
    from encoder_service.errors import StartupError
    from encoder_service.logs import configure_logs

    try:
        settings = parse_settings(
            model=model,
            device=device,
            dtype=None if dtype is None else dtype.value,
            listen=tuple(listen) if listen else None,
            admin_listen=admin_listen,
            model_name=model_name,
            precision=precision,
            tower=tower,
            attention=attention,
            deterministic=deterministic or None,
            bucket_sizes=bucket_sizes,
            store_bytes=store_bytes,
            broker_path=broker_path,
            arena_bytes=arena_bytes,
            device_arena_bytes=device_arena_bytes,
            drain_grace_s=drain_grace_s,
            log_format=log_format,
            log_level=log_level,
        )
        configure_logs(settings.log_format, settings.log_level)
        code = asyncio.run(run(settings, announce))
    except StartupError as error:
        fail(f"cannot start: {error.message}", EXIT_CANNOT_START)
    leave(code)


def leave(code: int) -> NoReturn:
    """Ends the process. A load, a decode or a forward that a signal or the grace cut off is not waited for,
    and its thread is not left to run native code while the interpreter is torn down."""
    if threading.active_count() > 1:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        os._exit(code)
    raise typer.Exit(code)


def announce(service: Service) -> None:
    """The one line on standard output that says the service takes work."""
    info = service.info()
    assert info is not None
    model = info.models[0]
    admin = f" (admin http://{service.admin_address})" if service.admin_address else ""
    with contextlib.suppress(BrokenPipeError):  # whoever started the service may not listen
        print(
            f"ready: {model.name} ({model.family}) on {service.settings.device} "
            f"at {' '.join(service.addresses)}{admin}",
            flush=True,
        )


@app.command()
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


@app.command()
def encode(
    images: Annotated[list[Path], typer.Argument(help="Image files.")],
    server: ServerOption = "127.0.0.1:50051",
    out: Annotated[Path | None, typer.Option(help="Writes rows.<i> and grid_thw.<i> as safetensors.")] = None,
    namespace: Annotated[str, typer.Option(help="Namespace of the keys.")] = "",
    min_pixels: Annotated[int | None, typer.Option(help="Qwen: smallest target area.")] = None,
    max_pixels: Annotated[int | None, typer.Option(help="Qwen: largest target area.")] = None,
    timeout_s: Annotated[float, typer.Option(help="Seconds for the whole call.")] = 300.0,
) -> None:
    """Encodes image files and shows what came back; exits with 1 when any failed."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Table

    from lm_adapter import (
        EncodedRows,
        EncoderError,
        ImageItem,
        ItemFailed,
        PreprocessOptions,
        VisionEncoderClient,
    )

    options = PreprocessOptions(min_pixels=min_pixels, max_pixels=max_pixels)
    items = []
    for path in images:
        try:
            items.append(ImageItem(path.read_bytes(), options=options))
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
        with VisionEncoderClient(server, namespace=namespace, timeout_s=timeout_s) as client, progress:
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
    """Writes ``rows.<i>`` [rows, width] and ``grid_thw.<i>`` int64 [3] in input order, with the file
    metadata ``key.<i>``, ``content_digest.<i>`` (hexadecimal), ``image.<i>`` and, for the whole file,
    ``format``, ``dtype``, ``num_deepstack_levels``, ``num_items``."""
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    tensors: dict[str, torch.Tensor] = {}
    metadata = {"format": ROWS_FORMAT, "num_items": str(len(images))}
    for index, rows in encoded.items():
        tensors[f"rows.{index}"] = rows.torch()
        tensors[f"grid_thw.{index}"] = torch.tensor(rows.grid_thw, dtype=torch.int64)
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


@app.command()
def info(server: ServerOption = "127.0.0.1:50051") -> None:
    """Shows what a running service serves, its limits and its transports."""
    from rich.console import Console
    from rich.table import Table

    from lm_adapter import EncoderError, VisionEncoderClient

    try:
        with VisionEncoderClient(server) as client:
            answer: ServerInfo = client.info()
    except EncoderError as error:
        fail(f"{server}: {error}")

    table = Table(show_header=False, title=f"{server}")
    table.add_row("server", f"{answer.server_version} on {answer.device}, instance {answer.instance_id[:12]}")
    table.add_row("protocol", f"{answer.min_protocol_version} to {answer.protocol_version}")
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
        ("model", f"{model.name} ({model.family}), {model.dtype}, precision {model.precision}"),
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


@app.command()
def health(
    server: ServerOption = "127.0.0.1:50051",
    timeout_s: Annotated[float, typer.Option(help="Seconds to wait for the answer.")] = 3.0,
) -> None:
    """Exits with 0 when the service says SERVING, with 1 otherwise: for container probes."""
    from encoder_service.rpc.server import check_health

    serving = asyncio.run(check_health(server, timeout_s))
    print("SERVING" if serving else "NOT SERVING")
    raise typer.Exit(0 if serving else EXIT_FAILED)


@app.command("make-checkpoint")
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


def main() -> None:
    """The console script."""
    app()
