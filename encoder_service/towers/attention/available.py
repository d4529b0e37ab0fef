"""The attention backends that are installed and fit a device, by name and in order of preference.

Owns the names and the requirements of each. ``select.py`` measures which is fastest.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog
import torch

from encoder_service.errors import ConfigurationError
from encoder_service.towers.attention.backend import AttentionBackend
from encoder_service.towers.attention.sdpa import SdpaAttention

log = structlog.get_logger(__name__)

AUTO = "auto"


def available_backends(device: torch.device, *, deterministic: bool = False) -> list[AttentionBackend]:
    """Every backend that imports and fits the device, most preferred first; the last always serves.

    deterministic: only backends whose rows for a sequence depend on that sequence alone. No kernel here
    splits the keys, and no tile depends on the batch. SDPA then runs sequence by sequence.
    """
    found: list[AttentionBackend] = []
    for name, build in BUILDERS.items():
        try:
            found.extend(build(device))
        except Exception as error:  # an extension built for another torch fails in ways of its own
            log.debug("attention_backend_absent", backend=name, reason=f"{type(error).__name__}: {error}")
    found.append(SdpaAttention(one_by_one=deterministic))
    return [backend for backend in found if backend.batch_invariant or not deterministic]


def parse_attention(
    choice: str, device: torch.device, *, deterministic: bool = False
) -> list[AttentionBackend]:
    """The candidates behind a setting: all of them for "auto", the one named otherwise.

    Raises ConfigurationError, which says what is installed, for a name that is unknown, that is not
    installed or does not fit the device.
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


def build_fa4(device: torch.device) -> list[AttentionBackend]:
    require_capability(device, 9, 10, 11)
    from encoder_service.towers.attention.fa4 import TILES, Fa4Attention

    # Each tile is the fastest at some shapes.
    major, _ = torch.cuda.get_device_capability(device)
    others = [tile for (of_major, _), tiles in TILES.items() if of_major == major for tile in tiles[1:]]
    return [Fa4Attention(), *map(Fa4Attention, others), Fa4Attention(library_tile=True)]


def build_fa3(device: torch.device) -> list[AttentionBackend]:
    require_capability(device, 9)
    from encoder_service.towers.attention.fa3 import Fa3Attention

    return [Fa3Attention()]


def build_fa2(device: torch.device) -> list[AttentionBackend]:
    require_capability(device, 8, 9, 10, 11, 12)
    from encoder_service.towers.attention.fa2 import Fa2Attention

    return [Fa2Attention()]


def build_varlen(device: torch.device) -> list[AttentionBackend]:
    require_capability(device, 8, 9, 10, 11, 12)
    from encoder_service.towers.attention.varlen import TorchVarlenAttention

    return [TorchVarlenAttention()]


def require_capability(device: torch.device, *majors: int) -> None:
    """Raises ConfigurationError unless the device is CUDA of one of these compute capabilities."""
    if device.type != "cuda":
        raise ConfigurationError(f"needs a CUDA device, this is {device.type}", found=device.type)
    major, minor = torch.cuda.get_device_capability(device)
    if major not in majors:
        raise ConfigurationError(
            f"needs compute capability {' or '.join(map(str, majors))}.x, the device has {major}.{minor}",
            found=f"{major}.{minor}",
        )


# Most preferred first. SDPA, which serves every device, comes after all of them.
BUILDERS: dict[str, Callable[[torch.device], list[AttentionBackend]]] = {
    "fa4": build_fa4,
    "fa3": build_fa3,
    "fa2": build_fa2,
    "varlen": build_varlen,
}
FA4_TILES = ("fa4-192x128", "fa4-192x112r", "fa4-128x160r")
NAMES = ("fa4", *FA4_TILES, "fa4-library", "fa3", "fa2", "varlen", "sdpa")
