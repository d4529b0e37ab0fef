"""Random-weight checkpoints in the layout in which the model hub publishes real ones.

Owns: sizes, config files, tensor names and shapes, random draws, a byte-level tokenizer, sharding. Leaves
loading to ``towers.checkpoint``: nothing here is used when a real checkpoint is served.

``make_checkpoint`` writes a directory; ``config_for`` and ``vision_tensors`` give its parts in memory, for
benches that need no files.
"""

from encoder_service.towers.synthetic.configs import FAMILIES, SIZES, config_for
from encoder_service.towers.synthetic.writer import make_checkpoint, vision_tensors

__all__ = ["FAMILIES", "SIZES", "config_for", "make_checkpoint", "vision_tensors"]
