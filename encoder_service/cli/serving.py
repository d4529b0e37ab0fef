"""``serve``: the service, until a signal.

Owns its arguments, its one line on standard output, and how the process ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from encoder_service.cli.exits import EXIT_CANNOT_START, fail

if TYPE_CHECKING:
    from collections.abc import Callable

    from encoder_service.app import Service


class DType(enum.StrEnum):
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


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
    bucket_sizes: Annotated[str | None, typer.Option(help="Patches of each graph, comma separated.")] = None,
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
    from encoder_service.ops.logs import configure_logs, stop_logs

    try:
        settings = parse_settings(
            model=model,
            device=device,
            dtype=None if dtype is None else dtype.value,
            listen=tuple(listen) if listen else None,
            admin_listen=admin_listen,
            model_name=model_name,
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
        with asyncio.Runner(loop_factory=loop_factory(settings.event_loop)) as runner:
            code = runner.run(run(settings, announce))
    except StartupError as error:
        stop_logs()
        fail(f"cannot start: {error.message}", EXIT_CANNOT_START)
    stop_logs()
    leave(code)


def loop_factory(wanted: str) -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Makes the service's event loop; None for asyncio's own. wanted: as the setting has it. uvloop is there
    on request alone: under it more calls of a soak ended as UNAVAILABLE, and why is not known."""
    if wanted == "asyncio":
        return None
    try:
        import uvloop
    except ImportError:  # an optional extra, which takes a tenth and more off what an item costs the loop
        return None
    return uvloop.new_event_loop


def leave(code: int) -> NoReturn:
    """Ends the process. A load, a decode or a forward that a signal or the grace cut off is not waited for,
    and its thread is not left to run native code while the interpreter is torn down."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # nobody reads it, or its disk is full: the interpreter would make an error of it
            os._exit(code)
    if threading.active_count() > 1:
        os._exit(code)
    raise typer.Exit(code)


def announce(service: Service) -> None:
    """The one line on standard output that says the service takes work."""
    info = service.info()
    assert info is not None
    model = info.models[0]
    admin = f" (admin http://{service.admin_address})" if service.admin_address else ""
    with contextlib.suppress(OSError):  # whoever started the service may not listen; a disk may be full
        print(
            f"ready: {model.name} ({model.family}) on {service.settings.device} "
            f"at {' '.join(service.addresses)}{admin}",
            flush=True,
        )
