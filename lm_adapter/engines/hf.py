"""The reference language models of ``transformers`` 5.17 or later, loaded without their towers.

Owns building the language model of a Qwen3-VL, Qwen3.5 or Kimi-K2.5 checkpoint. The text model is built on
the meta device and then filled with the checkpoint's language tensors. ``RemoteVisionLM`` runs it with rows
from the service. The tower is not built and its tensors are not read.

    language_model = load_language_model("Qwen3-VL-8B-Instruct", dtype=torch.bfloat16, device="cuda:0")
    items = [RemoteItem.from_encoded(rows) for rows in client.encode(images)]
    language_model.generate([prompt_ids], [items], max_new_tokens=64)
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm_adapter.engines.hf_checkpoint import LanguageCheckpoint, read_config, vision_interface
from lm_adapter.engines.hf_driver import Prefilled, RemoteItem, RemoteVisionLM
from lm_adapter.errors import InvalidRequest, MissingDependency

if TYPE_CHECKING:
    import torch

__all__ = ["Prefilled", "RemoteItem", "RemoteVisionLM", "import_transformers", "load_language_model"]


def load_language_model(
    path: str | Path, *, dtype: torch.dtype | None = None, device: str | torch.device = "cpu"
) -> RemoteVisionLM:
    """Loads the language model of a checkpoint directory in the hub's layout. dtype: of the weights, by
    default float32.

    Raises InvalidRequest for other families, and for missing, mis-shaped or unexpected language tensors,
    naming them. Raises MissingDependency without torch or transformers.
    """
    transformers = import_transformers()
    import torch

    path = Path(path)
    dtype = torch.float32 if dtype is None else dtype
    device = torch.device(device)
    interface = vision_interface(read_config(path))
    config = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
    text_config = config.get_text_config()
    with torch.device("meta"):
        language_model = transformers.AutoModel.from_config(text_config, dtype=dtype).eval()
    checkpoint = LanguageCheckpoint(path, interface.model_type)
    expected = dict(language_model.state_dict())
    embedding = expected["embed_tokens.weight"]
    if checkpoint.head_name is not None or not config.tie_word_embeddings:
        expected["lm_head.weight"] = embedding
    keeps_float32 = _keeps_float32(language_model, dtype)
    tensors = checkpoint.read(
        {name: tuple(tensor.shape) for name, tensor in expected.items()},
        num_layers=text_config.num_hidden_layers,
        device=device,
        dtypes={name: torch.float32 if keeps_float32(name) else dtype for name in expected},
    )
    head_VD = tensors.pop("lm_head.weight", None)
    language_model.load_state_dict(tensors, assign=True)
    language_model.requires_grad_(requires_grad=False)
    _rebuild_buffers(language_model, text_config, device)
    if head_VD is None or (
        config.tie_word_embeddings and torch.equal(head_VD, tensors["embed_tokens.weight"])
    ):
        head_VD = tensors["embed_tokens.weight"]
    return RemoteVisionLM(
        language_model, head_VD, interface, lambda: transformers.DynamicCache(config=text_config)
    )


_DECLARED: list[Any] = []
"""Keeps the Library objects alive: an operator declaration ends with its object."""


@functools.cache
def import_transformers() -> Any:
    """Imports ``transformers``. Raises MissingDependency without torch or transformers.

    The model files of transformers import torchvision if it is installed. A CUDA build of torchvision fails
    to import with a CPU build of torch, because two operators are not declared. This function declares them;
    they are never called."""
    try:
        import torch

        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise MissingDependency(error.name or "transformers", "lm_adapter.engines.hf") from error
    if importlib.util.find_spec("torchvision") is None:
        return transformers
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        library: Any = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _DECLARED.append(library)
    return transformers


def _keeps_float32(language_model: Any, dtype: torch.dtype) -> Callable[[str], bool]:
    """A predicate: whether the reference keeps a parameter of a 16-bit model in float32 (Kimi's router
    bias)."""
    marks = set(getattr(language_model, "_keep_in_fp32_modules_strict", None) or ())
    if str(dtype) == "torch.float16":
        marks |= set(getattr(language_model, "_keep_in_fp32_modules", None) or ())
    return lambda name: any(mark in name for mark in marks)


def _rebuild_buffers(language_model: Any, text_config: Any, device: torch.device) -> None:
    """Rebuilds the modules with computed buffers (rotary frequencies) on the device. Raises InvalidRequest if
    any tensor still has no values."""
    for name, module in list(language_model.named_modules()):
        if any(buffer.is_meta for buffer in module.buffers(recurse=False)):
            parent, _, child = name.rpartition(".")
            setattr(language_model.get_submodule(parent), child, type(module)(config=text_config).to(device))
    tensors = [*language_model.named_parameters(), *language_model.named_buffers()]
    unset = [name for name, tensor in tensors if tensor.is_meta]
    if unset:
        raise InvalidRequest(
            f"{len(unset)} of {len(tensors)} tensors have no values after loading: {', '.join(unset[:8])}",
            reason="CHECKPOINT_UNINITIALISED_TENSORS",
        )
