"""What opens the encoders' door to the connector and to the front: a token, and TLS.

Owns the names of these settings, and the look at their files before anything is sent: what cannot work stops
the start. How a channel is secured is ``transport.channel``'s.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from dataclasses import dataclass, replace

from lm_adapter.errors import InvalidRequest
from lm_adapter.fleet import DnsEndpoints
from lm_adapter.transport.channel import ClientTls, bearer

__all__ = ["Access", "tls_of_service"]

MAX_TOKEN_BYTES = 4096
MAX_PEM_BYTES = 4 << 20
TLS_SETTINGS = ("tls_ca", "tls_cert", "tls_key")


@dataclass(frozen=True, kw_only=True)
class Access:
    """token_file: a file whose only word is the namespace's token. tls_ca, tls_cert, tls_key: PEM files, any
    of which makes the channel TLS; without tls_ca the public authorities count, and the other two are this
    side's own, where encoders ask for one. tls_server_name: see ``ClientTls``."""

    token_file: str = ""
    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    tls_server_name: str = ""

    def token_and_tls(self, written: Callable[[str], str] = str) -> tuple[str, ClientTls | None]:
        """The token, empty without one, and TLS, None in clear. written: how a setting's name is written
        where it was given. Raises InvalidRequest for files that cannot be read, are not what they should be
        or do not belong together."""
        token = self._token(written("token_file")) if self.token_file else ""
        if not (self.tls_ca or self.tls_cert or self.tls_key):
            if self.tls_server_name:
                raise InvalidRequest(f"{written('tls_server_name')} is for TLS: give {written('tls_ca')} too")
            return token, None
        for one, other in (("tls_cert", "tls_key"), ("tls_key", "tls_cert")):
            if getattr(self, one) and not getattr(self, other):
                raise InvalidRequest(
                    f"{written(one)} without {written(other)}: a client certificate and its key are given "
                    f"together or not at all"
                )
        for name in TLS_SETTINGS:
            if path := getattr(self, name):
                _read(path, written(name), MAX_PEM_BYTES)
        if self.tls_ca:
            self._check_authorities(written("tls_ca"))
        if self.tls_cert:
            self._check_pair(written("tls_cert"), written("tls_key"))
        return token, ClientTls(self.tls_ca, self.tls_cert, self.tls_key, self.tls_server_name)

    def _token(self, setting: str) -> str:
        """No error repeats what is in the file."""
        words = _read(self.token_file, setting, MAX_TOKEN_BYTES).split()
        if len(words) != 1:
            raise InvalidRequest(f"{setting}: {self.token_file} has {len(words)} words, a token is 1")
        try:
            token = words[0].decode("ascii")
            bearer(token)
        except ValueError:
            raise InvalidRequest(f"{setting}: {self.token_file} has characters that no token has") from None
        return token

    def _check_authorities(self, setting: str) -> None:
        """gRPC would take an empty file for the public ones, and tell of any other with the first call."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            context.load_verify_locations(self.tls_ca)
        except OSError as error:
            raise InvalidRequest(f"{setting}: {self.tls_ca} has no certificate: {error}") from None

    def _check_pair(self, cert: str, key: str) -> None:
        def no_password() -> bytes:
            raise InvalidRequest(f"{key}: the key in {self.tls_key} is encrypted, which is not supported")

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            context.load_cert_chain(self.tls_cert, self.tls_key, no_password)
        except OSError as error:
            raise InvalidRequest(
                f"{cert}, {key}: {self.tls_cert} and {self.tls_key} are no certificate and its key: {error}"
            ) from None


def tls_of_service(tls: ClientTls, service: str) -> ClientTls:
    """For the replicas behind ``dns:///name:port``, which are connected to by address: what they show is made
    out to the name, unless ``server_name`` says otherwise."""
    if tls.server_name:
        return tls
    return replace(tls, server_name=DnsEndpoints(service).host.removesuffix("."))


def _read(path: str, setting: str, max_bytes: int) -> bytes:
    try:
        with open(path, "rb") as file:
            text = file.read(max_bytes + 1)
    except OSError as error:
        raise InvalidRequest(f"{setting}: cannot read {path}: {error.strerror or error}") from None
    if len(text) > max_bytes:
        raise InvalidRequest(f"{setting}: {path} has more than {max_bytes} bytes")
    return text
