"""Every attention backend against float32: mixed lengths, one-row sequences, empty slots, padding.

On a CPU the plain backend and, interpreted, the Triton kernel; with ``--device cuda`` every backend that is
installed, in bfloat16.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from encoder_service.towers.attention import AttentionBackend, SdpaAttention, available_backends
from encoder_service.towers.attention.available import FA4_TILES
from tests.unit.towers.attention_cases import bounds_of, exact, packed, relative_error

triton_varlen = pytest.importorskip("encoder_service.towers.attention.triton_varlen")

SMALL_TILE = triton_varlen.TileConfig(16, 32, 4, 2)
MIXED = (70, 1, 16, 33, 1, 64)
NAMES = ("fa4", *FA4_TILES, "fa4-library", "fa3", "triton", "fa2", "varlen", "sdpa")
# Relative Frobenius error. bfloat16 rounds probabilities and output to 8 bits: 2e-3 to 4e-3 on random data.
LIMITS = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def check(
    backend: AttentionBackend,
    seqlens: tuple[int, ...],
    *,
    num_patches: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    planned: bool,
    empty: int = 3,
) -> None:
    """Rows within the limit of float32, padding finite, under a baked max_seqlen beyond every length."""
    total = sum(seqlens)
    q, k, v = packed(num_patches, 2, head_dim, dtype=dtype, device=device)
    bounds = bounds_of(seqlens, empty=empty, max_seqlen=num_patches, device=device)
    used = backend.plan(bounds, q.shape, dtype) if planned else bounds
    found = backend.attend(q, k, v, used)
    assert found.shape == q.shape
    assert found.dtype == dtype
    assert relative_error(found[:total], exact(q, k, v, seqlens)) < LIMITS[dtype]
    assert bool(found[total:].isfinite().all())


def runnable_here(device: torch.device) -> dict[str, AttentionBackend]:
    return {backend.name: backend for backend in available_backends(device)}


@pytest.mark.gpu
@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("head_dim", [64, 72, 80])
@pytest.mark.parametrize("name", NAMES)
def test_installed_backends(device: torch.device, name: str, head_dim: int, planned: bool) -> None:
    if device.type != "cuda":
        pytest.skip("runs with --device cuda")
    backends = runnable_here(device)
    if name not in backends:
        pytest.skip(f"{name} is not installed")
    for seqlens, num_patches in [(MIXED, 200), (MIXED, 185), ((1,), 8), ((300, 1, 784), 2000)]:
        check(
            backends[name],
            seqlens,
            num_patches=num_patches,
            head_dim=head_dim,
            dtype=torch.bfloat16,
            device=device,
            planned=planned,
        )


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in NAMES if name != "sdpa"])
def test_p30_a_graph_serves_other_lengths_than_it_was_captured_with(device: torch.device, name: str) -> None:
    if device.type != "cuda":
        pytest.skip("runs with --device cuda")
    backends = runnable_here(device)
    if name not in backends:
        pytest.skip(f"{name} is not installed")
    backend = backends[name]
    q, k, v = packed(512, 2, 72, dtype=torch.bfloat16, device=device)
    static = bounds_of((512,), empty=7, max_seqlen=512, device=device)

    def run() -> torch.Tensor:
        return backend.attend(q, k, v, backend.plan(static, q.shape, q.dtype))

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for seqlens in [(512,), MIXED, (1,), (100, 300, 1, 1), (64,) * 8]:
        static.cu_seqlens.copy_(bounds_of(seqlens, empty=8 - len(seqlens)).cu_seqlens)
        graph.replay()
        total = sum(seqlens)
        assert relative_error(out[:total], exact(q, k, v, seqlens)) < LIMITS[torch.bfloat16]
        assert bool(out[total:].isfinite().all())


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_p31_rows_are_bit_equal_in_any_batch(device: torch.device, name: str) -> None:
    if device.type != "cuda":
        pytest.skip("runs with --device cuda")
    backends = {backend.name: backend for backend in available_backends(device, deterministic=True)}
    if name not in backends:
        pytest.skip(f"{name} is not installed")
    q, k, v = packed(2048, 4, 72, dtype=torch.bfloat16, device=device)
    alone = backends[name].attend(q[:784], k[:784], v[:784], bounds_of((784,), device=device))
    batch = bounds_of((784, 1, 900, 64), empty=12, max_seqlen=2048, device=device)
    assert torch.equal(backends[name].attend(q, k, v, batch)[:784], alone)


@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("head_dim", [16, 64, 72, 80])
def test_triton_on_mixed_lengths(device: torch.device, head_dim: int, planned: bool) -> None:
    check(
        triton_varlen.TritonVarlenAttention(SMALL_TILE),
        MIXED,
        num_patches=200,
        head_dim=head_dim,
        dtype=torch.float32,
        device=device,
        planned=planned,
    )


@pytest.mark.parametrize("head_dim", [72, 8])
def test_triton_in_half_precision(device: torch.device, head_dim: int) -> None:
    check(
        triton_varlen.TritonVarlenAttention(SMALL_TILE),
        (40, 1, 33),
        num_patches=80,
        head_dim=head_dim,
        dtype=torch.float16,
        device=device,
        planned=True,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_triton_default_tiles(device: torch.device, dtype: torch.dtype) -> None:
    check(
        triton_varlen.TritonVarlenAttention(),
        (130, 7),
        num_patches=140,
        head_dim=72,
        dtype=dtype,
        device=device,
        planned=True,
    )


@pytest.mark.parametrize("backend", [SdpaAttention(), SdpaAttention(one_by_one=True)])
@pytest.mark.parametrize("head_dim", [16, 64, 72, 80])
def test_plain_on_mixed_lengths(device: torch.device, backend: SdpaAttention, head_dim: int) -> None:
    check(
        backend,
        MIXED,
        num_patches=200,
        head_dim=head_dim,
        dtype=torch.float32,
        device=device,
        planned=True,
    )


@settings(deadline=None, max_examples=15)
@given(
    seqlens=st.lists(st.sampled_from([0, 1, 2, 15, 16, 17, 40]), min_size=1, max_size=7),
    extra=st.integers(0, 20),
)
def test_triton_any_lengths(seqlens: list[int], extra: int) -> None:
    if not sum(seqlens):
        return
    backend = triton_varlen.TritonVarlenAttention(triton_varlen.TileConfig(16, 16, 4, 2))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    num_patches = sum(seqlens) + extra
    q, k, v = packed(num_patches, 1, 24, device=device)
    found = backend.attend(q, k, v, bounds_of(seqlens, empty=2, device=device))
    assert relative_error(found[: sum(seqlens)], exact(q, k, v, seqlens)) < 1e-5
    assert not found[sum(seqlens) :].any()


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy, interpreting
def test_p29_triton_never_reads_padding_nor_a_neighbour(device: torch.device) -> None:
    """NaN beyond a sequence stays there, although a masked weight of zero would carry it over."""
    backend = triton_varlen.TritonVarlenAttention(SMALL_TILE)
    q, k, v = packed(60, 2, 72, device=device)
    clean = backend.attend(q, k, v, bounds_of((20, 21), device=device)).clone()
    poisoned = [x.clone() for x in (q, k, v)]
    for x in poisoned:
        x[20:] = torch.nan
    # clone() gives dense copies: strides stay alike, and the kernel takes them as it takes views.
    found = backend.attend(*poisoned, bounds_of((20, 21), device=device))
    assert torch.equal(found[:20], clean[:20])
    assert not found[41:].any()


def test_p31_triton_rows_are_bit_equal_in_any_batch(device: torch.device) -> None:
    backend = triton_varlen.TritonVarlenAttention(SMALL_TILE)
    q, k, v = packed(150, 2, 72, device=device)
    alone = backend.attend(q[:37], k[:37], v[:37], bounds_of((37,), device=device))
    batch = bounds_of((37, 1, 90), empty=5, max_seqlen=150, device=device)
    assert torch.equal(backend.attend(q, k, v, batch)[:37], alone)


def test_tiles_stand_longest_first_and_the_rest_is_empty(device: torch.device) -> None:
    bounds = bounds_of((5, 1, 0, 70, 33, 70), empty=2, device=device)
    tiles = triton_varlen.list_tiles(bounds.cu_seqlens, 200, 32).tolist()
    assert len(tiles) == 7 + 8
    assert tiles[:9] == ([[6, 76, 0]] * 3 + [[109, 179, 3]] * 3 + [[76, 109, 6]] * 2 + [[0, 5, 8]])
    assert tiles[9] == [5, 6, 9]
    assert tiles[10:] == [[0, 0, 0]] * 5


def test_tiles_of_a_full_list_fit(device: torch.device) -> None:
    """One row over a whole tile each: the most tiles that these patches can need."""
    bounds = bounds_of((33,) * 4, device=device)
    tiles = triton_varlen.list_tiles(bounds.cu_seqlens, 132, 32)
    assert tiles[:, 1].count_nonzero() == 8
    assert tiles.shape[0] == 5 + 4


@pytest.mark.parametrize(
    ("head_dim", "widths"),
    [(8, (16, 0)), (16, (16, 0)), (24, (32, 0)), (64, (64, 0)), (72, (128, 0)), (80, (128, 0)),
     (96, (128, 0)), (128, (128, 0)), (176, (256, 0))],
)  # fmt: skip
def test_head_dim_splits(head_dim: int, widths: tuple[int, int]) -> None:
    assert triton_varlen.split_head_dim(head_dim) == widths


def test_triton_refuses_what_it_cannot_serve(device: torch.device) -> None:
    backend = triton_varlen.TritonVarlenAttention()
    q, k, v = packed(8, 1, 16, device=device)
    with pytest.raises(ValueError, match="one stride"):
        backend.attend(q, k.contiguous(), v, bounds_of((8,), device=device))
    with pytest.raises(ValueError, match="264 is over the largest served, 256"):
        backend.config_for(264, torch.bfloat16)
