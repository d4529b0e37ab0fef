"""The attention backends that are installed and fit a device, by name and in order of preference.

Owns the names and the requirements of the backends. ``selection.py`` measures which is fastest.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Collection
from functools import partial
from typing import get_args

import torch

from encoder_service.config import AUTO, AttentionName
from encoder_service.errors import ConfigurationError
from encoder_service.towers.attention.backend import AttentionBackend
from encoder_service.towers.attention.sdpa import SdpaAttention


def available_backends(device: torch.device, *, deterministic: bool = False) -> list[AttentionBackend]:
    """Every backend that imports and fits the device, most preferred first. The last, SDPA, always works.

    deterministic: only backends whose rows for a sequence depend on that sequence alone. No kernel here
    splits the keys, and no tile depends on the batch. SDPA then runs sequence by sequence.
    """
    backends: list[AttentionBackend] = []
    for build in BUILDERS.values():
        # An extension built for another torch can fail with any error; unusable_kernels gives the reason.
        with contextlib.suppress(Exception):
            backends.extend(build(device))
    backends.append(SdpaAttention(one_by_one=deterministic))
    return [backend for backend in backends if backend.batch_invariant or not deterministic]


def parse_attention(
    choice: str, device: torch.device, *, deterministic: bool = False
) -> list[AttentionBackend]:
    """The candidates for a setting: all backends for "auto", otherwise the named one.

    Raises ConfigurationError for a name that is unknown, not installed or does not fit the device. The text
    lists what is installed.
    """
    backends = available_backends(device, deterministic=deterministic)
    if choice == AUTO:
        return backends
    installed = [backend.name for backend in backends]
    if choice in installed:
        return [backends[installed.index(choice)]]
    known = choice in NAMES
    raise ConfigurationError(
        f'attention "{choice}" is '
        + (f"not installed or does not run on {device}" if known else "unknown")
        + f"; usable here: {', '.join([AUTO, *installed])}"
        + ("" if known else f"; all names: {', '.join(NAMES)}"),
        found=choice,
        usable=", ".join(installed),
    )


def build(module: str, majors: Collection[int], device: torch.device) -> list[AttentionBackend]:
    """The backends that a module of this package builds for the device. Raises ConfigurationError, or the
    error of importing the library."""
    require_capability(device, majors)
    backends: list[AttentionBackend] = importlib.import_module(f"{__package__}.{module}").build(device)
    return backends


def require_capability(device: torch.device, majors: Collection[int]) -> None:
    """Raises ConfigurationError unless the device is CUDA with one of these major compute capabilities."""
    if device.type != "cuda":
        raise ConfigurationError(f"needs a CUDA device, this is {device.type}", found=device.type)
    major, minor = torch.cuda.get_device_capability(device)
    if major not in majors:
        raise ConfigurationError(
            f"needs compute capability {' or '.join(map(str, majors))}.x, the device has {major}.{minor}",
            found=f"{major}.{minor}",
        )


# Most preferred first: the module, which has a function ``build``, and the major compute capabilities that it
# supports. SDPA, which supports every device, comes after all of them.
BUILDERS: dict[str, Callable[[torch.device], list[AttentionBackend]]] = {
    "fa4": partial(build, "fa4", (9, 10, 11)),
    "fa3": partial(build, "fa3", (9,)),
    "varlen": partial(build, "varlen", (8, 9, 10, 11, 12)),
}
NAMES = tuple(name for name in get_args(AttentionName) if name != AUTO)
