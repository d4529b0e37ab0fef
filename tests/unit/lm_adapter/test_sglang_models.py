"""Model classes without towers, over stand-ins of SGLang's modules (tests/sglang has the real ones)."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lm_adapter.engines.sglang.families import SERVED, TOWERS
from lm_adapter.engines.sglang.settings import LOADERS, PACKAGE, VARIABLE
from lm_adapter.errors import InvalidRequest

MODULE = f"{PACKAGE}.models"
STAND_INS = (
    *("sglang", "sglang.srt", "sglang.srt.managers", "sglang.srt.managers.mm_schedule", "sglang.srt.models"),
    *(f"sglang.srt.models.{name}" for name in sorted({*SERVED.values(), *TOWERS})),
)


class Tower(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.deepstack_visual_indexes = config.deepstack_visual_indexes
        self.blocks = nn.Linear(4, 4)


class Model(nn.Module):
    """As SGLang builds one: its tower by a name of its module."""

    module: Any
    tower = "Qwen3VLMoeVisionModel"

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.visual = getattr(self.module, self.tower)(config)
        self.model = nn.Linear(2, 2)
        self.loaded: list[str] = []

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> None:
        self.loaded = [name for name, _ in weights]

    def forward(
        self, input_ids: Any, positions: Any, forward_batch: Any, pp_proxy_tensors: Any = None
    ) -> Any:
        forward_batch.mm_inputs = None
        return input_ids


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    modules: dict[str, Any] = {name: ModuleType(name) for name in (*STAND_INS, f"{PACKAGE}.processors")}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, last = name.rpartition(".")
        if parent in modules:
            setattr(modules[parent], last, module)
    modules["sglang.srt.managers.mm_schedule"].host_offload_event = None
    for module, names in TOWERS.items():
        for name in names:
            setattr(modules[f"sglang.srt.models.{module}"], name, Tower)
    for name, module in SERVED.items():
        # The models of one line of releases share the tower of the first one's module.
        tower_of = next(where for where in (module, "qwen3_vl") if where in TOWERS)
        of_tower = {"module": modules[f"sglang.srt.models.{tower_of}"], "tower": TOWERS[tower_of][0]}
        setattr(modules[f"sglang.srt.models.{module}"], name, type(name, (Model,), of_tower))
    monkeypatch.setenv(VARIABLE, '{"target": "127.0.0.1:1"}')
    for name in LOADERS:
        monkeypatch.setenv(name, PACKAGE)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    yield importlib.import_module(MODULE)
    sys.modules.pop(MODULE, None)


CONFIG = SimpleNamespace(deepstack_visual_indexes=[1, 3])


def test_towers_are_neither_built_nor_loaded(models: Any) -> None:
    """Each model keeps its name, by which SGLang knows it, and what it reads of its tower."""
    assert {model.__name__ for model in models.EntryClass} == SERVED.keys()
    for kind in models.EntryClass:
        model = kind(CONFIG)
        assert {name.partition(".")[0] for name, _ in model.named_parameters()} == {"model"}
        assert model.visual.deepstack_visual_indexes == [1, 3]
        names_of_weights = [
            *("model.visual.blocks.0.attn.qkv.weight", "vision_tower.encoder.weight", "mm_projector.bias"),
            *("model.language_model.embed_tokens.weight", "lm_head.weight", "language_model.lm_head.weight"),
        ]
        model.load_weights((name, None) for name in names_of_weights)
        assert model.loaded == names_of_weights[3:]


def test_other_models_of_the_process_have_their_towers(models: Any) -> None:
    models.EntryClass[0](CONFIG)
    parent = models.EntryClass[0].__mro__[1]
    assert isinstance(parent(CONFIG).visual, Tower)


def test_half_a_plugin_does_not_start(models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LOADERS[0])
    with pytest.raises(InvalidRequest, match=LOADERS[0]):
        models.EntryClass[0](CONFIG)
    monkeypatch.setenv(LOADERS[0], PACKAGE)
    monkeypatch.delenv(VARIABLE)
    with pytest.raises(InvalidRequest, match=VARIABLE):
        models.EntryClass[0](CONFIG)


class OnGpu:
    """Rows on a GPU, as far as the model looks at them."""

    is_cuda = True

    def __init__(self, events: list[str]) -> None:
        self._events = events

    def record_stream(self, stream: str) -> None:
        self._events.append(f"used on {stream}")

    def to(self, device: str, *, non_blocking: bool) -> str:
        self._events.append(f"to {device}")
        return "on the host"


def test_p24_rows_leave_the_gpu_after_their_step(models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """And before the event that SGLang waits for where it reads them again."""
    events: list[str] = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "a stream")
    event = SimpleNamespace(record=lambda stream: events.append(f"event on {stream}"))
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    model = models.EntryClass[0](CONFIG)
    assert "pp_proxy_tensors" in inspect.signature(model.forward).parameters
    items = [SimpleNamespace(precomputed_embeddings=OnGpu(events)) for _ in range(2)]
    on_host = SimpleNamespace(precomputed_embeddings=torch.zeros(1))
    batch = SimpleNamespace(mm_inputs=[SimpleNamespace(mm_items=[*items, on_host]), None])
    assert model.forward("ids", None, batch) == "ids"
    assert [item.precomputed_embeddings for item in items] == ["on the host"] * 2
    assert events == ["used on a stream", "to cpu"] * 2 + ["event on a stream"]
    assert models.mm_schedule.host_offload_event is event
    assert model.forward("ids", None, SimpleNamespace(mm_inputs=None)) == "ids"
