"""What opens the encoders' door to the connector and to the front: a token, and TLS.

Owns the names of these settings, and the look at their files before anything is sent: what cannot work stops
the start. How a channel is secured is ``transport.channel``'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from lm_adapter.channel import ClientTls, EncryptedKey, read_file, read_token_file
from lm_adapter.errors import InvalidRequest

__all__ = ["Access"]

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

    def client_tls(self, written: Callable[[str], str] = str) -> ClientTls | None:
        """TLS to the encoder, None without. Reads the files of all settings. written: how a setting's name is
        written where it was given. Raises InvalidRequest for files that cannot be read, have the wrong content
        or do not belong together."""
        if self.token_file:
            with _naming(written("token_file")):
                read_token_file(self.token_file)
        if not (self.tls_ca or self.tls_cert or self.tls_key):
            if self.tls_server_name:
                raise InvalidRequest(f"{written('tls_server_name')} is for TLS: give {written('tls_ca')} too")
            return None
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
        return tls


@contextmanager
def _naming(setting: str) -> Iterator[None]:
    """Errors inside begin with the setting's name."""
    try:
        yield
    except InvalidRequest as error:
        raise InvalidRequest(f"{setting}: {error.message}") from None
