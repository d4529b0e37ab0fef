"""M-RoPE positions of padded batches, resumed and drafted ones equal the reference's ``get_rope_index``.

The reference computes whole prompts only: a part is compared with its place in the whole sequence.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bench.harness.reference import import_reference
from encoder_service.checkpoints.synthetic import config_for
from encoder_service.ingest.qwen2_5_vl import Qwen25Clips
from encoder_service.ingest.settings import Normalisation, QwenVideoSettings, QwenVLSettings
from encoder_service.ingest.video.source import ClipHeader, ClipLimits
from encoder_service.types import PreprocessOptions
from lm_adapter.engines.shared.checkpoint import vision_interface
from lm_adapter.items import Modality
from lm_adapter.prefill.mrope import MRopePositions, batch_positions, mrope_positions
from lm_adapter.prefill.placeholders import ExpandedPrompt, PromptItem, expand_placeholders, prompt_item
from lm_adapter.prefill.prefix_cache import PadScheme, pad_id, restore_placeholders, substitute_pad_ids

IMAGE, VIDEO, MERGE = 900, 901, 2
VOCAB_SIZE = 1000
MODEL_CLASSES = {"qwen3_vl": "Qwen3VLModel", "qwen3_5": "Qwen3_5Model", "glm4v": "Glm4vModel"}
Grid = tuple[int, int, int]
Positions = npt.NDArray[np.int64]
sweep = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@dataclass(frozen=True)
class Prompt:
    """As the reference and as we see it."""

    expanded: ExpandedPrompt
    grids: list[Grid]
    modalities: list[Modality]
    positions: MRopePositions


sides = st.integers(1, 8).map(lambda side: MERGE * side)
texts = st.lists(st.integers(0, 799), min_size=1, max_size=6)
parts = st.one_of(
    texts.map(lambda ids: ("text", ids)),
    st.tuples(sides, sides).map(lambda hw: ("image", (1, *hw))),
    st.tuples(st.integers(1, 4), sides, sides, st.lists(texts, min_size=4, max_size=4)).map(
        lambda clip: ("clip", clip)
    ),
)


@st.composite
def prompts(draw: st.DrawFn) -> Prompt:
    """Text, images and clips in any order, each vision run after some text (the vision start id, which every
    chat template writes and the reference relies on); clips with a timestamp before every frame."""
    ids: list[int] = []
    items: list[PromptItem] = []
    grids: list[Grid] = []
    modalities: list[Modality] = []
    drawn: list[tuple[str, Any]] = draw(st.lists(parts, min_size=1, max_size=6))
    for kind, content in drawn:
        if kind == "text":
            ids += content
            continue
        modality = Modality.IMAGE if kind == "image" else Modality.VIDEO
        grid = content if kind == "image" else content[:3]
        placeholder = IMAGE if kind == "image" else VIDEO
        items.append(
            prompt_item(
                grid, placeholder_id=placeholder, merge_size=MERGE, modality=modality, merges_time=False
            )
        )
        grids.append(grid)
        modalities.append(modality)
        for frame in range(grid[0]):
            ids += [*(content[3][frame] if kind == "clip" else []), 800, placeholder]
    expanded = expand_placeholders(ids, items, [IMAGE, VIDEO])
    return Prompt(expanded, grids, modalities, mrope_positions(expanded, grids, merge_size=MERGE))


@cache
def rope_index(family: str) -> Any:
    """The reference's method; it reads the merge size and nothing else of its model."""
    import_reference()
    modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    model_class = getattr(modeling, MODEL_CLASSES[family])
    model = SimpleNamespace(config=SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=MERGE)))
    model.get_vision_position_ids = model_class.get_vision_position_ids.__get__(model)
    return model_class.get_rope_index.__get__(model)


def reference_positions(
    family: str, batch: Sequence[Prompt], ids: torch.Tensor, mask: torch.Tensor | None = None
) -> tuple[Positions, list[int]]:
    """Positions [3, B, S] and deltas. ids, mask: [B, S]."""

    def grids_of(modality: Modality) -> torch.Tensor | None:
        grids = [
            grid
            for prompt in batch
            for grid, its in zip(prompt.grids, prompt.modalities, strict=True)
            if its is modality
        ]
        return torch.tensor(grids) if grids else None

    positions, deltas = rope_index(family)(
        input_ids=ids,
        mm_token_type_ids=(ids == IMAGE).int() + 2 * (ids == VIDEO).int(),
        image_grid_thw=grids_of(Modality.IMAGE),
        video_grid_thw=grids_of(Modality.VIDEO),
        attention_mask=mask,
    )
    return positions.numpy(), deltas[:, 0].tolist()


def continued(family: str, prompt: Prompt, more: list[int]) -> Positions:
    """[3, N]: the reference's positions of the prompt with text ``more`` behind it."""
    ids = np.concatenate([prompt.expanded.ids, np.array(more, dtype=np.int64)])
    return reference_positions(family, [prompt], torch.from_numpy(ids)[None])[0][:, 0]


@pytest.mark.parametrize("family", MODEL_CLASSES)
@sweep
@given(batch=st.lists(prompts(), min_size=1, max_size=5), side=st.sampled_from(["left", "right"]))
def test_p01_positions_and_deltas_of_batches(
    family: str, batch: list[Prompt], side: Literal["left", "right"]
) -> None:
    length = max(len(prompt.expanded) for prompt in batch)
    ids = torch.zeros(len(batch), length, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(batch):
        size = len(prompt.expanded)
        columns = slice(length - size, length) if side == "left" else slice(0, size)
        ids[row, columns] = torch.from_numpy(prompt.expanded.ids)
        mask[row, columns] = 1
    expected, deltas = reference_positions(family, batch, ids, mask)
    found = [prompt.positions for prompt in batch]
    np.testing.assert_array_equal(
        batch_positions(found, 0, length, padded_length=length, side=side), expected
    )
    assert [positions.delta for positions in found] == deltas


@pytest.mark.parametrize("family", MODEL_CLASSES)
@sweep
@given(prompt=prompts(), generated=st.lists(st.integers(0, 799), max_size=8), data=st.data())
def test_p03_a_retracted_request_and_a_prefix_hit_resume_as_the_whole_sequence(
    family: str, prompt: Prompt, generated: list[int], data: st.DataObject
) -> None:
    """The prompt with what was generated is prefilled again, from any token on and in chunks of any size: in
    text, in a vision run, in what was generated."""
    expected = continued(family, prompt, generated)
    num_prompt, total = len(prompt.expanded), len(prompt.expanded) + len(generated)
    hit = data.draw(st.integers(0, total))
    cut = data.draw(st.integers(hit, total))
    np.testing.assert_array_equal(prompt.positions.chunk(hit, cut), expected[:, hit:cut])
    np.testing.assert_array_equal(prompt.positions.chunk(cut, total), expected[:, cut:])
    assert prompt.positions.next_position == expected[:, :num_prompt].max() + 1
    assert prompt.positions.decode(total) == expected.max() + 1
    for n, column in enumerate(expected[:, num_prompt:].T):
        assert (column == prompt.positions.decode(num_prompt + n)).all()


@pytest.mark.parametrize("family", MODEL_CLASSES)
@sweep
@given(prompt=prompts(), accepted=st.integers(0, 5), drafted=st.integers(1, 6))
def test_p06_drafts_stand_where_accepted_tokens_would(
    family: str, prompt: Prompt, accepted: int, drafted: int
) -> None:
    index = len(prompt.expanded) + accepted
    expected = continued(family, prompt, [1] * (accepted + drafted))
    np.testing.assert_array_equal(prompt.positions.drafts(index, np.arange(drafted)), expected[:, index:])
    # A tree: every branch stands where the chain stands at that depth.
    depths = [0, 1, 1, 2, 2, 2][:drafted]
    tree = prompt.positions.drafts(index, depths)
    np.testing.assert_array_equal(tree, prompt.positions.drafts(index, range(4))[:, depths])
    # The draft model reads the same prompt without a pad id.
    digests = [bytes([n + 1] * 32) for n in range(len(prompt.grids))]
    pads = [
        pad_id(digest, modality, PadScheme.TOKENSPEED)
        for digest, modality in zip(digests, prompt.modalities, strict=True)
    ]
    restored = restore_placeholders(
        substitute_pad_ids(prompt.expanded, pads),
        scheme=PadScheme.TOKENSPEED,
        image_placeholder_id=IMAGE,
        video_placeholder_id=VIDEO,
        vocab_size=VOCAB_SIZE,
    )
    np.testing.assert_array_equal(restored, prompt.expanded.ids)


@pytest.mark.parametrize(("fps", "grid"), [(2.0, (4, 4, 6)), (1.0, (3, 40, 2)), (4.0, (1, 2, 2))])
def test_clips_of_qwen3_omni_advance_in_time(fps: float, grid: Grid) -> None:
    """An image and a clip without timestamps; 13 positions are a second, and two frames are a patch."""
    import_reference()
    module = importlib.import_module("transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe")
    config = SimpleNamespace(
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        audio_token_id=902,
        vision_start_token_id=903,
        audio_start_token_id=904,
        position_id_per_seconds=13,
    )
    kind = module.Qwen3OmniMoePreTrainedModelForConditionalGeneration
    model = SimpleNamespace(
        config=config,
        spatial_merge_size=MERGE,
        get_llm_pos_ids_for_vision=partial(kind.get_llm_pos_ids_for_vision, None),
    )
    image = (1, 6, 4)
    items = [
        prompt_item(
            shape,
            placeholder_id=token,
            merge_size=MERGE,
            modality=modality,
            merges_time=False,
            has_timestamps=False,
        )
        for shape, token, modality in ((image, IMAGE, Modality.IMAGE), (grid, VIDEO, Modality.VIDEO))
    ]
    ids = [1, 903, IMAGE, 905, 7, 8, 903, VIDEO, 905, 9]
    prompt = expand_placeholders(ids, items, (IMAGE, VIDEO))
    seconds = 2 / fps
    found = mrope_positions(prompt, [image, grid], merge_size=MERGE, time_steps=[1, seconds * 13])
    expected, delta = kind.get_rope_index(
        model,
        torch.from_numpy(prompt.ids)[None],
        torch.tensor([image]),
        torch.tensor([grid]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        second_per_grids=torch.tensor([seconds]),
    )
    np.testing.assert_array_equal(found.prompt, expected[:, 0].numpy().astype(np.int64))
    assert found.delta == int(delta)


@pytest.mark.parametrize(("num_frames", "fps"), [(43, 15.0), (300, 24000 / 1001), (9, 30.0), (1200, 25.0)])
def test_clips_of_qwen2_5_advance_by_the_seconds_of_the_frames_taken(num_frames: int, fps: float) -> None:
    """From the frames that the encoder takes to positions; two are a second. The reference goes on behind a
    clip by its sides alone, which is the same where they are longer than its time."""
    import_reference()
    from transformers.video_utils import VideoMetadata

    module = importlib.import_module("transformers.models.qwen2_5_vl.modeling_qwen2_5_vl")
    config = config_for("qwen2_5_vl", "tiny")
    interface = vision_interface(config)
    images = QwenVLSettings(14, 2, 2, 3136, 12845056, Normalisation((0.5,) * 3, (0.5,) * 3, 1 / 255))
    settings = QwenVideoSettings(3136, 12845056, 2.0, 4, 768, 768, cap_pixels_per_frame=False)
    header = ClipHeader(num_frames, fps, 28, 28)
    plan = Qwen25Clips(settings, images, ClipLimits()).plan(header, PreprocessOptions())
    metadata = VideoMetadata(total_num_frames=num_frames, fps=fps, frames_indices=list(plan.indices))
    seconds = torch.tensor([2 / metadata.sampled_fps])
    image, clip = (1, 6, 4), (plan.grid.t, 4, 4 * math.ceil(seconds * plan.grid.t + 1))
    model = SimpleNamespace(config=SimpleNamespace(vision_config=SimpleNamespace(**config["vision_config"])))
    kind = module.Qwen2_5_VLModel
    model.get_vision_position_ids = kind.get_vision_position_ids.__get__(model)
    items = [interface.prompt_item(image, Modality.IMAGE), interface.prompt_item(clip, Modality.VIDEO)]
    placeholders = interface.placeholder_ids
    prompt = expand_placeholders([1, placeholders[0], 5, 7, placeholders[1], 5, 9], items, placeholders)
    steps = [1.0, interface.time_step(plan.timestamps_s)]
    found = mrope_positions(prompt, [image, clip], merge_size=MERGE, time_steps=steps)
    ids = torch.from_numpy(prompt.ids)[None]
    expected, delta = kind.get_rope_index(
        model,
        ids,
        mm_token_type_ids=(ids == placeholders[0]).int() + 2 * (ids == placeholders[1]).int(),
        image_grid_thw=torch.tensor([image]),
        video_grid_thw=torch.tensor([clip]),
        second_per_grid_ts=seconds,
    )
    np.testing.assert_array_equal(found.prompt, expected[:, 0].numpy())
    assert found.delta == int(delta)
    assert steps[1] == float(seconds) * 2
