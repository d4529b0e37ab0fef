"""How an engine's plugin reaches the encoder.

Owns the names of the settings, their defaults and checks, and the client that they describe. Files are read
once at the start, so that unusable files stop the start.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self

from lm_adapter.channel import ClientTls, read_token_file
from lm_adapter.client import AsyncVisionEncoderClient
from lm_adapter.errors import InvalidRequest, ItemFailed
from lm_adapter.shm.attachment import TRANSPORTS, check_transports
from lm_adapter.types import CheckServer

MAY_BE_ZERO = {"retry_s"}
"""Settings that may be 0; the others must be positive."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """target: the encoder's host:port, or a gateway's with ``fleet``. fallback_target: a gateway that is used
    while the encoder at ``target`` does not answer. namespace, model, broker_path, transports: as for
    the client. token_file: a file whose only word is the namespace's token. tls_ca, tls_cert, tls_key,
    tls_server_name: as in ``ClientTls``; one of the files turns TLS on. timeout_s: of one image, its encode
    included. retry_s: for how long transient failures, such as a restarting encoder, are retried.
    finite: check every element for NaN and infinity. ENGINE, SOURCE: the engine, and where its user states
    the settings; error messages name both. DTYPES: those that the engine's ``--dtype`` and an encoder's have
    in common."""

    ENGINE: ClassVar[str] = "the engine"
    SOURCE: ClassVar[str] = "the settings"
    DTYPES: ClassVar[tuple[str, ...]] = ("float32", "bfloat16")

    target: str
    fallback_target: str = ""
    fleet: bool = False
    namespace: str = ""
    model: str = ""
    token_file: str = ""
    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    tls_server_name: str = ""
    transports: tuple[str, ...] = TRANSPORTS
    broker_path: str = ""
    timeout_s: float = 30.0
    retry_s: float = 5.0
    finite: bool = False

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Self:
        """Raises InvalidRequest for an unknown name, a missing target, a value of another type, or unusable
        files."""
        known = {field.name: field.type for field in fields(cls)}
        unknown = sorted(set(config) - set(known))
        if unknown:
            raise InvalidRequest(f"{cls.SOURCE} has {unknown}, known are {sorted(known)}")
        if not config.get("target"):
            raise InvalidRequest(f"{cls.SOURCE} has no target, the address of the encoder")
        values = dict(config)
        if isinstance(values.get("transports"), list):
            values["transports"] = tuple(values["transports"])
        for name, value in values.items():
            default = getattr(cls, name, "")
            if isinstance(default, int | float) and not isinstance(default, bool):
                kinds = int if isinstance(default, int) else int | float
                fits = isinstance(value, kinds) and not isinstance(value, bool)
                if fits and not (value > 0 or (value == 0 and name in MAY_BE_ZERO)):
                    bound = "of at least" if name in MAY_BE_ZERO else "above"
                    raise InvalidRequest(f"{name} is {value!r}, needs a number {bound} 0")
            else:
                fits = isinstance(value, type(default))
            if not fits:
                raise InvalidRequest(f"{name} is {value!r}, needs {known[name]}")
        settings = cls(**values)
        if settings.fleet and settings.fallback_target:
            raise InvalidRequest(
                "fleet is for a gateway at target; fallback_target names one behind an encoder"
            )
        check_transports(settings.transports, settings.broker_path)
        settings.client_tls()
        return settings

    @classmethod
    def of_variable(cls, environment: Mapping[str, str]) -> Self:
        """From the variable SOURCE, a JSON object. Raises InvalidRequest if it is missing or no JSON object,
        and as ``read``."""
        text = environment.get(cls.SOURCE, "")
        if not text:
            raise InvalidRequest(
                f'{cls.SOURCE} is not set, needs an object such as {{"target": "127.0.0.1:50051"}}'
            )
        try:
            config = json.loads(text)
        except ValueError as error:
            raise InvalidRequest(f"{cls.SOURCE} is no JSON: {error}") from error
        if not isinstance(config, dict):
            raise InvalidRequest(f"{cls.SOURCE} holds a {type(config).__name__}, needs an object")
        return cls.read(config)

    @property
    def is_routed(self) -> bool:
        """Whether calls may go to a gateway, which routes them by the content's digest."""
        return self.fleet or bool(self.fallback_target)

    def on_host(self, why: str, remedy: str) -> Self:
        """Without the transport that ends on a GPU. why, remedy: of the error's text. Raises InvalidRequest
        if no transport is left."""
        transports = tuple(name for name in self.transports if name != "device")
        if not transports:
            raise InvalidRequest(f"transports is {list(self.transports)}, but {why}: {remedy}")
        return replace(self, transports=transports)

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

    def client(
        self, *, reads_rows: bool, check_server: CheckServer | None = None
    ) -> AsyncVisionEncoderClient:
        """A client on the running loop. reads_rows: attaches to the encoder's memory; rows go to the calling
        thread's current GPU, if it uses one. check_server: as of the client. Raises ItemFailed for files that
        became unusable after the start."""
        options: dict[str, Any] = {
            "namespace": self.namespace,
            "model": self.model,
            "timeout_s": self.timeout_s,
            "token_file": self.token_file,
            "check_server": check_server,
            "waits": False,  # ``EncoderThread`` repeats overloaded calls, for ``retry_s``
            "max_in_flight": sys.maxsize,  # the engine bounds its images
        }
        kind: type[AsyncVisionEncoderClient] = AsyncVisionEncoderClient
        if self.fleet:
            options["fleet"] = True
        elif reads_rows:
            options |= {"transports": self.transports, "broker_path": self.broker_path}
        else:
            options["transports"] = ("inline",)
        if self.fallback_target:
            from lm_adapter.local_first import LocalFirstClient

            kind, options["fallback_target"] = LocalFirstClient, self.fallback_target
        try:
            return kind(self.target, tls=self.client_tls(), **options)
        except InvalidRequest as error:
            raise ItemFailed(error.message, reason="UNUSABLE_SETTINGS") from error
