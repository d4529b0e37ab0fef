"""Releases by their published files: from a file's bytes to rows.

``tests/data/published`` has the files of each release; SOURCES.md there says where each is from and what is a
predecessor's. Two blocks stand for 27, which are alike. Weights are random.
"""

from __future__ import annotations

import io
import json
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image

from bench.harness.reference import ReferenceTower, import_reference
from encoder_service.ingest.decode import DecodeLimits
from encoder_service.ingest.preprocessor import Preprocessor
from encoder_service.ingest.registry import load_preprocessor
from encoder_service.towers import load_tower
from encoder_service.types import EncodedFile, FrameItem, Grid, PreprocessOptions
from lm_adapter.engines.shared.checkpoint import read_config, vision_interface
from lm_adapter.items import Modality
from tests.parity import kimi_processors
from tests.parity.tower_cases import (
    FLOAT32_RELATIVE,
    assert_close,
    fresh_seed,
    run_tower,
    vision_weights,
    write_published,
)
from tests.published import MODELS, PUBLISHED
from tests.unit.ingest import clip_files, image_files

DEPTH = {
    "kimi_k25": "vt_num_hidden_layers",
    "kimi_vl": "num_hidden_layers",
    "kimi_k3": "vt_num_hidden_layers",
}
NUM_BLOCKS = 2
# Where the published files name code of their own, which has the rules of these.
PROCESSORS: dict[str, tuple[str, ...]] = {
    "interns1_pro": ("Qwen2VLImageProcessor", "Qwen3VLVideoProcessor"),
    "bailing_moe_v3_vl": ("Qwen2VLImageProcessor",),
}
SAME_TOWER = {
    "Kimi-K2.7-Code": "Kimi-K2.6",
    "Qwen3.8-27B": "Qwen3.6-27B",
    "GLM-4.6V": "GLM-4.5V",
    "GLM-4.6V-Flash": "GLM-4.1V-9B-Thinking",
}
# One of each tower's kind; the others take long, GLM's with their mergers of 200 million weights.
QUICK_ROWS = ("Qwen3.6-27B", "Kimi-K2.6", "Kimi-K3", "GLM-OCR", "Qwen2.5-VL-7B-Instruct")
LIMITS = DecodeLimits(max_encoded_bytes=1 << 28, max_image_pixels=1 << 26)
PLAIN = PreprocessOptions()
# (height, width): a strip below Qwen's least area, longer than the learned table's side; above Kimi's limit.
STRIP, LARGE = (45, 1101), (1501, 2305)

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


class Pixels(NamedTuple):
    """values: float32 [P, patch_dim] of all grids."""

    values: torch.Tensor
    grids: list[Grid]


class Processors(NamedTuple):
    """The reference's. clips: None for models of images only."""

    images: Any
    clips: Any | None = None


def reference_processors(model: str) -> Processors:
    """As the published files set them."""
    transformers = import_reference()
    transformers.logging.set_verbosity_error()
    folder = PUBLISHED / model
    path = folder / "preprocessor_config.json"
    settings = json.loads(path.read_text()) if path.exists() else {}
    family = read_config(folder)["model_type"]
    if family in ("kimi_vl", "kimi_k3"):
        return Processors(partial(checkpoints_processor, getattr(kimi_processors, family), settings), None)
    if "media_proc_cfg" not in settings:
        model_type = read_config(folder)["model_type"]
        names = PROCESSORS.get(model_type, ("AutoImageProcessor", "AutoVideoProcessor"))
        found = Processors(*(getattr(transformers, name).from_pretrained(folder) for name in names))
        if model_type == "qwen3_omni_moe":
            from transformers.image_utils import SizeDict
            from transformers.models.qwen3_omni_moe.processing_qwen3_omni_moe import Qwen3OmniMoeProcessor

            # The files have no settings for clips: these are what the whole model's processor passes.
            assert found.clips is not None
            found.clips.size = SizeDict(**Qwen3OmniMoeProcessor.videos_kwargs["size"])
        if model_type in ("qwen3_omni_moe", "qwen2_5_vl"):
            # The files state none; vLLM's loaders take this one.
            assert found.clips is not None
            found.clips.fps = 2.0
        return found
    from transformers.models.kimi_k25.image_processing_kimi_k25 import Kimi_K25ImageProcessor
    from transformers.models.kimi_k25.video_processing_kimi_k25 import Kimi_K25VideoProcessor

    # The reference has other names for these settings and does not read the published ones.
    published = settings["media_proc_cfg"]
    both = {
        "patch_size": published["patch_size"],
        "merge_size": published["merge_kernel_size"],
        "size": dict.fromkeys(("max_height", "max_width"), published["patch_limit_on_one_side"]),
        "image_mean": published["image_mean"],
        "image_std": published["image_std"],
    }
    return Processors(
        Kimi_K25ImageProcessor(max_patches=published["in_patch_limit"], **both),
        Kimi_K25VideoProcessor(
            max_patches=published["in_patch_limit_each_frame"],
            temporal_patch_size=published["temporal_merge_kernel_size"],
            fps=published["sample_fps"],
            **both,
        ),
    )


def checkpoints_processor(
    process: Any, settings: dict[str, Any], images: list[Image.Image], return_tensors: str
) -> dict[str, torch.Tensor]:
    """A processor that is code of the checkpoint, as one of the reference."""
    assert return_tensors == "pt"
    ((values, grid),) = (process(image, settings) for image in images)
    return {"pixel_values": values, "image_grid_thw": torch.tensor([grid])}


@cache
def photograph(height: int, width: int) -> bytes:
    return image_files.encode(Image.fromarray(image_files.pixels(height, width)), "JPEG", quality=90)


def image_pixels(preprocessor: Preprocessor, data: bytes) -> Pixels:
    item, _, _ = preprocessor.open_image(data, PLAIN).load()
    assert isinstance(item, FrameItem)
    return Pixels(preprocessor.patchify(item.frames_THWC), [item.grid])


def expected_image(processors: Processors, data: bytes) -> Pixels:
    batch = processors.images(images=[Image.open(io.BytesIO(data))], return_tensors="pt")
    values = batch["pixel_values"]
    return Pixels(values.flatten(1), [Grid(*grid) for grid in batch["image_grid_thw"].tolist()])


def clip_pixels(preprocessor: Preprocessor, data: bytes) -> Pixels:
    assert preprocessor.clips is not None
    pieces = list(preprocessor.clips.open(EncodedFile(data), PLAIN).pieces(max_patches=1 << 20))
    values = [preprocessor.patchify(piece.frames_THWC) for piece in pieces]
    return Pixels(torch.cat(values), [piece.grid for piece in pieces])


def expected_clip(processors: Processors, path: Path) -> Pixels:
    from transformers.video_utils import load_video

    assert processors.clips is not None
    sample = partial(processors.clips.sample_frames, fps=processors.clips.fps)
    frames, metadata = load_video(str(path), backend="pyav", sample_indices_fn=sample)
    # Its reader gives a frame once that is sampled twice; its others, and arrays, give it twice.
    frames = frames[np.unique(metadata.frames_indices, return_inverse=True)[1]]
    batch = processors.clips(
        videos=[torch.from_numpy(frames).permute(0, 3, 1, 2)],
        video_metadata=[metadata],
        do_sample_frames=False,
        input_data_format="channels_first",
        return_tensors="pt",
    )
    values = batch["pixel_values_videos"]
    grids = [Grid(*grid) for grid in batch["video_grid_thw"].tolist()]
    return Pixels(values.reshape(-1, values.shape[-1] if values.dim() < 4 else values[0].numel()), grids)


def opened(model: str) -> tuple[dict[str, Any], Preprocessor]:
    """(config.json, the service's preprocessor) of the published files."""
    config = read_config(PUBLISHED / model)
    return config, load_preprocessor(PUBLISHED / model, vision_interface(config).family, LIMITS)


def film(folder: Path) -> Path:
    path = folder / "clip.mp4"
    path.write_bytes(clip_files.encode(clip_files.moving(43, 46, 74), fps=15))
    return path


def assert_same(found: Pixels, expected: Pixels) -> None:
    assert found.grids == expected.grids
    assert torch.equal(found.values, expected.values)


@pytest.mark.parametrize("model", MODELS)
def test_pixels_of_files_equal_the_references(model: str, tmp_path: Path) -> None:
    config, preprocessor = opened(model)
    processors = reference_processors(model)
    for size in (STRIP, LARGE):
        data = photograph(*size)
        assert_same(image_pixels(preprocessor, data), expected_image(processors, data))
    if processors.clips is not None:
        clip = film(tmp_path)
        assert_same(clip_pixels(preprocessor, clip.read_bytes()), expected_clip(processors, clip))
    # The rows of a release are compared once for all with its tower.
    if model in SAME_TOWER:
        assert config["vision_config"] == read_config(PUBLISHED / SAME_TOWER[model])["vision_config"]


@pytest.mark.parametrize(
    "model",
    [
        model if model in QUICK_ROWS else pytest.param(model, marks=pytest.mark.extended)
        for model in MODELS
        if model not in SAME_TOWER
    ],
)
def test_rows_of_files_equal_the_references(model: str, tmp_path: Path, device: torch.device) -> None:
    config, preprocessor = opened(model)
    vision = config.get("thinker_config", config)["vision_config"]
    vision[DEPTH.get(config["model_type"], "depth")] = NUM_BLOCKS
    if vision.get("deepstack_visual_indexes"):
        vision["deepstack_visual_indexes"] = list(range(NUM_BLOCKS))
    if "fullatt_block_indexes" in vision:
        vision["fullatt_block_indexes"] = [1]
    checkpoint = write_published(tmp_path / model, config, vision_weights(config, fresh_seed()))
    tower = load_tower(checkpoint, device=device, dtype=torch.float32).tower
    reference = ReferenceTower(checkpoint, device=device, dtype=torch.float64)
    sent = {Modality.IMAGE: image_pixels(preprocessor, photograph(*STRIP))}
    if preprocessor.clips is not None:
        sent[Modality.VIDEO] = clip_pixels(preprocessor, film(tmp_path).read_bytes())
    pixels = torch.cat([item.values for item in sent.values()])
    grids = [grid for item in sent.values() for grid in item.grids]
    with torch.inference_mode():
        expected = reference.rows(pixels, grids).cpu()
    assert_close(model, run_tower(tower, pixels, grids), expected, FLOAT32_RELATIVE)

    # The side of the language model takes the file for the same family.
    interface = vision_interface(config)
    assert (interface.family, interface.num_deepstack_levels) == (tower.family, tower.num_deepstack_levels)
    for modality, item in sent.items():
        assert interface.prompt_item(item.grids[0], modality).num_rows == tower.num_rows(item.grids[0])
