"""The reference implementation, importable on a machine without torchvision's compiled operators.

Owns the one import of the ``transformers`` package in tests. Leaves what to compare to each test.
"""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

import torch

_LIBRARIES: list[torch.library.Library] = []


@functools.cache
def import_reference() -> ModuleType:
    """The ``transformers`` module, after declaring the two operators that torchvision's Python code
    registers meta kernels for. Where torchvision comes with its operators, nothing is declared."""
    try:
        torch.ops.torchvision.nms  # noqa: B018
    except AttributeError:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _LIBRARIES.append(library)
    return importlib.import_module("transformers")
