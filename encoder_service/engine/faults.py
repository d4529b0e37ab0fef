"""Distinguishes a device fault from the failure of one batch."""

from __future__ import annotations

import torch

# cudaErrorInvalidValue, cudaErrorMemoryAllocation (pinned memory too), cudaErrorInvalidConfiguration. CUDA
# refused the call, but the context is intact. A lost context fails the next call with its own code.
CUDA_CODES_OF_ONE_CALL = frozenset({1, 2, 9})


def is_device_fault(error: BaseException) -> bool:
    """Whether an error means that the device is lost. Running out of device memory is only the batch's
    failure, because its halves may fit."""
    if isinstance(error, torch.OutOfMemoryError):
        return False
    if getattr(error, "error_code", None) in CUDA_CODES_OF_ONE_CALL:
        return False
    return isinstance(error, torch.AcceleratorError)


def first_line(error: BaseException) -> str:
    """The error's type name and the first line of its text."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
