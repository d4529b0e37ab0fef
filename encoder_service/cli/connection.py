"""How client commands reach a service: address, TLS, token and namespace."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from encoder_service.cli.options import with_options
from encoder_service.cli.output import fail

if TYPE_CHECKING:
    from lm_adapter import VisionEncoderClient
    from lm_adapter.options import ClientOptions

DEFAULT_SERVER = "127.0.0.1:50051"


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

    def client_options(self, timeout_s: float) -> ClientOptions:
        """Raises EncoderError. Ends the command for a server name without TLS."""
        from lm_adapter import ClientTls

        tls = None
        if self.tls or self.ca or self.cert or self.key:
            tls = ClientTls(self.ca or "", self.cert or "", self.key or "", self.server_name)
        elif self.server_name:
            fail("--server-name is for TLS: give --tls or --ca too")
        return {"tls": tls, "namespace": self.namespace, "token": self.read_token(), "timeout_s": timeout_s}

    def client(self, timeout_s: float, *, fleet: bool = False) -> VisionEncoderClient:
        """Raises EncoderError."""
        from lm_adapter import VisionEncoderClient

        return VisionEncoderClient(self.server, fleet=fleet, **self.client_options(timeout_s))


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
