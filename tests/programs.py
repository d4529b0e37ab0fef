"""Programs that tests run. Without one its tests skip, or fail with REQUIRE_PROGRAMS in the environment."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

ARE_REQUIRED = bool(os.environ.get("REQUIRE_PROGRAMS"))


def program(name: str) -> str:
    """The program's path: beside this interpreter, where wheels put theirs, or on PATH."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None:
        (pytest.fail if ARE_REQUIRED else pytest.skip)(f"{name} is not installed")
    return found
