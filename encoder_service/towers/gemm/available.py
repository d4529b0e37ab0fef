"""The libraries of matrix products that work on a device. ``selection.py`` measures which is fastest."""

from __future__ import annotations

import contextlib
import warnings

import torch

from encoder_service.towers.attention.available import require_capability
from encoder_service.towers.gemm import TORCH_GEMM, Gemm


def available_gemms(device: torch.device) -> list[Gemm]:
    """Every gemm that works on this device, torch's first."""
    gemms: list[Gemm] = [TORCH_GEMM]
    # An optional library may fail to import with any error; unusable_kernels gives the reason.
    with contextlib.suppress(Exception):
        gemms += quack_gemms(device)
    return gemms


def quack_gemms(device: torch.device) -> list[Gemm]:
    """Raises ConfigurationError for a device that quack does not support, or the error of its import."""
    require_capability(device, (9,))
    from encoder_service.towers.attention.fa4 import import_interface

    import_interface()  # puts the DSL's packages on the path
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as import_interface does
        from encoder_service.towers.gemm.quack_gemm import TILES, QuackGemm

    return [QuackGemm(tile, steps) for tile, steps in TILES.items()]
