"""The grid of an image of GLM from its size, by the reference's own rule, for the engines' plugins.

Imports transformers when it is called, which the engines have.
"""

from __future__ import annotations

import importlib
from typing import Any

from lm_adapter.items import Grid

GLM = ("glm4v", "glm4v_moe", "glm46v", "glm_ocr", "glm5_next")
"""model_type of the models with GLM's grids and marks around an image."""


def glm_grid(processor: Any, height: int, width: int, min_size: int = 0, max_size: int = 0) -> Grid:
    """processor: the reference's for images. min_size, max_size: in place of the processor's own limits, if
    they are not 0. Raises ValueError for sizes that the processor refuses."""
    factor, temporal = processor.patch_size * processor.merge_size, processor.temporal_patch_size
    if hasattr(processor, "min_image_tokens"):  # GLM-5.3-Flash, which counts rows
        rule, factor = "glm5_next", factor * processor.patch_expand_factor
        least, most = processor.min_image_tokens, processor.max_image_tokens
    else:
        rule, size = "glm4v", processor.size
        least, most = size["shortest_edge"], size["longest_edge"]
    module = importlib.import_module(f"transformers.models.{rule}.image_processing_{rule}")
    height, width = module.smart_resize(
        num_frames=temporal,
        height=height,
        width=width,
        temporal_factor=temporal,
        factor=factor,
        min_pixels=min_size or least,
        max_pixels=max_size or most,
    )
    return Grid(1, height // processor.patch_size, width // processor.patch_size)
