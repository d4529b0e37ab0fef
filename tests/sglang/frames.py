"""Messages of SGLang's encoder protocol as their receiver reads them, without SGLang."""

from __future__ import annotations

import enum
import io
import pickle
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch


class Modality(enum.Enum):
    IMAGE = 1
    VIDEO = 2


CLASSES: dict[tuple[str, str], Any] = {
    ("sglang.srt.disaggregation.encoder.receiver", "EmbeddingData"): SimpleNamespace,
    ("sglang.srt.multimodal.modality", "Modality"): Modality,
    **{("torch", name): getattr(torch, name) for name in ("float32", "bfloat16", "float16")},
}


class Unpickler(pickle.Unpickler):
    """With the classes that the service names, and none else. others: further ones, of SGLang's encoder."""

    def __init__(self, frame: bytes, others: dict[tuple[str, str], Any] | None = None) -> None:
        super().__init__(io.BytesIO(frame))
        self._classes = CLASSES | (others or {})

    def find_class(self, module: str, name: str) -> Any:
        return self._classes[module, name]


def fields_of(head: bytes) -> dict[str, Any]:
    """The fields of an EmbeddingData that the service wrote."""
    loaded = Unpickler(head).load()
    assert type(loaded) is SimpleNamespace
    return vars(loaded)


def message_of(frames: Sequence[bytes]) -> tuple[dict[str, Any], torch.Tensor]:
    """The fields, and the rows as SGLang makes them."""
    head, data = frames
    fields = fields_of(head)
    return fields, torch.frombuffer(bytearray(data), dtype=fields["dtype"]).reshape(fields["shape"])
