"""An image or a clip in a request of vLLM, on its way from the API server to the scheduler.

Owns the names of the fields and the layout of the one that carries the file. Imports neither vLLM nor torch.
"""

from __future__ import annotations

import json
import operator
import struct
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from lm_adapter.items import ClipItem, Grid, ImageItem, Modality, PixelItem, PreprocessOptions

NO_OPTIONS = PreprocessOptions()
GRID_FIELDS = ("image_grid_thw", "video_grid_thw", "grid_thws")
"""vLLM's names of an item's grid; each item has one of them."""
FILE_FIELDS = FILE_FIELD, CLIP_FIELD = "vision_encoder_file", "vision_encoder_clip"
"""Fields of vLLM's features that carry a ``FileItem``: one for images and one for clips, because each field
of vLLM has one modality."""


@dataclass(frozen=True)
class FileItem:
    """An image or a clip. data: a view where it was unpacked, because the scheduler has no time for copies.
    options: those that differ from the checkpoint's. reply: the address for failures (``failures``).
    is_announced: the file was sent to the encoder, with these options. pixel_grid: if set, the data are pixel
    values of this grid, float32 [P, D], instead of a file."""

    data: bytes | memoryview = field(repr=False)
    digest: bytes
    modality: Modality = Modality.IMAGE
    options: PreprocessOptions = NO_OPTIONS
    reply: str = ""
    is_announced: bool = False
    pixel_grid: Grid | None = None

    def packed(self) -> npt.NDArray[np.uint8]:
        """uint8 [n]: the header's length, the header, the file."""
        header = json.dumps(
            {
                "digest": self.digest.hex(),
                "modality": self.modality.value,
                "options": self.options.given(),
                "reply": self.reply,
                "is_announced": self.is_announced,
                "pixel_grid": self.pixel_grid,
            }
        ).encode()
        # Writable, because tensors made of it have to be.
        return np.frombuffer(
            bytearray().join((struct.pack("<I", len(header)), header, self.data)), dtype=np.uint8
        )

    @classmethod
    def unpacked(cls, packed: npt.NDArray[np.uint8]) -> FileItem:
        """Raises ValueError."""
        whole = packed.data
        try:
            (length,) = struct.unpack_from("<I", whole)
            fields = json.loads(bytes(whole[4 : 4 + length]))
            fields["digest"] = bytes.fromhex(fields["digest"])
            fields["modality"] = Modality(fields["modality"])
            options, reply = fields["options"], fields["reply"]
            are_numbers = all(type(value) in (int, float) for value in options.values())
            if not (isinstance(reply, str) and isinstance(fields["is_announced"], bool) and are_numbers):
                raise TypeError(f"the fields are {fields!r:.200}")
            fields["options"] = PreprocessOptions(**options)
            if fields["pixel_grid"] is not None:
                fields["pixel_grid"] = Grid(*map(operator.index, fields["pixel_grid"]))
            return cls(data=whole[4 + length :], **fields)
        except (struct.error, KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise ValueError(f"the packed file cannot be read: {error}") from error

    def item(self) -> ImageItem | ClipItem | PixelItem:
        if self.pixel_grid is not None:
            values = np.frombuffer(self.data, "<f4").reshape(self.pixel_grid.num_patches, -1)
            return PixelItem(values, self.pixel_grid, self.digest, self.modality)
        kind = ImageItem if self.modality is Modality.IMAGE else ClipItem
        return kind(bytes(self.data), digest=self.digest, options=self.options)
