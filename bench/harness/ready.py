"""The line of a service's log that says that it is ready, in both formats of the log."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

READY = re.compile(r"\[info +\] ready ")


def ready_in(lines: Iterable[str]) -> dict[str, str]:
    """The fields of the first such line: ``listen``, ``admin``, ``model``, ``device`` and others. Empty if
    there is none. lines: with their ends; one that is not whole yet is passed over."""
    for line in lines:
        if not line.endswith("\n"):
            continue
        if line.startswith("{"):
            fields = json.loads(line)
            if fields["event"] == "ready":
                return {name: str(value) for name, value in fields.items()}
        elif READY.search(line):
            return dict(re.findall(r"(\w+)=(\S+)", line))
    return {}
