"""The optional kernel libraries that cannot be used on a device, and why."""

from __future__ import annotations

import structlog
import torch

from encoder_service.towers.attention.available import BUILDERS
from encoder_service.towers.gemm.available import quack_gemms

log = structlog.get_logger(__name__)


def unusable_kernels(device: torch.device) -> dict[str, str]:
    """The reason for each library that cannot be used, by its name. Logged for a GPU, where a missing library
    costs speed."""
    reasons = {}
    for name, load in {**BUILDERS, "quack": quack_gemms}.items():
        try:
            load(device)
        except Exception as error:  # an extension built for another torch can fail with any error
            text = str(error).strip().splitlines()
            reasons[name] = f"{type(error).__name__}: {text[0] if text else ''}"
            if device.type == "cuda":
                log.info("optional kernels not usable", library=name, reason=reasons[name])
    return reasons
