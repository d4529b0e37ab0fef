"""The plugin's settings in SGLang: one environment variable with a JSON object.

Owns its name, and the names of SGLang's variables that load the plugin.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from lm_adapter.engines.shared import settings
from lm_adapter.errors import InvalidRequest

VARIABLE = "SGLANG_VISION_ENCODER"
"""Not ``VE_...``: the encoder refuses variables of its prefix that it does not know."""
PACKAGE = "lm_adapter.engines.sglang"
LOADERS = ("SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE", "SGLANG_EXTERNAL_MODEL_PACKAGE")


@dataclass(frozen=True, kw_only=True)
class Settings(settings.Settings):
    ENGINE: ClassVar[str] = "SGLang"
    SOURCE: ClassVar[str] = VARIABLE


def check_loaded(environment: Mapping[str, str]) -> None:
    """Raises InvalidRequest unless SGLang loads both halves of the plugin. With the processor alone the tower
    would stay in memory; with the models alone there would be no tower for SGLang's own processor."""
    for name in LOADERS:
        package = environment.get(name, "")
        if package != PACKAGE:
            raise InvalidRequest(f"{name} is {package!r}, needs {PACKAGE!r}: both of {' and '.join(LOADERS)}")
