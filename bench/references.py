"""The reference implementation's tower as the benches run it: eager, packed, captured and compiled.

Owns running the reference with FlashAttention-3, capturing it and compiling it. ``harness/reference.py``
loads it.

* ``ref_sdpa``: eager, with torch's attention, one call for each sequence.
* ``ref_fa3``: eager, with FlashAttention-3 over the packed sequences (num_splits=1).
* ``ref_fa3_graph``: the same forward in a CUDA graph with exactly the case's shapes. The reference reads
  grids on the host to compute its tables (interpolation indices and weights, coordinates, cu_seqlens and
  max_seqlen; for Kimi also frame indices and the merge's gather). A graph cannot capture that, so the
  reference's own functions compute the tables before the timing. Applying them is timed. The eager variants
  compute the tables in every run.
* ``ref_compiled``: the same forward through torch.compile with static shapes, then in a CUDA graph.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.harness.reference import ReferenceTower, VarlenKernel, register_varlen_attention
from encoder_service.towers.attention.fa3 import import_interface
from encoder_service.types import Grid

SDPA = "sdpa"
FA3 = "flash_fa3_varlen"
# FlashAttention-3 as a registered operator, which torch.compile does not trace.
FA3_OPERATOR = "flash_fa3_operator"
WARM_UP_RUNS = 2
OPERATOR_SCHEMA = "(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens, int max_seqlen, float scale) -> Tensor"


class LeftOut(Exception):
    """A variant cannot run here. The text is the reason in the result."""


def load_reference(path: Path, device: torch.device, dtype: torch.dtype) -> ReferenceTower:
    """The reference implementation's tower with its projector."""
    return ReferenceTower(path, device=device, dtype=dtype)


def register_fa3(device: torch.device) -> str | None:
    """Registers FlashAttention-3 with the reference; once per process. Returns the reason if that is not
    possible, else None."""
    if importlib.util.find_spec("transformers") is None:
        return "the reference package is not installed"
    if device.type != "cuda":
        return f"FlashAttention-3 needs a CUDA device, this is {device}"
    try:
        kernel = fa3_kernel()
    except LeftOut as error:
        return str(error)
    register_varlen_attention(FA3, kernel)
    register_varlen_attention(FA3_OPERATOR, operator_of(kernel, "varlen_attention"))
    return None


def fa3_kernel() -> VarlenKernel:
    """FlashAttention-3's public function, from the fa3-fwd wheel or flash_attn_interface. Raises LeftOut."""
    try:
        module: Any = import_interface()
    except ImportError as error:
        raise LeftOut(f"FlashAttention-3 is not installed: {error}") from error

    def attend(
        q_PHd: torch.Tensor,
        k_PHd: torch.Tensor,
        v_PHd: torch.Tensor,
        cu_seqlens: torch.Tensor,
        max_seqlen: int,
        scale: float,
    ) -> torch.Tensor:
        out = module.flash_attn_varlen_func(
            q_PHd,
            k_PHd,
            v_PHd,
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_k=cu_seqlens,
            max_seqlen_q=max_seqlen,
            max_seqlen_k=max_seqlen,
            softmax_scale=scale,
            causal=False,
            num_splits=1,
        )
        # Builds before 2025-07 return the log-sum-exp as well.
        return out[0] if isinstance(out, tuple) else out

    return attend


def operator_of(kernel: VarlenKernel, name: str) -> VarlenKernel:
    """Registers the kernel as operator ``bench::name`` and returns it."""

    def contiguous_rows(*arguments: Any) -> torch.Tensor:
        return kernel(*arguments).contiguous()

    operator: Any = torch.library.custom_op(
        f"bench::{name}", contiguous_rows, mutates_args=(), schema=OPERATOR_SCHEMA
    )
    operator.register_fake(lambda q, *_others: q.new_empty(q.shape))
    return operator


def eager(
    reference: ReferenceTower, pixels: torch.Tensor, grids: Sequence[Grid], attention: str
) -> Callable[[], torch.Tensor]:
    """The unmodified reference, including its tables and host synchronisation."""

    def run() -> torch.Tensor:
        reference.use_attention(attention)
        return reference.rows(pixels, grids)

    return run


def with_tables(
    reference: ReferenceTower, pixels: torch.Tensor, grids: Sequence[Grid], attention: str
) -> Callable[[], torch.Tensor]:
    """The reference's forward with precomputed tables: exact shapes, no host synchronisation."""
    tables = reference.tables(grids)

    def run() -> torch.Tensor:
        reference.use_attention(attention)
        return reference.forward(pixels, **tables)

    return run


def captured(run: Callable[[], torch.Tensor], device: torch.device) -> Callable[[], torch.Tensor]:
    """Captures ``run`` in a CUDA graph and returns its replay. The replay returns the graph's own rows, which
    the next replay overwrites."""
    side_stream = torch.cuda.Stream(device)
    side_stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side_stream):
        for _ in range(WARM_UP_RUNS):
            run()
    torch.cuda.current_stream(device).wait_stream(side_stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rows = run()

    def replay(_kept: object = run) -> torch.Tensor:
        """``_kept`` keeps the memory alive that the graph reads."""
        graph.replay()
        return rows

    return replay


def compiled(
    reference: ReferenceTower, pixels: torch.Tensor, grids: Sequence[Grid], attention: str
) -> Callable[[], torch.Tensor]:
    """The reference's forward compiled for exactly these shapes, in a CUDA graph. Raises the compiler's
    errors."""
    # Each case compiles from scratch. Otherwise a shape that differs from an earlier one becomes dynamic.
    torch.compiler.reset()
    tables = reference.tables(grids)
    reference.use_attention(attention)
    forward = torch.compile(reference.forward, dynamic=False)

    def run() -> torch.Tensor:
        rows: torch.Tensor = forward(pixels, **tables)
        return rows

    return captured(run, pixels.device)


def reason_of(error: BaseException) -> str:
    """An error as one line, for the result."""
    text = str(error).strip()
    if isinstance(error, LeftOut):
        return text
    return f"{type(error).__name__}: {text.splitlines()[0] if text else 'no message'}"
