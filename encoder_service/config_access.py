"""Settings of who may call, how much at a time, and what the service fetches for them.

Owns those knobs: TLS, tokens, bounds on calls and connections, URLs. ``config.Settings`` has them among the
others.
"""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Annotated

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode


class AccessSettings(BaseSettings):
    """See ``config.Settings``."""

    tls_cert: Path | None = Field(
        None, description="PEM chain of the service; with tls_key, host:port addresses speak TLS only."
    )
    tls_key: Path | None = Field(None, description="PEM key of tls_cert, not encrypted.")
    tls_client_ca: Path | None = Field(
        None, description="PEM authorities; with it, gRPC clients need a certificate of theirs."
    )
    admin_tls: bool = Field(False, description="The admin plane speaks TLS too, with the same certificate.")
    admin_token: SecretStr | None = Field(
        None, description="What opens the admin plane beyond /healthz and /readyz; not set: open."
    )
    tokens: Annotated[dict[str, SecretStr], NoDecode] = Field(
        {},
        description="What opens a namespace, over gRPC and at the broker: name=token, comma separated; "
        "name=old|new for two.",
    )
    broker_tokens: Annotated[dict[str, SecretStr], NoDecode] = Field(
        {}, description="More of the same, in their older name: they count over gRPC too."
    )
    tokens_file: Path | None = Field(
        None, description="More tokens: lines of name=token, read again when the file changes."
    )
    open_namespaces: bool = Field(True, description="A namespace without a token is open to every caller.")
    max_calls: int = Field(4096, ge=1, le=1_000_000, description="Calls in progress; over it: full.")
    max_calls_per_host: int = Field(
        2048, ge=0, le=1_000_000, description="The same from one address; 0: as many as max_calls."
    )
    max_connections: int = Field(1024, ge=1, le=1_000_000, description="TCP connections on one address.")
    connection_idle_s: float = Field(
        1800.0, ge=1, le=86_400, description="Closed after so long without calls."
    )
    connection_age_s: float = Field(
        0.0, ge=0, le=604_800, description="Closed at this age, once its calls have ended; 0: never."
    )
    receive_timeout_s: float = Field(30.0, gt=0, le=3600, description="From a call's start to its message.")
    url_allow: Annotated[tuple[str, ...], NoDecode] = Field(
        (),
        description="Where URL items may point: host, *.domain or host:port, with http:// in front where "
        "wanted; comma separated; empty: URL items are refused.",
    )
    url_networks: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="Networks that URLs may lead to though they are not public: 10.1.0.0/16, ..."
    )
    url_timeout_s: float = Field(10.0, gt=0, le=600, description="For one URL, redirects included.")

    def namespace_tokens(self) -> dict[str, tuple[str, ...]]:
        """Every token that the settings themselves give, by namespace."""
        found: dict[str, tuple[str, ...]] = {}
        for given in (self.tokens, self.broker_tokens):
            for name, secret in given.items():
                found[name] = found.get(name, ()) + tuple(filter(None, secret.get_secret_value().split("|")))
        return found

    @model_validator(mode="after")
    def check_access(self) -> AccessSettings:
        """What is half set protects nothing."""
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key are set together or not at all")
        for name in ("tls_client_ca", "admin_tls"):
            if getattr(self, name) and self.tls_cert is None:
                raise ValueError(f"{name} needs tls_cert and tls_key")
        if self.admin_token is not None and not self.admin_token.get_secret_value():
            raise ValueError("admin_token is empty")
        for name, values in self.namespace_tokens().items():
            if not values:
                raise ValueError(f"namespace {name!r} has an empty token")
        return self

    @field_validator("tokens", "broker_tokens", mode="before")
    @classmethod
    def split_tokens(cls, value: object) -> object:
        """``name=token`` pairs in a comma list; the default namespace's name is empty."""
        return named_values(value)

    @field_validator("url_allow", "url_networks", mode="before")
    @classmethod
    def split_url_list(cls, value: object) -> object:
        """A comma list is accepted from the environment and the command line."""
        if not isinstance(value, str):
            return value
        return tuple(part.strip() for part in value.split(",")) if value.strip() else ()

    @field_validator("url_networks")
    @classmethod
    def check_networks(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for network in value:
            ipaddress.ip_network(network)
        return value


def named_values(value: object) -> object:
    """``name=value`` pairs of a comma list as a dictionary; anything but a text as it is. Raises ValueError,
    which repeats the name only: the value may be a token."""
    if not isinstance(value, str):
        return value
    found: dict[str, str] = {}
    for part in filter(None, value.split(",")):
        name, separator, text = part.partition("=")
        if not separator or not text or name.strip() in found:
            raise ValueError(f"{name.strip()!r} is not one name=value of a comma list")
        found[name.strip()] = text.strip()
    return found
