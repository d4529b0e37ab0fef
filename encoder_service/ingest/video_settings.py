"""Processor settings of clips, read from the checkpoint's own files, and the limits on what a clip may ask
for.

Owns which file they come from, their spellings and the values that stand for keys which published files leave
out. Reading, types and refusals are ``settings``'; what the settings do is ``video_rules``'.

A published Qwen file of clips has the area and the patch sizes alone, so that for sampling the reference's
own values count (``Qwen3VLVideoProcessor``: 2 frames a second, 4 to 768 frames). Kimi's stand beside those of
images (``sample_fps``, ``in_patch_limit_each_frame``, ``temporal_merge_kernel_size``).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from encoder_service.config_clips import ClipSettings
from encoder_service.ingest.settings import (
    PREPROCESSOR_FILE,
    PROCESSOR_FILE,
    MoonViTSettings,
    Normalisation,
    QwenVLSettings,
    SettingsReader,
    read_object,
)

VIDEO_PREPROCESSOR_FILE = "video_preprocessor_config.json"
MIB = 1 << 20

_COMMON = frozenset({"image_mean", "image_std", "rescale_factor", "patch_size", "merge_size"})
# Keys that name the class or say how metadata is handed over: no frame depends on them.
_INERT = frozenset({"video_processor_type", "return_metadata"})
_SAMPLING = frozenset({"fps", "do_sample_frames", "num_frames"})


@dataclass(frozen=True)
class QwenVideoSettings:
    """Qwen3-VL and Qwen3.5. min_pixels, max_pixels: frames times height times width of the target; fps:
    frames
    sampled a second. cap_pixels_per_frame: also hold one frame to max_video_tokens visual tokens, as releases
    of the reference from 5.22 can."""

    min_pixels: int
    max_pixels: int
    fps: float
    min_frames: int
    max_frames: int
    max_video_tokens: int
    cap_pixels_per_frame: bool


@dataclass(frozen=True)
class MoonViTVideoSettings:
    """Kimi-K2.5. max_patches: of one frame, before padding; max_frames: None for no bound of the
    checkpoint's; chunk_frames: frames that the tower averages into one set of rows."""

    max_patches: int
    max_patches_per_side: int
    fps: float
    chunk_frames: int
    max_frames: int | None = None


@dataclass(frozen=True)
class ClipLimits:
    """What a clip may ask for. max_encoded_bytes: of the file; max_frame_pixels: width times height of a
    frame; max_duration_s and max_source_frames: of the file, whatever is sampled; max_decoded_pixels: of all
    frames that are decoded for those that are sampled; max_frames: that are sampled; decode_threads: of one
    clip's decoder. Raises ValueError for a limit below 1."""

    max_encoded_bytes: int = 256 * MIB
    max_frame_pixels: int = 64_000_000
    max_duration_s: float = 7200.0
    max_source_frames: int = 1_000_000
    max_decoded_pixels: int = 250_000_000_000
    max_frames: int = 2048
    decode_threads: int = 1

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"{name} is {value}, needs at least 1")


def clip_limits(settings: ClipSettings, max_frame_pixels: int, num_workers: int) -> ClipLimits:
    """The limits that the service's settings say. num_workers: threads that decode and resize."""
    return ClipLimits(
        max_encoded_bytes=settings.max_clip_bytes,
        max_frame_pixels=max_frame_pixels,
        max_duration_s=settings.max_clip_duration_s,
        max_source_frames=settings.max_clip_source_frames,
        max_decoded_pixels=settings.max_clip_decoded_pixels,
        max_frames=settings.max_clip_frames,
        decode_threads=settings.clip_decode_threads or max(2, min(8, num_workers // 4)),
    )


def read_video_settings_file(checkpoint: Path) -> SettingsReader | None:
    """The settings of clips of a checkpoint folder: the video_processor section of its processor_config.json,
    else its video_preprocessor_config.json, else its preprocessor_config.json, in the reference's order
    (``get_video_processor_dict``). None where there is none, and where the last one is not read for images
    either: what nobody reads may be of another model.

    Raises UnsupportedCheckpoint when one is malformed.
    """
    processor, names = checkpoint / PROCESSOR_FILE, [VIDEO_PREPROCESSOR_FILE, PREPROCESSOR_FILE]
    if processor.exists():
        combined = SettingsReader(read_object(processor), str(processor))
        if combined.has("video_processor"):
            return combined.section("video_processor")
        if combined.has("image_processor"):
            names.remove(PREPROCESSOR_FILE)
    for name in names:
        if (path := checkpoint / name).exists():
            return SettingsReader(read_object(path), str(path))
    return None


def parse_qwen_video(reader: SettingsReader, images: QwenVLSettings) -> QwenVideoSettings:
    """Raises UnsupportedCheckpoint for settings that are missing, unknown, or other than those of images
    where
    one forward pass takes both."""
    reader.check_keys(
        {
            *_COMMON, *_SAMPLING, *_INERT, "cap_pixels_per_frame", "max_frames", "max_pixels",
            "max_video_tokens", "min_frames", "min_pixels", "size", "temporal_patch_size",
        }
    )  # fmt: skip
    _check_sampling(reader)
    for name in ("patch_size", "merge_size", "temporal_patch_size"):
        _check_equal(reader, name, reader.count(name), getattr(images, name))
    _check_normalisation(reader, images.normalisation)

    def area(key: str, size_key: str) -> int:
        return reader.count(key) if reader.has(key) else reader.section("size").count(size_key)

    settings = QwenVideoSettings(
        min_pixels=area("min_pixels", "shortest_edge"),
        max_pixels=area("max_pixels", "longest_edge"),
        fps=reader.number("fps") if reader.has("fps") else 2.0,
        min_frames=reader.count("min_frames") if reader.has("min_frames") else 4,
        max_frames=reader.count("max_frames") if reader.has("max_frames") else 768,
        max_video_tokens=reader.count("max_video_tokens") if reader.has("max_video_tokens") else 768,
        cap_pixels_per_frame=_flag(reader, "cap_pixels_per_frame"),
    )
    for low, high in (("min_pixels", "max_pixels"), ("min_frames", "max_frames")):
        least, most = getattr(settings, low), getattr(settings, high)
        if least > most:
            raise reader.refuse(low, least, f"at most {high} = {most}")
    return settings


def parse_moonvit_video(reader: SettingsReader, images: MoonViTSettings) -> MoonViTVideoSettings:
    """Published names, nested under media_proc_cfg or flat, and the reference package's (max_patches, size,
    fps, temporal_patch_size). Raises UnsupportedCheckpoint, also where a published limit over the whole clip
    is
    set, which no published checkpoint does."""
    if reader.has("media_proc_cfg"):
        reader = reader.section("media_proc_cfg")
    if reader.has("in_patch_limit"):  # the published file: images' keys were checked with the images
        for name in ("in_patch_limit_video", "fixed_output_tokens_each_frame"):
            if reader.has(name):
                raise reader.refuse(name, reader.values[name], "null")
        if reader.has("timestamp_mode") and reader.values["timestamp_mode"] != "hh:mm:ss.fff":
            raise reader.refuse("timestamp_mode", reader.values["timestamp_mode"], "'hh:mm:ss.fff'")
        return MoonViTVideoSettings(
            max_patches=reader.count("in_patch_limit_each_frame"),
            max_patches_per_side=reader.count("patch_limit_on_one_side"),
            fps=reader.number("sample_fps"),
            chunk_frames=reader.count("temporal_merge_kernel_size"),
            max_frames=reader.count("max_num_frames_each_video")
            if reader.has("max_num_frames_each_video")
            else None,
        )
    reader.check_keys({*_COMMON, *_SAMPLING, *_INERT, "max_patches", "size", "temporal_patch_size"})
    _check_sampling(reader)
    _check_equal(reader, "patch_size", reader.square("patch_size"), images.patch_size)
    _check_equal(reader, "merge_size", reader.square("merge_size"), images.merge_size)
    _check_normalisation(reader, images.normalisation)
    size = reader.section("size")
    per_side = size.count("max_height")
    _check_equal(size, "max_width", size.count("max_width"), per_side)
    return MoonViTVideoSettings(
        max_patches=reader.count("max_patches"),
        max_patches_per_side=per_side,
        fps=reader.number("fps") if reader.has("fps") else 2.0,
        chunk_frames=reader.count("temporal_patch_size"),
    )


def has_moonvit_video(reader: SettingsReader) -> bool:
    """Whether a file says anything of clips; a file of images alone does not."""
    values = reader.section("media_proc_cfg") if reader.has("media_proc_cfg") else reader
    return values.has("in_patch_limit_each_frame") or values.has("temporal_patch_size")


def _flag(reader: SettingsReader, key: str) -> bool:
    value = reader.values.get(key)
    if value is not None and not isinstance(value, bool):
        raise reader.refuse(key, value, "true, false or null")
    return bool(value)


def _check_sampling(reader: SettingsReader) -> None:
    if reader.has("num_frames"):
        raise reader.refuse("num_frames", reader.values["num_frames"], "null: frames are sampled by fps")
    if reader.has("do_sample_frames") and reader.values["do_sample_frames"] is not True:
        raise reader.refuse("do_sample_frames", reader.values["do_sample_frames"], "true")


def _check_equal(reader: SettingsReader, key: str, found: object, needed: object) -> None:
    if found != needed:
        raise reader.refuse(key, found, f"{needed!r}, as images have")


def _check_normalisation(reader: SettingsReader, images: Normalisation) -> None:
    """Clips and images are normalised in one launch."""
    found = reader.normalisation()
    for name in ("image_mean", "image_std", "rescale_factor"):
        _check_equal(reader, name, getattr(found, name), getattr(images, name))
