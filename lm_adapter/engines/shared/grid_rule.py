"""The grid of an image by its size alone, as the model's own processor computes it.

The rules are the reference's: ``smart_resize`` of transformers for Qwen and GLM, and ``navit_resize`` of
Kimi's published processors.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from lm_adapter.engines.shared.checkpoint import VisionInterface
from lm_adapter.engines.shared.glm_grids import GLM, glm_grid
from lm_adapter.engines.shared.images import ImageFile
from lm_adapter.engines.shared.kimi import kimi_vl_grid
from lm_adapter.items import Grid

KIMI_GRIDS = ("kimi_k25", "kimi_k3")
"""model_type of the models whose images keep their size up to a budget of patches. All others round sides to
whole merge blocks, within limits of the area."""


def grid_rule(interface: VisionInterface, hf_config: Any, processor: Any) -> Callable[[ImageFile], Grid]:
    """The function by which the model's own processor derives a grid from an image's size. It raises
    ValueError for sizes that the processor refuses."""
    if interface.model_type in KIMI_GRIDS:
        # ``media_processor`` in the published code's processor, ``image_processor`` in that of transformers.
        media_processor = getattr(processor, "media_processor", None) or processor.image_processor
        return _kimi_rule(media_processor.media_proc_cfg)
    if interface.model_type == "kimi_vl":
        theirs = processor.image_processor
        return lambda image: kimi_vl_grid(
            image.width,
            image.height,
            patch_size=theirs.patch_size,
            merge_size=interface.merge_size,
            max_patches=theirs.in_token_limit,
        )
    if interface.model_type in GLM:
        return lambda image: glm_grid(processor.image_processor, image.height, image.width)
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

    patch_size = getattr(hf_config, "thinker_config", hf_config).vision_config.patch_size
    size = processor.image_processor.size

    def rule(image: ImageFile) -> Grid:
        height, width = smart_resize(
            image.height,
            image.width,
            factor=patch_size * interface.merge_size,
            min_pixels=size["shortest_edge"],
            max_pixels=size["longest_edge"],
        )
        return Grid(1, height // patch_size, width // patch_size)

    return rule


def _kimi_rule(config: dict[str, Any]) -> Callable[[ImageFile], Grid]:
    patch_size, merge_size = config["patch_size"], config["merge_kernel_size"]
    max_patches, max_side = config["in_patch_limit"], config["patch_limit_on_one_side"]
    factor = patch_size * merge_size

    def rule(image: ImageFile) -> Grid:
        width, height = image.width, image.height
        # The budget counts whole patches of the image as it is; the sides are cut, then padded.
        num_patches = max(1.0, width // patch_size) * max(1.0, height // patch_size)
        limit = max_side * patch_size
        scale = min(1.0, math.sqrt(max_patches / num_patches), limit / width, limit / height)
        sides = (min(max(1, int(side * scale)), limit) for side in (height, width))
        height, width = (-(-side // factor) * factor for side in sides)
        return Grid(1, height // patch_size, width // patch_size)

    return rule
