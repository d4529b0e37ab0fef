"""Applies M-RoPE: rotates q and k by three-axis positions.

Owns the axis of each pair of a head, the table of angles, and the choice between the torch version and the
fused kernel (``kernels.rotate``, imported at its first launch). Positions come from ``mrope``. torch is
imported only inside functions.

The first ``rotary_dim`` elements of a head are rotated in pairs (j, j + rotary_dim / 2). The others, if the
rotation is partial, stay as they are. Pair j is rotated by the angle position[axis(j)] * inv_freq[j]. With
sections (t, h, w), axis(j) is:

* interleaved (Qwen3-VL, Qwen3.5): 1 for j = 1, 4, 7, ... below 3h, 2 for j = 2, 5, 8, ... below 3w, else 0;
* chunked (Qwen2-VL, Qwen2.5-VL): 0 for the first t pairs, 1 for the next h, 2 for the last w.

Products are computed in float32 and rounded once, to the dtype of q and k. Engines that first round the
angles to bfloat16, as the reference does, differ by that rounding.

Shape legend: T tokens of a step, H heads, d head_dim, P positions of the table, F rotary_dim / 2.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from lm_adapter.errors import InvalidRequest, MissingDependency

if TYPE_CHECKING:
    import torch

Backend: TypeAlias = Literal["auto", "torch", "triton"]


@dataclass(frozen=True)
class MRopeLayout:
    """sections: number of pairs for each of the axes t, h, w; interleaved: whether the axes alternate or form
    contiguous blocks."""

    sections: tuple[int, int, int]
    interleaved: bool

    def __post_init__(self) -> None:
        if len(self.sections) != 3 or min(self.sections) < 0 or not sum(self.sections):
            raise InvalidRequest(
                f"M-RoPE needs 3 sections of 0 pairs or more, not all 0, got {list(self.sections)}"
            )

    @property
    def rotary_dim(self) -> int:
        return 2 * sum(self.sections)

    def axes(self) -> npt.NDArray[np.int64]:
        """int64 [F]: the axis that rotates each pair."""
        t, h, w = self.sections
        if not self.interleaved:
            return np.repeat(np.arange(3, dtype=np.int64), self.sections)
        axes = np.zeros(t + h + w, dtype=np.int64)
        axes[1 : 3 * h : 3] = 1
        axes[2 : 3 * w : 3] = 2
        return axes


@dataclass(frozen=True, eq=False)
class RotaryTable:
    """Cosine and sine of every angle, shared by all layers of a model.

    cos_sin: float32 [P, 2F], the cosines of a position before its sines, contiguous, on the device of q and
    k. A position takes 512 bytes for a rotary_dim of 128.
    """

    layout: MRopeLayout
    cos_sin: torch.Tensor

    @classmethod
    def build(
        cls,
        layout: MRopeLayout,
        inv_freq: torch.Tensor,
        *,
        max_positions: int,
        device: torch.device | str = "cpu",
        scaling: float = 1.0,
    ) -> RotaryTable:
        """Builds a table. inv_freq: float32 [F], from any RoPE variant whose frequencies do not depend on the
        prompt; scaling: the variant's attention factor. Raises InvalidRequest when the numbers of frequencies
        and pairs differ, and for max_positions below 1."""
        import torch

        if inv_freq.ndim != 1 or 2 * len(inv_freq) != layout.rotary_dim:
            raise InvalidRequest(
                f"inv_freq has shape {list(inv_freq.shape)}, sections {list(layout.sections)} need "
                f"[{layout.rotary_dim // 2}]"
            )
        if max_positions < 1:
            raise InvalidRequest(f"a table holds 1 position or more, got {max_positions}")
        # Computed in float32 like the reference: models were trained with the rounding of these products.
        positions = torch.arange(max_positions, dtype=torch.float32)
        angles = positions[:, None] * inv_freq.detach().to("cpu", torch.float32)
        return cls(layout, torch.cat([angles.cos() * scaling, angles.sin() * scaling], dim=1).to(device))

    @classmethod
    def from_config(
        cls, text_config: Mapping[str, Any], *, max_positions: int, device: torch.device | str = "cpu"
    ) -> RotaryTable:
        """Builds a table from a model's ``text_config``: plain RoPE frequencies with the published sections.

        Reads ``rope_parameters``, or ``rope_scaling`` and ``rope_theta`` from older files. Raises
        InvalidRequest if sections are missing or the frequencies are scaled (use ``build`` for these).
        """
        import torch

        rope = text_config.get("rope_parameters") or text_config.get("rope_scaling") or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind not in ("default", "mrope"):
            raise InvalidRequest(f"rope_type {kind!r} scales its frequencies; pass inv_freq to build()")
        if "mrope_section" not in rope:
            raise InvalidRequest("the text config has no mrope_section, needs 3 sections")
        sections = tuple(int(section) for section in rope["mrope_section"])
        head_dim = text_config.get("head_dim")
        head_dim = head_dim or text_config["hidden_size"] // text_config["num_attention_heads"]
        partial = rope.get("partial_rotary_factor", text_config.get("partial_rotary_factor", 1.0))
        rotary_dim = int(head_dim * partial)
        theta = float(rope.get("rope_theta", text_config.get("rope_theta", 10_000.0)))
        exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
        layout = MRopeLayout(sections, bool(rope.get("mrope_interleaved", False)))  # type: ignore[arg-type]
        return cls.build(layout, 1.0 / theta**exponents, max_positions=max_positions, device=device)

    @property
    def max_positions(self) -> int:
        return int(self.cos_sin.shape[0])

    @functools.cached_property
    def axes(self) -> torch.Tensor:
        """int64 [F], on the table's device: the axis that rotates each pair."""
        import torch

        return torch.from_numpy(self.layout.axes()).to(self.cos_sin.device)

    def require(self, position: int) -> None:
        """Raises InvalidRequest if ``position`` is outside the table. Call it on the host for the largest
        position of a prompt (``MRopePositions.next_position`` - 1), and for the smallest of centred ones: the
        device does not check."""
        if not 0 <= position < self.max_positions:
            raise InvalidRequest(
                f"position {position} is outside the rotary table of {self.max_positions} positions"
            )


def apply_mrope(
    q_THd: torch.Tensor,
    k_THd: torch.Tensor,
    positions_3T: torch.Tensor,
    table: RotaryTable,
    *,
    backend: Backend = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotates q and k in place and returns them.

    q_THd: [T, Hq, d], k_THd: [T, Hk, d], both float32, float16 or bfloat16. They may be views with any token
    and head strides, such as parts of one packed projection. positions_3T: int64 or int32 [3, T], from 0
    and less than the table's number of positions, which the device does not check (centred ones may be below
    0). All tensors are on one device.
    backend: "auto" selects the kernel on CUDA if Triton is installed. The kernel is compiled at the first
    launch for each of three ranges of T, which start at 1, ``kernels.rotate.SHORT_STEP`` + 1 and
    ``MEDIUM_STEP`` + 1 tokens.
    Raises InvalidRequest, before anything is written, for other shapes, dtypes and devices.
    """
    _check(q_THd, k_THd, positions_3T, table)
    if choose_backend(backend, q_THd) == "torch":
        _rotate(q_THd, k_THd, positions_3T, table)
    else:
        from lm_adapter.prefill.kernels.rotate import rotate_qk_

        rotate_qk_(q_THd, k_THd, positions_3T, table.cos_sin, table.layout.sections, table.layout.interleaved)
    return q_THd, k_THd


def choose_backend(backend: Backend, tensor: torch.Tensor) -> Literal["torch", "triton"]:
    """The backend for ``tensor``'s device. Raises InvalidRequest for an unknown name, and MissingDependency
    when Triton is requested by name and not installed."""
    if backend not in ("auto", "torch", "triton"):
        raise InvalidRequest(f"backend is {backend!r}, needs auto, torch or triton")
    if backend == "triton" and not _has_triton():
        raise MissingDependency("triton", "the fused kernels")
    if backend == "auto":
        return "triton" if tensor.is_cuda and _has_triton() else "torch"
    return backend


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _check(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, table: RotaryTable) -> None:
    import torch

    if q.ndim != 3 or k.ndim != 3 or q.shape[0] != k.shape[0] or q.shape[2] != k.shape[2]:
        raise InvalidRequest(
            f"q has shape {list(q.shape)} and k {list(k.shape)}, need [T, Hq, d] and [T, Hk, d]"
        )
    if q.stride(2) != 1 or k.stride(2) != 1:
        raise InvalidRequest(
            f"elements of a head are {q.stride(2)} apart in q and {k.stride(2)} in k, need to be contiguous"
        )
    if tuple(positions.shape) != (3, q.shape[0]):
        raise InvalidRequest(f"positions have shape {list(positions.shape)}, need {[3, q.shape[0]]}")
    if positions.dtype not in (torch.int64, torch.int32):
        raise InvalidRequest(f"positions are {positions.dtype}, need torch.int64 or torch.int32")
    if table.layout.rotary_dim > q.shape[2]:
        raise InvalidRequest(
            f"heads have {q.shape[2]} elements, the table rotates {table.layout.rotary_dim} of them"
        )
    if q.dtype != k.dtype or q.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise InvalidRequest(
            f"q is {q.dtype} and k {k.dtype}, need float32, float16 or bfloat16, the same for both"
        )
    devices = {tensor.device for tensor in (q, k, positions, table.cos_sin)}
    if len(devices) > 1:
        raise InvalidRequest(f"q, k, positions and table are on {sorted(map(str, devices))}, need one device")


def _rotate(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, table: RotaryTable) -> None:
    import torch

    half = table.layout.rotary_dim // 2
    pairs = torch.arange(half, device=q.device)
    with torch.no_grad():
        positions_TF = positions.long()[table.axes].T
        cos = table.cos_sin[positions_TF, pairs][:, None]
        sin = table.cos_sin[positions_TF, pairs + half][:, None]
        for x in (q, k):
            first, second = x[..., :half].float(), x[..., half : 2 * half].float()
            rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
            x[..., : 2 * half] = rotated.to(x.dtype)
