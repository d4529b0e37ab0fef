"""This project's answers: the adapter's modules, and the service's for what the service alone computes.

Owns the translation of questions into calls, nothing else.
"""

from __future__ import annotations

import base64
import functools
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch

from encoder_service.ingest.decode import DecodeLimits
from encoder_service.ingest.glm import (
    Glm5NextClips,
    Glm5NextPreprocessor,
    Glm5NextSettings,
    GlmClips,
    GlmPreprocessor,
    GlmVideoSettings,
    glm4v_indices,
    glm5_next_indices,
    glm46v_indices,
)
from encoder_service.ingest.moonvit import MoonViTClips, MoonViTPreprocessor, moonvit_indices
from encoder_service.ingest.preprocessor import Preprocessor
from encoder_service.ingest.qwen2_5_vl import framewise_indices
from encoder_service.ingest.qwen3_omni import OmniClips
from encoder_service.ingest.qwen_vl import QwenClips, QwenVLPreprocessor, qwen_indices
from encoder_service.ingest.registry import load_preprocessor
from encoder_service.ingest.settings import (
    MoonViTSettings,
    MoonViTVideoSettings,
    Normalisation,
    QwenVideoSettings,
    QwenVLSettings,
)
from encoder_service.ingest.video.clip import timestamps_of
from encoder_service.ingest.video.source import ClipHeader, ClipLimits
from encoder_service.store.host_memory import SealedFile
from encoder_service.types import PreprocessOptions as ServiceOptions
from lm_adapter.engines.shared.checkpoint import VisionInterface, read_config, vision_interface
from lm_adapter.errors import InvalidRequest, MappingFailed
from lm_adapter.items import FramesItem, Grid, Modality, PreprocessOptions
from lm_adapter.keys import content_digest, frames_digest, item_key, pixels_digest
from lm_adapter.prefill.clip_texts import (
    glm_frame_texts,
    kimi_chunk_texts,
    qwen_frame_texts,
    qwen_patch_distance_s,
    qwen_patch_times,
)
from lm_adapter.prefill.mrope import MRopePositions, mrope_positions
from lm_adapter.prefill.placeholders import ExpandedPrompt, expand_placeholders, prompt_item
from lm_adapter.prefill.prefix_cache import PadScheme, pad_id, restore_placeholders
from lm_adapter.prefill.splice import RowsLayout, Splicer, StepChunk, splice_step
from lm_adapter.shm.broker import Attachment
from lm_adapter.shm.reader import MappedArena
from lm_adapter.testing import fake_model
from tests.conformance.protocol import Function
from tests.published import PUBLISHED
from vision_encoder.layout import control_page, directory, keys
from vision_encoder.layout.control_page import LayoutError, PageHeader, Probe
from vision_encoder.v1 import broker_pb2

Asked = dict[str, Any]
PLAIN = ServiceOptions()
# Families with Kimi's sizes, frames and texts. All others have Qwen's.
KIMI_RULES = ("kimi_k25",)
PIXELS = Normalisation((0.5,) * 3, (0.5,) * 3, 1 / 255)
IMAGE_LIMITS = DecodeLimits(max_encoded_bytes=1, max_image_pixels=1 << 30)


def answer_content_digest(asked: Asked) -> Asked:
    return {"digest": content_digest(base64.b64decode(asked["data_base64"])).hex()}


def answer_pixels_digest(asked: Asked) -> Asked:
    data = base64.b64decode(asked["data_base64"])
    return {"digest": pixels_digest(asked["dtype"], asked["shape"], data, Grid(*asked["grid"])).hex()}


def answer_embedding_key(asked: Asked) -> Asked:
    options = {name: value for name, _, value in asked["options"]}
    grid = asked["pixels_grid"]
    key = keys.embedding_key(
        bytes.fromhex(asked["digest"]),
        namespace=asked["namespace"],
        modality=asked["modality"],
        model_fingerprint=bytes.fromhex(asked["model_fingerprint"]),
        preprocess_fingerprint=bytes.fromhex(asked["preprocess_fingerprint"]),
        options=PreprocessOptions(**options).given(),
        source=keys.ENCODED_SOURCE if grid is None else keys.pixels_source(grid),
        dtype=asked["dtype"],
    )
    return {"key": key.hex()}


def frames_item(asked: Asked) -> FramesItem:
    data, times = base64.b64decode(asked["data_base64"]), asked["timestamps_s"]
    return FramesItem(
        np.frombuffer(data, np.uint8).reshape(asked["shape"]),
        fps=asked["fps"],
        timestamps_s=None if times is None else tuple(times),
        digest=None if asked["digest"] is None else bytes.fromhex(asked["digest"]),
        options=PreprocessOptions(**{name: value for name, _, value in asked["options"]}),
    )


def answer_frames_key(asked: Asked) -> Asked:
    item = frames_item(asked)
    try:
        item.array()
    except InvalidRequest:
        return {"refused": True}
    fingerprints: Asked = {
        name: bytes.fromhex(asked[name]) for name in ("model_fingerprint", "preprocess_fingerprint")
    }
    key = item_key(item, fake_model(dtype=asked["dtype"], **fingerprints), namespace=asked["namespace"])
    return {"digest": (item.digest or frames_digest(item)).hex(), "key": key.hex()}


@contextmanager
def arena_of(arena_id: bytes, page: bytes, listed: bytes, namespace: str = "") -> Iterator[MappedArena]:
    """The adapter's reader over a control page, a directory and memory of one byte. Raises MappingFailed."""
    files = [SealedFile("conformance", len(content)) for content in (b"0", page, listed)]
    with ExitStack() as closing:
        descriptors = []
        for file, content in zip(files, (b"0", page, listed), strict=True):
            file.mapping[:] = content
            closing.callback(file.close)
            descriptors.append(file.export_fd())
            closing.callback(os.close, descriptors[-1])
        geometry = broker_pb2.ArenaGeometry(
            arena_id=arena_id,
            kind=broker_pb2.ARENA_KIND_HOST,
            size_bytes=1,
            page_bytes=len(page),
            directory_bytes=len(listed),
        )
        arena = MappedArena(Attachment(geometry, *descriptors), namespace, None)
        closing.callback(arena.unmap, 1.0)
        yield arena


def answer_control_page(asked: Asked) -> Asked:
    page = base64.b64decode(asked["page_base64"])
    try:
        header = control_page.read_header(page, len(page))
        listed = directory.pack_header(header.arena_id, header.instance, header.num_slots)
        listed = listed.ljust(directory.directory_bytes(header.num_slots), b"\0")
        with arena_of(header.arena_id, page, listed) as arena:
            read = arena.read(asked["slot_index"], int(asked["generation"]), 0, 1)
    except (LayoutError, MappingFailed):
        return {"refused": True}
    return {
        "arena_id": header.arena_id.hex(),
        "instance": str(header.instance),
        "num_slots": header.num_slots,
        "probe": {
            "offset_bytes": str(header.probe.offset_bytes),
            "num_bytes": str(header.probe.num_bytes),
            "sha256": header.probe.sha256.hex(),
        },
        "is_current": read is not None,
    }


def answer_directory(asked: Asked) -> Asked:
    listed = base64.b64decode(asked["directory_base64"])
    try:
        header = directory.read_header(listed, len(listed))
        no_probe = Probe(0, 1, bytes(32))
        page = control_page.pack_header(
            PageHeader(header.arena_id, header.instance, header.num_slots, no_probe)
        )
        page = page.ljust(control_page.page_bytes(header.num_slots), b"\0")
        with arena_of(header.arena_id, page, listed, asked["namespace"]) as arena:
            record = arena.find(bytes.fromhex(asked["key"]))
    except (LayoutError, MappingFailed):
        return {"refused": True}
    if record is None:
        return {"record": None}
    found = record._asdict()
    for name in ("generation", "offset_bytes", "rows_bytes"):
        found[name] = str(found[name])
    found["content_digest"] = record.content_digest.hex()
    return {"record": {name: value for name, value in found.items() if name not in ("key", "tag")}}


def answer_pad_id(asked: Asked) -> Asked:
    digest = bytes.fromhex(asked["digest"])
    return {"pad_id": pad_id(digest, Modality(asked["modality"]), PadScheme(asked["scheme"]))}


def answer_restored_ids(asked: Asked) -> Asked:
    restored = restore_placeholders(
        asked["ids"],
        scheme=PadScheme(asked["scheme"]),
        image_placeholder_id=asked["image_placeholder_id"],
        video_placeholder_id=asked["video_placeholder_id"],
        vocab_size=asked["vocab_size"],
    )
    return {"ids": restored.tolist()}


def qwen_images(asked: Asked) -> QwenVLSettings:
    names = ("patch_size", "merge_size", "temporal_patch_size", "min_pixels", "max_pixels")
    return QwenVLSettings(*[*(asked[name] for name in names), PIXELS])


def moonvit_images(asked: Asked) -> MoonViTSettings:
    names = ("patch_size", "merge_size", "max_patches", "max_patches_per_side")
    return MoonViTSettings(*[*(asked[name] for name in names), PIXELS])


def answer_target_size(asked: Asked) -> Asked:
    height, width = asked["height"], asked["width"]
    if asked["modality"] == "video":
        plan = qwen_clips(asked).sized(asked["num_frames"], height, width, PLAIN)
        return {"height": plan.height, "width": plan.width}
    if asked["family"] == "qwen_vl":
        grid = QwenVLPreprocessor(qwen_images(asked), IMAGE_LIMITS).plan_image(height, width, PLAIN).grid
        return {"height": grid.h * asked["patch_size"], "width": grid.w * asked["patch_size"]}
    preprocessor = MoonViTPreprocessor(moonvit_images(asked), IMAGE_LIMITS)
    target, _, grid = preprocessor.plan_image(height, width, PLAIN)
    return {
        "height": target[0],
        "width": target[1],
        "padded_height": grid.h * asked["patch_size"],
        "padded_width": grid.w * asked["patch_size"],
    }


def qwen_clips(asked: Asked) -> QwenClips:
    settings = QwenVideoSettings(
        min_pixels=asked["min_pixels"],
        max_pixels=asked["max_pixels"],
        fps=2.0,
        min_frames=4,
        max_frames=768,
        max_video_tokens=768,
        cap_pixels_per_frame=False,
    )
    rules = OmniClips if asked["family"] == "qwen3_omni_moe" else QwenClips
    return rules(settings, qwen_images(asked), ClipLimits())


def moonvit_clips(asked: Asked) -> MoonViTClips:
    limits = asked["max_patches"], asked["max_patches_per_side"]
    settings = MoonViTVideoSettings(*limits, fps=2.0, chunk_frames=asked["chunk_frames"])
    return MoonViTClips(settings, moonvit_images(asked), ClipLimits())


def answer_frame_indices(asked: Asked) -> Asked:
    source = asked["num_source_frames"], asked["source_fps"]
    if asked["family"] == "qwen3_omni_moe":
        bounds = {name: asked[name] for name in ("fps", "min_frames", "max_frames")}
        return {"indices": framewise_indices(*source, **bounds, temporal=asked["temporal_patch_size"])}
    if asked["family"] in KIMI_RULES:
        return {"indices": moonvit_indices(*source, fps=asked["fps"], max_frames=None)}
    bounds = {name: asked[name] for name in ("fps", "min_frames", "max_frames")}
    return {"indices": qwen_indices(*source, **bounds)}


def answer_timestamps(asked: Asked) -> Asked:
    times = timestamps_of(asked["indices"], asked["source_fps"])
    if asked["family"] in KIMI_RULES:
        return {"texts": kimi_chunk_texts(times, chunk_frames=asked["chunk_frames"])}
    temporal = asked["temporal_patch_size"]
    return {
        "seconds": qwen_patch_times(times, temporal_patch_size=temporal),
        "texts": qwen_frame_texts(times, temporal_patch_size=temporal),
    }


def answer_grid(asked: Asked) -> Asked:
    height, width = asked["height"], asked["width"]
    is_kimi, modality = asked["family"] in KIMI_RULES, Modality(asked["modality"])
    if modality is Modality.VIDEO:
        clips = moonvit_clips(asked) if is_kimi else qwen_clips(asked)
        plan = clips.sized(asked["num_frames"], height, width, PLAIN)
        grids = list(plan.chunk_grids) or [plan.grid]
    else:
        preprocessor: Preprocessor = (
            MoonViTPreprocessor(moonvit_images(asked), IMAGE_LIMITS)
            if is_kimi
            else QwenVLPreprocessor(qwen_images(asked), IMAGE_LIMITS)
        )
        grids = [preprocessor.plan_image(height, width, PLAIN).grid]
    items = [
        prompt_item(
            grid,
            placeholder_id=0,
            merge_size=2,
            modality=modality,
            merges_time=is_kimi,
            has_timestamps=asked["family"] != "qwen3_omni_moe",
        )
        for grid in grids
    ]
    rows = [count for item in items for count in item.unit_rows]
    return {"grids": [list(grid) for grid in grids], "rows": rows}


def answer_glm_grid(asked: Asked) -> Asked:
    height, width, is_clip = asked["height"], asked["width"], asked["modality"] == "video"
    sizes = asked["patch_size"], asked["merge_size"], asked["temporal_patch_size"]
    is_next = asked["family"] == "glm5_next"
    if is_next:
        pixels = asked["temporal_patch_size"] * (asked["patch_size"] * asked["merge_size"]) ** 2
        least, most = (asked[name] * pixels for name in ("min_image_tokens", "max_image_tokens"))
        settings: QwenVLSettings = Glm5NextSettings(*sizes, least, most, PIXELS, 1)
    else:
        least, most = asked["min_pixels"], asked["max_pixels"]
        settings = QwenVLSettings(*sizes, least, most, PIXELS)
    if is_clip:
        rules = Glm5NextClips if is_next else GlmClips
        video = GlmVideoSettings(least, most, fps=2.0, max_duration_s=300.0, max_frames=None)
        grid = rules(video, settings, ClipLimits()).sized(asked["num_frames"], height, width, PLAIN).grid
    else:
        preprocessor = (Glm5NextPreprocessor if is_next else GlmPreprocessor)(settings, IMAGE_LIMITS)
        grid = preprocessor.plan_image(height, width, PLAIN).grid
    modality = Modality(asked["modality"])
    item = prompt_item(grid, placeholder_id=0, merge_size=2, modality=modality, merges_time=False)
    return {"grid": list(grid), "rows": list(item.unit_rows)}


def answer_glm_clip(asked: Asked) -> Asked:
    """With the published settings of each model."""
    source = asked["num_source_frames"], asked["source_fps"]
    if asked["family"] == "glm4v":
        indices = glm4v_indices(*source, fps=2.0, max_duration_s=300.0)
    elif asked["family"] == "glm46v":
        indices = glm46v_indices(*source, temporal=2)
    else:
        indices = glm5_next_indices(*source, fps=2.0, max_frames=2048, max_duration_s=None)
    times = timestamps_of(indices, asked["source_fps"])
    return {
        "indices": indices,
        "texts": glm_frame_texts(times, whole_seconds=asked["family"] == "glm4v"),
    }


@functools.cache
def published(model: str) -> tuple[Preprocessor, VisionInterface]:
    """Of a release's files."""
    interface = vision_interface(read_config(PUBLISHED / model))
    return load_preprocessor(PUBLISHED / model, interface.family, IMAGE_LIMITS), interface


def answer_model_images(asked: Asked) -> Asked:
    preprocessor, interface = published(asked["model"])
    grid = preprocessor.plan_image(asked["height"], asked["width"], PLAIN).grid
    return {"grid": list(grid), "rows": interface.prompt_item(grid, Modality.IMAGE).num_rows}


def answer_model_clips(asked: Asked) -> Asked:
    preprocessor, interface = published(asked["model"])
    assert preprocessor.clips is not None
    names = ("num_source_frames", "source_fps", "height", "width")
    plan = preprocessor.clips.plan(ClipHeader(*(asked[name] for name in names)), PLAIN)
    grids = plan.chunk_grids or (plan.grid,)
    answer: Asked = {
        "indices": list(plan.indices),
        "grids": [list(grid) for grid in grids],
        "rows": [rows for grid in grids for rows in interface.prompt_item(grid, Modality.VIDEO).unit_rows],
    }
    if interface.positions_per_second is not None:
        answer["seconds_per_patch"] = qwen_patch_distance_s(plan.timestamps_s)
    return answer


def answer_model_positions(asked: Asked) -> Asked:
    _, interface = published(asked["model"])
    grids = [item["grid"] for item in asked["items"]]
    items = [interface.prompt_item(item["grid"], Modality(item["modality"])) for item in asked["items"]]
    prompt = expand_placeholders(asked["ids"], items, interface.placeholder_ids)
    steps = [
        item["seconds_per_patch"] * interface.positions_per_second if "seconds_per_patch" in item else 1.0
        for item in asked["items"]
    ]
    found = mrope_positions(prompt, grids, merge_size=interface.merge_size, time_steps=steps)
    return {"positions": found.prompt.tolist(), "delta": found.delta}


def prompt_of(asked: Asked) -> ExpandedPrompt:
    placeholders = {
        modality: asked[f"{modality.value}_placeholder_id"] for modality in (Modality.IMAGE, Modality.VIDEO)
    }
    items = [
        prompt_item(
            item["grid"],
            placeholder_id=placeholders[Modality(item["modality"])],
            merge_size=asked["merge_size"],
            modality=Modality(item["modality"]),
            merges_time=False,
            has_timestamps="time_steps" not in asked,
        )
        for item in asked["items"]
    ]
    return expand_placeholders(asked["ids"], items, list(placeholders.values()))


def positions_of(asked: Asked) -> MRopePositions:
    grids = [item["grid"] for item in asked["items"]]
    steps = asked.get("time_steps")
    return mrope_positions(prompt_of(asked), grids, merge_size=asked["merge_size"], time_steps=steps)


def answer_positions(asked: Asked) -> Asked:
    found = positions_of(asked)
    return {"positions": found.prompt.tolist(), "delta": found.delta}


def answer_centred_positions(asked: Asked) -> Asked:
    grids = [item["grid"] for item in asked["items"]]
    found = mrope_positions(prompt_of(asked), grids, merge_size=asked["merge_size"], centred=True)
    return {"positions": found.prompt.tolist(), "delta": found.delta}


def answer_resumed_positions(asked: Asked) -> Asked:
    found = positions_of(asked)
    total = found.num_tokens + asked["num_generated"]
    return {
        "positions": found.chunk(asked["start"], total).tolist(),
        "next_position": found.decode(total),
    }


def answer_splice(asked: Asked) -> Asked:
    prompt = prompt_of(asked)
    layout = RowsLayout(asked["out_width"], asked["num_deepstack_levels"])
    rows = [
        torch.from_numpy(
            10_000.0 * (span.item + 1)
            + 10.0 * np.arange(span.length)[:, None]
            + np.arange(layout.width)[None]
        ).float()
        for span in prompt.spans
    ]
    start, end = asked["start"], asked["end"]
    embeds = -torch.arange(start + 1.0, end + 1.0)[:, None].expand(-1, asked["out_width"]).contiguous()
    splicer = Splicer(prompt.spans, rows, layout, inputs_embeds_dtype=torch.float32)
    spliced = splice_step(embeds, [StepChunk(splicer, start, end - start)])
    visual_tokens = spliced.visual_tokens.tolist()
    return {
        "inputs_embeds": embeds.tolist(),
        "visual_mask": [token in visual_tokens for token in range(end - start)],
        "deepstack": [level.tolist() for level in spliced.deepstack],
    }


def implementation() -> Mapping[str, Function]:
    """Every subject."""
    return {
        name.removeprefix("answer_"): value for name, value in globals().items() if name.startswith("answer_")
    }
