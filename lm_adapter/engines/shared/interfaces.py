"""Which versions of an engine a plugin takes.

Owns the rule and the comparison; each engine's ``interfaces`` has its tested versions and tables. A tested
version is taken as it is. A newer one is compared with the tables: it is taken with a warning, or refused
with the first difference. The comparison imports all that the tables name, which would delay the start of a
tested version for nothing.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import multiprocessing
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Table = Mapping[str, tuple[str, ...]]
"""Module -> names in it, with the parameters of functions in brackets."""


@dataclass(frozen=True, eq=False)
class Interfaces:
    """engine: its name. tested: series for which the tests run, oldest first. called: what the plugin calls
    or reads. It passes the parameters in brackets; there may be more. So are methods that it replaces by one
    that takes any further parameters. overridden: methods that the plugin replaces, which the engine calls.
    They have exactly these parameters. logger: gets the warning."""

    engine: str
    tested: tuple[tuple[int, int], ...]
    called: Table
    overridden: Table
    logger: logging.Logger

    @functools.cache  # noqa: B019 - instances live as long as the process
    def refusal(self, version: str) -> str:
        """Why the plugin cannot run with the installed engine, whose version this is; empty if it can."""
        found, names = series(version), " and ".join(f"{major}.{minor}" for major, minor in self.tested)
        if found in self.tested:
            return ""
        tested = f"{self.engine} is {version}, this plugin was tested with {names}"
        which = "one of these" if len(self.tested) > 1 else "this one"
        if found is not None and found < self.tested[0]:
            return f"{tested}: install {which}"
        if difference := self.first_difference():
            return f"{tested}, and {difference}: install {which}, or a newer release of this plugin"
        if multiprocessing.parent_process() is None:
            # The engine's other processes would repeat it.
            self.logger.warning("%s. It has all that the plugin uses, so the plugin runs", tested)
        return ""

    def first_difference(self) -> str:
        """The first interface of the tables that the engine lacks or has with other parameters; empty if
        there is none."""
        for table, is_exact in ((self.called, False), (self.overridden, True)):
            for module, entries in table.items():
                for entry in entries:
                    if difference := _difference(module, entry, is_exact=is_exact):
                        return difference
        return ""


def series(version: str) -> tuple[int, int] | None:
    """The first two numbers of a version, None for a build without a version."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else None


def _difference(module: str, entry: str, *, is_exact: bool) -> str:
    path, bracket, rest = entry.partition("(")
    try:
        found: Any = importlib.import_module(module)
    except Exception as error:  # whatever a version's modules do when they are imported
        return f"its module {module} cannot be imported ({type(error).__name__}: {error})"
    for name in path.split("."):
        if not hasattr(found, name) and name in getattr(found, "__dataclass_fields__", ()):
            return ""  # a field without a default, which only instances have
        if not hasattr(found, name):
            return f"its {module} has no {path}"
        found = getattr(found, name)
    if not bracket:
        return ""
    parameters = inspect.signature(found).parameters
    names = [name for name in parameters if name != "self"]
    expected = [name for name in rest.rstrip(")").split(", ") if name]
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if names == expected if is_exact else takes_any or set(expected) <= set(names):
        return ""
    return f"{module}.{path} takes ({', '.join(names)}), where it was ({', '.join(expected)})"
