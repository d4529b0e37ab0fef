"""NVIDIA's Multi-Process Service: a daemon through which processes use a GPU at the same time."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MPS_CONTROL = "nvidia-cuda-mps-control"


def has_mps() -> bool:
    return shutil.which(MPS_CONTROL) is not None


@contextmanager
def mps_daemon(folder: Path) -> Iterator[dict[str, str]]:
    """Runs a daemon whose sockets and logs are in ``folder``, which is made if it is missing. Gives the
    environment variables that make a process its client."""
    folder.mkdir(parents=True, exist_ok=True)
    variables = dict.fromkeys(("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"), str(folder))
    # The daemon has all GPUs: it would number those that it sees anew, and its clients name theirs.
    seen = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    environment = seen | variables
    subprocess.run([MPS_CONTROL, "-d"], env=environment, check=True)
    try:
        yield variables
    finally:
        subprocess.run([MPS_CONTROL], input=b"quit\n", env=environment, check=False)
