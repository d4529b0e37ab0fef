"""What the registry knows of a model family, and the sizes that every family's tower has.

Owns the record of a family, the base class of its sizes, and what all families read alike from a checkpoint's
config.json. A size that config.json does not state is an error; only settings that are the same in every
published checkpoint have a default. Each family's file (``qwen3_vl.py``, ``moonvit.py``) reads its own sizes.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from encoder_service.errors import UnsupportedCheckpoint
from encoder_service.json_reader import JsonReader
from encoder_service.towers.published import PublishedTensor
from encoder_service.towers.tower import Tower

ROPE_THETA = 10_000.0


@dataclass(frozen=True, kw_only=True)
class VisionConfig(abc.ABC):
    """Sizes of a tower and its merger. intermediate_size: width of the MLP. out_width: width of the language
    model. rope_theta: base of the rotary frequencies.

    prefixes: alternatives for the prefixes of vision tensors in a checkpoint. If an alternative is a single
    prefix, it is stripped from the names. If it has two, they distinguish parts of the tower and are kept.
    """

    prefixes: ClassVar[Sequence[tuple[str, ...]]]

    depth: int
    hidden_size: int
    num_heads: int
    intermediate_size: int
    patch_size: int
    merge_size: int
    out_width: int
    in_channels: int = 3
    rope_theta: float = ROPE_THETA

    @property
    def attention_width(self) -> int:
        """Elements of q, of k and of v for one patch, all heads together."""
        return self.hidden_size

    @property
    def head_dim(self) -> int:
        return self.attention_width // self.num_heads

    @property
    @abc.abstractmethod
    def patch_dim(self) -> int:
        """Elements of one flattened patch."""

    @abc.abstractmethod
    def published_tensors(self) -> Iterator[PublishedTensor]:
        """Every vision tensor of a checkpoint with these sizes."""


@dataclass(frozen=True)
class Family:
    """A model family whose tower can be loaded.

    model_types: the values of config.json's model_type; mixture-of-experts models have the tower of dense
    ones. models: the names under which checkpoints of these types are published. parse: reads the sizes from
    config.json; raises UnsupportedCheckpoint. build: a tower of these sizes whose parameters have no
    meaningful values yet. section: of config.json, whose vision_config and text_config these models have;
    None if that is the whole file.
    """

    name: str
    model_types: tuple[str, ...]
    models: str
    parse: Callable[[JsonReader], VisionConfig]
    build: Callable[[Any], Tower]
    section: str | None = None


def stated_dtype(values: Mapping[str, object]) -> str | None:
    """The dtype that a config.json states, where transformers and vLLM look for it: for the model, else for
    the language model, else for the tower. None if it states none."""
    for section in (values, *map(values.get, ("thinker_config", "text_config", "vision_config"))):
        if isinstance(section, Mapping):
            for key in ("dtype", "torch_dtype"):
                if isinstance(stated := section.get(key), str) and stated != "auto":
                    return stated.removeprefix("torch.")
    return None


def rope_theta(vision: JsonReader) -> float:
    """Base of the rotary frequencies. Only configs saved by the reference package state it."""
    parameters = vision.section("rope_parameters", {})
    parameters.require("rope_type", "axial")
    return parameters.number("rope_theta", default=ROPE_THETA)


def block_numbers(
    vision: JsonReader, key: str, depth: int, default: tuple[int, ...] | None = None
) -> tuple[int, ...]:
    """Block numbers, which must ascend: a tower outputs deepstack levels in block order."""
    value = vision.values[key] if vision.has(key) else default
    if (
        not isinstance(value, Sequence)
        or isinstance(value, str)
        or any(not isinstance(index, int) or not 0 <= index < depth for index in value)
        or list(value) != sorted(set(value))
    ):
        raise vision.refuse(key, value, f"ascending block numbers below depth {depth}")
    return tuple(value)


def check_heads(config: VisionConfig) -> None:
    """Raises UnsupportedCheckpoint unless a head's size is a multiple of 4: it rotates pairs on two axes."""
    head_dim, rest = divmod(config.attention_width, config.num_heads)
    if rest or head_dim % 4:
        raise UnsupportedCheckpoint(
            f"{config.num_heads} heads over {config.attention_width} elements of q: the size of a head needs"
            " to be a whole multiple of 4",
            num_heads=config.num_heads,
            attention_width=config.attention_width,
        )
