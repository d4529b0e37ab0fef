"""The tower of Ling-3.0-VL (BailingMoeV3-VL): Qwen3-VL's without deepstack, with its projector.

Owns the names of the tensors and what config.json has to state. The published merger has a norm and no
layers; the two layers of the projector, ``linear_proj``, take merged patches to the language model's width.

Reference: vLLM's ``bailing_moe_v3_vl``, which tests/engines compare with; transformers has no such model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from encoder_service.json_reader import JsonReader
from encoder_service.towers.config import Family
from encoder_service.towers.layers import Merger
from encoder_service.towers.published import PublishedTensor, layer
from encoder_service.towers.qwen3_vl import NORM, NORM_EPS, Qwen3VLTower, QwenVisionConfig
from encoder_service.towers.qwen3_vl import parse_sizes as qwen_sizes
from encoder_service.types import Modality

LING_VL = "ling_vl"


@dataclass(frozen=True, kw_only=True)
class LingVisionConfig(QwenVisionConfig):
    """Sizes of a Ling tower and its projector."""

    prefixes: ClassVar[Sequence[tuple[str, ...]]] = [("model.visual.", "linear_proj.")]

    def published_tensors(self) -> Iterator[PublishedTensor]:
        for tensor in super().published_tensors():
            if not tensor.name.startswith("merger."):
                yield replace(tensor, name=f"model.visual.{tensor.name}")
        width, out_width = self.hidden_size, self.out_width
        yield from layer("model.visual.merger.norm", "merger.norm", width)
        yield from layer("linear_proj.0", "merger.fc1", out_width, width * self.merge_size**2)
        yield from layer("linear_proj.2", "merger.fc2", out_width, out_width)


class LingTower(Qwen3VLTower):
    """Ling's vision tower. ``merger`` is its merger and its projector. Clips are not taken: which frames
    stand for one is decided by code in the checkpoint, and vLLM takes images only."""

    modalities = (Modality.IMAGE,)

    def __init__(self, config: LingVisionConfig) -> None:
        super().__init__(config, LING_VL)
        self.merger = Merger(
            config.hidden_size, config.merge_size, config.out_width, NORM, inner_width=config.out_width
        )


def parse_sizes(config: JsonReader) -> QwenVisionConfig:
    """The sizes in config.json. Its ``out_hidden_size`` is the width of a merger's layer that the published
    tower lacks. Raises UnsupportedCheckpoint."""
    config.section("vision_config").require("disable_merger_proj", True)
    config.require("norm_query_embeds", False)
    config.require("rms_norm_eps", NORM_EPS)
    sizes = qwen_sizes(config, levels="ignored", kind=LingVisionConfig)
    return replace(sizes, out_width=config.section("text_config").count("hidden_size"))


FAMILY = Family(LING_VL, ("bailing_moe_v3_vl",), "Ling-3.0-VL", parse_sizes, LingTower)
