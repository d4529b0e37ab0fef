"""A file in a request of vLLM, or pixels: what the scheduler's half sends to the encoder.

Owns the layout of the field that carries it from vLLM's API server to the scheduler. Imports neither vLLM nor
torch.
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
FILE_FIELDS = FILE_FIELD, CLIP_FIELD = "vision_encoder_file", "vision_encoder_clip"
"""Fields of vLLM's features that carry a ``FileRequest``: of images, and of clips, as each field of vLLM's is
of one modality."""


@dataclass(frozen=True)
class FileRequest:
    """An image or a clip. options: what is not the checkpoint's own. reply: where failures are reported to
    (``failures``). is_announced: the encoder has been sent the file, with these options. pixel_grid: the data
    are no file but pixel values, float32 [P, D], of this grid."""

    data: bytes = field(repr=False)
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
        # Writable, as tensors made of it have to be.
        return np.frombuffer(
            bytearray().join((struct.pack("<I", len(header)), header, self.data)), dtype=np.uint8
        )

    @classmethod
    def unpacked(cls, packed: npt.NDArray[np.uint8]) -> FileRequest:
        """Raises ValueError."""
        whole = memoryview(packed.tobytes())
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
            return cls(data=bytes(whole[4 + length :]), **fields)
        except (struct.error, KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise ValueError(f"no file request: {error}") from error

    def item(self) -> ImageItem | ClipItem | PixelItem:
        if self.pixel_grid is not None:
            values = np.frombuffer(self.data, "<f4").reshape(self.pixel_grid.num_patches, -1)
            return PixelItem(values, self.pixel_grid, self.digest, self.modality)
        kind = ImageItem if self.modality is Modality.IMAGE else ClipItem
        return kind(self.data, digest=self.digest, options=self.options)
