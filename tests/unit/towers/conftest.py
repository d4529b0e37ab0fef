"""Triton kernels run through its interpreter where there is no CUDA device.

The choice is read when triton is imported, which nothing but the kernels does.
"""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
