"""Prompts of Kimi-VL and Kimi-K3: vLLM's own processor and the plugin's give the same tokens and grids.

Kimi-K3 has no other test with a whole vLLM: its language model does not run on a CPU.
"""

from __future__ import annotations

import io
import random
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from vllm.config import ModelConfig
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.plugins import load_general_plugins

from bench.harness.engine_checkpoints import write_checkpoint
from encoder_service.ingest.decode import DecodeLimits
from encoder_service.ingest.registry import load_preprocessor
from encoder_service.types import PreprocessOptions
from lm_adapter.engines.shared.images import ImageFile
from lm_adapter.engines.vllm.settings import mark
from lm_adapter.items import Grid

pytestmark = [pytest.mark.extended, pytest.mark.filterwarnings("ignore")]
IMAGES = {
    "kimi_vl": "<|media_start|>image<|media_content|><|media_pad|><|media_end|>",
    "kimi_k3": "<|kimi_image_placeholder|>",
}


@pytest.fixture(scope="module", params=IMAGES)
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def checkpoint(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("kimi") / family, family)


@pytest.fixture(scope="module")
def processors(checkpoint: Path) -> tuple[Any, Any]:
    """vLLM's own, and for files; the second without the checkpoint's code."""
    load_general_plugins()
    own = ModelConfig(model=str(checkpoint), dtype="bfloat16", trust_remote_code=True)
    for_files = ModelConfig(model=str(checkpoint), dtype="bfloat16")
    mark(for_files.get_multimodal_config())
    create = MULTIMODAL_REGISTRY.create_processor
    return create(own), create(for_files)


def processed(processor: Any, prompt: str, images: list[Any]) -> Any:
    return processor(prompt, processor.info.parse_mm_data({"image": images}), hf_processor_mm_kwargs={})


def file_of(image: Image.Image) -> ImageFile:
    file = io.BytesIO()
    image.save(file, "PNG")
    return ImageFile.read(file.getvalue())


def test_images_of_any_size(family: str, checkpoint: Path, processors: tuple[Any, Any]) -> None:
    """By two, and of sizes that the processors reduce."""
    encoder = load_preprocessor(checkpoint, family, DecodeLimits(1 << 30, 1 << 30))
    own, for_files = processors
    for most in (40, 700, 700, 1600):
        draw = random.Random(most)
        images = [Image.new("RGB", (draw.randint(1, most), draw.randint(1, most))) for _ in range(2)]
        prompt = f"What is {IMAGES[family]} beside {IMAGES[family]}?"
        expected = processed(own, prompt, images)
        found = processed(for_files, prompt, [file_of(image) for image in images])
        assert found["prompt_token_ids"] == expected["prompt_token_ids"]
        for number, image in enumerate(images):
            grid = Grid(*found["mm_kwargs"]["image"][number]["grid_thws"].data.tolist())
            assert grid == encoder.plan_image(image.height, image.width, PreprocessOptions()).grid
            spans = [prompts["mm_placeholders"]["image"][number] for prompts in (found, expected)]
            assert spans[0].get_num_embeds() == spans[1].get_num_embeds() == grid.h * grid.w // 4


def test_the_largest_image_takes_no_file(processors: tuple[Any, Any]) -> None:
    """With which vLLM measures its memory: as large as its own."""
    own, for_files = (
        processor.dummy_inputs.get_dummy_mm_data(2048, {"image": 1}, {})["image"][0]
        for processor in processors
    )
    assert (for_files.data, for_files.width, for_files.height) == (b"", *own.size)


def test_options_and_long_sides_are_refused(family: str, processors: tuple[Any, Any]) -> None:
    _, for_files = processors
    items = for_files.info.parse_mm_data({"image": [file_of(Image.new("RGB", (60, 60)))]})
    with pytest.raises(ValueError, match="max_pixels"):
        for_files(IMAGES[family], items, hf_processor_mm_kwargs={"max_pixels": 5})
    if family == "kimi_vl":
        with pytest.raises(ValueError, match="512 patches along a side, Kimi-VL takes 511"):
            processed(for_files, IMAGES[family], [file_of(Image.new("RGB", (7168, 20)))])
