"""Processor settings of both families, for images and clips, read from the checkpoint's own files.

Owns the spellings in which published checkpoints and the reference package write them, and the refusal of
everything that is missing, of the wrong type, out of range or unknown: a setting that is not understood would
change pixels silently. What the settings do is in ``qwen_vl`` and ``moonvit``.

A published Qwen file of clips has the area and the patch sizes only; the reference's own values stand for the
sampling (``Qwen3VLVideoProcessor``: 2 frames a second, 4 to 768 frames). Kimi's settings of clips stand
beside those of images (``sample_fps``, ``in_patch_limit_each_frame``, ``temporal_merge_kernel_size``).
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from encoder_service.errors import CheckpointError, UnsupportedCheckpoint

PREPROCESSOR_FILE = "preprocessor_config.json"
VIDEO_PREPROCESSOR_FILE = "video_preprocessor_config.json"
PROCESSOR_FILE = "processor_config.json"  # the reference package's combined file, one section per part
BICUBIC = 3
Triple: TypeAlias = tuple[float, float, float]

# Keys that name classes or the form of results: no pixel depends on them.
_INERT = frozenset(
    {
        "auto_map", "config_type", "data_format", "default_to_square", "device", "disable_grouping",
        "feature_extractor_type", "image_processor_type", "input_data_format", "processor_class",
        "return_metadata", "return_tensors", "transformers_version", "video_processor_type", "_commit_hash",
        "_processor_class", "_valid_processor_keys", "_valid_kwargs_names",
    }
)  # fmt: skip
# Settings of which the families' rules cover one value; others are refused.
_FIXED: Mapping[str, object] = {
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "do_convert_rgb": True,
    "do_center_crop": False,
    "do_pad": False,
    "resample": BICUBIC,
}


@dataclass(frozen=True)
class Normalisation:
    """(pixel * rescale_factor - mean) / std, per channel."""

    image_mean: Triple
    image_std: Triple
    rescale_factor: float


@dataclass(frozen=True)
class QwenVLSettings:
    """Qwen3-VL and Qwen3.5. Sizes in pixels, patches and frames; min_pixels, max_pixels are target areas."""

    patch_size: int
    merge_size: int
    temporal_patch_size: int
    min_pixels: int
    max_pixels: int
    normalisation: Normalisation


@dataclass(frozen=True)
class MoonViTSettings:
    """Kimi-K2.5. max_patches: of one image, before padding; max_patches_per_side: of its height or width."""

    patch_size: int
    merge_size: int
    max_patches: int
    max_patches_per_side: int
    normalisation: Normalisation


@dataclass(frozen=True)
class QwenVideoSettings:
    """Qwen3-VL and Qwen3.5. min_pixels, max_pixels: frames times height times width of the target; fps:
    frames sampled a second. cap_pixels_per_frame: also limit one frame to max_video_tokens visual tokens, as
    releases of the reference from 5.22 can."""

    min_pixels: int
    max_pixels: int
    fps: float
    min_frames: int
    max_frames: int
    max_video_tokens: int
    cap_pixels_per_frame: bool


@dataclass(frozen=True)
class MoonViTVideoSettings:
    """Kimi-K2.5. max_patches: of one frame, before padding; chunk_frames: frames that the tower averages into
    one set of rows; max_frames: None where the checkpoint has no bound."""

    max_patches: int
    max_patches_per_side: int
    fps: float
    chunk_frames: int
    max_frames: int | None = None


class SettingsReader:
    """Typed access to one JSON object; every refusal names the file and the key."""

    def __init__(self, values: Mapping[str, object], where: str) -> None:
        self.values = values
        self.where = where

    def refuse(self, key: str, found: object, needed: str) -> UnsupportedCheckpoint:
        return UnsupportedCheckpoint(
            f"{self.where} has {key} = {found!r}, needs {needed}", key=key, found=found, needed=needed
        )

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def require(self, key: str) -> object:
        if not self.has(key):
            raise UnsupportedCheckpoint(f"{self.where} lacks {key}", key=key)
        return self.values[key]

    def section(self, key: str) -> SettingsReader:
        value = self.require(key)
        if not isinstance(value, Mapping):
            raise self.refuse(key, value, "an object")
        return SettingsReader(value, f"{self.where}, {key},")

    def count(self, key: str) -> int:
        """An integer of at least 1."""
        value = self.require(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.refuse(key, value, "an integer of at least 1")
        return value

    def square(self, key: str) -> int:
        """A side given as one integer or as two equal ones."""
        value = self.require(key)
        if isinstance(value, list) and len(value) == 2 and value[0] == value[1]:
            return SettingsReader({key: value[0]}, self.where).count(key)
        return self.count(key)

    def number(self, key: str) -> float:
        """A finite number above zero."""
        value = self.require(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.refuse(key, value, "a number above 0")
        if not (math.isfinite(value) and value > 0):
            raise self.refuse(key, value, "a finite number above 0")
        return float(value)

    def triple(self, key: str, *, above_zero: bool) -> Triple:
        """Three finite numbers, one per channel."""
        value = self.require(key)
        needed = "three finite numbers" + (" above 0" if above_zero else "")
        if not isinstance(value, list) or len(value) != 3:
            raise self.refuse(key, value, needed)
        for channel in value:
            if isinstance(channel, bool) or not isinstance(channel, int | float):
                raise self.refuse(key, value, needed)
            if not math.isfinite(channel) or (above_zero and channel <= 0):
                raise self.refuse(key, value, needed)
        red, green, blue = (float(channel) for channel in value)
        return red, green, blue

    def check_keys(self, known: Collection[str]) -> None:
        """Refuses keys that mean nothing here, unless they are null, and fixed settings of another value."""
        for key, needed in _FIXED.items():
            if self.has(key) and self.values[key] != needed:
                raise self.refuse(key, self.values[key], repr(needed))
        unknown = sorted(
            key for key in self.values if self.has(key) and key not in {*known, *_FIXED, *_INERT}
        )
        if unknown:
            raise UnsupportedCheckpoint(
                f"{self.where} has settings that this family does not know: {', '.join(unknown)}",
                unknown=", ".join(unknown),
            )

    def flag(self, key: str) -> bool:
        """False where the key is missing or null."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.refuse(key, value, "true, false or null")
        return bool(value)

    def check_equal(self, key: str, found: object, needed: object) -> None:
        """Refuses a setting of clips that differs from that of images."""
        if found != needed:
            raise self.refuse(key, found, f"{needed!r}, as images have")

    def area(self, key: str, size_key: str) -> int:
        """``min_pixels`` or ``max_pixels``, which win over ``size`` where both are given, as in the
        reference."""
        return self.count(key) if self.has(key) else self.section("size").count(size_key)

    def normalisation(self) -> Normalisation:
        return Normalisation(
            image_mean=self.triple("image_mean", above_zero=False),
            image_std=self.triple("image_std", above_zero=True),
            rescale_factor=self.number("rescale_factor") if self.has("rescale_factor") else 1 / 255,
        )


def read_object(path: Path) -> Mapping[str, object]:
    """A file that holds one JSON object. Raises CheckpointError, UnsupportedCheckpoint."""
    try:
        values = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}", path=path) from error
    except ValueError as error:
        raise UnsupportedCheckpoint(f"{path} is not JSON: {error}", path=path) from error
    if not isinstance(values, Mapping):
        raise UnsupportedCheckpoint(f"{path} holds a {type(values).__name__}, needs an object", path=path)
    return values


def read_settings_file(checkpoint: Path) -> SettingsReader:
    """The image settings of a checkpoint folder: the image_processor section of its processor_config.json,
    else its preprocessor_config.json, in the reference's order (``get_image_processor_dict``).

    Raises CheckpointError when neither is there, UnsupportedCheckpoint when one is malformed.
    """
    preprocessor, processor = checkpoint / PREPROCESSOR_FILE, checkpoint / PROCESSOR_FILE
    if processor.exists():
        combined = SettingsReader(read_object(processor), str(processor))
        if combined.has("image_processor"):
            return combined.section("image_processor")
    if preprocessor.exists():
        return SettingsReader(read_object(preprocessor), str(preprocessor))
    raise CheckpointError(
        f"{checkpoint} has no {PREPROCESSOR_FILE}, and no {PROCESSOR_FILE} with an image_processor",
        path=checkpoint,
    )


def parse_qwen_vl(reader: SettingsReader) -> QwenVLSettings:
    """Raises UnsupportedCheckpoint."""
    reader.check_keys(
        {
            "image_mean", "image_std", "max_pixels", "merge_size", "min_pixels", "patch_size",
            "rescale_factor", "size", "temporal_patch_size",
        }
    )  # fmt: skip
    if reader.has("size"):
        reader.section("size").check_keys({"shortest_edge", "longest_edge"})
    settings = QwenVLSettings(
        patch_size=reader.count("patch_size"),
        merge_size=reader.count("merge_size"),
        temporal_patch_size=reader.count("temporal_patch_size"),
        min_pixels=reader.area("min_pixels", "shortest_edge"),
        max_pixels=reader.area("max_pixels", "longest_edge"),
        normalisation=reader.normalisation(),
    )
    if settings.min_pixels > settings.max_pixels:
        raise reader.refuse("min_pixels", settings.min_pixels, f"at most max_pixels = {settings.max_pixels}")
    return settings


# Settings of clips in the published file; an image does not depend on them.
_MOONVIT_VIDEO = frozenset(
    {
        "fixed_output_tokens_each_frame", "in_patch_limit_each_frame", "in_patch_limit_video",
        "max_num_frames_each_video", "sample_fps", "temporal_merge_kernel_size", "timestamp_mode",
    }
)  # fmt: skip


def parse_moonvit(reader: SettingsReader) -> MoonViTSettings:
    """Published names (in_patch_limit, patch_limit_on_one_side, merge_kernel_size), nested under
    media_proc_cfg or flat, and the reference package's (max_patches, size.max_height and size.max_width,
    merge_size). Raises UnsupportedCheckpoint."""
    if reader.has("media_proc_cfg"):
        reader.check_keys({"media_proc_cfg"})
        reader = reader.section("media_proc_cfg")
    common = {"image_mean", "image_std", "patch_size", "rescale_factor"}
    if reader.has("in_patch_limit"):
        # fixed_output_tokens pads every image to one count; null in every published checkpoint.
        reader.check_keys(
            {*common, "in_patch_limit", "patch_limit_on_one_side", "merge_kernel_size", *_MOONVIT_VIDEO}
        )
        merge_size = reader.square("merge_kernel_size")
        max_patches, max_per_side = reader.count("in_patch_limit"), reader.count("patch_limit_on_one_side")
    else:
        reader.check_keys({*common, "max_patches", "size", "merge_size"})
        size = reader.section("size")
        size.check_keys({"max_height", "max_width"})
        merge_size = reader.square("merge_size")
        max_patches, max_per_side = reader.count("max_patches"), size.count("max_height")
        if size.count("max_width") != max_per_side:
            raise size.refuse("max_width", size.values["max_width"], f"max_height = {max_per_side}")
    settings = MoonViTSettings(
        patch_size=reader.square("patch_size"),
        merge_size=merge_size,
        max_patches=max_patches,
        max_patches_per_side=max_per_side,
        normalisation=reader.normalisation(),
    )
    if max_per_side % merge_size:
        # A side at the limit would be padded past it, and past the tower's rotary table.
        raise reader.refuse(
            "the patch limit of one side", max_per_side, f"a multiple of the merge size {merge_size}"
        )
    return settings


_VIDEO_COMMON = frozenset({"image_mean", "image_std", "rescale_factor", "patch_size", "merge_size"})
_VIDEO_SAMPLING = frozenset({"fps", "do_sample_frames", "num_frames"})


def read_video_settings_file(checkpoint: Path) -> SettingsReader | None:
    """The settings of clips of a checkpoint folder: the video_processor section of its processor_config.json,
    else its video_preprocessor_config.json, else its preprocessor_config.json, in the reference's order
    (``get_video_processor_dict``). None where there is none, and where the last one is not read for images
    either: it may belong to another model.

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
    where one forward pass takes both."""
    reader.check_keys(
        {
            *_VIDEO_COMMON, *_VIDEO_SAMPLING, "cap_pixels_per_frame", "max_frames", "max_pixels",
            "max_video_tokens", "min_frames", "min_pixels", "size", "temporal_patch_size",
        }
    )  # fmt: skip
    _check_sampling(reader)
    for name in ("patch_size", "merge_size", "temporal_patch_size"):
        reader.check_equal(name, reader.count(name), getattr(images, name))
    _check_normalisation(reader, images.normalisation)

    settings = QwenVideoSettings(
        min_pixels=reader.area("min_pixels", "shortest_edge"),
        max_pixels=reader.area("max_pixels", "longest_edge"),
        fps=reader.number("fps") if reader.has("fps") else 2.0,
        min_frames=reader.count("min_frames") if reader.has("min_frames") else 4,
        max_frames=reader.count("max_frames") if reader.has("max_frames") else 768,
        max_video_tokens=reader.count("max_video_tokens") if reader.has("max_video_tokens") else 768,
        cap_pixels_per_frame=reader.flag("cap_pixels_per_frame"),
    )
    for low, high in (("min_pixels", "max_pixels"), ("min_frames", "max_frames")):
        least, most = getattr(settings, low), getattr(settings, high)
        if least > most:
            raise reader.refuse(low, least, f"at most {high} = {most}")
    return settings


def parse_moonvit_video(reader: SettingsReader, images: MoonViTSettings) -> MoonViTVideoSettings:
    """Published names, nested under media_proc_cfg or flat, and the reference package's (max_patches, size,
    fps, temporal_patch_size). Raises UnsupportedCheckpoint, also for a limit over the whole clip, which no
    published checkpoint sets."""
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
    reader.check_keys({*_VIDEO_COMMON, *_VIDEO_SAMPLING, "max_patches", "size", "temporal_patch_size"})
    _check_sampling(reader)
    reader.check_equal("patch_size", reader.square("patch_size"), images.patch_size)
    reader.check_equal("merge_size", reader.square("merge_size"), images.merge_size)
    _check_normalisation(reader, images.normalisation)
    size = reader.section("size")
    per_side = size.count("max_height")
    size.check_equal("max_width", size.count("max_width"), per_side)
    return MoonViTVideoSettings(
        max_patches=reader.count("max_patches"),
        max_patches_per_side=per_side,
        fps=reader.number("fps") if reader.has("fps") else 2.0,
        chunk_frames=reader.count("temporal_patch_size"),
    )


def has_moonvit_video(reader: SettingsReader) -> bool:
    """Whether a file has settings of clips."""
    values = reader.section("media_proc_cfg") if reader.has("media_proc_cfg") else reader
    return values.has("in_patch_limit_each_frame") or values.has("temporal_patch_size")


def _check_sampling(reader: SettingsReader) -> None:
    if reader.has("num_frames"):
        raise reader.refuse("num_frames", reader.values["num_frames"], "null: frames are sampled by fps")
    if reader.has("do_sample_frames") and reader.values["do_sample_frames"] is not True:
        raise reader.refuse("do_sample_frames", reader.values["do_sample_frames"], "true")


def _check_normalisation(reader: SettingsReader, images: Normalisation) -> None:
    """Clips and images are normalised in one launch."""
    found = reader.normalisation()
    for name in ("image_mean", "image_std", "rescale_factor"):
        reader.check_equal(name, getattr(found, name), getattr(images, name))
