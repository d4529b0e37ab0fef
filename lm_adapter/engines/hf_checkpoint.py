"""Reads the language tensors of a vision-language checkpoint, and no others.

Owns config.json, the shard index and the published tensor names. ``hf`` builds the model. torch and
safetensors are imported when tensors are read.

Published layouts (hub): Qwen3-VL and Qwen3.5 have ``model.language_model.*`` and ``lm_head.weight``;
Kimi-K2.5 has ``language_model.model.*`` and ``language_model.lm_head.weight``. Mixture-of-experts weights are
fused (``experts.gate_up_proj``; Qwen3-VL-MoE stores the transpose), or one tensor per expert and projection
(Kimi).
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm_adapter.errors import InvalidRequest, MissingDependency
from lm_adapter.items import Modality

if TYPE_CHECKING:
    import torch

__all__ = ["LanguageCheckpoint", "VisionInterface", "read_config", "vision_interface"]

_LANGUAGE_PREFIXES = ("model.language_model.", "language_model.model.")
_HEAD_NAMES = ("lm_head.weight", "language_model.lm_head.weight")
_FAMILIES = {
    "qwen3_vl": (False, True),
    "qwen3_vl_moe": (False, True),
    "qwen3_5": (False, True),
    "qwen3_5_moe": (False, True),
    "kimi_k25": (True, False),
}
"""model_type -> (an item's frames are averaged into one set of rows, positions are M-RoPE)."""

_LAYER = re.compile(r"^layers\.(\d+)\.")
_INDEX_NAME = "model.safetensors.index.json"
_SINGLE_NAME = "model.safetensors"


@dataclass(frozen=True)
class VisionInterface:
    """What the language model must know about the tower: placeholder ids, geometry, deepstack levels."""

    model_type: str
    image_placeholder_id: int
    video_placeholder_id: int
    merge_size: int
    merges_time: bool
    uses_mrope: bool
    num_deepstack_levels: int

    def placeholder_id(self, modality: Modality) -> int:
        return self.image_placeholder_id if modality is Modality.IMAGE else self.video_placeholder_id


def read_config(path: Path) -> dict[str, Any]:
    """config.json of a checkpoint directory. Raises InvalidRequest if it cannot be read."""
    file = path / "config.json"
    try:
        config = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"cannot read {file}: {error}", reason="CHECKPOINT") from error
    if not isinstance(config, dict):
        raise InvalidRequest(f"{file} holds a {type(config).__name__}, needs an object", reason="CHECKPOINT")
    return config


def vision_interface(config: Mapping[str, Any]) -> VisionInterface:
    """Reads the interface from config.json. Raises InvalidRequest for other families.

    Kimi's published files have one placeholder for images and clips, ``media_placeholder_token_id``; files
    saved by the reference have ``image_token_id`` and ``video_token_id``.
    """
    model_type = str(config.get("model_type"))
    if model_type not in _FAMILIES:
        raise InvalidRequest(
            f"model_type {model_type!r} is not driven here, needs {' or '.join(_FAMILIES)}",
            reason="CHECKPOINT",
        )
    merges_time, uses_mrope = _FAMILIES[model_type]
    vision = config.get("vision_config", {})
    image_id = config.get("image_token_id", config.get("media_placeholder_token_id"))
    merge = vision.get("spatial_merge_size") or vision.get("merge_kernel_size", (2, 2))[0]
    if image_id is None:
        raise InvalidRequest(
            "config.json names no placeholder: neither image_token_id nor media_placeholder_token_id",
            reason="CHECKPOINT",
        )
    levels = vision.get("deepstack_visual_indexes", ()) if model_type.startswith("qwen3_vl") else ()
    return VisionInterface(
        model_type=model_type,
        image_placeholder_id=int(image_id),
        video_placeholder_id=int(config.get("video_token_id", image_id)),
        merge_size=int(merge),
        merges_time=merges_time,
        uses_mrope=uses_mrope,
        num_deepstack_levels=len(levels),
    )


@dataclass(frozen=True)
class _Source:
    """The published tensors of one parameter: ``names[e][p]`` is projection p of expert e; a plain tensor is
    ``[[name]]``. transposed: the tensor may be [E, in, out], while the model has [E, out, in]."""

    names: tuple[tuple[str, ...], ...]
    per_expert: bool = False
    transposed: bool = False

    def all_names(self) -> Iterator[str]:
        for names in self.names:
            yield from names


class LanguageCheckpoint:
    """The language tensors of a checkpoint directory, by their names in the language model."""

    def __init__(self, path: Path, model_type: str) -> None:
        """Raises InvalidRequest if the directory has no weights or no language model."""
        self._path = path
        self._transposes_experts = model_type == "qwen3_vl_moe"
        self._shards = _weight_map(path)
        prefixes = [p for p in _LANGUAGE_PREFIXES if f"{p}embed_tokens.weight" in self._shards]
        if len(prefixes) != 1:
            raise InvalidRequest(
                f"{path} holds {len(prefixes)} language models among {len(self._shards)} tensors, needs 1 of "
                f"{' or '.join(f'{p}embed_tokens.weight' for p in _LANGUAGE_PREFIXES)}",
                reason="CHECKPOINT",
            )
        (self._prefix,) = prefixes
        heads = [name for name in _HEAD_NAMES if name in self._shards]
        self.head_name = heads[0] if heads else None

    def read(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        *,
        num_layers: int,
        device: torch.device,
        dtypes: Mapping[str, torch.dtype],
    ) -> dict[str, torch.Tensor]:
        """Reads every parameter in ``shapes`` (by name) to the device, in its dtype. num_layers: tensors of
        later layers (multi-token prediction) are ignored. Raises InvalidRequest for missing, mis-shaped and
        unexpected tensors, naming them."""
        sources = {name: self._source(name) for name in shapes}
        missing = sorted(name for name, source in sources.items() if source is None)
        if missing:
            raise InvalidRequest(
                f"{self._path} lacks {len(missing)} of {len(shapes)} language tensors: {_listed(missing)}",
                reason="CHECKPOINT_MISSING_TENSORS",
                details={"missing": len(missing), "needed": len(shapes)},
            )
        found = {name: source for name, source in sources.items() if source is not None}
        self._refuse_leftovers(found.values(), num_layers)
        tensors: dict[str, torch.Tensor] = {}
        with contextlib.ExitStack() as stack:
            files: dict[str, Any] = {}
            for name, source in found.items():
                value = self._assemble(source, shapes[name], files, stack)
                if tuple(value.shape) != shapes[name]:
                    raise InvalidRequest(
                        f"{self._path}: {name} has shape {list(value.shape)}, needs {list(shapes[name])}",
                        reason="CHECKPOINT_MISMATCHED_TENSORS",
                        details={"name": name, "found": list(value.shape), "needed": list(shapes[name])},
                    )
                tensors[name] = value.to(device=device, dtype=dtypes[name])
        return tensors

    def _source(self, name: str) -> _Source | None:
        if name == "lm_head.weight":
            return _Source(((self.head_name,),)) if self.head_name else None
        published = self._prefix + name
        if published in self._shards:
            transposed = self._transposes_experts and ".mlp.experts." in name
            return _Source(((published,),), transposed=transposed)
        stem, _, last = published.rpartition(".")
        projections = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(last, ())
        if not stem.endswith(".experts") or not projections:
            return None
        per_expert: list[tuple[str, ...]] = []
        while f"{stem}.{len(per_expert)}.{projections[0]}.weight" in self._shards:
            names = tuple(f"{stem}.{len(per_expert)}.{projection}.weight" for projection in projections)
            if not all(part in self._shards for part in names):
                return None
            per_expert.append(names)
        return _Source(tuple(per_expert), per_expert=True) if per_expert else None

    def _refuse_leftovers(self, sources: Iterable[_Source], num_layers: int) -> None:
        used = {name for source in sources for name in source.all_names()}
        left = []
        for name in self._shards:
            if not name.startswith(self._prefix) or name in used or name.endswith(".rotary_emb.inv_freq"):
                continue
            layer = _LAYER.match(name.removeprefix(self._prefix))
            if layer is None or int(layer.group(1)) < num_layers:
                left.append(name)
        if left:
            raise InvalidRequest(
                f"{self._path} has {len(left)} language tensors that the config has no place for: "
                f"{_listed(sorted(left))}",
                reason="CHECKPOINT_UNEXPECTED_TENSORS",
                details={"unexpected": len(left)},
            )

    def _assemble(
        self, source: _Source, shape: tuple[int, ...], files: dict[str, Any], stack: contextlib.ExitStack
    ) -> torch.Tensor:
        import torch

        if source.per_expert:
            experts = [
                torch.cat([self._tensor(name, files, stack) for name in names]) for names in source.names
            ]
            return torch.stack(experts)
        tensor = self._tensor(source.names[0][0], files, stack)
        # Checkpoints saved by the reference have the other orientation; the shape distinguishes the two.
        transposed = source.transposed and tuple(tensor.shape) != shape
        return tensor.transpose(1, 2).contiguous() if transposed else tensor

    def _tensor(self, name: str, files: dict[str, Any], stack: contextlib.ExitStack) -> torch.Tensor:
        try:
            from safetensors import SafetensorError, safe_open
        except ImportError as error:
            raise MissingDependency("safetensors", "reading a checkpoint") from error
        shard = self._shards[name]
        try:
            if shard not in files:
                files[shard] = stack.enter_context(safe_open(self._path / shard, framework="pt"))
            tensor: torch.Tensor = files[shard].get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise InvalidRequest(
                f"cannot read {name} from {self._path / shard}: {error}", reason="CHECKPOINT"
            ) from error
        return tensor


def _weight_map(path: Path) -> dict[str, str]:
    """Tensor name -> shard file name, from the header of a single file or from the index. If both exist, the
    single file is used, as by the service's tower and by the reference. Raises InvalidRequest."""
    index, single = path / _INDEX_NAME, path / _SINGLE_NAME
    try:
        if single.exists():
            # A safetensors file begins with the header's length, 8 bytes little-endian, and a JSON header.
            with single.open("rb") as file:
                num_bytes = int.from_bytes(file.read(8), "little")
                if num_bytes > single.stat().st_size:
                    raise ValueError(f"it announces a header of {num_bytes} bytes")
                header = json.loads(file.read(num_bytes))
            return {name: _SINGLE_NAME for name in header if name != "__metadata__"}
        if index.exists():
            weight_map: dict[str, str] = json.loads(index.read_bytes())["weight_map"]
            return dict(weight_map)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidRequest(
            f"the weights of {path} cannot be listed: {type(error).__name__} {error}", reason="CHECKPOINT"
        ) from error
    raise InvalidRequest(f"{path} has neither {_INDEX_NAME} nor {_SINGLE_NAME}", reason="CHECKPOINT")


def _listed(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
