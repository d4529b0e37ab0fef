"""The golden vectors: where they are, what they hold, and when an answer is right.

Owns the files' form and the comparison.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VERSION = "v1"
FOLDER = Path(__file__).parent / "vectors"
# Seconds, as doubles: the order of two divisions may differ, the tenth of a second in the prompt may not.
FLOAT_TOLERANCE = 1e-9


@dataclass(frozen=True)
class Case:
    subject: str
    name: str
    asked: Any
    expected: Any


@dataclass(frozen=True)
class Vectors:
    """One file. source: what the answers come from."""

    subject: str
    source: str
    cases: tuple[Case, ...]


def load(version: str = VERSION, folder: Path = FOLDER) -> list[Vectors]:
    """All files of a version, by name. Raises FileNotFoundError for a version that is not there."""
    files = sorted(path for path in (folder / version).glob("*.json") if path.name != "manifest.json")
    if not files:
        raise FileNotFoundError(f"{folder / version} holds no vectors")
    loaded = []
    for path in files:
        content = json.loads(path.read_text())
        cases = tuple(
            Case(content["subject"], case["name"], case["input"], case["expected"])
            for case in content["cases"]
        )
        loaded.append(Vectors(content["subject"], content["source"], cases))
    return loaded


def difference(found: Any, expected: Any, where: str = "output") -> str | None:
    """Where an answer first departs from the expected one, None where it does not. Fields beyond the expected
    ones are the implementation's own business. Integers are exact, and 1.0 is no integer."""
    if isinstance(expected, dict):
        if not isinstance(found, dict):
            return f"{where} is {_short(found)}, needs an object"
        for key, value in expected.items():
            if key not in found:
                return f"{where} lacks {key!r}"
            if wrong := difference(found[key], value, f"{where}.{key}"):
                return wrong
        return None
    if isinstance(expected, list):
        if not isinstance(found, list):
            return f"{where} is {_short(found)}, needs a list"
        if len(found) != len(expected):
            return f"{where} has {len(found)} elements, needs {len(expected)}"
        for index, (one, other) in enumerate(zip(found, expected, strict=True)):
            if wrong := difference(one, other, f"{where}[{index}]"):
                return wrong
        return None
    if isinstance(expected, float) and isinstance(found, int | float) and not isinstance(found, bool):
        if math.isclose(found, expected, rel_tol=FLOAT_TOLERANCE, abs_tol=FLOAT_TOLERANCE):
            return None
    elif type(found) is type(expected) and found == expected:
        return None
    return f"{where} is {_short(found)}, needs {_short(expected)}"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
