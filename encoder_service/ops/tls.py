"""The service's TLS certificates, for gRPC and HTTP servers. New connections use changed files."""

from __future__ import annotations

import contextlib
import ssl
import time
from dataclasses import dataclass
from pathlib import Path

import structlog

from encoder_service.errors import ConfigurationError
from encoder_service.ops.reloaded import Reloaded

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Certificates:
    """PEM texts. chain: the server's certificate first. key: its private key. client_ca: the authorities that
    sign client certificates; None if clients need no certificate. context: for servers built on ``ssl``."""

    chain: bytes
    key: bytes
    client_ca: bytes | None
    context: ssl.SSLContext


def certificate_files(cert: Path, key: Path, client_ca: Path | None = None) -> Reloaded[Certificates]:
    """The current certificates. Raises ConfigurationError for files that cannot be read or do not match each
    other. Logs a warning for a certificate that is expired or not valid yet."""

    def parse(chain: bytes, private_key: bytes, authority: bytes | None = None) -> Certificates:
        if authority is not None:
            check_authority(authority)
        context = load_context(cert, key, authority)
        warn_of_dates(cert)
        return Certificates(chain, private_key, authority, context)

    return Reloaded([cert, key] if client_ca is None else [cert, key, client_ca], parse)


def warn_of_dates(cert: Path) -> None:
    """Logs a warning outside the certificate's dates, because only clients see that error otherwise."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        # The standard library has no public function that reads a certificate from a file.
        fields = ssl._ssl._test_decode_cert(str(cert))  # type: ignore[attr-defined]
        valid_from, valid_until = fields["notBefore"], fields["notAfter"]
        if ssl.cert_time_to_seconds(valid_until) < time.time():
            log.warning("the certificate has expired", file=str(cert), expired_at=valid_until)
        elif ssl.cert_time_to_seconds(valid_from) > time.time():
            log.warning("the certificate is not valid yet", file=str(cert), valid_from=valid_from)


def server_context(cert: Path, key: Path, client_ca: Path | None = None) -> ssl.SSLContext:
    """A context for servers built on ``ssl``. Each handshake uses the current files. client_ca: the
    authorities that sign client certificates; None if clients need none. Raises as ``certificate_files``."""
    files = certificate_files(cert, key, client_ca)

    def use_current(connection: ssl.SSLObject | ssl.SSLSocket, *_: object) -> None:
        connection.context = files.current().context

    first = load_context(cert, key, files.current().client_ca)
    first.sni_callback = use_current
    return first


def load_context(cert: Path, key: Path, client_ca: bytes | None = None) -> ssl.SSLContext:
    """A server context. client_ca: as in ``Certificates``. Raises ConfigurationError if the files are not a
    certificate and its key."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=ascii_of(client_ca))

    def no_password() -> bytes:
        raise ConfigurationError(f"the key in {key} is encrypted, which is not supported")

    try:
        context.load_cert_chain(cert, key, no_password)
    except (OSError, ssl.SSLError) as error:
        raise ConfigurationError(f"{cert} and {key} are not a certificate and its key: {error}") from None
    return context


def check_authority(client_ca: bytes) -> None:
    """Raises ConfigurationError if the file of the clients' authority has no certificate."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(cadata=ascii_of(client_ca))
    except (ssl.SSLError, ValueError) as error:
        raise ConfigurationError(f"the clients' authority is not a certificate: {error}") from None


def ascii_of(pem: bytes) -> str:
    """Certificates are ASCII; comments in their file may not be."""
    return pem.decode("ascii", errors="ignore")
