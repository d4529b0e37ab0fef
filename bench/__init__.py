"""Benches, and the harness of processes that they share with the tests.

They run from a working tree: nothing of it has to be installed.
"""

import sys
from pathlib import Path

PROTO = str(Path(__file__).resolve().parents[1] / "proto")
if PROTO not in sys.path:
    sys.path.insert(0, PROTO)
