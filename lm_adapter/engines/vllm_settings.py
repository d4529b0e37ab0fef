"""The settings of the vLLM connector, and those of them that the HTTP front shares.

Owns their names, defaults and checks. Files are read once at start, so that unusable ones stop it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lm_adapter.channel import ClientTls, read_token_file
from lm_adapter.errors import InvalidRequest
from lm_adapter.shm.attachment import TRANSPORTS, check_transports

__all__ = ["Access", "FetchSettings"]


@dataclass(frozen=True, kw_only=True)
class Access:
    """What an encoder asks of its callers. token_file: a file whose only word is the namespace's token.
    tls_ca, tls_cert, tls_key, tls_server_name: as in ``ClientTls``; one of the files turns TLS on."""

    token_file: str = ""
    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    tls_server_name: str = ""

    def client_tls(self) -> ClientTls | None:
        """TLS to the encoder, or None. Reads the files of all settings. Raises InvalidRequest for files that
        are missing, have the wrong content or do not belong together."""
        if self.token_file:
            read_token_file(self.token_file)
        if not (self.tls_ca or self.tls_cert or self.tls_key):
            if self.tls_server_name:
                raise InvalidRequest("tls_server_name needs TLS: give tls_ca, or tls_cert and tls_key")
            return None
        tls = ClientTls(self.tls_ca, self.tls_cert, self.tls_key, self.tls_server_name)
        tls.credentials()
        return tls


@dataclass(frozen=True, kw_only=True)
class FetchSettings(Access):
    """``ec_connector_extra_config``.

    target: the encoder's host:port. namespace, model, broker_path, transports: as for the client. timeout_s:
    of one item, its encode included. retry_s: how long retryable failures, such as an encoder that restarts,
    are tried again. max_resident_bytes: of rows that wait for vLLM's forward pass. max_bound_items:
    identifiers whose key and grid are remembered. finite: check every element for NaN and infinity.
    failures_path: a datagram socket that receives the reasons of rejections; the front has the same setting.
    """

    target: str
    namespace: str = ""
    model: str = ""
    transports: tuple[str, ...] = TRANSPORTS
    broker_path: str = ""
    timeout_s: float = 30.0
    retry_s: float = 5.0
    max_resident_bytes: int = 2 << 30
    max_bound_items: int = 1 << 18
    finite: bool = False
    failures_path: str = ""

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> FetchSettings:
        """Raises InvalidRequest for an unknown name, a missing target or a value of another type."""
        known = {name: field.type for name, field in cls.__dataclass_fields__.items()}
        unknown = sorted(set(config) - set(known))
        if unknown:
            raise InvalidRequest(f"ec_connector_extra_config has {unknown}, known are {sorted(known)}")
        if not config.get("target"):
            raise InvalidRequest("ec_connector_extra_config has no target, the address of the encoder")
        values = dict(config)
        if isinstance(values.get("transports"), list):
            values["transports"] = tuple(values["transports"])
        for name, value in values.items():
            default = getattr(cls, name, "")
            if isinstance(default, int | float) and not isinstance(default, bool):
                fits = isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
            else:
                fits = isinstance(value, type(default))
            if not fits:
                raise InvalidRequest(f"{name} is {value!r}, needs {known[name]}")
        settings = cls(**values)
        check_transports(settings.transports, settings.broker_path)
        return settings
