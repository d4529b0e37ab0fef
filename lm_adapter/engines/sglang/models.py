"""SGLang's model classes without their vision towers.

Owns subclasses under the same names, as SGLang's registry has it for models out of its tree. SGLang 0.5.23
builds the towers even with ``--language-only``. Deepstack and M-RoPE stay as they are; rows come with the
request.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from sglang.srt.managers import mm_schedule
from sglang.srt.models import kimi_k25, qwen3_5, qwen3_vl, qwen3_vl_moe
from torch import nn

from lm_adapter.engines.sglang.settings import PACKAGE, check_loaded, read_settings

logger = logging.getLogger("sglang.vision_encoder")

TOWER_PREFIXES = ("model.visual.", "visual.", "vision_tower.", "mm_projector.")
"""Published names of the tower's tensors."""
TOWERS = {
    qwen3_vl: ("Qwen3VLMoeVisionModel",),
    kimi_k25: ("MoonViT3dPretrainedModel", "K2VLMultiModalProjector"),
}
"""Tower classes, by module."""


class NoTower(nn.Module):
    """Replaces a tower: it has no parameters, only the attributes that models read of a tower."""

    def __init__(self, config: Any, *_args: Any, **_kwargs: Any) -> None:
        super().__init__()
        self.deepstack_visual_indexes = getattr(config, "deepstack_visual_indexes", [])


@contextlib.contextmanager
def _towers_left_out() -> Iterator[None]:
    """Within the block, SGLang's constructors, which look their tower up by name, make a NoTower."""
    towers = {(module, name): getattr(module, name) for module, names in TOWERS.items() for name in names}
    try:
        for module, name in towers:
            setattr(module, name, NoTower)
        yield
    finally:
        for (module, name), tower in towers.items():
            setattr(module, name, tower)


def _rows_to_host(items: list[Any]) -> None:
    """Rows on a GPU leave it after the step that used them, as rows of SGLang's own encoders do. They are
    needed again only if a later step or a preempted request computes with them once more."""
    on_gpu = [item for item in items if getattr(item.precomputed_embeddings, "is_cuda", False)]
    if not on_gpu:
        return
    stream = torch.cuda.current_stream()
    for item in on_gpu:
        rows = item.precomputed_embeddings
        rows.record_stream(stream)
        item.precomputed_embeddings = rows.to("cpu", non_blocking=True)
    # SGLang waits for this event before it reads the rows from the host.
    new_event: Any = torch.cuda.Event  # untyped in torch
    mm_schedule.host_offload_event = mm_schedule.host_offload_event or new_event()
    mm_schedule.host_offload_event.record(stream)


def without_tower(parent: Any) -> type:
    """The parent, with rows from elsewhere: its tower is neither built nor loaded."""

    class WithoutTower(parent):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            # Raise here, because SGLang only logs modules that fail to import.
            check_loaded(os.environ)
            read_settings(os.environ)
            importlib.import_module(f"{PACKAGE}.processors")
            with _towers_left_out():
                super().__init__(*args, **kwargs)
            num_parameters = sum(parameter.numel() for parameter in self.parameters())
            logger.info("%s is built without a vision tower: %d parameters", parent.__name__, num_parameters)

        def load_weights(self, weights: Iterable[tuple[str, Any]], *args: Any, **kwargs: Any) -> Any:
            of_language = (pair for pair in weights if not pair[0].startswith(TOWER_PREFIXES))
            return super().load_weights(of_language, *args, **kwargs)

        @functools.wraps(parent.forward)
        def forward(
            self, input_ids: Any, positions: Any, forward_batch: Any, *args: Any, **kwargs: Any
        ) -> Any:
            # SGLang takes them out of the batch while it makes embeddings.
            inputs = [entry for entry in forward_batch.mm_inputs or () if entry is not None]
            out = super().forward(input_ids, positions, forward_batch, *args, **kwargs)
            _rows_to_host([item for entry in inputs for item in entry.mm_items])
            return out

    # SGLang tells models apart by the names of their classes.
    WithoutTower.__name__ = WithoutTower.__qualname__ = parent.__name__
    WithoutTower.__module__ = __name__
    return WithoutTower


EntryClass = [
    without_tower(parent)
    for parent in (
        qwen3_vl.Qwen3VLForConditionalGeneration,
        qwen3_vl_moe.Qwen3VLMoeForConditionalGeneration,
        qwen3_5.Qwen3_5ForConditionalGeneration,
        qwen3_5.Qwen3_5MoeForConditionalGeneration,
        kimi_k25.KimiK25ForConditionalGeneration,
    )
]
