"""The command line: serve, encode, info, health, download, make-checkpoint.

Owns arguments, output and exit codes. A command imports what it needs when it runs, so that a probe stays
quick. Tokens also come from the environment or a file, since every process of a host can read the arguments
of the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import functools
import inspect
import os
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

if TYPE_CHECKING:
    from encoder_service.serve import Service
    from lm_adapter import ClipItem, EncodedRows, EncoderError, ImageItem, VisionEncoderClient

__all__ = ["announce", "app", "leave", "main", "serve_command"]

EXIT_FAILED = 1
EXIT_CANNOT_START = 2
DEFAULT_SERVER = "127.0.0.1:50051"
# How a clip's file begins: Matroska and WebM; boxes of MP4 and MOV, of which one names what follows.
EBML, FIRST_BOXES = b"\x1aE\xdf\xa3", frozenset((b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip"))
STILL_BRANDS = frozenset((b"avif", b"avis", b"mif1", b"msf1", b"heic", b"heix", b"heim", b"heis"))
ROWS_FORMAT = "vision_encoder.rows.v1"


class Commands(TyperGroup):
    """All commands. The options of ``serve`` are made only when they are needed: the settings take 0.3 s to
    import, for which a probe should not wait."""

    def list_commands(self, ctx: Any) -> list[str]:
        return ["serve", *super().list_commands(ctx)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return serve_command() if cmd_name == "serve" else super().get_command(ctx, cmd_name)


app = typer.Typer(
    name="vision-encoder",
    cls=Commands,
    help="A vision encoder as its own service: image in, visual tokens out, addressed by content.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """The console script."""
    app()


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


def with_options(
    function: Callable[..., None], parameters: Iterable[inspect.Parameter]
) -> Callable[..., None]:
    """The function, of which Typer sees these parameters in place of its own. They come by keyword."""
    keywords = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in parameters]
    function.__signature__ = inspect.Signature(keywords)  # type: ignore[attr-defined]
    return function


# -- serve ---------------------------------------------------------------------------------------------


@functools.cache
def serve_command() -> Any:
    """The command ``serve`` of Typer, with an option for each setting. Values are parsed by the settings."""
    from encoder_service.config import settings_help

    parameters = []
    for name, setting in settings_help().items():
        kind: Any = bool | None if setting.is_flag else list[str] | None if setting.is_list else str | None
        option = typer.Option(help=setting.text, metavar=None if setting.is_flag else setting.value)
        parameters.append(
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, option]
            )
        )
    alone = typer.Typer(add_completion=False, rich_markup_mode=None)  # of rich, the table cuts names
    alone.command("serve")(with_options(serve, parameters))
    return typer.main.get_command(alone)


def serve(**options: Any) -> None:
    """Serves one checkpoint until SIGTERM.

    Every option can also come from the environment: --max-calls as VE_MAX_CALLS. Several values are separated
    by commas, or the option is repeated."""
    from encoder_service.config import parse_settings
    from encoder_service.errors import StartupError
    from encoder_service.ops.logs import configure_logs, never_wait

    try:
        settings = parse_settings(**given_options(options))
        from encoder_service.serve import serve as run

        configure_logs(settings.log_format, settings.log_level, never_wait())
        code = asyncio.run(run(settings, announce))
    except StartupError as error:
        leave(EXIT_CANNOT_START, f"vision-encoder: cannot start: {error.message}")
    except Exception:
        leave(EXIT_FAILED, traceback.format_exc())
    leave(code)


def given_options(options: Mapping[str, Any]) -> dict[str, str | bool]:
    """Those that were given, as text or as a flag. Several values are separated by commas."""
    return {
        name: ",".join(value) if isinstance(value, (list, tuple)) else value
        for name, value in options.items()
        if value is not None and value != [] and value != ()
    }


def announce(service: Service) -> None:
    """The one line on standard output that says the service takes work. Without a reader it is lost."""
    assert service.info is not None
    model = service.info.models[0]
    admin = f" (admin http://{service.addresses['admin']})" if "admin" in service.addresses else ""
    with contextlib.suppress(OSError):  # a closed pipe or a full disk does not end the service
        print(
            f"ready: {model.name} ({model.family}) on {service.settings.device} "
            f"at {' '.join(service.listen)}{admin}",
            flush=True,
        )


def leave(code: int, message: str = "") -> NoReturn:
    """Ends the process once logs are written, without the interpreter's own end: that waits for threads, and
    one may hang in native code (a load, a decode or a forward that a signal or the grace cut off)."""
    from encoder_service.ops.logs import stop_logs

    stop_logs()
    if message:
        with contextlib.suppress(OSError):  # a closed pipe or a full disk
            print(message, file=sys.stderr, flush=True)
    os._exit(code)


# -- how clients reach a service -----------------------------------------------------------------------


@dataclass(frozen=True)
class Connection:
    """The options of every command that calls a service, with their help texts."""

    server: Annotated[str, typer.Option(help="host:port or unix:/path of a running service.")] = (
        DEFAULT_SERVER
    )
    tls: Annotated[
        bool, typer.Option("--tls", help="TLS by the public authorities; the three below imply it.")
    ] = False
    ca: Annotated[Path | None, typer.Option(help="PEM authorities of the server's certificate.")] = None
    cert: Annotated[Path | None, typer.Option(help="PEM certificate of this client, for mutual TLS.")] = None
    key: Annotated[Path | None, typer.Option(help="PEM key of --cert.")] = None
    server_name: Annotated[
        str, typer.Option(help="Name in the server's certificate; default: the host of --server.")
    ] = ""
    token: Annotated[
        str,
        typer.Option(
            envvar="VISION_ENCODER_TOKEN",
            help="Token of the namespace; better in this variable or --token-file than as an argument.",
        ),
    ] = ""
    token_file: Annotated[Path | None, typer.Option(help="File whose only line is the token.")] = None
    namespace: Annotated[str, typer.Option(help="Namespace of rows and keys; the token must open it.")] = ""

    def read_token(self) -> str:
        """Raises InvalidRequest for a file without exactly one token."""
        from lm_adapter.channel import read_token_file

        return self.token if self.token_file is None else read_token_file(self.token_file)

    def client(self, timeout_s: float, *, fleet: bool = False) -> VisionEncoderClient:
        """Raises EncoderError. Ends the command for a server name without TLS."""
        from lm_adapter import ClientTls, VisionEncoderClient

        tls = None
        if self.tls or self.ca or self.cert or self.key:
            tls = ClientTls(self.ca or "", self.cert or "", self.key or "", self.server_name)
        elif self.server_name:
            fail("--server-name is for TLS: give --tls or --ca too")
        return VisionEncoderClient(
            self.server,
            tls=tls,
            namespace=self.namespace,
            token=self.read_token(),
            timeout_s=timeout_s,
            fleet=fleet,
        )


def calls_a_service(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the options of ``Connection`` in place of its parameter ``connection``."""
    own = inspect.signature(command, eval_str=True).parameters
    connection_options = inspect.signature(Connection, eval_str=True).parameters

    @functools.wraps(command)
    def run(**options: Any) -> None:
        connection = Connection(**{name: options.pop(name) for name in connection_options})
        command(connection=connection, **options)

    parameters = [*connection_options.values(), *(own[name] for name in own if name != "connection")]
    return with_options(run, parameters)


# -- encode --------------------------------------------------------------------------------------------


@app.command()
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


# -- info and health -----------------------------------------------------------------------------------


@app.command()
@calls_a_service
def info(
    connection: Connection,
    timeout_s: Annotated[float, typer.Option(help="Seconds for the whole call.")] = 30.0,
) -> None:
    """Shows what a running service serves, its limits and its transports; with a namespace or a token, also
    whether the token opens the namespace."""
    from rich.console import Console
    from rich.table import Table

    from lm_adapter import EncoderError

    try:
        # Routed calls, because the server may be a gateway.
        with connection.client(timeout_s, fleet=True) as client:
            answer = client.info()
            is_named = bool(connection.namespace or connection.read_token())
            if is_named:
                # No key is all zeros. A refusal is the answer.
                client.lookup([bytes(32)], routing_digests=[bytes(32)])
    except EncoderError as error:
        fail(f"{connection.server}: {error}")

    table = Table(show_header=False, title=plain(connection.server))

    def add(name: str, value: str) -> None:
        table.add_row(name, plain(value))

    add("server", f"{answer.server_version} on {answer.device}, instance {answer.instance_id[:12]}")
    add("protocol", f"{answer.min_protocol_version} to {answer.protocol_version}")
    if is_named:
        add("namespace", f"{connection.namespace!r} is open to this caller")
    for model in answer.models:
        for name, value in (
            vars(model) | {"modalities": ", ".join(one.value for one in model.modalities)}
        ).items():
            add(name, value.hex() if isinstance(value, bytes) else str(value))
    for name, value in vars(answer.limits).items():
        add(name, f"{value:,}")
    for transport in answer.transports:
        add("transport", str(getattr(transport.delivery, "value", transport.delivery)))
    for name, reason in answer.unusable_kernels.items():
        add("not usable", f"{name}: {reason}")
    Console(markup=False, emoji=False).print(table)  # names are no markup


@app.command()
@calls_a_service
def health(
    connection: Connection,
    timeout_s: Annotated[float, typer.Option(help="Seconds to wait for the answer.")] = 3.0,
) -> None:
    """Exits with 0 when the service says SERVING, with 1 otherwise: for container probes. The service needs
    no token for this; a proxy in front of it may."""
    from lm_adapter import CallFailed, EncoderError

    is_serving = False
    try:
        with connection.client(timeout_s) as client, contextlib.suppress(CallFailed):
            is_serving = client.is_serving()
    except EncoderError as error:
        fail(f"{connection.server}: {error}")
    print("SERVING" if is_serving else "NOT SERVING")
    raise typer.Exit(0 if is_serving else EXIT_FAILED)


# -- download, make-checkpoint -------------------------------------------------------------------------


@app.command()
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

    configure_logs("text", "info")
    try:
        folder = fetch(found)
    except StartupError as error:
        fail(error.message)
    print(plain(str(folder)))


class Family(enum.StrEnum):
    QWEN3_VL = "qwen3_vl"
    QWEN3_5 = "qwen3_5"
    KIMI_K25 = "kimi_k25"


class Size(enum.StrEnum):
    TINY = "tiny"
    SMALL = "small"
    FULL = "full"


@app.command()
def make_checkpoint(
    out: Annotated[Path, typer.Argument(help="Directory to write; must not exist or be empty.")],
    family: Annotated[Family, typer.Option(help="Which model family.")],
    size: Annotated[Size, typer.Option(help="full has the real tower's dimensions.")] = Size.TINY,
    seed: Annotated[int, typer.Option(help="The same seed gives the same weights.")] = 0,
    with_lm: Annotated[bool, typer.Option("--with-lm", help="A small language model too.")] = False,
) -> None:
    """Writes a random-weight checkpoint in the hub's layout: for tests, demos and benchmarks."""
    from encoder_service.checkpoints.synthetic import make_checkpoint as write
    from encoder_service.errors import StartupError

    try:
        write(out, family.value, size.value, seed, with_lm=with_lm)
    except StartupError as error:
        fail(error.message)
    except OSError as error:
        fail(f"cannot write {out}: {error.strerror or error}")
    print(f"wrote {plain(str(out))}")
