"""Triton kernels of the fused CUDA path. Importing this package imports triton.

Owns the passes between the matrix products: norms with the addition to the residual, rotary positions on
packed projections, position interpolation, GELU, SwiGLU, the average over frames, and patches from uint8
frames. ``fused.py`` runs them in order.

Every wrapper launches on the current CUDA device and stream, never waits for the device, and allocates only
what it returns, so it can be captured in a CUDA graph. Shapes are internal invariants and are checked by
assertions.
"""

from encoder_service.towers.kernels.activation import gelu_, swiglu
from encoder_service.towers.kernels.embedding import embed_norm
from encoder_service.towers.kernels.expand import PatchTables, expand_items
from encoder_service.towers.kernels.frames import merge_frames_norm
from encoder_service.towers.kernels.norm import add_norm
from encoder_service.towers.kernels.patches import patchify_items
from encoder_service.towers.kernels.rotary import rotate_qkv_

__all__ = [
    "PatchTables",
    "add_norm",
    "embed_norm",
    "expand_items",
    "gelu_",
    "merge_frames_norm",
    "patchify_items",
    "rotate_qkv_",
    "swiglu",
]
