"""A language model that takes visual tokens as rows: chunked prefill and greedy decoding.

Owns the batch: padding, chunks, the state between calls, and calling the reference's text model with
embeddings, positions, mask and deepstack levels. ``model`` builds the model; ``mrope``, ``placeholders`` and
``splice`` own positions, placeholders and rows.

A batch is padded on the left, so that all prompts end in the same column and decode together. A chunk is a
range of columns. Attention masks the padding. Qwen3.5's linear-attention layers multiply it by zero, so their
convolution and recurrent states stay zero until a prompt begins. The reference ignores the mask of a chunk of
one column, so such a chunk is widened to two columns if it holds padding.

Shape legend: B prompts, S padded length, C columns of a chunk, N tokens of a prompt, V visual tokens of a
chunk or the vocabulary's size (in logits), D width, R rows of an item, L deepstack levels.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from lm_adapter.engines.shared.checkpoint import VisionInterface
from lm_adapter.errors import InvalidRequest
from lm_adapter.items import Grid, Modality
from lm_adapter.prefill.mrope import MRopePositions, batch_positions, mrope_positions, plain_positions
from lm_adapter.prefill.placeholders import ExpandedPrompt, expand_batch
from lm_adapter.prefill.splice import RowsLayout, Splicer, StepChunk, splice_step
from lm_adapter.types import EncodedRows

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, eq=False)
class RemoteItem:
    """One image or clip of a prompt. rows: [R, D * (1 + L)]. num_deepstack_levels: L, None if unknown."""

    grid_thw: Sequence[int]
    rows: torch.Tensor = field(repr=False)
    modality: Modality = Modality.IMAGE
    num_deepstack_levels: int | None = None

    @classmethod
    def from_encoded(cls, encoded: EncodedRows, modality: Modality = Modality.IMAGE) -> RemoteItem:
        """The item for an encode result. Shares the memory of its rows."""
        return cls(encoded.grid_thw, encoded.torch(), modality, encoded.num_deepstack_levels)


@dataclass(eq=False)
class Prefilled:
    """A batch after its prefill; ``RemoteVisionLM.decode`` advances it. Holds no rows and no positions.

    logits_BV: of each prompt's last token. prompt_logits_NV: of every token of each prompt, if requested.
    lengths, deltas: number of tokens and M-RoPE delta of each prompt. num_decoded: tokens decoded so far.
    """

    logits_BV: torch.Tensor
    lengths: tuple[int, ...]
    deltas: tuple[int, ...]
    cache: Any = field(repr=False)
    prompt_logits_NV: tuple[torch.Tensor, ...] | None = None
    num_decoded: int = 0

    @property
    def padded_length(self) -> int:
        """S: the number of columns of the prefill."""
        return max(self.lengths)


class RemoteVisionLM:
    """A language model that takes visual tokens as rows. Not thread safe."""

    def __init__(
        self,
        language_model: Any,
        head_VD: torch.Tensor,
        interface: VisionInterface,
        new_cache: Callable[[], Any],
    ) -> None:
        """language_model: the reference's text model; head_VD: its output head; new_cache: makes an empty
        cache for it."""
        self.language_model = language_model
        self.head_VD = head_VD
        self.interface = interface
        self._new_cache = new_cache
        # transformers 5.24 and later name this parameter ``cache``.
        parameters = inspect.signature(language_model.forward).parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        embedding = language_model.embed_tokens.weight
        self.vocab_size, self.out_width = embedding.shape
        self.dtype: torch.dtype = embedding.dtype
        self.device: torch.device = embedding.device

    @property
    def layout(self) -> RowsLayout:
        """The layout that rows must have."""
        return RowsLayout(self.out_width, self.interface.num_deepstack_levels)

    def prefill(
        self,
        prompts: Sequence[Sequence[int] | npt.NDArray[np.integer]],
        items: Sequence[Sequence[RemoteItem]],
        *,
        chunk_size: int | None = None,
        all_logits: bool = False,
    ) -> Prefilled:
        """Runs the prompts through the model. The result keeps no rows.

        prompts: ids with one placeholder per item, or expanded; items: those of each prompt, in prompt order.
        chunk_size: columns per forward pass, None for all at once; the result does not depend on it.
        Raises InvalidRequest or InvalidRows, before anything runs, when prompts, grids and rows disagree.
        """
        import torch

        if not prompts or (chunk_size is not None and chunk_size < 1):
            raise InvalidRequest(
                f"needs 1 prompt and chunks of 1 or more, got {len(prompts)} and {chunk_size}"
            )
        expanded, splicers, positions = self._prepare(prompts, items)
        lengths = tuple(len(prompt) for prompt in expanded)
        if min(lengths) == 0:
            raise InvalidRequest(f"prompt {lengths.index(0)} has 0 tokens, needs 1 or more")
        padded_length = max(lengths)
        paddings = [padded_length - length for length in lengths]
        cache = self._new_cache()
        mask_BS = self._attention_mask(paddings, padded_length)
        ids_BS = self._padded_ids(expanded, paddings)
        kept: list[torch.Tensor] = []
        with torch.no_grad():
            for start, end in _chunks(padded_length, max(paddings), chunk_size):
                inputs_embeds_BCD = self.language_model.embed_tokens(ids_BS[:, start:end])
                levels = self._splice(inputs_embeds_BCD, splicers, paddings, start, end)
                columns = batch_positions(positions, start, end, padded_length=padded_length, side="left")
                hidden_BCD = self._forward(
                    inputs_embeds_BCD, columns, None if mask_BS is None else mask_BS[:, :end], cache, levels
                )
                if all_logits:
                    kept.append(torch.nn.functional.linear(hidden_BCD, self.head_VD))
            logits_BV = torch.nn.functional.linear(hidden_BCD[:, -1], self.head_VD)
        prompt_logits = None
        if all_logits:
            logits_BSV = torch.cat(kept, dim=1)
            prompt_logits = tuple(logits_BSV[row, padding:] for row, padding in enumerate(paddings))
        deltas = tuple(prompt.delta for prompt in positions)
        return Prefilled(logits_BV, lengths, deltas, cache, prompt_logits)

    def decode(self, state: Prefilled, tokens: Sequence[int]) -> torch.Tensor:
        """Appends one token to each prompt, advances ``state``, and returns the next logits [B, V].

        Raises InvalidRequest when the number of tokens differs from the number of prompts.
        """
        import torch

        if len(tokens) != len(state.lengths):
            raise InvalidRequest(f"a batch of {len(state.lengths)} prompts was given {len(tokens)} tokens")
        positions = [
            length + state.num_decoded + delta
            for length, delta in zip(state.lengths, state.deltas, strict=True)
        ]
        columns = np.broadcast_to(np.array(positions, dtype=np.int64)[:, None], (3, len(positions), 1))
        state.num_decoded += 1
        paddings = [state.padded_length - length for length in state.lengths]
        mask_BS = self._attention_mask(paddings, state.padded_length + state.num_decoded)
        with torch.no_grad():
            ids_B1 = torch.tensor(list(tokens), device=self.device)[:, None]
            embeds_B1D = self.language_model.embed_tokens(ids_B1)
            hidden_B1D = self._forward(embeds_B1D, columns, mask_BS, state.cache, None)
            state.logits_BV = torch.nn.functional.linear(hidden_B1D[:, -1], self.head_VD)
        return state.logits_BV

    def generate(
        self,
        prompts: Sequence[Sequence[int] | npt.NDArray[np.integer]],
        items: Sequence[Sequence[RemoteItem]],
        *,
        max_new_tokens: int,
        chunk_size: int | None = None,
        stop_ids: Collection[int] = (),
    ) -> list[list[int]]:
        """Greedy continuations, each up to and including its first stop id. Raises the errors of
        ``prefill``."""
        state = self.prefill(prompts, items, chunk_size=chunk_size)
        continuations: list[list[int]] = [[] for _ in prompts]
        done = [False] * len(prompts)
        for step in range(max_new_tokens):
            tokens = state.logits_BV.argmax(dim=-1).tolist()
            for row, token in enumerate(tokens):
                if not done[row]:
                    continuations[row].append(token)
                    done[row] = token in stop_ids
            if all(done) or step + 1 == max_new_tokens:
                break
            self.decode(state, tokens)
        return continuations

    def _prepare(
        self,
        prompts: Sequence[Sequence[int] | npt.NDArray[np.integer]],
        items: Sequence[Sequence[RemoteItem]],
    ) -> tuple[list[ExpandedPrompt], list[Splicer], list[MRopePositions]]:
        """Checks the whole batch. Raises InvalidRequest or InvalidRows."""
        interface = self.interface
        requested = [
            [interface.prompt_item(item.grid_thw, item.modality) for item in prompt_items]
            for prompt_items in items
        ]
        expanded = expand_batch(prompts, requested, interface.placeholder_ids)
        splicers, positions = [], []
        for prompt, prompt_items in zip(expanded, items, strict=True):
            splicers.append(
                Splicer(
                    prompt.spans,
                    [item.rows for item in prompt_items],
                    self.layout,
                    inputs_embeds_dtype=self.dtype,
                    announced_levels=[item.num_deepstack_levels for item in prompt_items],
                )
            )
            if interface.uses_mrope:
                grids = [Grid(*item.grid_thw) for item in prompt_items]
                positions.append(mrope_positions(prompt, grids, merge_size=interface.merge_size))
            else:
                positions.append(plain_positions(len(prompt)))
            _check_vocabulary(prompt, self.vocab_size)
        return expanded, splicers, positions

    def _padded_ids(self, expanded: Sequence[ExpandedPrompt], paddings: Sequence[int]) -> torch.Tensor:
        """int64 [B, S]. Padding and placeholders become id 0: a placeholder may be outside the vocabulary,
        and its embedding is overwritten."""
        import torch

        ids_BS = np.zeros((len(expanded), paddings[0] + len(expanded[0])), dtype=np.int64)
        for row, (prompt, padding) in enumerate(zip(expanded, paddings, strict=True)):
            ids_BS[row, padding:] = np.where(prompt.visual_mask, 0, prompt.ids)
        return torch.from_numpy(ids_BS).to(self.device)

    def _attention_mask(self, paddings: Sequence[int], num_columns: int) -> torch.Tensor | None:
        """int64 [B, num_columns], 0 at padding; None without padding."""
        import torch

        if not any(paddings):
            return None
        columns = torch.arange(num_columns, device=self.device)
        return (columns[None] >= torch.tensor(paddings, device=self.device)[:, None]).long()

    def _splice(
        self,
        inputs_embeds_BCD: torch.Tensor,
        splicers: Sequence[Splicer],
        paddings: Sequence[int],
        start: int,
        end: int,
    ) -> tuple[torch.Tensor, list[torch.Tensor]] | None:
        """Writes the main level of the rows into columns [start, end).

        Returns the mask [B, C] of visual tokens and the deepstack levels, each [V, D], in the order of the
        prompts; None if there are no levels to add."""
        import torch

        mask_BC = torch.zeros(inputs_embeds_BCD.shape[:2], dtype=torch.bool, device=self.device)
        levels: list[torch.Tensor] = []
        for row, (splicer, padding) in enumerate(zip(splicers, paddings, strict=True)):
            first = max(start, padding)
            if first >= end:
                continue
            chunk = StepChunk(splicer, first - padding, end - first)
            spliced = splice_step(inputs_embeds_BCD[row, first - start :], [chunk])
            splicer.drop_before(end - padding)
            mask_BC[row, first - start + spliced.visual_tokens] = True
            levels.append(spliced.deepstack)
        levels_LVD = torch.cat(levels, dim=1)
        return (mask_BC, [*levels_LVD]) if levels_LVD.numel() else None

    def _forward(
        self,
        inputs_embeds_BCD: torch.Tensor,
        positions: npt.NDArray[np.int64],
        attention_mask: torch.Tensor | None,
        cache: Any,
        levels: tuple[torch.Tensor, list[torch.Tensor]] | None,
    ) -> torch.Tensor:
        import torch

        position_ids = torch.tensor(positions, device=self.device)
        extra = (
            {} if levels is None else {"visual_pos_masks": levels[0], "deepstack_visual_embeds": levels[1]}
        )
        output = self.language_model(
            inputs_embeds=inputs_embeds_BCD,
            position_ids=position_ids if self.interface.uses_mrope else position_ids[0],
            attention_mask=attention_mask,
            use_cache=True,
            **{self._cache_name: cache},
            **extra,
        )
        hidden_BCD: torch.Tensor = output.last_hidden_state
        return hidden_BCD


def _chunks(padded_length: int, max_padding: int, chunk_size: int | None) -> Iterator[tuple[int, int]]:
    """Ranges of columns. A range of one column that holds padding is widened to two (see the module)."""
    start = 0
    while start < padded_length:
        width = padded_length if chunk_size is None else chunk_size
        if width == 1 and start < max_padding:
            width = 2
        end = min(start + width, padded_length)
        yield start, end
        start = end


def _check_vocabulary(prompt: ExpandedPrompt, vocab_size: int) -> None:
    text = prompt.ids[~prompt.visual_mask]
    outside = text[(text < 0) | (text >= vocab_size)]
    if len(outside):
        raise InvalidRequest(
            f"{len(outside)} of {len(text)} text ids are outside the vocabulary of {vocab_size}, "
            f"the first is {int(outside[0])}"
        )
