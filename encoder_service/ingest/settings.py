"""Processor settings of Qwen and Kimi-K2.5, and how every family reads its own from the checkpoint's files.

Owns the names that published checkpoints and the reference package use for them, and the refusal of settings
that are missing, of the wrong type, out of range, or that need preprocessing that the families' rules do not
implement. Other keys are ignored. ``qwen_vl`` and ``moonvit`` apply the settings.

Qwen's published settings for clips contain only the area and the patch sizes. For the sampling, the
reference's defaults apply (``Qwen3VLVideoProcessor``: 2 frames per second, 4 to 768 frames). Kimi's settings
for clips are in the same file as those for images (``sample_fps``, ``in_patch_limit_each_frame``,
``temporal_merge_kernel_size``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import Field, dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeAlias

from encoder_service.errors import CheckpointError
from encoder_service.json_reader import JsonReader, is_number

PREPROCESSOR_FILE = "preprocessor_config.json"
VIDEO_PREPROCESSOR_FILE = "video_preprocessor_config.json"
PROCESSOR_FILE = "processor_config.json"  # the reference package's combined file, one section per part
BICUBIC = 3
Triple: TypeAlias = tuple[float, float, float]

# Settings that change pixels or the sampled frames, with the only value that the families' rules implement. A
# setting that is missing or null is accepted.
_FIXED: Mapping[str, object] = {
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "do_convert_rgb": True,
    "do_center_crop": False,
    "do_pad": False,
    "resample": BICUBIC,
    "do_sample_frames": True,
    "fixed_output_tokens": None,
    "fixed_output_tokens_each_frame": None,
    "in_patch_limit_video": None,
    "timestamp_mode": "hh:mm:ss.fff",
}


@dataclass(frozen=True)
class Normalisation:
    """The normalisation (pixel * rescale_factor - mean) / std, per channel."""

    image_mean: Triple
    image_std: Triple
    rescale_factor: float
    in_steps: ClassVar[bool] = False


@dataclass(frozen=True)
class SteppedNormalisation(Normalisation):
    """The same, with each of the three steps rounded to float32: torchvision's ``to_tensor`` and
    ``normalize``. The plain one has the rescale factor in mean and std."""

    in_steps: ClassVar[bool] = True


class Settings(Protocol):
    """A family's settings, a frozen dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


class ImageSettings(Settings, Protocol):
    """What the settings for images of all families have. patch_size: pixels per side. merge_size: patches per
    side."""

    @property
    def patch_size(self) -> int: ...
    @property
    def merge_size(self) -> int: ...
    @property
    def normalisation(self) -> Normalisation: ...


@dataclass(frozen=True)
class QwenVLSettings:
    """Qwen3-VL and Qwen3.5. Sizes in pixels, patches, frames. min_pixels, max_pixels: limits of the area."""

    patch_size: int
    merge_size: int
    temporal_patch_size: int
    min_pixels: int
    max_pixels: int
    normalisation: Normalisation


@dataclass(frozen=True)
class MoonViTSettings:
    """Kimi-K2.5. max_patches, max_patches_per_side: limits of one image and of its sides, before padding."""

    patch_size: int
    merge_size: int
    max_patches: int
    max_patches_per_side: int
    normalisation: Normalisation


@dataclass(frozen=True)
class QwenVideoSettings:
    """Qwen3-VL and Qwen3.5. min_pixels, max_pixels: limits of frames times height times width of the target.
    fps: sampled frames per second. cap_pixels_per_frame: also limit one frame to max_video_tokens visual
    tokens, an option of the reference from 5.22 on."""

    min_pixels: int
    max_pixels: int
    fps: float
    min_frames: int
    max_frames: int
    max_video_tokens: int
    cap_pixels_per_frame: bool


@dataclass(frozen=True)
class MoonViTVideoSettings:
    """Kimi-K2.5. max_patches: limit of one frame, before padding. chunk_frames: frames that the tower
    averages into one set of rows. max_frames: None if the checkpoint has no limit."""

    max_patches: int
    max_patches_per_side: int
    fps: float
    chunk_frames: int
    max_frames: int | None = None


class SettingsReader(JsonReader):
    """One object of processor settings."""

    def __init__(self, values: Mapping[str, object], where: str) -> None:
        """Refuses settings with a value that the families' rules do not implement."""
        super().__init__(values, where)
        for key, needed in _FIXED.items():
            self.require(key, needed)

    def nested(self, key: str) -> SettingsReader:
        """The section of that name, or this object if there is none."""
        return self.section(key) if self.has(key) else self

    def flag(self, key: str, *, default: bool = False) -> bool:
        value: bool = self.read((key,), "true or false", lambda value: isinstance(value, bool), default)
        return value

    def one_of(self, key: str, allowed: Sequence[str]) -> Any:
        """The default is the first."""
        needed = f"one of {', '.join(dict.fromkeys(allowed))}"
        return self.read((key,), needed, lambda value: value in allowed, allowed[0])

    def level(self, key: str, default: int) -> int:
        """A value of a pixel."""
        value: int = self.read(
            (key,), "0 to 255", lambda value: type(value) is int and 0 <= value <= 255, default
        )
        return value

    def area(self, key: str, size_key: str) -> int:
        """``min_pixels`` or ``max_pixels``, which take precedence over ``size``, as in the reference."""
        return self.count(key) if self.has(key) else self.section("size").count(size_key)

    def normalisation(self) -> Normalisation:
        def are_three(values: object) -> bool:
            return isinstance(values, list) and len(values) == 3 and all(map(is_number, values))

        mean = self.read(("image_mean",), "three finite numbers", are_three)
        std = self.read(
            ("image_std",),
            "three finite numbers above 0",
            lambda values: are_three(values) and min(values) > 0,
        )
        mean_C, std_C = ((float(red), float(green), float(blue)) for red, green, blue in (mean, std))
        return Normalisation(mean_C, std_C, self.number("rescale_factor", default=1 / 255))

    def check_order(self, settings: object, low: str, high: str) -> None:
        """Refuses limits that contradict each other. One that is set by its own name may contradict the
        other's default or ``size``, as a request's may (``qwen_vl``)."""
        least, most = getattr(settings, low), getattr(settings, high)
        if least > most and self.has(low) == self.has(high):
            raise self.refuse(low, least, f"at most {high} = {most}")

    def check_same(self, images: object, sizes: Mapping[str, object]) -> None:
        """Refuses clip settings whose sizes or normalisation differ from those of images, because one forward
        pass takes both."""
        for key, value in {**sizes, "normalisation": self.normalisation()}.items():
            if value != getattr(images, key):
                raise self.refuse(key, value, f"{getattr(images, key)!r}, as images have")


def read_settings_file(checkpoint: Path) -> SettingsReader:
    """The image settings of a checkpoint folder: the image_processor section of its processor_config.json, or
    else its preprocessor_config.json, in the reference's order (``get_image_processor_dict``).

    Raises CheckpointError if neither exists, UnsupportedCheckpoint if one is malformed.
    """
    preprocessor, processor = checkpoint / PREPROCESSOR_FILE, checkpoint / PROCESSOR_FILE
    if processor.exists() and (combined := SettingsReader.of_file(processor)).has("image_processor"):
        return combined.section("image_processor")
    if preprocessor.exists():
        return SettingsReader.of_file(preprocessor)
    raise CheckpointError(
        f"{checkpoint} has no {PREPROCESSOR_FILE}, and no {PROCESSOR_FILE} with an image_processor"
    )


def read_video_settings_file(checkpoint: Path) -> SettingsReader | None:
    """The clip settings of a checkpoint folder: the video_processor section of its processor_config.json, or
    else its video_preprocessor_config.json, or else its preprocessor_config.json, in the reference's order
    (``get_video_processor_dict``). None if there is none. preprocessor_config.json is skipped if it is not
    read for images either, because it may belong to another model.

    Raises UnsupportedCheckpoint if one is malformed.
    """
    processor, names = checkpoint / PROCESSOR_FILE, [VIDEO_PREPROCESSOR_FILE, PREPROCESSOR_FILE]
    if processor.exists():
        combined = SettingsReader.of_file(processor)
        if combined.has("video_processor"):
            return combined.section("video_processor")
        if combined.has("image_processor"):
            names.remove(PREPROCESSOR_FILE)
    found = (checkpoint / name for name in names if (checkpoint / name).exists())
    return next(map(SettingsReader.of_file, found), None)


def parse_qwen_vl(reader: SettingsReader) -> QwenVLSettings:
    """Qwen's image settings. Raises UnsupportedCheckpoint."""
    settings = QwenVLSettings(
        patch_size=reader.count("patch_size"),
        merge_size=reader.count("merge_size"),
        temporal_patch_size=reader.count("temporal_patch_size"),
        min_pixels=reader.area("min_pixels", "shortest_edge"),
        max_pixels=reader.area("max_pixels", "longest_edge"),
        normalisation=reader.normalisation(),
    )
    reader.check_order(settings, "min_pixels", "max_pixels")
    return settings


def parse_qwen_video(
    reader: SettingsReader, images: QwenVLSettings, *, max_video_tokens: int = 768
) -> QwenVideoSettings:
    """Qwen's clip settings. max_video_tokens: the family's default. Raises UnsupportedCheckpoint."""
    reader.require("num_frames", None)
    sizes = {name: reader.count(name) for name in ("patch_size", "merge_size", "temporal_patch_size")}
    reader.check_same(images, sizes)
    settings = QwenVideoSettings(
        min_pixels=reader.area("min_pixels", "shortest_edge"),
        max_pixels=reader.area("max_pixels", "longest_edge"),
        fps=reader.number("fps", default=2.0),
        min_frames=reader.count("min_frames", default=4),
        max_frames=reader.count("max_frames", default=768),
        max_video_tokens=reader.count("max_video_tokens", default=max_video_tokens),
        cap_pixels_per_frame=reader.flag("cap_pixels_per_frame"),
    )
    reader.check_order(settings, "min_pixels", "max_pixels")
    reader.check_order(settings, "min_frames", "max_frames")
    return settings


def parse_moonvit(reader: SettingsReader) -> MoonViTSettings:
    """Kimi's image settings. Accepts the published names (in_patch_limit, patch_limit_on_one_side,
    merge_kernel_size), nested under media_proc_cfg or flat, and those of the reference package (max_patches,
    size.max_height and size.max_width, merge_size). Raises UnsupportedCheckpoint."""
    reader = reader.nested("media_proc_cfg")
    is_published = reader.has("in_patch_limit")
    settings = MoonViTSettings(
        patch_size=reader.square("patch_size"),
        merge_size=reader.square("merge_kernel_size" if is_published else "merge_size"),
        max_patches=reader.count("in_patch_limit" if is_published else "max_patches"),
        max_patches_per_side=_patches_per_side(reader),
        normalisation=reader.normalisation(),
    )
    per_side, merge_size = settings.max_patches_per_side, settings.merge_size
    if per_side % merge_size:
        # Padding would extend a side at the limit past the limit, and past the tower's rotary table.
        needed = f"a multiple of the merge size {merge_size}"
        raise reader.refuse("the patch limit of one side", per_side, needed)
    return settings


def parse_moonvit_video(reader: SettingsReader, images: MoonViTSettings) -> MoonViTVideoSettings | None:
    """Kimi's clip settings. Accepts the published names, nested under media_proc_cfg or flat, and those of
    the reference package (max_patches, size, fps, temporal_patch_size). None for a file without clip
    settings. Raises UnsupportedCheckpoint."""
    reader = reader.nested("media_proc_cfg")
    reader.require("num_frames", None)
    if reader.has("in_patch_limit_each_frame"):
        has_bound = reader.has("max_num_frames_each_video")
        return MoonViTVideoSettings(
            max_patches=reader.count("in_patch_limit_each_frame"),
            max_patches_per_side=_patches_per_side(reader),
            fps=reader.number("sample_fps"),
            chunk_frames=reader.count("temporal_merge_kernel_size"),
            max_frames=reader.count("max_num_frames_each_video") if has_bound else None,
        )
    if not reader.has("temporal_patch_size"):
        return None
    sizes = {name: reader.square(name) for name in ("patch_size", "merge_size")}
    reader.check_same(images, sizes)
    return MoonViTVideoSettings(
        max_patches=reader.count("max_patches"),
        max_patches_per_side=_patches_per_side(reader),
        fps=reader.number("fps", default=2.0),
        chunk_frames=reader.count("temporal_patch_size"),
    )


def _patches_per_side(reader: SettingsReader) -> int:
    if reader.has("patch_limit_on_one_side") or not reader.has("size"):
        return reader.count("patch_limit_on_one_side")
    size = reader.section("size")
    height, width = size.count("max_height"), size.count("max_width")
    if width != height:
        raise size.refuse("max_width", width, f"max_height = {height}")
    return height
