"""The plugin's settings in LMDeploy: one environment variable with a JSON object."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lm_adapter.engines.shared import settings

VARIABLE = "LMDEPLOY_VISION_ENCODER"
"""Not ``VE_...``: the encoder refuses variables of its prefix that it does not know."""
SOCKET_VARIABLE = "LMDEPLOY_VISION_ENCODER_SOCKET"
"""By which the engine's process learns the name of the API server's socket."""


@dataclass(frozen=True, kw_only=True)
class Settings(settings.Settings):
    ENGINE: ClassVar[str] = "LMDeploy"
    SOURCE: ClassVar[str] = VARIABLE
    DTYPES: ClassVar[tuple[str, ...]] = ("bfloat16",)
