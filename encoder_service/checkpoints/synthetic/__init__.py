"""Random-weight checkpoints in the layout of real ones on the model hub.

Owns sizes, settings files, a byte-level tokenizer, the random values and sharding. The service does not need
it to serve a real checkpoint.

``make_checkpoint`` writes a directory. ``config_for``, ``small_files``, ``vision_layout`` return its parts.
"""

from encoder_service.checkpoints.families import FAMILIES
from encoder_service.checkpoints.synthetic.files import SIZES, WITH_LANGUAGE_MODEL, config_for, small_files
from encoder_service.checkpoints.synthetic.tensors import TensorSpec, draw, vision_layout
from encoder_service.checkpoints.synthetic.writer import make_checkpoint

__all__ = [
    "FAMILIES",
    "SIZES",
    "WITH_LANGUAGE_MODEL",
    "TensorSpec",
    "config_for",
    "draw",
    "make_checkpoint",
    "small_files",
    "vision_layout",
]
