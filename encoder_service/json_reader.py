"""Typed access to the JSON files that describe a checkpoint.

Owns reading a file, and the errors for values that are missing or of the wrong type. Callers define the
meaning of values: ``towers`` for towers, ``ingest.settings`` for processors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

from encoder_service.errors import CheckpointError, UnsupportedCheckpoint


def is_count(value: object) -> bool:
    return type(value) is int and value >= 1


def is_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]


class JsonReader:
    """Typed access to one JSON object. A null counts as missing. A missing or wrong value raises
    UnsupportedCheckpoint, which names the object and the key. Of several keys, the first that is present is
    read."""

    def __init__(self, values: Mapping[str, object], where: str) -> None:
        self.values = values
        self._where = where

    @classmethod
    def of_file(cls, path: Path) -> Self:
        """Reads a file that holds one JSON object. Raises CheckpointError if it cannot be read."""
        try:
            values = json.loads(path.read_bytes())
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise UnsupportedCheckpoint(f"{path} is not JSON: {error}") from error
        if not isinstance(values, Mapping):
            raise UnsupportedCheckpoint(f"{path} holds a {type(values).__name__}, needs an object")
        return cls(values, str(path))

    def refuse(self, key: str, value: object, needed: str) -> UnsupportedCheckpoint:
        return UnsupportedCheckpoint(f"{self._where} has {key} = {value!r}, needs {needed}")

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def read(
        self, keys: tuple[str, ...], needed: str, is_valid: Callable[[Any], bool], default: object = None
    ) -> Any:
        value = next((self.values[key] for key in keys if self.has(key)), default)
        name = " or ".join(keys)
        if value is None:
            raise UnsupportedCheckpoint(f"{self._where} lacks {name}")
        if not is_valid(value):
            raise self.refuse(name, value, needed)
        return value

    def section(self, key: str, default: Mapping[str, object] | None = None) -> Self:
        values = self.read((key,), "an object", lambda value: isinstance(value, Mapping), default)
        return type(self)(values, f"{self._where}, {key},")

    def count(self, *keys: str, default: object = None) -> int:
        """An integer of at least 1."""
        value: int = self.read(keys, "an integer of at least 1", is_count, default)
        return value

    def square(self, key: str, default: int | None = None) -> int:
        """A side length, given as one integer or as a list of two equal integers."""
        sides = self.values.get(key)
        if isinstance(sides, list) and len(sides) == 2 and sides[0] == sides[1] and is_count(sides[0]):
            return int(sides[0])
        return self.count(key, default=default)

    def number(self, *keys: str, default: float | None = None) -> float:
        """A finite number above 0."""
        needed = "a finite number above 0"
        return float(self.read(keys, needed, lambda value: is_number(value) and value > 0, default))

    def require(self, key: str, needed: object) -> None:
        """Refuses a value that is present and is not ``needed``, the only one that is implemented."""
        if self.has(key) and self.values[key] != needed:
            raise self.refuse(key, self.values[key], "null" if needed is None else repr(needed))
