"""LMDeploy's loaders of media: an image stays an undecoded file; clips and sound are refused before they are
decoded.

LMDeploy's own rules hold: which URLs and paths are read, and their time limits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

import pybase64
from lmdeploy.vl.media.image import ImageMediaIO

from lm_adapter.engines.shared.images import ImageFile


class FileMediaIO(ImageMediaIO):  # type: ignore[misc]
    """All methods raise ValueError for what is no image, which LMDeploy answers with 400."""

    def __init__(self, **options: Any) -> None:
        if options:
            raise ValueError(f"media_io_kwargs has {sorted(options)} for images: the encoder decodes them")
        super().__init__()

    def load_bytes(self, data: bytes) -> ImageFile:
        return ImageFile.read(data)

    def load_base64(self, media_type: str, data: str) -> ImageFile:
        return ImageFile.read(pybase64.b64decode(data))

    def load_file(self, file_path: Path) -> ImageFile:
        return ImageFile.read(file_path.read_bytes())


def refuse_media(**_options: Any) -> NoReturn:
    """Takes the place of the loaders of other media."""
    raise ValueError("clips, sound and time series are not accepted: the encoder takes images here")
