"""The reference language models of ``transformers`` 5.17 or later, loaded without their towers.

Owns loading the language model of a Qwen3-VL, Qwen3.5 or Kimi-K2.5 checkpoint. ``transformers`` loads the
text model; the tower is not built and its tensors are not read. ``RemoteVisionLM`` runs it with rows from
the service.

    language_model = load_language_model("Qwen3-VL-8B-Instruct", dtype=torch.bfloat16, device="cuda:0")
    items = [RemoteItem.from_encoded(rows) for rows in client.encode(images)]
    language_model.generate([prompt_ids], [items], max_new_tokens=64)
"""

from __future__ import annotations

import contextlib
import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm_adapter.engines.hf.driver import RemoteVisionLM
from lm_adapter.engines.hf.transformers_import import import_transformers
from lm_adapter.engines.shared.checkpoint import read_config, vision_interface
from lm_adapter.errors import InvalidRequest

if TYPE_CHECKING:
    import torch

DRIVEN = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "kimi_k25")
"""model_type of the checkpoints that are loaded here."""
_LANGUAGE_PREFIX = r"^(model\.language_model|language_model\.model)\."
_HEAD_NAMES = ("lm_head.weight", "language_model.lm_head.weight")
_LAYER = re.compile(r"layers\.(\d+)\.")
_INDEX_NAME, _SINGLE_NAME = "model.safetensors.index.json", "model.safetensors"


def load_language_model(
    path: str | Path, *, dtype: torch.dtype | None = None, device: str | torch.device = "cpu"
) -> RemoteVisionLM:
    """Loads the language model of a checkpoint directory in the hub's layout. dtype: of the weights, by
    default float32.

    Raises InvalidRequest for other families, for files that cannot be read, and for missing, mis-shaped or
    unexpected language tensors, naming them. Raises MissingDependency without torch or transformers.
    """
    transformers = import_transformers()
    import torch

    path = Path(path)
    dtype = torch.float32 if dtype is None else dtype
    interface = vision_interface(read_config(path))
    if interface.model_type not in DRIVEN:
        raise InvalidRequest(
            f"model_type {interface.model_type!r} is not driven here, needs {' or '.join(DRIVEN)}",
            reason="CHECKPOINT",
        )
    try:
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
        text_config = config.get_text_config()
        _convert_as(config.model_type, text_config.model_type)
        with _quiet(transformers):
            language_model, report = transformers.AutoModel.from_pretrained(
                path,
                config=text_config,
                dtype=dtype,
                key_mapping={_LANGUAGE_PREFIX: ""},
                output_loading_info=True,
                local_files_only=True,
            )
        head_VD = _read_head(path)
    except Exception as error:  # damaged files raise errors of transformers, safetensors and json
        raise InvalidRequest(
            f"{path} cannot be loaded: {type(error).__name__}: {error}", reason="CHECKPOINT"
        ) from error
    _check_report(path, report, text_config.num_hidden_layers)
    embedding_VD = language_model.embed_tokens.weight
    if head_VD is None and not config.tie_word_embeddings:
        raise InvalidRequest(
            f"{path} lacks lm_head.weight, and its config does not tie it to the embedding",
            reason="CHECKPOINT_MISSING_TENSORS",
        )
    if head_VD is not None:
        head_VD = head_VD.to(dtype)
        is_tied = config.tie_word_embeddings and torch.equal(head_VD, embedding_VD)
        head_VD = None if is_tied else head_VD.to(device)
    language_model = language_model.eval().requires_grad_(requires_grad=False).to(device)
    return RemoteVisionLM(
        language_model,
        language_model.embed_tokens.weight if head_VD is None else head_VD,
        interface,
        lambda: transformers.DynamicCache(config=text_config),
    )


def _convert_as(model_type: str, text_type: str) -> None:
    """Gives the text model its family's conversions of published tensors, such as transposed experts, where
    ``transformers`` names none for the text model itself."""
    mapping = importlib.import_module("transformers.conversion_mapping")
    family = mapping.get_checkpoint_conversion_mapping(model_type)
    if family and mapping.get_checkpoint_conversion_mapping(text_type) is None:
        mapping.register_checkpoint_conversion_mapping(text_type, family)


@contextlib.contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Without a progress bar and the list of the tower's tensors, none of which is read."""
    logging = transformers.utils.logging
    verbosity, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if has_bars:
            logging.enable_progress_bar()


def _check_report(path: Path, report: dict[str, Any], num_layers: int) -> None:
    """Raises InvalidRequest unless every parameter has its tensor and every language tensor its parameter.
    Tensors of later layers (multi-token prediction) and old rotary buffers are no part of the model."""
    missing = sorted(report["missing_keys"])
    unexpected = sorted(
        name
        for name in report["unexpected_keys"]
        if (layer := _LAYER.match(name)) is not None
        and int(layer[1]) < num_layers
        and not name.endswith(".rotary_emb.inv_freq")
    )
    for names, text, reason in (
        (missing, "lacks", "CHECKPOINT_MISSING_TENSORS"),
        (unexpected, "has unexpected", "CHECKPOINT_UNEXPECTED_TENSORS"),
    ):
        if names:
            more = f" and {len(names) - 8} more" if len(names) > 8 else ""
            raise InvalidRequest(
                f"{path} {text} {len(names)} language tensors: {', '.join(names[:8])}{more}",
                reason=reason,
                details={"count": len(names)},
            )


def _read_head(path: Path) -> torch.Tensor | None:
    """The output head [V, D]; None if the checkpoint has none. Of a single file and an index, the single file
    is read, as by the reference."""
    from safetensors import safe_open

    files = [path / _SINGLE_NAME]
    if not files[0].exists():
        shards = json.loads((path / _INDEX_NAME).read_bytes())["weight_map"]
        files = [path / shards[name] for name in _HEAD_NAMES if name in shards]
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in _HEAD_NAMES:
                if name in opened.keys():  # noqa: SIM118 - no mapping
                    head_VD: torch.Tensor = opened.get_tensor(name)
                    return head_VD
    return None
