"""Frames sampled, timestamps, grids and float32 pixels of clips equal the reference's video processors, bit
for bit: files read by its PyAV reader, arrays of frames, frames that were sampled before."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench.harness.reference import import_reference
from encoder_service.ingest.decode import DecodeLimits
from encoder_service.ingest.preprocessor import Preprocessor
from encoder_service.ingest.qwen2_5_vl import Qwen25Clips
from encoder_service.ingest.registry import load_preprocessor
from encoder_service.ingest.video.clip import Clip
from encoder_service.ingest.video.source import ClipHeader
from encoder_service.types import EncodedFile, FrameArray, Grid, Modality, PreprocessOptions
from tests.unit.ingest import clip_files

LIMITS = DecodeLimits(max_encoded_bytes=1 << 28, max_image_pixels=1 << 26)
HALF = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
# Small budgets, so that all of their branches are met with small pictures.
QWEN_SIZE = {"shortest_edge": 4 * 32 * 32, "longest_edge": 40 * 32 * 32}
FRAME_SIZE = {"shortest_edge": 4 * 28 * 28, "longest_edge": 20 * 28 * 28}
GLM_SIZE = {"shortest_edge": 4 * 28 * 28, "longest_edge": 60 * 28 * 28}
GLM_CLIPS = {
    "glm4v": "Glm4vVideoProcessor",
    "glm_ocr": "Glm46VVideoProcessor",
    "glm5_next": "Glm5NextVideoProcessor",
}
FAMILIES = ("qwen3_vl", "qwen3_5", "kimi_k25", *GLM_CLIPS, "qwen2_5_vl")

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


@cache
def reference_of(family: str) -> Any:
    """The reference's video processor."""
    transformers = import_reference()
    transformers.logging.set_verbosity_error()
    if family == "kimi_k25":
        from transformers.models.kimi_k25.video_processing_kimi_k25 import Kimi_K25VideoProcessor

        return Kimi_K25VideoProcessor(max_patches=40, size={"max_height": 12, "max_width": 12}, **HALF)
    if family in GLM_CLIPS:
        limits = (
            {"min_image_tokens": 16, "max_image_tokens": 90} if family == "glm5_next" else {"size": GLM_SIZE}
        )
        return getattr(transformers, GLM_CLIPS[family])(**limits)
    if family == "qwen2_5_vl":
        return transformers.Qwen2VLVideoProcessor(size=FRAME_SIZE, fps=2, do_sample_frames=True, **HALF)
    return transformers.Qwen3VLVideoProcessor(size=QWEN_SIZE, **HALF)


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Preprocessor]:
    """Our preprocessors, from the files that the reference's processors save."""

    @cache
    def load(family: str) -> Preprocessor:
        folder = tmp_path_factory.mktemp(family)
        save(folder, family, reference_of(family))
        return load_preprocessor(folder, family, LIMITS)

    return load


def save(folder: Path, family: str, reference: Any) -> None:
    transformers = import_reference()
    if family == "kimi_k25":
        from transformers.models.kimi_k25.image_processing_kimi_k25 import Kimi_K25ImageProcessor

        Kimi_K25ImageProcessor(**HALF).save_pretrained(folder)
    elif family in GLM_CLIPS:
        getattr(transformers, GLM_CLIPS[family].replace("Video", "Image"))().save_pretrained(folder)
    else:
        patch_size = reference.patch_size
        transformers.Qwen2VLImageProcessor(patch_size=patch_size, **HALF).save_pretrained(folder)
    reference.save_pretrained(folder)


def expected_of(
    family: str, frames: np.ndarray, metadata: Any, **overrides: Any
) -> tuple[torch.Tensor, list[Grid], Any]:
    """(pixels [P, patch_dim], grids, metadata) by the reference. frames: uint8 [T, H, W, 3]."""
    batch = reference_of(family)(
        videos=[torch.from_numpy(frames).permute(0, 3, 1, 2)],
        video_metadata=[metadata],
        input_data_format="channels_first",
        return_metadata=True,
        return_tensors="pt",
        **overrides,
    )
    pixels = batch["pixel_values_videos"]
    if not pixels.numel():
        pytest.skip("the reference takes no frame of this clip")
    grids = [Grid(*grid) for grid in batch["video_grid_thw"].tolist()]
    return pixels.reshape(pixels.shape[0], -1), grids, batch["video_metadata"][0]


def read(
    clip: Clip, preprocessor: Preprocessor, max_patches: int = 1 << 20
) -> tuple[torch.Tensor, list[Grid]]:
    """All pieces' (pixels [P, patch_dim], grids)."""
    pixels, grids = [], []
    for piece in clip.pieces(max_patches):
        pixels.append(preprocessor.patchify(piece.frames_THWC))
        grids.append(piece.grid)
    return torch.cat(pixels), grids


def check(clip: Clip, preprocessor: Preprocessor, expected: tuple[torch.Tensor, list[Grid], Any]) -> None:
    """Whatever size its pieces have."""
    pixels, grids, metadata = expected
    found, pieces = read(clip, preprocessor, max_patches=random.choice([1, 8, 64, 1 << 20]))
    plan = clip.plan
    assert list(plan.indices) == [int(index) for index in metadata.frames_indices]
    expected_s = metadata.timestamps
    if any(isinstance(time_s, torch.Tensor) for time_s in expected_s):  # 5.17 has Kimi's in float32
        expected_s = pytest.approx([float(time_s) for time_s in expected_s], rel=1e-6)
    if isinstance(preprocessor.clips, Qwen25Clips):
        # Positions are of the rate.
        expected_s = [index / metadata.sampled_fps for index in range(len(metadata.frames_indices))]
    assert list(plan.timestamps_s) == expected_s
    if plan.chunk_grids:
        assert list(plan.chunk_grids) == grids == pieces
    else:
        assert [plan.grid] == grids
        assert sum(grid.t for grid in pieces) == plan.grid.t
    assert torch.equal(found, pixels), (found.shape, pixels.shape)


def metadata_of(num_frames: int, fps: float) -> Any:
    import_reference()
    from transformers.video_utils import VideoMetadata

    return VideoMetadata(total_num_frames=num_frames, fps=fps, duration=num_frames / fps)


def open_clip(preprocessor: Preprocessor, content: EncodedFile | FrameArray, **options: Any) -> Clip:
    assert preprocessor.clips is not None
    return preprocessor.clips.open(content, PreprocessOptions(**options))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["h264.mp4", "mpeg4.mp4"])
def test_a_file_is_read_as_the_reference_reads_it(
    family: str, kind: str, ours: Callable[[str], Preprocessor], tmp_path: Path
) -> None:
    import_reference()
    from transformers.video_utils import load_video

    data = clip_files.encode(clip_files.moving(random.randint(40, 70), 60, 90), kind, fps=15, key_every=16)
    (tmp_path / "clip.mp4").write_bytes(data)
    frames, metadata = load_video(
        str(tmp_path / "clip.mp4"),
        backend="pyav",
        sample_indices_fn=partial(reference_of(family).sample_frames, fps=2),
    )
    # Its reader gives a frame once that is sampled twice; its others, and arrays, give it twice.
    frames = frames[np.unique(metadata.frames_indices, return_inverse=True)[1]]
    clip = open_clip(ours(family), EncodedFile(data))
    check(clip, ours(family), expected_of(family, frames, metadata, do_sample_frames=False))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["vp9.webm", "av1.webm", "h264.mkv", "gif.gif"])
def test_a_file_whose_frames_the_reference_cannot_count_is_sampled_as_their_array(
    family: str, kind: str, ours: Callable[[str], Preprocessor]
) -> None:
    num_frames = random.randint(20, 40)
    data = clip_files.encode(clip_files.moving(num_frames, 48, 80), kind, fps=10)
    clip = open_clip(ours(family), EncodedFile(data))
    expected = expected_of(family, clip_files.decoded(data), metadata_of(num_frames, 10.0))
    check(clip, ours(family), expected)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", [random.randrange(1 << 30) for _ in range(10)], ids=lambda seed: "random")
def test_arrays_of_any_length_rate_and_size(
    family: str, seed: int, ours: Callable[[str], Preprocessor]
) -> None:
    rng = random.Random(seed)
    num_frames, fps = rng.randint(2, 90), rng.choice([1.5, 7.0, 23.976, 24.0, 30000 / 1001, 60.0])
    height, width = rng.randint(6, 260), rng.randint(6, 260)
    rates: list[float | None] = [None, 0.5, 1.0, 3.7, 12.0] if family != "glm_ocr" else [None]
    if family == "kimi_k25":  # the reference refuses more frames than there are
        rates = [rate for rate in rates if max(1, int(num_frames / fps * (rate or 2))) <= num_frames]
    sampled_fps = rng.choice(rates)
    options: dict[str, Any] = {} if sampled_fps is None else {"fps": sampled_fps}
    overrides = dict(options)
    if family.startswith("qwen"):
        # One alone may contradict the checkpoint's other.
        limits = {"min_pixels": rng.randint(1, 90_000), "max_pixels": rng.randint(1, 400_000)}
        names = rng.choice([[], ["min_pixels"], ["max_pixels"], list(limits)])
        limits["max_pixels"] += limits["min_pixels"] if len(names) == 2 else 0
        options |= {name: limits[name] for name in names}
        edges = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}
        overrides["size"] = dict(reference_of(family).size) | {edges[name]: limits[name] for name in names}
    ours(family).check_options(Modality.VIDEO, PreprocessOptions(**options))
    frames = np.random.default_rng(seed).integers(0, 256, (num_frames, height, width, 3), dtype=np.uint8)
    clip = open_clip(ours(family), FrameArray(torch.from_numpy(frames), fps), **options)
    try:
        expected = expected_of(family, frames, metadata_of(num_frames, fps), **overrides)
    except (ZeroDivisionError, ValueError) as error:
        # 5.17 has no frame of a clip shorter than the time between two.
        if isinstance(error, ValueError) and not str(error).startswith("t:0 "):
            raise
        pytest.skip("the reference takes no frame of this clip")
    except IndexError:
        # 5.17 may ask for a frame after the last one; ours are the others.
        asked = reference_of(family).sample_frames(metadata_of(num_frames, fps), fps=sampled_fps).tolist()
        clips = ours(family).clips
        assert clips is not None
        found = clips.sample(ClipHeader(num_frames, fps, height, width), PreprocessOptions(**options))
        assert asked[-1] == num_frames
        assert found == asked[:-1]
        return
    check(clip, ours(family), expected)


@pytest.mark.parametrize("family", GLM_CLIPS)
def test_glm_takes_the_frames_of_a_clip_of_any_length_that_the_reference_takes(
    family: str, ours: Callable[[str], Preprocessor]
) -> None:
    """Around the lengths at which the rules change: 30 s, 300 s, 2400 s, and 2048 frames."""
    clips = ours(family).clips
    assert clips is not None
    for seconds in (1.1, 29.9, 30.0, 31.0, 299.7, 300.0, 301.0, 1030.0, 2399.0, 2405.0):
        for fps in (0.7, 2.0, 24000 / 1001):
            num_frames = max(1, round(seconds * fps))
            expected = reference_of(family).sample_frames(metadata_of(num_frames, fps))
            found = clips.sample(ClipHeader(num_frames, fps, 8, 8), PreprocessOptions())
            assert found == expected.tolist() or not len(expected), (seconds, fps)
            assert found


@pytest.mark.parametrize("family", FAMILIES)
def test_p07_frames_that_were_sampled_before_keep_their_timestamps(
    family: str, ours: Callable[[str], Preprocessor]
) -> None:
    num_frames = random.randint(3, 11)
    frames = clip_files.moving(num_frames, 70, 50)
    indices = sorted(random.sample(range(400), num_frames))
    fps = 24000 / 1001
    metadata = metadata_of(400, fps)
    metadata.frames_indices = indices
    at_s = tuple(index / fps for index in indices)
    clip = open_clip(ours(family), FrameArray(torch.from_numpy(frames), None, at_s))
    pixels, _, _ = expected_of(family, frames, metadata, do_sample_frames=False)
    assert torch.equal(read(clip, ours(family))[0], pixels)
    assert clip.plan.timestamps_s == at_s


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5"])
@pytest.mark.parametrize(
    ("num_frames", "low", "high"),
    [(50, 4, 6), (3, 4, 768), (90, 12, 12), (20, 2, 3), (20, None, 2), (30, None, 3), (90, 12, None)],
)
def test_p07_a_clamped_number_of_frames_gives_the_timestamps_of_those_taken(
    family: str, num_frames: int, low: int | None, high: int | None, ours: Callable[[str], Preprocessor]
) -> None:
    """One alone may contradict the checkpoint's other: at least 4, at most 768."""
    frames = clip_files.moving(num_frames, 48, 64)
    reference = reference_of(family)
    ours(family).check_options(Modality.VIDEO, PreprocessOptions(min_frames=low, max_frames=high))
    clip = open_clip(
        ours(family), FrameArray(torch.from_numpy(frames), 10.0), min_frames=low, max_frames=high
    )
    before = reference.min_frames, reference.max_frames
    try:  # the reference takes these from itself, not from the call
        reference.min_frames, reference.max_frames = low or before[0], high or before[1]
        expected = expected_of(family, frames, metadata_of(num_frames, 10.0))
    finally:
        reference.min_frames, reference.max_frames = before
    check(clip, ours(family), expected)


def test_a_single_frame_counts_as_one_that_is_shown_twice(ours: Callable[[str], Preprocessor]) -> None:
    """The reference refuses it, but what it makes of the frame repeated is what repeating it means."""
    frame = clip_files.moving(1, 50, 70)
    metadata = metadata_of(2, 24.0)
    metadata.frames_indices = [0, 0]
    pixels, grids, _ = expected_of("qwen3_vl", np.repeat(frame, 2, axis=0), metadata, do_sample_frames=False)
    clip = open_clip(ours("qwen3_vl"), FrameArray(torch.from_numpy(frame)))
    assert clip.plan.grid == grids[0]
    assert torch.equal(read(clip, ours("qwen3_vl"))[0], pixels)


@pytest.mark.parametrize("turn", [(0, 1, -1, 0), (0, -1, 1, 0), (-1, 0, 0, -1), (-1, 0, 0, 1), (0, 1, 1, 0)])
def test_a_turned_file_equals_upright_frames(
    turn: tuple[int, int, int, int], ours: Callable[[str], Preprocessor]
) -> None:
    data = clip_files.patched_matrix(clip_files.encode(clip_files.moving(12, 48, 80), fps=6), turn)
    coded = clip_files.decoded(data)
    a, b, c, d = turn
    _, height, width, _ = coded.shape
    upright = np.zeros((len(coded), *((width, height) if b else (height, width)), 3), np.uint8)
    for y in range(height):
        for x in range(width):  # where the matrix puts each pixel, moved back into the picture
            to_x, to_y = a * x + c * y, b * x + d * y
            upright[:, to_y % upright.shape[1], to_x % upright.shape[2]] = coded[:, y, x]
    # Mirroring by -1 maps 0 to 0 and 1 to the last: one further than the picture's own edge.
    if -1 in (a, c):
        upright = np.roll(upright, -1, axis=2)
    if -1 in (b, d):
        upright = np.roll(upright, -1, axis=1)
    expected = expected_of("qwen3_vl", upright, metadata_of(len(coded), 6.0))
    check(open_clip(ours("qwen3_vl"), EncodedFile(data)), ours("qwen3_vl"), expected)


def test_frames_of_qwen2_5_share_a_budget_where_the_checkpoint_says_so(tmp_path: Path) -> None:
    processor = import_reference().Qwen2VLVideoProcessor
    budget = {"cap_pixels_per_frame": True, "max_video_tokens": 60}
    reference = processor(size=FRAME_SIZE, fps=2, do_sample_frames=True, **budget, **HALF)
    save(tmp_path, "qwen2_5_vl", reference)
    preprocessor = load_preprocessor(tmp_path, "qwen2_5_vl", LIMITS)
    for num_frames in (20, 90, 400):
        frames = clip_files.moving(num_frames, 120, 150)
        batch = reference(
            videos=[torch.from_numpy(frames).permute(0, 3, 1, 2)],
            video_metadata=[metadata_of(num_frames, 15.0)],
            input_data_format="channels_first",
            return_tensors="pt",
        )
        clip = open_clip(preprocessor, FrameArray(torch.from_numpy(frames), 15.0))
        assert [list(clip.plan.grid)] == batch["video_grid_thw"].tolist()
        assert torch.equal(read(clip, preprocessor)[0], batch["pixel_values_videos"])
