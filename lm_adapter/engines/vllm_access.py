"""What opens the encoders' door to the connector and to the front: a token, and TLS.

Owns the names of these settings, and the look at their files before anything is sent: what cannot work stops
the start. How a channel is secured is ``transport.channel``'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from lm_adapter.errors import InvalidRequest
from lm_adapter.fleet import DnsEndpoints
from lm_adapter.transport.channel import ClientTls, EncryptedKey
from lm_adapter.transport.followed import TokenFile, read_file, token_in

__all__ = ["Access", "tls_of_service"]

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

    def token_and_tls(self, written: Callable[[str], str] = str) -> tuple[str | TokenFile, ClientTls | None]:
        """The token's file, empty without one, and TLS, None in clear; both are followed from then on.
        written: how a setting's name is written where it was given. Raises InvalidRequest for files that
        cannot be read, are not what they should be or do not belong together."""
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
                with _naming(written(name)):
                    read_file(path)
        tls = ClientTls(self.tls_ca, self.tls_cert, self.tls_key, self.tls_server_name)
        with _naming(written("tls_ca")):
            tls.check_authorities()
        try:
            tls.check_pair()
        except EncryptedKey as error:
            raise InvalidRequest(f"{written('tls_key')}: {error.message}") from None
        except InvalidRequest as error:
            pair = f"{written('tls_cert')}, {written('tls_key')}"
            raise InvalidRequest(f"{pair}: {error.message}") from None
        return token, tls

    def _token(self, setting: str) -> TokenFile:
        with _naming(setting):
            token_in(read_file(self.token_file), self.token_file)
        return TokenFile(self.token_file)


def tls_of_service(tls: ClientTls, service: str) -> ClientTls:
    """For the replicas behind ``dns:///name:port``, which are connected to by address: what they show is made
    out to the name, unless ``server_name`` says otherwise."""
    if tls.server_name:
        return tls
    return replace(tls, server_name=DnsEndpoints(service).host.removesuffix("."))


@contextmanager
def _naming(setting: str) -> Iterator[None]:
    """Errors inside begin with the setting's name."""
    try:
        yield
    except InvalidRequest as error:
        raise InvalidRequest(f"{setting}: {error.message}") from None
