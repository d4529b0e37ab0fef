"""SGLang's model classes without their vision towers.

Owns subclasses with the names of their parents, by which SGLang's registry replaces its own classes. SGLang
0.5.23 builds the towers even with ``--language-only``. The subclasses do not change deepstack and M-RoPE; a
request brings its rows along.
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
from torch import nn

from lm_adapter.engines.sglang.families import PROJECTORS, TOWER_PREFIXES, TOWERS, module_of, served_classes
from lm_adapter.engines.sglang.settings import PACKAGE, Settings, check_loaded
from lm_adapter.engines.shared.first_contact import start_of

logger = logging.getLogger("sglang.vision_encoder")


class NoTower(nn.Module):
    """Replaces a tower: it has no parameters, only the attributes that models read of a tower."""

    def __init__(self, config: Any = None, *_args: Any, **_kwargs: Any) -> None:
        super().__init__()
        self.deepstack_visual_indexes = getattr(config, "deepstack_visual_indexes", [])

    def precompile_fused_rope(self) -> bool:
        """As Kimi-K3's tower where nothing was compiled."""
        return False

    precompile_attention_backend = precompile_fused_rope


@contextlib.contextmanager
def _towers_left_out() -> Iterator[None]:
    """Within the block, SGLang's constructors build a NoTower, because they look up their tower by name."""
    towers = {
        (module, name): getattr(module, name)
        for module, names in ((module_of(module), names) for module, names in TOWERS.items())
        if module is not None
        for name in names
    }
    try:
        for module, name in towers:
            setattr(module, name, NoTower)
        yield
    finally:
        for (module, name), tower in towers.items():
            setattr(module, name, tower)


def _rows_to_host(items: list[Any]) -> None:
    """Moves rows from the GPU to the host after the step that used them, as SGLang moves those of its own
    encoders. They are needed again only for a later chunk of the prompt or after a preemption."""
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


def _then_rows_to_host(forward: Any) -> Any:
    """A model's ``forward``, after which the rows that it used leave the GPU."""

    @functools.wraps(forward)
    def wrapped(input_ids: Any, positions: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        # Read first, because SGLang clears ``mm_inputs`` while it computes embeddings.
        inputs = [entry for entry in forward_batch.mm_inputs or () if entry is not None]
        out = forward(input_ids, positions, forward_batch, *args, **kwargs)
        _rows_to_host([item for entry in inputs for item in entry.mm_items])
        return out

    return wrapped


def without_tower(parent: Any) -> type:
    """A subclass of the model class ``parent`` whose tower is neither built nor loaded."""

    class WithoutTower(parent):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            # Raise here, because SGLang only logs modules that fail to import.
            with start_of(Settings.ENGINE, logger):
                check_loaded(os.environ)
                Settings.of_variable(os.environ)
            importlib.import_module(f"{PACKAGE}.processors")
            with _towers_left_out():
                super().__init__(*args, **kwargs)
            instance: Any = self
            for name in PROJECTORS:
                if hasattr(instance, name):
                    setattr(instance, name, NoTower())
            # Of the instance, because some models of SGLang set theirs there too.
            instance.forward = _then_rows_to_host(instance.forward)
            num_parameters = sum(parameter.numel() for parameter in self.parameters())
            logger.info("%s is built without a vision tower: %d parameters", parent.__name__, num_parameters)

        def load_weights(self, weights: Iterable[tuple[str, Any]], *args: Any, **kwargs: Any) -> Any:
            language_weights = (pair for pair in weights if not pair[0].startswith(TOWER_PREFIXES))
            return super().load_weights(language_weights, *args, **kwargs)

    # SGLang finds a model by the name of its class.
    WithoutTower.__name__ = WithoutTower.__qualname__ = parent.__name__
    WithoutTower.__module__ = __name__
    return WithoutTower


EntryClass = [without_tower(parent) for parent in served_classes()]
