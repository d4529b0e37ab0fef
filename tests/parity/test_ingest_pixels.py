"""Resized uint8 pixels and float32 pixel_values equal the reference's default processors, bit for bit."""

from __future__ import annotations

import io
import json
import random
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from bench.harness.reference import import_reference
from encoder_service.errors import AspectRatioExceeded
from encoder_service.ingest.decode import DecodeLimits
from encoder_service.ingest.preprocessor import Preprocessor
from encoder_service.ingest.registry import load_preprocessor
from encoder_service.types import FrameItem, Modality, PreprocessOptions
from tests.unit.ingest import image_files

LIMITS = DecodeLimits(max_encoded_bytes=1 << 28, max_image_pixels=1 << 26)
PLAIN = PreprocessOptions()
CLIP = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
HALF = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
NUM_RANDOM = 120

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


@cache
def qwen_reference(low: int = 65536, high: int = 16777216, clip: bool = False, patch_size: int = 16) -> Any:
    return import_reference().Qwen2VLImageProcessor(
        size={"shortest_edge": low, "longest_edge": high},
        patch_size=patch_size,
        **(CLIP if clip else HALF),
    )


def ling_reference() -> Any:
    return qwen_reference(4096, 4_194_304, clip=True)


@cache
def kimi_reference(clip: bool = False) -> Any:
    import_reference()
    from transformers.models.kimi_k25.image_processing_kimi_k25 import Kimi_K25ImageProcessor

    return Kimi_K25ImageProcessor(**(CLIP if clip else HALF))


@cache
def glm_reference(family: str) -> Any:
    """With small budgets, so that all of their branches are met with small pictures."""
    transformers = import_reference()
    if family == "glm5_next":
        return transformers.Glm5NextImageProcessor(min_image_tokens=20, max_image_tokens=90)
    return transformers.Glm46VImageProcessor(size={"shortest_edge": 60_000, "longest_edge": 200_000})


@pytest.fixture
def saved(tmp_path: Path) -> Callable[[Any, str], Preprocessor]:
    """Our preprocessor of a reference processor, from the file that it saves."""

    def save(reference: Any, family: str) -> Preprocessor:
        reference.save_pretrained(tmp_path)
        preprocessor = load_preprocessor(tmp_path, family, LIMITS)
        assert isinstance(preprocessor, Preprocessor)
        return preprocessor

    return save


def picture(height: int, width: int) -> np.ndarray:
    """uint8 [H, W, 3]: noise over a gradient, with flat black and white parts where the kernel overshoots."""
    rng = np.random.default_rng(height * 100003 + width)
    array = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
    array[: height // 3] = (array[: height // 3] > 127) * 255
    array[height // 2 :, : width // 2] //= 8
    return array


def reference_pixels(reference: Any, array: np.ndarray, **overrides: Any) -> tuple[torch.Tensor, list[int]]:
    """(pixel_values [P, patch_dim], grid) by the reference, from a channels-first tensor."""
    image_CHW = torch.from_numpy(array).permute(2, 0, 1)
    batch = reference(
        images=[image_CHW], return_tensors="pt", input_data_format="channels_first", **overrides
    )
    values = batch["pixel_values"]
    return values.reshape(values.shape[0], -1), batch["image_grid_thw"][0].tolist()


def check(
    preprocessor: Preprocessor,
    reference: Any,
    array: np.ndarray,
    options: PreprocessOptions = PLAIN,
    **overrides: Any,
) -> None:
    expected, grid = reference_pixels(reference, array, **overrides)
    item, _, _ = preprocessor.open_image(image_files.ppm(array), options).load()
    where = (array.shape, options)
    assert list(item.grid) == grid, where
    assert isinstance(item, FrameItem)
    values = preprocessor.patchify(item.frames_THWC)
    assert values.dtype == torch.float32
    assert torch.equal(values, expected), (where, (values - expected).abs().max())


def random_sides(family: str, count: int) -> list[tuple[int, int]]:
    """Sizes of all kinds: plain, around multiples of a block, strips, tiny."""
    rng = random.Random(family)
    block = 32 if family.startswith("qwen3") else 28
    sizes = []
    size: Sequence[int]
    for _ in range(count):
        match rng.randrange(5):
            case 0:
                size = rng.randint(3, 450), rng.randint(3, 450)
            case 1:
                size = tuple(max(1, block * rng.randint(1, 13) + rng.choice((-1, 0, 1))) for _ in range(2))
            case 2:  # halfway between two multiples, where rounding goes to the even one
                size = tuple(block * rng.randint(1, 13) + block // 2 for _ in range(2))
            case 3:
                thin = rng.randint(1, 9)
                size = rng.sample((thin, thin * rng.randint(20, 199)), 2)
            case _:
                size = rng.randint(1, 40), rng.randint(1, 40)
        sizes.append((size[0], size[1]))
    return sizes


SPECIAL = [
    (1, 1), (1, 2), (2, 1), (1, 200), (200, 1), (16, 16), (14, 14), (28, 28), (32, 32), (31, 33), (48, 80),
    (700, 900), (325, 325), (316, 317),
]  # fmt: skip


@pytest.mark.parametrize(("family", "patch_size"), [("qwen3_vl", 16), ("qwen2_5_vl", 14)])
def test_qwen_on_random_sizes(
    family: str, patch_size: int, saved: Callable[[Any, str], Preprocessor]
) -> None:
    reference = qwen_reference(4096, 100_000, clip=patch_size == 14, patch_size=patch_size)
    preprocessor = saved(reference, family)
    for height, width in random_sides(family, NUM_RANDOM) + SPECIAL:
        check(preprocessor, reference, picture(height, width))


def test_kimi_on_random_sizes(saved: Callable[[Any, str], Preprocessor]) -> None:
    reference = kimi_reference()
    preprocessor = saved(reference, "kimi_k25")
    for height, width in random_sides("kimi_k25", NUM_RANDOM) + SPECIAL:
        # Images below the budget are only padded: limits of the request make most of these shrink.
        patches, side = 40 + (height * 7 + width) % 500, 8 + (height + width) % 40
        options = PreprocessOptions(max_patches=patches, max_patches_per_side=side)
        size = {"max_height": side, "max_width": side}
        check(preprocessor, reference, picture(height, width), options, max_patches=patches, size=size)


@pytest.mark.parametrize("family", ["glm4v", "glm5_next"])
def test_glm_on_random_sizes(family: str, saved: Callable[[Any, str], Preprocessor]) -> None:
    reference = glm_reference(family)
    preprocessor = saved(reference, family)
    for height, width in random_sides(family, NUM_RANDOM) + SPECIAL:
        check(preprocessor, reference, picture(height, width))
    for height, width in [(1, 201), (300, 3)] if family == "glm5_next" else []:
        check(preprocessor, reference, picture(height, width))  # any aspect ratio is taken


QWEN_SIZES = [(1080, 1920), (1, 1), (255, 257), (256, 256), (5, 900), (1000, 5), (37, 2049)]
KIMI_SIZES = [(1080, 1920), (1, 1), (7168, 3), (3, 7169), (1, 65535), (65535, 1), (900, 3999)]


@pytest.mark.parametrize(
    ("family", "sizes"),
    [("qwen3_vl", QWEN_SIZES), ("qwen3_5", QWEN_SIZES), ("kimi_k25", KIMI_SIZES), ("ling_vl", QWEN_SIZES)],
)
def test_published_settings(
    family: str, sizes: list[tuple[int, int]], saved: Callable[[Any, str], Preprocessor]
) -> None:
    references: dict[str, Callable[[], Any]] = {"kimi_k25": kimi_reference, "ling_vl": ling_reference}
    reference = references.get(family, qwen_reference)()
    preprocessor = saved(reference, family)
    for height, width in sizes:
        check(preprocessor, reference, picture(height, width))


def test_qwen_with_one_limit_of_a_request_that_may_contradict_the_checkpoints_other(
    saved: Callable[[Any, str], Preprocessor],
) -> None:
    reference = qwen_reference(20_000, 60_000)
    preprocessor = saved(reference, "qwen3_vl")
    rng = random.Random(6)
    for height, width in [*random_sides("one limit", 50), (480, 640), (90, 120), (300, 500)]:
        pixels = rng.choice((1, 900, 5000, 19_999, 20_000, 30_000, 60_001, 90_000))
        for name, edge in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
            options = PreprocessOptions(**{name: pixels})
            preprocessor.check_options(Modality.IMAGE, options)
            size = {"shortest_edge": 20_000, "longest_edge": 60_000} | {edge: pixels}
            check(preprocessor, reference, picture(height, width), options, size=size)


def test_a_checkpoint_with_one_limit_by_its_own_name_that_contradicts_its_size(tmp_path: Path) -> None:
    reference = import_reference()
    qwen_reference(20_000, 60_000).save_pretrained(tmp_path)
    file = tmp_path / "preprocessor_config.json"
    values = json.loads(file.read_text())
    for name, pixels in (("max_pixels", 10_000), ("min_pixels", 90_000)):
        file.write_text(json.dumps(values | {name: pixels}))
        loaded = reference.Qwen2VLImageProcessor.from_pretrained(tmp_path)
        preprocessor = load_preprocessor(tmp_path, "qwen3_vl", LIMITS)
        for height, width in [(90, 120), (150, 150), (300, 400)]:
            check(preprocessor, loaded, picture(height, width))


@pytest.mark.parametrize("family", ["qwen3_vl", "kimi_k25"])
def test_any_mean_and_std(family: str, saved: Callable[[Any, str], Preprocessor]) -> None:
    reference = kimi_reference(clip=True) if family == "kimi_k25" else qwen_reference(4096, 90_000, clip=True)
    preprocessor = saved(reference, family)
    ramp = np.arange(256, dtype=np.uint8).repeat(3).reshape(8, 32, 3)
    for array in (picture(123, 234), picture(224, 224), np.ascontiguousarray(np.tile(ramp, (8, 2, 1)))):
        check(preprocessor, reference, array)


@pytest.mark.parametrize(("height", "width"), [(1, 201), (402, 1), (3, 601), (65535, 1)])
def test_the_reference_refuses_the_same_aspects(
    height: int, width: int, saved: Callable[[Any, str], Preprocessor]
) -> None:
    reference = qwen_reference(4096, 100_000)
    preprocessor = saved(reference, "qwen3_vl")
    array = picture(height, width)
    with pytest.raises(ValueError, match="aspect ratio"):
        reference_pixels(reference, array)
    with pytest.raises(AspectRatioExceeded):
        preprocessor.open_image(image_files.ppm(array), PLAIN).load()
    # One step less is fine for both.
    side = min(height, width)
    check(preprocessor, reference, picture(side, 200 * side))


FILES = image_files.every_file() | image_files.every_orientation()


@pytest.mark.parametrize("family", ["qwen3_vl", "kimi_k25"])
def test_p42_from_file_bytes_to_pixel_values(family: str, saved: Callable[[Any, str], Preprocessor]) -> None:
    """The whole route: the reference processor gets the opened file, whose transparency releases from 5.2x on
    composite over white; older ones drop it."""
    reference = kimi_reference() if family == "kimi_k25" else qwen_reference(4096, 90_000)
    preprocessor = saved(reference, family)
    clear = reference(images=[Image.new("RGBA", (448, 448))], return_tensors="pt")["pixel_values"]
    preprocessor.transparent = "white" if bool((clear > 0).all()) else "drop"
    for name, data in FILES.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            opened = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
            batch = reference(images=[opened], return_tensors="pt")
        item, _, _ = preprocessor.open_image(data, PLAIN).load()
        assert list(item.grid) == batch["image_grid_thw"][0].tolist(), name
        assert isinstance(item, FrameItem)
        values = preprocessor.patchify(item.frames_THWC)
        assert torch.equal(values, batch["pixel_values"].reshape(values.shape)), name
