"""Settings of the tier that replicas share on a Valkey or Redis server.

Owns those knobs. ``config.Settings`` has them among the others.
"""

from __future__ import annotations

from pydantic import Field, SecretStr, model_validator
from pydantic_settings import BaseSettings

MIB = 1 << 20
MIN_SECRET_CHARACTERS = 16


class SharedTierSettings(BaseSettings):
    """See ``config.Settings``."""

    shared_url: SecretStr | None = Field(
        None,
        description="Server of the shared tier: redis://, rediss:// or unix://, user and password in it; not "
        "set: no such tier.",
    )
    shared_secret: SecretStr | None = Field(
        None, description="What replicas that share rows have in common: names and checksums are keyed by it."
    )
    shared_prefix: str = Field(
        "ve", pattern=r"^[A-Za-z0-9._-]{1,64}$", description="What the shared tier's keys begin with."
    )
    shared_ttl_s: float = Field(
        86_400.0, ge=1, le=31_536_000, description="Rows in the shared tier are gone after so long."
    )
    shared_timeout_ms: float = Field(
        100.0, ge=1, le=10_000, description="The most that a look into the shared tier adds to a miss."
    )
    shared_max_value_bytes: int = Field(
        64 * MIB, ge=4096, le=448 * MIB, description="The largest item's rows in the shared tier."
    )
    shared_queue_bytes: int = Field(
        128 * MIB, ge=4096, description="Rows that wait to be written to the shared tier; over it: given up."
    )

    @model_validator(mode="after")
    def check_shared_tier(self) -> SharedTierSettings:
        """Without a secret, whoever reaches the server could plant rows."""
        if self.shared_url is None:
            return self
        scheme = self.shared_url.get_secret_value().partition("://")[0]
        if scheme not in ("redis", "rediss", "unix"):
            raise ValueError("shared_url is no redis://, rediss:// or unix:// URL")
        secret = "" if self.shared_secret is None else self.shared_secret.get_secret_value()
        if len(secret) < MIN_SECRET_CHARACTERS:
            raise ValueError(
                f"shared_url needs a shared_secret of at least {MIN_SECRET_CHARACTERS} characters, "
                f"found {len(secret)}"
            )
        if self.shared_queue_bytes < self.shared_max_value_bytes:
            raise ValueError(
                f"shared_queue_bytes {self.shared_queue_bytes} is below shared_max_value_bytes "
                f"{self.shared_max_value_bytes}, which could then never be written"
            )
        return self
