"""The table of kernels from a profiler's trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_profile import (
    NAME_LENGTH,
    DeviceSpan,
    busy_us,
    device_spans,
    group_of,
    profile_table,
    short_name,
    split_runs,
    summary,
)
from rich.console import Console

REAL_NAMES = {
    "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<flash::CollectiveMainloopFwd>>>"
    "(flash::Params)": "attention",
    "kernel_cutlass_kernel_flash_attncuteflash_fwd_sm90FlashAttentionForwardSm90_object_at__tensorptrbf16": (
        "attention"
    ),
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_kernel0_0": "attention",
    "attend_kernel": "attention",
    "nvjet_tst_192x192_64x4_2x1_v_bz_coopB_bias_TNN": "products",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_bias_gelu": "products",
    "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cute::tuple<int>>>": "products",
    "_rotate_kernel": "rope",
    "_norm_kernel": "norms",
    "_embed_norm_kernel": "norms",
    "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float>(int)": "norms",
    "_gelu_kernel": "gelu",
    "void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl(at::Tensor&)>": "gelu",
    "_quantize_kernel": "quantize",
    "Memcpy HtoD (Pinned -> Device)": "copies",
    "Memset (Device)": "copies",
    "void at::native::vectorized_elementwise_kernel<8, at::native::FillFunctor<c10::BFloat16>>": "copies",
    "void at::native::elementwise_kernel<128, 4, at::native::direct_copy_kernel_cuda>": "copies",
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>": "other",
}


@pytest.mark.parametrize("name", REAL_NAMES)
def test_kernels_fall_into_groups_by_the_names_that_libraries_give_them(name: str) -> None:
    assert group_of(name) == REAL_NAMES[name]


@pytest.mark.parametrize("name", REAL_NAMES)
def test_short_names_are_short_and_keep_the_start(name: str) -> None:
    short = short_name(name)
    assert 0 < len(short) <= NAME_LENGTH
    assert not short.startswith("void ")


def spans_of_runs(repeats: int) -> list[DeviceSpan]:
    """Each run: a product of 40 us, 10 us of nothing, a norm of 30 that overlaps a copy of 20."""
    spans = []
    for run in range(repeats):
        start = run * 6000.0
        spans += [
            DeviceSpan("nvjet_a", start, 40),
            DeviceSpan("_norm_kernel", start + 50, 30),
            DeviceSpan("Memcpy DtoD", start + 60, 20),
        ]
    return spans


def test_summary_is_of_one_run() -> None:
    found = summary(spans_of_runs(3), 3)
    assert found["span_us"] == pytest.approx(80)
    assert found["busy_us"] == pytest.approx(70)
    assert found["idle_share"] == pytest.approx(10 / 80)
    assert [(row["name"], row["calls"], row["total_us"]) for row in found["groups"]] == [
        ("products", 1, 40),
        ("norms", 1, 30),
        ("copies", 1, 20),
    ]
    assert sum(row["share"] for row in found["groups"]) == pytest.approx(1)
    assert sum(row["share"] for row in found["kernels"]) == pytest.approx(1)
    assert {row["name"]: row["group"] for row in found["kernels"]}["_norm_kernel"] == "norms"


def test_runs_of_different_kernel_counts_are_told_apart_by_their_pauses() -> None:
    spans = spans_of_runs(2)
    del spans[4]
    assert [len(one) for one in split_runs(spans, 2)] == [3, 2]


def test_a_long_kernel_under_short_ones_hides_no_pause() -> None:
    spans = [DeviceSpan("long", 0, 1000), DeviceSpan("short", 10, 1), DeviceSpan("next", 1100, 5)]
    assert [len(one) for one in split_runs(spans, 2)] == [2, 1]
    assert busy_us(spans) == pytest.approx(1005)


def test_fewer_kernels_than_runs_are_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match="1 kernels of 2 runs"):
        summary([DeviceSpan("a", 0, 1)], 2)


def test_only_what_runs_on_the_device_is_read_from_a_trace() -> None:
    trace: dict[str, Any] = {
        "traceEvents": [
            {"ph": "X", "cat": "kernel", "name": "b", "ts": 5.0, "dur": 1.0},
            {"ph": "X", "cat": "gpu_memcpy", "name": "a", "ts": 2.0, "dur": 1.0},
            {"ph": "X", "cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": 0.0, "dur": 9.0},
            {"ph": "M", "name": "process_name"},
        ]
    }
    assert device_spans(trace) == [DeviceSpan("a", 2, 1), DeviceSpan("b", 5, 1)]


def test_a_trace_of_this_torch_has_the_fields_that_are_read(tmp_path: Any) -> None:
    import json

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        torch.ones(4).sum()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    trace = json.loads((tmp_path / "trace.json").read_text())
    event = next(one for one in trace["traceEvents"] if one.get("ph") == "X" and one.get("cat") == "cpu_op")
    assert {"name", "ts", "dur"} <= set(event)
    assert device_spans(trace) == []


def test_the_table_names_span_idle_and_groups() -> None:
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(profile_table("case", summary(spans_of_runs(2), 2)))
    text = console.export_text()
    console.file.close()
    for word in ("case: 80 us, idle 12.5%", "products", "_norm_kernel", "44.4%"):
        assert word in text
