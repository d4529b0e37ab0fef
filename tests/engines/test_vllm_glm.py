"""Prompts of GLM: vLLM's own processor and the plugin's give the same tokens and grids.

GLM-5.3-Flash has no other test with vLLM: its language model does not run on a CPU.
"""

from __future__ import annotations

import io
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from vllm.config import ModelConfig
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.plugins import load_general_plugins

from encoder_service.checkpoints.synthetic import make_checkpoint
from encoder_service.ingest.decode import DecodeLimits
from encoder_service.ingest.registry import load_preprocessor
from encoder_service.types import PreprocessOptions
from lm_adapter.engines.shared.images import ImageFile
from lm_adapter.engines.vllm.api_server.clips import ClipFile
from lm_adapter.engines.vllm.settings import mark
from lm_adapter.items import Grid
from lm_adapter.prefill.clip_texts import glm_patch_times

pytestmark = [pytest.mark.extended, pytest.mark.filterwarnings("ignore")]
IMAGE = "<|begin_of_image|><|image|><|end_of_image|>"
CLIP = "<|begin_of_video|><|video|><|end_of_video|>"


@pytest.fixture(scope="module", params=["glm4v", "glm_ocr", "glm5_next"])
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def checkpoint(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("glm") / family
    make_checkpoint(path, family, "tiny", 0)
    return path


@pytest.fixture(scope="module")
def processors(checkpoint: Path) -> tuple[Any, Any]:
    """vLLM's own, and for files."""
    load_general_plugins()
    own, for_files = (ModelConfig(model=str(checkpoint), dtype="bfloat16") for _ in range(2))
    mark(for_files.get_multimodal_config())
    create = MULTIMODAL_REGISTRY.create_processor
    return create(own), create(for_files)


def processed(processor: Any, prompt: str, **media: Any) -> Any:
    return processor(prompt, processor.info.parse_mm_data(media), hf_processor_mm_kwargs={})


def test_images_of_any_size(family: str, checkpoint: Path, processors: tuple[Any, Any]) -> None:
    encoder = load_preprocessor(checkpoint, family, DecodeLimits(1 << 30, 1 << 30))
    own, for_files = processors
    for seed in range(12):
        draw = random.Random(seed)
        image = Image.new("RGB", (draw.randint(20, 700), draw.randint(20, 700)))
        file = io.BytesIO()
        image.save(file, "PNG")
        prompt = f"What is {IMAGE} in it?"
        expected = processed(own, prompt, image=[image])
        found = processed(for_files, prompt, image=[ImageFile.read(file.getvalue())])
        assert found["prompt_token_ids"] == expected["prompt_token_ids"]
        grids = [item["mm_kwargs"]["image"][0]["image_grid_thw"].data.tolist() for item in (found, expected)]
        assert grids[0] == grids[1]
        assert grids[0] == list(encoder.plan_image(image.height, image.width, PreprocessOptions()).grid)


def test_clips_with_the_encoders_times(processors: tuple[Any, Any]) -> None:
    own, for_files = processors
    for num_frames in (2, 6, 14):
        indices, fps = sorted(random.Random(num_frames).sample(range(300), num_frames)), 24.0
        metadata = {
            "fps": fps, "frames_indices": indices, "total_num_frames": 300, "duration": 300 / fps,
            "video_backend": "opencv", "do_sample_frames": False,
        }  # fmt: skip
        prompt = f"What happens {CLIP} in it?"
        frames = np.zeros((num_frames, 60, 90, 3), np.uint8)
        expected = processed(own, prompt, video=[(frames, metadata)])
        grid = Grid(*expected["mm_kwargs"]["video"][0]["video_grid_thw"].data.tolist())
        times = tuple(glm_patch_times([index / fps for index in indices]))
        assert len(times) == grid.t
        clip = ClipFile(b"file", b"7" * 32, grid=grid, patch_times_s=times)
        found = processed(for_files, prompt, video=[clip])
        assert found["prompt_token_ids"] == expected["prompt_token_ids"]
        spans = [item["mm_placeholders"]["video"][0] for item in (found, expected)]
        assert spans[0].get_num_embeds() == spans[1].get_num_embeds() == grid.t * grid.h * grid.w // 4
        # Frames that the client has decoded are prepared by vLLM's own code.
        prepared = processed(for_files, prompt, video=[(frames, metadata)])
        assert prepared["prompt_token_ids"] == expected["prompt_token_ids"]


def test_the_largest_image_and_clip_take_no_file(processors: tuple[Any, Any]) -> None:
    """With which vLLM measures its memory: as many rows as its own."""
    own, for_files = (
        processor.dummy_inputs.get_dummy_mm_data(2048, {"image": 1, "video": 1}, {})
        for processor in processors
    )
    (image,), (clip,) = for_files["image"], for_files["video"]
    assert (image.data, image.width, image.height) == (b"", *own["image"][0].size)
    assert not clip.data
    ((frames, metadata),) = own["video"]
    _, num_rows = processors[0].info._get_vision_info(
        image_width=frames.shape[2],
        image_height=frames.shape[1],
        num_frames=metadata["total_num_frames"],
        max_image_pixels=processors[0].info._get_video_max_pixels(),
    )
    assert clip.grid.t * clip.grid.h * clip.grid.w // 4 == num_rows
    assert len(clip.patch_times_s) == clip.grid.t
