"""Puts an implementation in Python behind the line protocol: ``python -m tests.conformance.serve
[module:factory]``, by default this project's own."""

from __future__ import annotations

import importlib
import sys

from tests.conformance.protocol import serve
from tests.conformance.run import OWN

if __name__ == "__main__":
    module, _, factory = (sys.argv[1] if len(sys.argv) > 1 else OWN).partition(":")
    serve(getattr(importlib.import_module(module), factory)(), sys.stdin, sys.stdout)
