"""``vision-encoder serve``: an option for each setting, the service's process and its end."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import structlog
import typer
from typer.core import TyperCommand

from encoder_service import __version__
from encoder_service.cli.options import with_options
from encoder_service.cli.output import EXIT_CANNOT_START, EXIT_FAILED

if TYPE_CHECKING:
    from encoder_service.config import Settings


log = structlog.get_logger(__name__)

TCP_SETTINGS = ("admin_listen", "http_listen", "serve_sglang", "serve_tokenspeed")
"""Settings of one host:port each; empty: none."""


class GroupedCommand(TyperCommand):
    """A command whose help has the options in the settings' groups."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        from encoder_service.config import settings_help

        settings, groups = settings_help(), dict[str, list[tuple[str, str]]]()
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                title = settings[parameter.name].group if parameter.name in settings else "Options"
                groups.setdefault(title, []).append(record)
        for title, records in groups.items():
            with formatter.section(title):
                formatter.write_dl(records)


@functools.cache
def serve_command() -> Any:
    """The command ``serve`` of Typer, with an option for each setting. Values are parsed by the settings."""
    from encoder_service.config import settings_help, variable_of

    file = typer.Option(help="YAML file of settings, name: value. [VE_CONFIG]", metavar="path")
    options: dict[str, Any] = {"config": Annotated[str | None, file]}
    for name, setting in settings_help().items():
        kind: Any = bool | None if setting.is_flag else list[str] | None if setting.is_list else str | None
        option = typer.Option(
            help=f"{setting.text} [{variable_of(name)}]", metavar=None if setting.is_flag else setting.value
        )
        options[name] = Annotated[kind, option]
    parameters = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in options.items()
    ]
    alone = typer.Typer(add_completion=False, rich_markup_mode=None)  # of rich, the table cuts names
    alone.command("serve", cls=GroupedCommand)(with_options(serve, parameters))
    return typer.main.get_command(alone)


def serve(**options: Any) -> None:
    """Serves one checkpoint until SIGTERM.

    Every option can also come from the environment, --max-calls as VE_MAX_CALLS, or from a file, as
    max_calls. An option goes before the environment, the environment before the file. Several values are
    separated by commas, or the option is repeated."""
    from encoder_service.checkpoints.hub_id import check_model
    from encoder_service.config import parse_settings
    from encoder_service.defaults import check_installed
    from encoder_service.errors import StartupError, missing_module
    from encoder_service.ingest.allowed_urls import AllowList
    from encoder_service.ops.logs import configure_logs, never_wait, silence_grpc

    try:
        settings = parse_settings(**given_options(options))
        # First, so that warnings of what is imported are lines of the log too.
        configure_logs(settings.log_format, settings.log_level, never_wait())
        silence_grpc()
        check_model(settings.model)
        check_files(settings)
        check_addresses(settings)
        check_installed(settings)
        AllowList(settings.url_allow)
        # Imports torch, for seconds, which an answer to a wrong setting does not wait for.
        log.info("starting", version=__version__, model=str(settings.model), step="importing torch")
        from encoder_service.rpc.event_loop import ServiceLoop
        from encoder_service.serve import serve as run

        with asyncio.Runner(loop_factory=ServiceLoop) as runner:
            code = runner.run(run(settings))
    except StartupError as error:
        leave(EXIT_CANNOT_START, f"vision-encoder: cannot start: {error.message}")
    except ModuleNotFoundError as error:
        leave(EXIT_CANNOT_START, f"vision-encoder: cannot start: {missing_module(error)}")
    except Exception:
        leave(EXIT_FAILED, traceback.format_exc())
    leave(code)


def check_files(settings: Settings) -> None:
    """Raises ConfigurationError for a file of a setting that cannot be read."""
    from encoder_service.config import option_of
    from encoder_service.errors import ConfigurationError

    for name in ("tls_cert", "tls_key", "tls_client_ca", "tokens_file"):
        file = getattr(settings, name)
        if file is None or (os.access(file, os.R_OK) and not os.path.isdir(file)):
            continue
        reason = "no permission" if os.path.exists(file) else "no such file"
        reason = "it is a folder" if os.path.isdir(file) else reason
        raise ConfigurationError(f"{option_of(name)}: cannot read {file}: {reason}")


def check_addresses(settings: Settings) -> None:
    """Takes every address for a moment. Raises ConfigurationError for one that cannot be listened on, with
    the option that changes it. The service binds them anew: gRPC takes no socket that another one bound."""
    from encoder_service.errors import ConfigurationError
    from encoder_service.ops.addresses import listen_tcp, remove_dead_socket

    with contextlib.ExitStack() as taken:  # all at once, so that two options with one port are found too
        for option, address, free in addresses_of(settings):
            try:
                if address.startswith("unix:"):
                    remove_dead_socket(address.removeprefix("unix:"))
                else:
                    taken.enter_context(listen_tcp(address))
            except ConfigurationError as error:
                code = error.details.get("errno")
                if code == "EAFNOSUPPORT" and option == "--listen":
                    continue  # on a host without IPv6, gRPC takes the address of the same meaning in IPv4
                is_taken = code == "EADDRINUSE"
                advice = f"{option} {free} takes a free port" if is_taken else f"set {option} to another one"
                raise ConfigurationError(f"{error.message}; {advice}") from None


def addresses_of(settings: Settings) -> Iterator[tuple[str, str, str]]:
    """Each address that is set: its option, the address, and the option's value for a free port."""
    from encoder_service.config import AUTO, option_of

    of_option = [("listen", address) for address in settings.listen]
    of_option += [(name, getattr(settings, name)) for name in TCP_SETTINGS]
    if settings.broker_path not in ("", AUTO):
        of_option.append(("broker_path", f"unix:{settings.broker_path}"))
    for name, address in of_option:
        if address:
            yield option_of(name), address, f"{address.rpartition(':')[0]}:0"
    first = settings.tokenspeed_bootstrap_port
    if settings.serve_tokenspeed and first:
        host = settings.serve_tokenspeed.rpartition(":")[0]
        for port in (first, first + 1):
            yield option_of("tokenspeed_bootstrap_port"), f"{host}:{port}", "0"


def given_options(options: Mapping[str, Any]) -> dict[str, str | bool]:
    """Those that were given, as text or as a flag. Several values are separated by commas."""
    return {
        name: ",".join(value) if isinstance(value, (list, tuple)) else value
        for name, value in options.items()
        if value is not None and value != [] and value != ()
    }


def leave(code: int, message: str = "") -> NoReturn:
    """Ends the process once logs are written, without the interpreter's own end: that waits for threads, and
    one may hang in native code (a load, a decode or a forward that a signal or the grace cut off)."""
    from encoder_service.ops.logs import stop_logs

    stop_logs()
    if message:
        with contextlib.suppress(OSError):  # a closed pipe or a full disk
            print(message, file=sys.stderr, flush=True)
    os._exit(code)
