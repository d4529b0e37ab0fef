"""Settings, options and plans of clips, without the reference."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from encoder_service.checkpoints.synthetic.files import small_files
from encoder_service.errors import (
    ClipTooLarge,
    InvalidOption,
    InvalidRequest,
    PixelTensorMismatch,
    UndecodableClip,
    UnsupportedCheckpoint,
)
from encoder_service.ingest.decode import DecodeLimits
from encoder_service.ingest.preprocessor import Preprocessor
from encoder_service.ingest.registry import load_preprocessor
from encoder_service.ingest.resize import resize_and_pad
from encoder_service.ingest.video.av_file import AvFile, Run
from encoder_service.ingest.video.source import ClipLimits
from encoder_service.types import EncodedFile, FrameArray, Modality, PreprocessOptions
from tests.unit.ingest import clip_files

LIMITS = DecodeLimits(max_encoded_bytes=1 << 26, max_image_pixels=1 << 24)
PLAIN = PreprocessOptions()
KIMI_CHANGES: tuple[dict[str, Any], ...] = ({}, {"sample_fps": 1.0})


def load(folder: Path, family: str, limits: ClipLimits | None = None, /, **changes: Any) -> Preprocessor:
    """A published checkpoint's preprocessor with changes of its settings of clips."""
    for name, text in small_files(family, "tiny").items():
        if "preprocessor_config" not in name:
            continue
        values = json.loads(text)
        if name.startswith("video") or family == "kimi_k25":
            values.get("media_proc_cfg", values).update(changes)
        (folder / name).write_text(json.dumps(values))
    return load_preprocessor(folder, family, LIMITS, limits)


def frames(count: int = 6, height: int = 48, width: int = 64) -> torch.Tensor:
    return torch.from_numpy(clip_files.moving(count, height, width))


@pytest.mark.parametrize(
    ("family", "changes", "text"),
    [
        ("qwen3_vl", {"patch_size": 14}, "patch_size = 14, needs 16, as images have"),
        ("qwen3_vl", {"temporal_patch_size": 1}, "temporal_patch_size = 1, needs 2"),
        ("qwen3_vl", {"image_mean": [0.1, 0.2, 0.3]}, "image_mean"),
        ("qwen3_vl", {"num_frames": 8}, "num_frames = 8, needs null"),
        ("qwen3_vl", {"do_sample_frames": False}, "do_sample_frames = False, needs True"),
        ("qwen3_vl", {"fps": 0}, "fps = 0"),
        ("qwen3_vl", {"min_frames": 9, "max_frames": 8}, "min_frames = 9, needs at most max_frames = 8"),
        ("qwen3_vl", {"cap_pixels_per_frame": 1}, "cap_pixels_per_frame = 1"),
        ("kimi_k25", {"in_patch_limit_video": 100}, "in_patch_limit_video = 100, needs null"),
        ("kimi_k25", {"timestamp_mode": "s"}, "timestamp_mode = 's'"),
        ("kimi_k25", {"sample_fps": None}, "lacks sample_fps"),
        ("kimi_k25", {"temporal_merge_kernel_size": 0}, "temporal_merge_kernel_size = 0"),
    ],
)
def test_settings_that_the_rules_do_not_cover_are_refused(
    family: str, changes: dict[str, Any], text: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedCheckpoint, match=text):
        load(tmp_path, family, **changes)


def test_p11_settings_of_clips_are_in_the_fingerprint(tmp_path: Path) -> None:
    kimi = tmp_path / "kimi"
    kimi.mkdir()
    changes: tuple[dict[str, Any], ...] = (
        {},
        {"fps": 3},
        {"max_frames": 100},
        {"min_frames": 5},
        {"size": {"shortest_edge": 4096, "longest_edge": 1 << 20}},
        {"cap_pixels_per_frame": True},
        {"cap_pixels_per_frame": True, "max_video_tokens": 3},
    )
    prints = [load(tmp_path, "qwen3_vl", **each).fingerprint for each in changes]
    prints += [load(kimi, "kimi_k25", **each).fingerprint for each in KIMI_CHANGES]
    assert len(set(prints)) == len(prints)


@pytest.mark.parametrize(
    ("family", "options", "text"),
    [
        ("qwen3_vl", {"fps": 0.0}, "fps is 0.0, allowed are more than 0 and at most 1000"),
        ("qwen3_vl", {"fps": float("nan")}, "fps is nan"),
        ("qwen3_vl", {"max_frames": 4096}, "max_frames is 4096, allowed are 1 to 2048"),
        ("qwen3_vl", {"min_frames": 8, "max_frames": 7}, "min_frames 8 is above max_frames 7"),
        ("qwen3_vl", {"min_pixels": 9, "max_pixels": 8}, "min_pixels 9 is above max_pixels 8"),
        ("qwen3_vl", {"min_pixels": 0}, "min_pixels is 0, needs at least 1"),
        ("qwen3_vl", {"max_patches": 5}, "does not apply to video items"),
        ("kimi_k25", {"min_frames": 2}, "does not apply to video items"),
        ("kimi_k25", {"max_patches": 0}, "max_patches is 0"),
        ("kimi_k25", {"max_patches_per_side": 513}, "max_patches_per_side is 513, allowed are 1 to 512"),
    ],
)
def test_options_out_of_bounds_name_both_numbers(
    family: str, options: dict[str, Any], text: str, tmp_path: Path
) -> None:
    preprocessor = load(tmp_path, family)
    with pytest.raises(InvalidOption, match=text):
        preprocessor.check_options(Modality.VIDEO, PreprocessOptions(**options))


@pytest.mark.parametrize(
    ("content", "error", "text"),
    [
        (FrameArray(torch.zeros(2, 4, 4, 3)), PixelTensorMismatch, r"float32 \[2, 4, 4, 3\]"),
        (FrameArray(torch.zeros(2, 4, 4, dtype=torch.uint8)), PixelTensorMismatch, r"\[2, 4, 4\]"),
        (FrameArray(torch.zeros(0, 4, 4, 3, dtype=torch.uint8)), PixelTensorMismatch, r"\[0, 4, 4, 3\]"),
        (FrameArray(torch.zeros(2, 0, 4, 3, dtype=torch.uint8)), UndecodableClip, "4x0"),
        (FrameArray(frames(), 0.0), InvalidRequest, r"0\.0 fps"),
        (FrameArray(frames(), None, (0.0, 1.0)), InvalidRequest, "2 timestamps for 6 frames"),
        (FrameArray(frames(3), None, (0.0, 2.0, 1.0)), InvalidRequest, r"timestamp 2 is 1\.0 s.*2\.0 s"),
        (FrameArray(frames(1), None, (-1.0,)), InvalidRequest, r"timestamp 0 is -1\.0 s"),
        (FrameArray(frames(1), None, (float("nan"),)), InvalidRequest, "timestamp 0 is nan"),
        (FrameArray(frames(1), None, (1e6,)), ClipTooLarge, r"lasts 1000000\.0 s, the limit is 7200\.0 s"),
        (FrameArray(frames(), 1e-4), ClipTooLarge, r"lasts 60000\.0 s"),
    ],
)
def test_arrays_that_are_no_clip_are_refused(
    content: FrameArray, error: type[Exception], text: str, tmp_path: Path
) -> None:
    rules = load(tmp_path, "qwen3_vl").clips
    assert rules is not None
    with pytest.raises(error, match=text):
        rules.open(content, PLAIN)


def test_more_frames_than_are_taken_are_refused_with_both_numbers(tmp_path: Path) -> None:
    rules = load(tmp_path, "kimi_k25", ClipLimits(max_frames=3)).clips
    assert rules is not None
    with pytest.raises(ClipTooLarge, match="5 frames of the clip would be taken, the limit is 3"):
        rules.open(FrameArray(frames(5), 2.0), PLAIN)


@pytest.mark.parametrize("kind", ["h264.mp4", "gif.gif"])
def test_a_clip_that_is_closed_while_it_is_read_stops_between_two_frames(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of many frames, few of them wanted, would else hold a worker for as long as it decodes."""
    rules = load(tmp_path, "qwen3_vl").clips
    assert rules is not None
    data = clip_files.encode(clip_files.moving(400), kind, b_frames=0, key_every=1000)
    clip = rules.open(EncodedFile(data), PreprocessOptions(min_frames=2, max_frames=2))
    assert clip.plan.indices == (0, 399)
    looked: list[object] = []
    feed = AvFile._seek

    def fed(source: AvFile, run: Run) -> Iterator[tuple[object, int]]:
        for packet in feed(source, run):
            looked.append(packet)
            yield packet

    def closing(image_HWC: torch.Tensor, target: tuple[int, int], padded: tuple[int, int]) -> torch.Tensor:
        clip.close()
        return resize_and_pad(image_HWC, target, padded)

    monkeypatch.setattr(AvFile, "_seek", fed)
    monkeypatch.setattr("encoder_service.ingest.video.clip.resize_and_pad", closing)
    assert list(clip.pieces(1 << 20)) == []
    assert len(looked) < 50
    assert list(clip.pieces(1 << 20)) == []
