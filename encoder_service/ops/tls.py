"""Certificates of the service: read, checked, and read again when their files change.

Owns the files and what is in them. How a server uses them is ``rpc.server``'s and ``admin.app``'s.
"""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import structlog

from encoder_service.errors import ConfigurationError

log = structlog.get_logger(__name__)

# How long a change of the files may go unnoticed.
RECHECK_S = 1.0


@dataclass(frozen=True)
class Certificates:
    """PEM texts: the chain with the server's certificate first, its key, and whose certificates clients must
    have (None: clients need none)."""

    chain: bytes
    key: bytes
    client_ca: bytes | None = None


class CertificateFiles:
    """Certificates as the files have them now. Safe to ask from several threads: gRPC asks on its own."""

    def __init__(
        self,
        cert: Path,
        key: Path,
        client_ca: Path | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises ConfigurationError for files that cannot be read or do not belong together."""
        self._paths = (cert, key, client_ca)
        self._clock = clock
        self._lock = threading.Lock()
        self._seen = self._read()
        self._checked_s = clock()
        check_pair(self._seen, cert, key)
        self._good = self._seen
        self.num_reloads = 0

    @property
    def needs_client(self) -> bool:
        """Whether clients have to show a certificate."""
        return self._good.client_ca is not None

    def current(self) -> Certificates:
        """What new connections are to use. Files that are half replaced, or unreadable, leave what was."""
        with self._lock:
            now_s = self._clock()
            if now_s - self._checked_s >= RECHECK_S:
                self._checked_s = now_s
                self._reload()
            return self._good

    def _reload(self) -> None:
        cert, key, _ = self._paths
        try:
            # Contents are compared and not times: a mounted secret is swapped through links, and three small
            # files once a second cost nothing.
            found = self._read()
            if found == self._seen:
                return
            self._seen = found
            check_pair(found, cert, key)
        except ConfigurationError as error:
            log.warning("certificates are kept as they were", reason=error.message)
            return
        self._good = found
        self.num_reloads += 1
        log.info("certificates read again", cert=str(cert))

    def _read(self) -> Certificates:
        cert, key, client_ca = self._paths
        return Certificates(read(cert), read(key), None if client_ca is None else read(client_ca))

    def server_context(self) -> ssl.SSLContext:
        """A context for servers of the standard library whose clients need no certificate; each handshake
        uses the files as they are then."""
        cert, key, _ = self._paths
        used = self.current()
        context = plain_context(cert, key)

        def choose(socket: ssl.SSLObject | ssl.SSLSocket, _: str | None, __: ssl.SSLContext) -> None:
            nonlocal used, context
            found = self.current()
            if found is not used:
                try:
                    context = plain_context(cert, key)
                except ConfigurationError:
                    return  # replaced again in this very moment: the next handshake looks anew
                used = found
            socket.context = context

        first = context
        first.sni_callback = choose
        return first


def read(path: Path) -> bytes:
    """Raises ConfigurationError."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror or error}") from None


def plain_context(cert: Path, key: Path) -> ssl.SSLContext:
    """Raises ConfigurationError for files that are no certificate with its key."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2

    def no_password() -> bytes:
        raise ConfigurationError(f"the key in {key} is encrypted, which is not supported")

    try:
        context.load_cert_chain(cert, key, no_password)
    except (OSError, ssl.SSLError) as error:
        raise ConfigurationError(f"{cert} and {key} are no certificate and its key: {error}") from None
    return context


def check_pair(certificates: Certificates, cert: Path, key: Path) -> None:
    """Raises ConfigurationError unless the key is the certificate's and the clients' authority has one."""
    plain_context(cert, key)
    if certificates.client_ca is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            # Certificates are ASCII; comments beside them, a name in its own script, need not be.
            context.load_verify_locations(cadata=certificates.client_ca.decode("ascii", errors="ignore"))
        except (ssl.SSLError, ValueError) as error:
            raise ConfigurationError(f"the clients' authority is no certificate: {error}") from None
