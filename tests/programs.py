"""Programs that tests run. Without one its tests skip, or fail with REQUIRE_PROGRAMS in the environment."""

from __future__ import annotations

import os

import pytest

from bench.harness import processes

ARE_REQUIRED = bool(os.environ.get("REQUIRE_PROGRAMS"))


def program(name: str) -> str:
    try:
        return processes.program(name)
    except FileNotFoundError as error:
        (pytest.fail if ARE_REQUIRED else pytest.skip)(str(error))
