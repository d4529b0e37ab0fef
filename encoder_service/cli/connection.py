"""How the client commands reach a service: its address, TLS, token, namespace.

Owns these options and their reading. A token comes from the environment or a file: arguments of a process are
for everybody on its host to see.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from encoder_service.cli.exits import fail

if TYPE_CHECKING:
    from lm_adapter import ClientTls, VisionEncoderClient

DEFAULT_SERVER = "127.0.0.1:50051"

ServerOption = Annotated[str, typer.Option(help="host:port or unix:/path of a running service.")]
TlsOption = Annotated[
    bool, typer.Option("--tls", help="TLS by the public authorities; the three below imply it.")
]
CaOption = Annotated[Path | None, typer.Option(help="PEM authorities of the server's certificate.")]
CertOption = Annotated[Path | None, typer.Option(help="PEM certificate of this client, for mutual TLS.")]
KeyOption = Annotated[Path | None, typer.Option(help="PEM key of --cert.")]
ServerNameOption = Annotated[
    str, typer.Option(help="What the server's certificate is made out to; default: the host of --server.")
]
TokenOption = Annotated[
    str,
    typer.Option(
        envvar="VISION_ENCODER_TOKEN",
        help="What opens the namespace; rather by this variable or --token-file than as an argument.",
    ),
]
TokenFileOption = Annotated[Path | None, typer.Option(help="File whose only line is the token.")]
NamespaceOption = Annotated[str, typer.Option(help="Whose rows and keys; the token has to open it.")]


@dataclass(frozen=True)
class Connection:
    """What the options above say."""

    server: str
    tls: bool = False
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    server_name: str = ""
    token: str = ""
    token_file: Path | None = None
    namespace: str = ""

    def client_tls(self) -> ClientTls | None:
        """None for a channel in clear. Raises InvalidRequest for half a pair."""
        from lm_adapter import ClientTls

        if not (self.tls or self.ca or self.cert or self.key):
            if self.server_name:
                fail("--server-name is for TLS: give --tls or --ca too")
            return None
        return ClientTls(self.ca or "", self.cert or "", self.key or "", self.server_name)

    def read_token(self) -> str:
        """Ends the command when there is a file that has none."""
        if self.token_file is None:
            return self.token
        from lm_adapter import InvalidRequest
        from lm_adapter.channel import read_token_file

        try:
            return read_token_file(self.token_file)
        except InvalidRequest as error:
            fail(error.message)

    def client(self, timeout_s: float) -> VisionEncoderClient:
        """Raises EncoderError."""
        from lm_adapter import VisionEncoderClient

        return VisionEncoderClient(
            self.server,
            tls=self.client_tls(),
            namespace=self.namespace,
            token=self.read_token(),
            timeout_s=timeout_s,
        )
