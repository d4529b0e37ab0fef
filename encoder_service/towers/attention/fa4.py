"""flash-attn 4 (CuTe DSL, Hopper and Blackwell): package flash-attn-4, module flash_attn.cute.

Owns the call, the tile and the import. The library compiles one kernel per head dim and tile in its first
call, which takes about a second and must come before a capture. Its Hopper tile for head dims from 65 to 96
(192 x 144) was tuned at 96. At 72, which it pads to 80, shared memory is left for more keys; 192 x 160 with
the probabilities in shared memory was the fastest of eleven tiles on long sequences. The private forward
function accepts the tile and an output buffer. A release whose forward lacks an argument counts as not
installed.

The keys are not split (num_splits=1) and one tile is used for all lengths, so results are batch invariant.

Source: Dao-AILab/flash-attention, flash_attn/cute/interface.py (_flash_attn_fwd, _tile_size_fwd_sm90),
4.0.0b36.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from encoder_service.towers.attention.backend import AttentionBackend, SequenceBounds, output_of, plan_output

FORWARD_ARGUMENTS = frozenset({
    "q", "k", "v", "out", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "softmax_scale",
    "causal", "num_splits", "tile_mn", "mma_pv_is_rs", "intra_wg_overlap",
})  # fmt: skip


@dataclass(frozen=True)
class Fa4Tile:
    """Queries and keys of a tile, and whether the probabilities stay in registers for the second product."""

    queries: int
    keys: int
    probabilities_in_registers: bool = False

    @property
    def label(self) -> str:
        return f"{self.queries}x{self.keys}{'r' if self.probabilities_in_registers else ''}"

    def arguments(self) -> dict[str, Any]:
        return {
            "tile_mn": (self.queries, self.keys),
            "mma_pv_is_rs": self.probabilities_in_registers,
            "intra_wg_overlap": True,
        }


# By major compute capability and head dim padded to 16: tiles that beat the library's choice. The first is
# the default. On an H200 they are the fastest, in turn, for long sequences, mixed lengths, 8 x 4096, and one
# short sequence.
TILES = {
    (9, 80): (
        Fa4Tile(192, 160),
        Fa4Tile(192, 128),
        Fa4Tile(192, 112, probabilities_in_registers=True),
        Fa4Tile(128, 160, probabilities_in_registers=True),
    )
}


class Fa4Attention:
    """flash-attn 4's varlen forward.

    tile: used if TILES lists it for the device and head dim. None uses the first tile in TILES. library_tile:
    use the library's own choice, which also applies to cases that TILES does not list. Raises ImportError if
    flash-attn 4 or a part of it is missing, or if its forward lacks an argument that ``attend`` passes.
    """

    static_lengths = False
    batch_invariant = True

    def __init__(self, tile: Fa4Tile | None = None, *, library_tile: bool = False) -> None:
        self._forward = find_forward(import_interface())
        self._tile = tile
        self._library_tile = library_tile
        self.name = f"fa4-{tile.label}" if tile else "fa4-library" if library_tile else "fa4"

    def plan(self, bounds: SequenceBounds, shape: Sequence[int], dtype: torch.dtype) -> SequenceBounds:
        """The bounds with the output buffer that all blocks write to."""
        return plan_output(bounds, shape, dtype)

    def attend(
        self, q_PHd: torch.Tensor, k_PHd: torch.Tensor, v_PHd: torch.Tensor, bounds: SequenceBounds
    ) -> torch.Tensor:
        """See AttentionBackend. float16 or bfloat16, head_dim a multiple of 8. The output of padding is
        zero."""
        out_PHd = output_of(q_PHd, bounds)
        tile = self._tile_for(q_PHd)
        self._forward(
            q_PHd,
            k_PHd,
            v_PHd,
            out=out_PHd,
            cu_seqlens_q=bounds.cu_seqlens,
            cu_seqlens_k=bounds.cu_seqlens,
            max_seqlen_q=bounds.max_seqlen,
            max_seqlen_k=bounds.max_seqlen,
            softmax_scale=q_PHd.shape[-1] ** -0.5,
            causal=False,
            num_splits=1,
            **({} if tile is None else tile.arguments()),
        )
        return out_PHd

    def _tile_for(self, q_PHd: torch.Tensor) -> Fa4Tile | None:
        major, _ = torch.cuda.get_device_capability(q_PHd.device)
        tiles = TILES.get((major, -(-q_PHd.shape[-1] // 16) * 16), ())
        if self._library_tile or not tiles:
            return None
        if self._tile is None:
            return tiles[0]
        return self._tile if self._tile in tiles else None


def build(device: torch.device) -> list[AttentionBackend]:
    """One backend for the default tile, one per other tile of the device, one for the library's choice."""
    major, _ = torch.cuda.get_device_capability(device)
    others = [tile for (of_major, _), tiles in TILES.items() if of_major == major for tile in tiles[1:]]
    return [Fa4Attention(), *map(Fa4Attention, others), Fa4Attention(library_tile=True)]


def import_interface() -> ModuleType:
    """Imports flash_attn.cute.interface. Puts the DSL's packages on the path if needed. Raises ImportError.

    The DSL's wheel puts its packages into a folder of its own and finds it by a .pth file, which works only
    in a site-packages folder. If it is installed with --target, the folder has to be put on the path.
    Warnings that the packages give about each other's releases are ignored.
    """
    # Every compilation raises this warning.
    warnings.filterwarnings("ignore", message="Argument aux_data", category=UserWarning)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            importlib.import_module("cutlass.cute")
        except ModuleNotFoundError:
            folder = dsl_folder()
            if folder is None:
                raise
            sys.path.append(str(folder))
            importlib.invalidate_caches()
            importlib.import_module("cutlass.cute")
        return importlib.import_module("flash_attn.cute.interface")


def dsl_folder() -> Path | None:
    """The folder nvidia_cutlass_dsl/dsl_packages of the installed DSL; None if missing or on the path."""
    spec = importlib.util.find_spec("nvidia_cutlass_dsl")
    for location in (spec.submodule_search_locations or ()) if spec is not None else ():
        folder = Path(location) / "dsl_packages"
        if folder.is_dir() and str(folder) not in sys.path:
            return folder
    return None


def find_forward(interface: ModuleType) -> Callable[..., Any]:
    """The private forward function. Raises ImportError if it lacks an argument that ``attend`` passes."""
    forward: Callable[..., Any] | None = getattr(interface, "_flash_attn_fwd", None)
    if forward is None or not set(inspect.signature(forward).parameters) >= FORWARD_ARGUMENTS:
        raise ImportError(f"flash-attn 4 has no forward with {', '.join(sorted(FORWARD_ARGUMENTS))}")
    return forward
