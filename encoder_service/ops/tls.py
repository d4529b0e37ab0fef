"""The service's TLS certificates, for ``rpc.server`` and ``ops.admin``. Changed files are used for new
connections."""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from encoder_service.errors import ConfigurationError
from encoder_service.ops.reloaded import Reloaded


@dataclass(frozen=True)
class Certificates:
    """PEM texts. chain: the server's certificate first. key: its private key. client_ca: the authorities that
    sign client certificates; None where clients need none. context: for servers built on ``ssl``."""

    chain: bytes
    key: bytes
    client_ca: bytes | None
    context: ssl.SSLContext


def certificate_files(
    cert: Path, key: Path, client_ca: Path | None = None, *, clock: Callable[[], float] = time.monotonic
) -> Reloaded[Certificates]:
    """The current certificates. Raises ConfigurationError for files that cannot be read or do not belong
    together."""

    def parse(chain: bytes, private_key: bytes, authority: bytes | None = None) -> Certificates:
        if authority is not None:
            check_authority(authority)
        return Certificates(chain, private_key, authority, load_context(cert, key))

    return Reloaded([cert, key] if client_ca is None else [cert, key, client_ca], parse, clock)


def server_context(files: Reloaded[Certificates], cert: Path, key: Path) -> ssl.SSLContext:
    """A context for servers built on ``ssl`` whose clients need no certificate. Each handshake uses the
    current files."""

    def use_current(connection: ssl.SSLObject | ssl.SSLSocket, *_: object) -> None:
        connection.context = files.current().context

    first = load_context(cert, key)
    first.sni_callback = use_current
    return first


def load_context(cert: Path, key: Path) -> ssl.SSLContext:
    """A server context. Raises ConfigurationError unless the files are a certificate and its key."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2

    def no_password() -> bytes:
        raise ConfigurationError(f"the key in {key} is encrypted, which is not supported")

    try:
        context.load_cert_chain(cert, key, no_password)
    except (OSError, ssl.SSLError) as error:
        raise ConfigurationError(f"{cert} and {key} are no certificate and its key: {error}") from None
    return context


def check_authority(client_ca: bytes) -> None:
    """Raises ConfigurationError unless the clients' authority holds a certificate."""
    try:
        # Certificates are ASCII, but comments in the file need not be.
        text = client_ca.decode("ascii", errors="ignore")
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(cadata=text)
    except (ssl.SSLError, ValueError) as error:
        raise ConfigurationError(f"the clients' authority is no certificate: {error}") from None
