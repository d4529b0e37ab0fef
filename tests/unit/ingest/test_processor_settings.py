"""Processor settings are read from the checkpoint's files, in every spelling, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from encoder_service.checkpoints.synthetic import small_files
from encoder_service.errors import CheckpointError, InvalidOption, UnsupportedCheckpoint
from encoder_service.ingest.decode import DecodeLimits
from encoder_service.ingest.glm import glm4v_indices
from encoder_service.ingest.moonvit import MoonViTPreprocessor
from encoder_service.ingest.qwen_vl import QwenVLPreprocessor
from encoder_service.ingest.registry import FAMILIES, load_preprocessor
from encoder_service.ingest.settings import MoonViTSettings, Normalisation, QwenVLSettings
from encoder_service.types import PreprocessOptions

LIMITS = DecodeLimits(max_encoded_bytes=1 << 20, max_image_pixels=1 << 20)
HALF = [0.5, 0.5, 0.5]
STATISTICS: dict[str, Any] = {"image_mean": HALF, "image_std": [0.25, 0.5, 0.75]}
QWEN: dict[str, Any] = STATISTICS | {
    "size": {"longest_edge": 16777216, "shortest_edge": 65536},
    "patch_size": 16, "temporal_patch_size": 2, "merge_size": 2,
    "processor_class": "Qwen3VLProcessor", "image_processor_type": "Qwen2VLImageProcessorFast",
}  # fmt: skip
KIMI_PUBLISHED: dict[str, Any] = STATISTICS | {
    "in_patch_limit": 1024, "patch_size": 14, "merge_kernel_size": 2, "fixed_output_tokens": None,
    "patch_limit_on_one_side": 64, "in_patch_limit_each_frame": 4096, "in_patch_limit_video": None,
    "sample_fps": 2.0, "max_num_frames_each_video": None, "temporal_merge_kernel_size": 4,
    "timestamp_mode": "hh:mm:ss.fff",
    "config_type": "media_proc.processors.moonvit.MoonViTMediaProcessorConfig",
}  # fmt: skip
KIMI_NESTED: dict[str, Any] = {
    "auto_map": {"AutoProcessor": "kimi_k25_processor.KimiK25Processor"}, "media_proc_cfg": KIMI_PUBLISHED,
}  # fmt: skip
KIMI_REFERENCE: dict[str, Any] = STATISTICS | {
    "do_convert_rgb": True, "do_normalize": True, "do_rescale": True, "do_resize": True, "resample": 3,
    "image_processor_type": "Kimi_K25ImageProcessor", "rescale_factor": 1 / 255, "max_patches": 1024,
    "merge_size": 2, "patch_size": 14, "size": {"max_height": 64, "max_width": 64},
}  # fmt: skip
NORMALISATION = Normalisation((0.5, 0.5, 0.5), (0.25, 0.5, 0.75), 1 / 255)


def write(folder: Path, values: object, name: str = "preprocessor_config.json") -> Path:
    (folder / name).write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5"])
@pytest.mark.parametrize(
    "values",
    [
        QWEN,
        QWEN | {"size": None, "min_pixels": 65536, "max_pixels": 16777216},
        QWEN | {"size": {"longest_edge": 9, "shortest_edge": 9}, "min_pixels": 65536, "max_pixels": 16777216},
        QWEN | {"do_resize": True, "resample": 3, "do_center_crop": None, "crop_size": None, "new": 1},
    ],
)
def test_qwen_spellings(tmp_path: Path, family: str, values: dict[str, Any]) -> None:
    preprocessor = load_preprocessor(write(tmp_path, values), family, LIMITS)
    assert isinstance(preprocessor, QwenVLPreprocessor)
    assert preprocessor.settings == QwenVLSettings(16, 2, 2, 65536, 16777216, NORMALISATION)
    assert preprocessor.patch_dim == 1536


@pytest.mark.parametrize(
    "values",
    [
        KIMI_NESTED,
        KIMI_PUBLISHED,
        KIMI_REFERENCE,
        KIMI_NESTED | {"media_proc_cfg": KIMI_PUBLISHED | {"merge_kernel_size": [2, 2]}},
    ],
)
def test_p09_kimi_spellings_nested_ones_included(tmp_path: Path, values: dict[str, Any]) -> None:
    preprocessor = load_preprocessor(write(tmp_path, values), "kimi_k25", LIMITS)
    assert isinstance(preprocessor, MoonViTPreprocessor)
    assert preprocessor.settings == MoonViTSettings(14, 2, 1024, 64, NORMALISATION)
    assert preprocessor.patch_dim == 588


def test_the_combined_file_wins_over_the_preprocessor_file_as_in_the_reference(tmp_path: Path) -> None:
    write(tmp_path, QWEN | {"patch_size": 14})
    write(tmp_path, {"image_processor": QWEN}, "processor_config.json")
    assert load_preprocessor(tmp_path, "qwen3_vl", LIMITS).patch_dim == 1536
    # Older checkpoints have a combined file without settings of images.
    for combined in ({"processor_class": "Qwen3VLProcessor"}, {"image_processor": None}):
        write(tmp_path, combined, "processor_config.json")
        assert load_preprocessor(tmp_path, "qwen3_vl", LIMITS).patch_dim == 3 * 2 * 14**2


@pytest.mark.parametrize("family", FAMILIES)
def test_no_file_is_an_error_not_class_defaults(tmp_path: Path, family: str) -> None:
    with pytest.raises(CheckpointError, match=r"no preprocessor_config\.json"):
        load_preprocessor(tmp_path, family, LIMITS)
    write(tmp_path, {"video_processor": {}}, "processor_config.json")
    with pytest.raises(CheckpointError, match="image_processor"):
        load_preprocessor(tmp_path, family, LIMITS)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "is not JSON"),
        (b"{", "is not JSON"),
        (b"\x89PNG\r\n", "is not JSON"),
        (b"[1, 2]", "holds a list, needs an object"),
        (b"null", "holds a NoneType, needs an object"),
    ],
)
def test_a_file_that_is_no_object(tmp_path: Path, data: bytes, text: str) -> None:
    """Of any file of a checkpoint."""
    (tmp_path / "preprocessor_config.json").write_bytes(data)
    with pytest.raises(UnsupportedCheckpoint, match=rf"preprocessor_config\.json {text}"):
        load_preprocessor(tmp_path, "qwen3_vl", LIMITS)


def test_an_unknown_family(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedCheckpoint, match=r"llava.*qwen3_vl, qwen3_5, kimi_k25"):
        load_preprocessor(write(tmp_path, QWEN), "llava", LIMITS)


@pytest.mark.parametrize(
    "key", ["size", "patch_size", "temporal_patch_size", "merge_size", "image_mean", "image_std"]
)
def test_qwen_missing_settings_are_named(tmp_path: Path, key: str) -> None:
    write(tmp_path, {name: value for name, value in QWEN.items() if name != key})
    with pytest.raises(UnsupportedCheckpoint, match=f"lacks {key}"):
        load_preprocessor(tmp_path, "qwen3_vl", LIMITS)
    nested = {name: value for name, value in KIMI_PUBLISHED.items() if name != "patch_size"}
    with pytest.raises(UnsupportedCheckpoint, match="media_proc_cfg, lacks patch_size"):
        load_preprocessor(write(tmp_path, {"media_proc_cfg": nested}), "kimi_k25", LIMITS)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"patch_size": 0}, r"patch_size = 0, needs an integer"),
        ({"patch_size": "16"}, r"patch_size = '16'"),
        ({"patch_size": True}, r"patch_size = True"),
        ({"merge_size": 2.0}, r"merge_size = 2.0"),
        ({"size": 4096}, r"size = 4096, needs an object"),
        ({"size": {"longest_edge": 4096}}, r"size, lacks shortest_edge"),
        ({"size": {"longest_edge": 4096, "shortest_edge": 8192}}, r"min_pixels = 8192.*max_pixels = 4096"),
        ({"size": None, "min_pixels": 9, "max_pixels": 8}, r"min_pixels = 9.*max_pixels = 8"),
        ({"image_mean": [0.5, 0.5]}, r"image_mean = \[0.5, 0.5\], needs three finite numbers"),
        ({"image_mean": [0.5, 0.5, "x"]}, r"image_mean"),
        ({"image_std": [0.5, 0.5, 0.0]}, r"image_std.*above 0"),
        ({"image_std": [0.5, 0.5, float("nan")]}, r"image_std"),
        ({"rescale_factor": 0}, r"rescale_factor = 0"),
        ({"resample": 2}, r"resample = 2, needs 3"),
        ({"do_resize": False}, r"do_resize = False, needs True"),
        ({"do_center_crop": True}, r"do_center_crop = True, needs False"),
    ],
)
def test_qwen_settings_that_are_refused(tmp_path: Path, changes: dict[str, Any], text: str) -> None:
    with pytest.raises(UnsupportedCheckpoint, match=text):
        load_preprocessor(write(tmp_path, QWEN | changes), "qwen3_vl", LIMITS)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (KIMI_PUBLISHED | {"fixed_output_tokens": 64}, r"fixed_output_tokens = 64, needs null"),
        (KIMI_PUBLISHED | {"in_patch_limit": -1}, r"in_patch_limit = -1"),
        (KIMI_PUBLISHED | {"merge_kernel_size": [2, 4]}, r"merge_kernel_size = \[2, 4\]"),
        (KIMI_PUBLISHED | {"patch_limit_on_one_side": 63}, r"63, needs a multiple of the merge size 2"),
        (
            KIMI_REFERENCE | {"size": {"max_height": 64, "max_width": 32}},
            r"max_width = 32, needs max_height = 64",
        ),
    ],
)
def test_kimi_settings_that_are_refused(tmp_path: Path, values: dict[str, Any], text: str) -> None:
    with pytest.raises(UnsupportedCheckpoint, match=text):
        load_preprocessor(write(tmp_path, values), "kimi_k25", LIMITS)


@pytest.mark.parametrize(
    ("family", "changes", "text"),
    [
        # The reference would cut sides that are no whole blocks.
        ("kimi_vl", {"pad_input": False}, "pad_input = False, needs True"),
        ("kimi_vl", {"pad_input": None}, "pad_input = None, needs True"),
        ("kimi_vl", {"in_token_limit": 0}, "in_token_limit = 0"),
        (
            "kimi_k3",
            {"image_mean": [0.5, 0.5, 0.4]},
            r"image_mean = \[0.5, 0.5, 0.4\], needs \[0.5, 0.5, 0.5\]",
        ),
        ("kimi_k3", {"transparent_bg_fill_stage": "never"}, "needs one of before_resize, after_resize"),
        (
            "kimi_k3",
            {"transparent_bg_config": {"pattern": "plaid"}},
            "needs one of black, white, gray, chess",
        ),
        ("kimi_k3", {"transparent_bg_config": {"chessboard_gray_value": 256}}, "= 256, needs 0 to 255"),
        ("kimi_k3", {"fixed_output_tokens": 64}, "fixed_output_tokens = 64, needs null"),
    ],
)
def test_settings_of_kimi_vl_and_kimi_k3_that_are_refused(
    tmp_path: Path, family: str, changes: dict[str, Any], text: str
) -> None:
    values = json.loads(small_files(family, "tiny")["preprocessor_config.json"])
    values.get("media_proc_cfg", values).update(changes)
    with pytest.raises(UnsupportedCheckpoint, match=text):
        load_preprocessor(write(tmp_path, values), family, LIMITS)


def test_fingerprints_cover_every_setting_and_nothing_else(tmp_path: Path) -> None:
    def fingerprint(values: dict[str, Any], family: str) -> bytes:
        return load_preprocessor(write(tmp_path, values), family, LIMITS).fingerprint

    changes: list[dict[str, Any]] = [
        {"patch_size": 14},
        {"temporal_patch_size": 1},
        {"merge_size": 4},
        {"size": {"longest_edge": 16777216, "shortest_edge": 65537}},
        {"size": {"longest_edge": 16777217, "shortest_edge": 65536}},
        {"image_mean": [0.5, 0.5, 0.5000000001]},
        {"image_std": [0.5, 0.25, 0.75]},
        {"rescale_factor": 1 / 256},
    ]
    prints = [fingerprint(QWEN, "qwen3_vl"), *(fingerprint(QWEN | change, "qwen3_vl") for change in changes)]
    kimi = [
        KIMI_NESTED,
        KIMI_REFERENCE | {"max_patches": 1023},
        KIMI_REFERENCE | {"size": {"max_height": 62, "max_width": 62}},
    ]
    prints += [fingerprint(values, "kimi_k25") for values in kimi]
    assert len(set(prints)) == len(prints)
    assert all(len(value) == 32 for value in prints)
    # The same settings in another spelling and order give the same fingerprint.
    assert fingerprint(dict(reversed(QWEN.items())) | {"processor_class": "Other"}, "qwen3_5") == prints[0]
    # A file that says something of clips has theirs in it as well; of images alone, spellings agree.
    of_images = {key: value for key, value in KIMI_PUBLISHED.items() if key != "in_patch_limit_each_frame"}
    assert fingerprint(KIMI_REFERENCE, "kimi_k25") == fingerprint(of_images, "kimi_k25")
    assert fingerprint(KIMI_NESTED, "kimi_k25") != fingerprint(of_images, "kimi_k25")
    # The same across versions and machines: keys derived from it outlive a process.
    drop = load_preprocessor(write(tmp_path, QWEN), "qwen3_vl", LIMITS, transparent="drop").fingerprint
    assert drop.hex() == "47414e82808309af5d3b57e6a0cb276615e827dcd765f3b1973271f280bcc901"
    assert prints[0].hex() == "93e2519f351f7092be26ba145fbb0b0658d9db5eea666547c45024f63d0ce3c6"


GLM = QWEN | {"patch_size": 14, "image_processor_type": "Glm4vImageProcessorFast"}
GLM5_PART = {
    **STATISTICS, "patch_size": 14, "merge_size": 2, "temporal_patch_size": 2, "min_image_tokens": 16,
    "max_image_tokens": 80,
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "name", "rules"),
    [
        ("glm4v", "Glm4vVideoProcessor", "glm4v_video.1"),
        ("glm4v", "Glm46VVideoProcessor", "glm46v_video.1"),
        ("glm_ocr", "Glm46VVideoProcessor", "glm46v_video.1"),
        ("glm4v", None, "glm4v_video.1"),
    ],
)
def test_the_named_processor_decides_how_glm_samples_clips(
    family: str, name: str | None, rules: str, tmp_path: Path
) -> None:
    """GLM-4.6V has GLM-4.5V's model_type. Without a file for clips, the class for images names the one."""
    write(tmp_path, GLM)
    if name is not None:
        write(
            tmp_path, GLM | {"video_processor_type": name, "num_frames": 16}, "video_preprocessor_config.json"
        )
    clips = load_preprocessor(tmp_path, family, LIMITS).clips
    assert clips is not None
    assert clips.rules == rules


def test_glm_takes_a_frame_of_a_clip_at_any_rate() -> None:
    """Where the longest clip has less than one."""
    assert glm4v_indices(4000, 10.0, fps=0.003, max_duration_s=300.0) == [0, 0]


def test_glm_without_a_longest_clip(tmp_path: Path) -> None:
    parts = {"image_processor": GLM5_PART, "video_processor": GLM5_PART | {"max_duration": None}}
    write(tmp_path, parts, "processor_config.json")
    assert load_preprocessor(tmp_path, "glm5_next", LIMITS).clips is not None


def test_glm_settings_that_cannot_be_are_refused_by_name(tmp_path: Path) -> None:
    write(tmp_path, GLM | {"video_processor_type": "GlmgaVideoProcessor"})
    with pytest.raises(
        UnsupportedCheckpoint, match="video_processor_type = 'GlmgaVideoProcessor', needs Glm4v"
    ):
        load_preprocessor(tmp_path, "glm4v", LIMITS)
    for changed, words in (
        ({"min_image_tokens": 90}, "min_image_tokens = 90, needs at most max_image_tokens = 80"),
        ({"max_image_tokens": None}, "lacks max_image_tokens"),
    ):
        both = dict.fromkeys(("image_processor", "video_processor"), GLM5_PART | changed)
        write(tmp_path, both, "processor_config.json")
        with pytest.raises(UnsupportedCheckpoint, match=words):
            load_preprocessor(tmp_path, "glm5_next", LIMITS)
    write(
        tmp_path,
        {"image_processor": GLM5_PART, "video_processor": GLM5_PART | {"patch_expand_factor": 2}},
        "processor_config.json",
    )
    with pytest.raises(UnsupportedCheckpoint, match="patch_expand_factor = 2, needs 1, as images have"):
        load_preprocessor(tmp_path, "glm5_next", LIMITS)


def test_a_limit_below_one_block_is_refused_with_both_numbers(tmp_path: Path) -> None:
    both = dict.fromkeys(("image_processor", "video_processor"), GLM5_PART)
    preprocessor = load_preprocessor(write(tmp_path, both, "processor_config.json"), "glm5_next", LIMITS)
    with pytest.raises(InvalidOption, match="max_pixels is 1000, 2 frames of one block have 1568"):
        preprocessor.plan_image(50, 60, PreprocessOptions(max_pixels=1000))
