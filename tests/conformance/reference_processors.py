"""Vectors of sizes, sampled frames, timestamps and grids, from the reference package's processors.

Owns their cases; every answer is a call of the reference's own code.
"""

from __future__ import annotations

import importlib
import random
import re
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch

from tests.conformance.vectors import Case, Vectors
from tests.parity.reference import import_reference

QWEN = {"patch_size": 16, "merge_size": 2, "temporal_patch_size": 2}
QWEN_IMAGE = {"min_pixels": 65_536, "max_pixels": 16_777_216}
QWEN_VIDEO = {"min_pixels": 4096, "max_pixels": 25_165_824}
KIMI = {"patch_size": 14, "merge_size": 2}
KIMI_IMAGE = {"max_patches": 16_384, "max_patches_per_side": 512}
KIMI_VIDEO = {"max_patches": 4096, "max_patches_per_side": 512}
SIZES = (
    (1, 1), (31, 33), (32, 32), (48, 80), (224, 224), (480, 640), (640, 480), (720, 1280), (1080, 1920),
    (2160, 3840), (4000, 6000), (200, 40), (33, 3000), (3000, 33), (5000, 5000), (400, 416), (416, 400),
)  # fmt: skip


def module(name: str) -> Any:
    import_reference()
    return importlib.import_module(f"transformers.models.{name}")


def random_sizes(seed: int, count: int) -> list[tuple[int, int]]:
    rng = random.Random(seed)
    return [(rng.randrange(1, 4000), rng.randrange(1, 4000)) for _ in range(count)]


def target_sizes() -> Vectors:
    smart = module("qwen2_vl.image_processing_qwen2_vl").smart_resize
    smart_video = module("qwen3_vl.video_processing_qwen3_vl").smart_resize
    navit = module("kimi_k25.image_processing_kimi_k25").navit_resize
    cases = []
    for height, width in (*SIZES, *random_sizes(1, 20)):
        size = {"height": height, "width": width}
        if max(height, width) <= 200 * min(height, width):
            for area in (QWEN_IMAGE, {"min_pixels": 3136, "max_pixels": 200_000}):
                target = smart(height, width, 32, **area)
                asked = {"family": "qwen_vl", "modality": "image", **QWEN, **area, **size}
                name = f"qwen {height}x{width} to {area['max_pixels']}"
                cases.append(Case("target_size", name, asked, {"height": target[0], "width": target[1]}))
        for limits in (KIMI_IMAGE, {"max_patches": 400, "max_patches_per_side": 30}):
            patches, side = limits["max_patches"], limits["max_patches_per_side"]
            target, padded = navit(height, width, 14, 2, patches, side)
            expected = {
                "height": target[0],
                "width": target[1],
                "padded_height": padded[0],
                "padded_width": padded[1],
            }
            asked = {"family": "kimi_k25", "modality": "image", **KIMI, **limits, **size}
            cases.append(Case("target_size", f"kimi {height}x{width} to {patches}", asked, expected))
    for num_frames, (height, width) in zip((2, 4, 5, 7, 64, 767, 768), random_sizes(2, 7), strict=True):
        target = smart_video(
            num_frames=num_frames, height=height, width=width, temporal_factor=2, factor=32, **QWEN_VIDEO
        )
        asked = {
            "family": "qwen_vl", "modality": "video", **QWEN, **QWEN_VIDEO,
            "height": height, "width": width, "num_frames": num_frames,
        }  # fmt: skip
        name = f"qwen clip of {num_frames} frames {height}x{width}"
        cases.append(Case("target_size", name, asked, {"height": target[0], "width": target[1]}))
    return Vectors("target_size", "smart_resize and navit_resize of the reference", tuple(cases))


@cache
def video_processor(family: str) -> Any:
    if family == "kimi_k25":
        return module("kimi_k25.video_processing_kimi_k25").Kimi_K25VideoProcessor()
    return import_reference().Qwen3VLVideoProcessor(
        patch_size=16, size={"shortest_edge": 4096, "longest_edge": 25_165_824}, cap_pixels_per_frame=False
    )


def metadata(num_frames: int, fps: float, indices: list[int] | None = None) -> Any:
    import_reference()
    video = importlib.import_module("transformers.video_utils")
    return video.VideoMetadata(total_num_frames=num_frames, fps=fps, frames_indices=indices)


def sampled(family: str, num_frames: int, source_fps: float, fps: float) -> list[int]:
    indices = video_processor(family).sample_frames(metadata(num_frames, source_fps), fps=fps)
    return [int(index) for index in indices]


def clips() -> list[tuple[int, float]]:
    rng = random.Random(3)
    fixed = [
        (1, 30.0),
        (3, 25.0),
        (4, 24.0),
        (300, 30.0),
        (301, 29.97),
        (20_000, 24.0),
        (48, 24.0),
        (97, 23.976),
    ]
    return fixed + [
        (rng.randrange(10, 4000), rng.choice([10.0, 23.976, 24.0, 25.0, 30.0, 59.94])) for _ in range(8)
    ]


def frame_indices() -> Vectors:
    cases = []
    for num_frames, source_fps in clips():
        for fps in (2.0, 0.5):
            asked = {
                "family": "qwen_vl", "num_source_frames": num_frames, "source_fps": source_fps,
                "fps": fps, "min_frames": 4, "max_frames": 768,
            }  # fmt: skip
            expected = {"indices": sampled("qwen_vl", num_frames, source_fps, fps)}
            name = f"{num_frames} frames at {source_fps}, {fps} a second"
            cases.append(Case("frame_indices", f"qwen, {name}", asked, expected))
            asked = {
                "family": "kimi_k25", "num_source_frames": num_frames, "source_fps": source_fps, "fps": fps
            }  # fmt: skip
            if num_frames < 5000:
                expected = {"indices": sampled("kimi_k25", num_frames, source_fps, fps)}
                cases.append(Case("frame_indices", f"kimi, {name}", asked, expected))
    return Vectors("frame_indices", "sample_frames of the reference's video processors", tuple(cases))


def timestamp_texts(family: str, indices: list[int], fps: float) -> list[str]:
    """What the reference's processor writes into a prompt, less the placeholders."""
    known = metadata(1_000_000, fps, list(indices))
    if family == "kimi_k25":
        processor = module("kimi_k25.processing_kimi_k25").Kimi_K25Processor
        num_chunks = -(-len(indices) // 4)
        stand_in = SimpleNamespace(
            video_processor=SimpleNamespace(merge_size=2, temporal_patch_size=4), video_token="V"
        )
        video_inputs = {
            "num_chunks_per_video": [num_chunks],
            "video_grid_thw": torch.tensor([[4, 2, 2]] * num_chunks),
            "video_metadata": [known],
        }
        written = processor.replace_video_token(stand_in, video_inputs, 0)
        return re.findall(r"\d\d:\d\d:\d\d\.\d{3}", written)
    processor = module("qwen3_vl.processing_qwen3_vl").Qwen3VLProcessor
    stand_in = SimpleNamespace(
        video_processor=SimpleNamespace(merge_size=2, temporal_patch_size=2),
        video_token="V",
        vision_start_token="(",
        vision_end_token=")",
    )
    stand_in._calculate_timestamps = processor._calculate_timestamps.__get__(stand_in)
    num_patches = -(-len(indices) // 2)
    video_inputs = {"video_grid_thw": torch.tensor([[num_patches, 2, 2]]), "video_metadata": [known]}
    return re.findall(r"<[\d.]+ seconds>", processor.replace_video_token(stand_in, video_inputs, 0))


def timestamps() -> Vectors:
    """Of the frames really sampled, also where their number was clamped."""
    processor = module("qwen3_vl.processing_qwen3_vl").Qwen3VLProcessor
    cases = []
    for num_frames, source_fps in clips():
        indices = sampled("qwen_vl", num_frames, source_fps, 2.0)
        name = f"{len(indices)} of {num_frames} frames at {source_fps}"
        asked = {
            "family": "qwen_vl", "indices": indices, "source_fps": source_fps, "temporal_patch_size": 2
        }  # fmt: skip
        expected = {
            "seconds": processor._calculate_timestamps(None, list(indices), source_fps, 2),
            "texts": timestamp_texts("qwen_vl", indices, source_fps),
        }
        cases.append(Case("timestamps", f"qwen, {name}", asked, expected))
        asked = {"family": "kimi_k25", "indices": indices, "source_fps": source_fps, "chunk_frames": 4}
        texts = timestamp_texts("kimi_k25", indices, source_fps)
        cases.append(Case("timestamps", f"kimi, {name}", asked, {"texts": texts}))
    return Vectors("timestamps", "the reference's processors, as they write them into prompts", tuple(cases))


def grids() -> Vectors:
    """What the processors give for pictures and clips of these sizes; rows: of each run of placeholders."""
    image_processors = {
        "qwen_vl": import_reference().Qwen2VLImageProcessor(
            patch_size=16, size={"shortest_edge": 65_536, "longest_edge": 16_777_216}
        ),
        "kimi_k25": module("kimi_k25.image_processing_kimi_k25").Kimi_K25ImageProcessor(),
    }
    cases = []
    for height, width in ((32, 32), (48, 80), (224, 224), (300, 451), (480, 640), (77, 700)):
        for family, processor in image_processors.items():
            features = processor([torch.zeros(3, height, width, dtype=torch.uint8)], return_tensors="pt")
            grid = next(features[key] for key in ("image_grid_thw", "image_grid_thws") if key in features)
            found = grid[0].tolist()
            asked = grid_question(family, "image", height, width)
            expected = {"grids": [found], "rows": [found[1] * found[2] // 4]}
            cases.append(Case("grid", f"{family} picture {height}x{width}", asked, expected))
    for num_frames, height, width in ((2, 64, 96), (5, 100, 60), (8, 224, 224), (9, 33, 70)):
        for family in ("qwen_vl", "kimi_k25"):
            frames = torch.zeros(num_frames, 3, height, width, dtype=torch.uint8)
            features = video_processor(family)([frames], do_sample_frames=False, return_tensors="pt")
            found = features["video_grid_thw"].tolist()
            # Qwen: a run for each temporal patch of the one grid; Kimi: one for each chunk, over its frames.
            runs = found if family == "kimi_k25" else [found[0]] * found[0][0]
            asked = {**grid_question(family, "video", height, width), "num_frames": num_frames}
            expected = {"grids": found, "rows": [h * w // 4 for _, h, w in runs]}
            cases.append(Case("grid", f"{family} clip {num_frames}x{height}x{width}", asked, expected))
    return Vectors("grid", "the reference's processors on black pictures and clips", tuple(cases))


def grid_question(family: str, modality: str, height: int, width: int) -> dict[str, Any]:
    settings = {
        ("qwen_vl", "image"): {**QWEN, **QWEN_IMAGE},
        ("qwen_vl", "video"): {**QWEN, **QWEN_VIDEO},
        ("kimi_k25", "image"): {**KIMI, **KIMI_IMAGE},
        ("kimi_k25", "video"): {**KIMI, **KIMI_VIDEO, "chunk_frames": 4},
    }[family, modality]
    return {"family": family, "modality": modality, **settings, "height": height, "width": width}


def all_vectors() -> list[Vectors]:
    return [target_sizes(), frame_indices(), timestamps(), grids()]
