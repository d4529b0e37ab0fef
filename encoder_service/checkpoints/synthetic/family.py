"""What a random checkpoint of one family consists of.

Owns the record. A module for each line of models (``qwen.py``, ``kimi.py``) has its sizes; ``files.py`` lists
the families.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from encoder_service.checkpoints.synthetic.tensors import TensorSpec


class LanguageTensors(NamedTuple):
    """Prefixes of the language model's tensors and of its output layer. norm_mean: 0 where the model adds one
    to the weights of its norms. layer: lists the tensors of one layer, of text_config, the layer's prefix and
    its number, where ``tensors`` has no such layer. embeddings: their name below the root."""

    root: str
    head: str
    norm_mean: float = 1.0
    layer: Callable[[dict[str, Any], str, int], Iterator[TensorSpec]] | None = None
    embeddings: str = "embed_tokens"


@dataclass(frozen=True, kw_only=True)
class SyntheticFamily:
    """A folder ``published/<name>`` has the family's ``config.json`` at size ``tiny``.

    set_sizes: writes the dimensions of a size into that file's content. settings: the folder of ``published``
    with the other files, of which families may share one. tokens: the special tokens in the order of their
    ids. has_vocabulary_files: with ``vocab.json``, ``merges.txt``, and the chat template in
    ``tokenizer_config.json`` too. language: None if the language model's tensors are not made here.
    template_in_json: the chat template is in ``chat_template.json``.
    """

    set_sizes: Callable[[dict[str, Any], str], None]
    settings: str
    tokens: tuple[str, ...]
    language: LanguageTensors | None
    has_vocabulary_files: bool = True
    template_in_json: bool = False
