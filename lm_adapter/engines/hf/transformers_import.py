"""Imports ``transformers`` beside any build of torchvision.

Owns a workaround that changes the whole process: the model files of transformers import torchvision if it is
installed, and a CUDA build of torchvision fails to import beside a CPU build of torch, because two of its
operators are not declared. Where that import fails, the modules that it left behind are removed from
``sys.modules``, and the two operators are declared in torch's registry. They are never called. Where
torchvision imports, or is not installed, nothing is changed.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from typing import Any

from lm_adapter.errors import MissingDependency

_OPERATORS = ("nms", "qnms")
_LIBRARIES: list[Any] = []
"""Keeps the declarations alive: a declaration ends with its Library object."""


@functools.cache
def import_transformers() -> Any:
    """The module ``transformers``. Raises MissingDependency without torch or transformers."""
    try:
        import torch

        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise MissingDependency(
            error.name or "transformers", "lm_adapter.engines.hf", "pip install '.[hf]' in a checkout"
        ) from error
    if importlib.util.find_spec("torchvision") is None:
        return transformers
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        library: Any = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
        for operator in _OPERATORS:
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _LIBRARIES.append(library)
    return transformers
