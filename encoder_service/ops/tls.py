"""The service's TLS certificates: read, checked, and read again when their files change.

Owns the files and their contents. Used by ``rpc.server`` and ``ops.admin``.
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

# A change of the files is noticed after at most this time.
RECHECK_S = 1.0


@dataclass(frozen=True)
class Certificates:
    """PEM texts. chain: the server's certificate first. key: its private key. client_ca: the authorities that
    sign client certificates; None where clients need none."""

    chain: bytes
    key: bytes
    client_ca: bytes | None = None


class CertificateFiles:
    """The current contents of the certificate files. Thread-safe, since gRPC uses its own threads."""

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
        self._seen = self._good = self._read()
        self._context = checked_context(self._seen, cert, key)
        self._checked_s = clock()

    @property
    def needs_client(self) -> bool:
        """Whether clients must present a certificate."""
        return self._good.client_ca is not None

    def current(self) -> Certificates:
        """The certificates for new connections. Keeps the last valid ones while the files are unreadable or
        half replaced."""
        with self._lock:
            now_s = self._clock()
            if now_s - self._checked_s >= RECHECK_S:
                self._checked_s = now_s
                self._reload()
            return self._good

    def server_context(self) -> ssl.SSLContext:
        """A context for servers built on ``ssl`` whose clients need no certificate. Each handshake uses the
        current files."""

        def use_current(connection: ssl.SSLObject | ssl.SSLSocket, *_: object) -> None:
            self.current()
            connection.context = self._context

        first = load_context(*self._paths[:2])
        first.sni_callback = use_current
        return first

    def _reload(self) -> None:
        cert, key, _ = self._paths
        try:
            # Compares contents, not times: a mounted secret changes when its symbolic link is swapped.
            found = self._read()
            if found == self._seen:
                return
            self._seen = found
            self._context = checked_context(found, cert, key)
        except ConfigurationError as error:
            log.warning("the certificates' files are not usable, the former stay", reason=error.message)
            return
        self._good = found
        log.info("certificates read again", cert=str(cert))

    def _read(self) -> Certificates:
        cert, key, client_ca = self._paths
        return Certificates(read(cert), read(key), None if client_ca is None else read(client_ca))


def read(path: Path) -> bytes:
    """The file's bytes. Raises ConfigurationError."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror or error}") from None


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


def checked_context(certificates: Certificates, cert: Path, key: Path) -> ssl.SSLContext:
    """A server context. Raises ConfigurationError unless the key belongs to the certificate and the clients'
    authority holds a certificate."""
    if certificates.client_ca is not None:
        try:
            # Certificates are ASCII, but comments in the file need not be.
            text = certificates.client_ca.decode("ascii", errors="ignore")
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(cadata=text)
        except (ssl.SSLError, ValueError) as error:
            raise ConfigurationError(f"the clients' authority is no certificate: {error}") from None
    return load_context(cert, key)
