"""A step's splice: the fused kernel and the torch version against rows that say where they come from."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lm_adapter.errors import InvalidRequest
from lm_adapter.prefill.kernels import scatter_rows
from lm_adapter.prefill.placeholders import ExpandedPrompt, PromptItem, expand_placeholders
from lm_adapter.prefill.splice import RowsLayout, Splicer, StepChunk, splice_step
from tests.unit.kernels.references import DTYPES, randn

IMAGE = 900
BACKENDS: list[Any] = ["torch", "triton"]


def make_prompt(runs: list[tuple[int, int]], tail: int = 0) -> ExpandedPrompt:
    """runs: (text tokens, rows of the item behind them)."""
    ids = [token for text, _ in runs for token in [*[1] * text, IMAGE]] + [2] * tail
    return expand_placeholders(ids, [PromptItem(IMAGE, (rows,)) for _, rows in runs])


def rows_of(prompt: ExpandedPrompt, generator: torch.Generator, width: int) -> list[torch.Tensor]:
    return [randn(generator, span.length, width) for span in prompt.spans]


def expected_step(
    embeds: torch.Tensor, parts: list[tuple[ExpandedPrompt, list[torch.Tensor], int, int]], levels: int
) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Token by token: embeddings, levels of every token [L, T, D], and the visual tokens."""
    embeds = embeds.clone()
    width = embeds.shape[1]
    deepstack = torch.zeros(levels, *embeds.shape, dtype=embeds.dtype)
    visual, at = [], 0
    for prompt, rows, start, num_tokens in parts:
        owner = {
            segment.start + i: rows[span.item][row]
            for span in prompt.spans
            for row, (segment, i) in enumerate(
                (segment, i) for segment in span.segments for i in range(segment.length)
            )
        }
        for token in range(start, start + num_tokens):
            if token in owner:
                row = owner[token].to(embeds.dtype)
                embeds[at] = row[:width]
                deepstack[:, at] = row[width:].view(levels, width)
                visual.append(at)
            at += 1
    return embeds, deepstack, visual


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Entries of each launch of the kernel."""
    sizes: list[int] = []
    plain = scatter_rows.scatter_rows_

    def counted(table: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        sizes.append(table.shape[1])
        plain(table, *args, **kwargs)

    monkeypatch.setattr(scatter_rows, "scatter_rows_", counted)
    return sizes


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_p02_requests_of_one_step_keep_their_own_rows(
    dtype: torch.dtype,
    backend: Any,
    per_token: bool,
    device: torch.device,
    generator: torch.Generator,
    launches: list[int],
) -> None:
    """A prefill's middle, a decode, a prompt's end and a request without items in one step, two levels,
    padding behind; two requests share one prompt and its rows, as samples of n > 1 do."""
    width, levels = 40, 2
    layout = RowsLayout(width, levels)
    first, second, text = make_prompt([(2, 5), (0, 3)], 2), make_prompt([(1, 4)]), make_prompt([], 6)
    rows = [rows_of(prompt, generator, layout.width) for prompt in (first, second, text)]
    narrow = [[r.to(dtype) for r in prompt_rows] for prompt_rows in rows]
    parts = [
        (first, narrow[0], 3, 6),  # begins and ends inside vision runs
        (text, narrow[2], 6, 1),  # decoding
        (second, narrow[1], 0, 5),
        (first, narrow[0], 3, 6),
    ]
    on_device = [[r.to(device) for r in prompt_rows] for prompt_rows in narrow]
    splicers = [
        Splicer(prompt.spans, item_rows, layout, inputs_embeds_dtype=dtype)
        for prompt, item_rows in zip((first, second, text), on_device, strict=True)
    ]
    chunks = [
        StepChunk(splicers[0], 3, 6),
        StepChunk(splicers[2], 6, 1),
        StepChunk(splicers[1], 0, 5),
        StepChunk(splicers[0], 3, 6),
    ]
    embeds = randn(generator, 21, width).to(dtype)
    expected, expected_levels, visual = expected_step(embeds, parts, levels)
    held = embeds.to(device, copy=True)
    buffer = torch.full((levels, 21, width), torch.nan, dtype=dtype, device=device) if per_token else None
    spliced = splice_step(held, chunks, deepstack_LTD=buffer, backend=backend)
    assert torch.equal(held.cpu(), expected)
    assert spliced.num_visual == len(visual) == 16
    assert spliced.visual_tokens.dtype == torch.int64
    assert spliced.visual_tokens.tolist() == visual
    found = spliced.deepstack.cpu()
    assert torch.equal(found, expected_levels if per_token else expected_levels[:, visual])
    if per_token:
        assert spliced.deepstack is buffer
    if backend == "triton":
        assert launches == [21 if per_token else 16]


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_of_several_dtypes_and_strides_and_devices(
    backend: Any, device: torch.device, generator: torch.Generator, launches: list[int]
) -> None:
    """float32 rows that lie apart and start off a multiple of 16 bytes, bfloat16 rows, rows on the host."""
    layout = RowsLayout(12, 1)
    prompt = make_prompt([(1, 3), (1, 2), (0, 2)])
    rows = rows_of(prompt, generator, layout.width)
    rows[1] = rows[1].bfloat16()
    wide = torch.full((3, layout.width + 1), torch.nan, device=device)
    wide[:, 1:] = rows[0].to(device)
    stored = [wide[:, 1:], rows[1].to(device), rows[2]]
    splicer = Splicer(prompt.spans, stored, layout, inputs_embeds_dtype=torch.float32)
    embeds = torch.zeros(len(prompt), 12)
    expected, expected_levels, visual = expected_step(embeds, [(prompt, rows, 0, len(prompt))], 1)
    held = embeds.to(device)
    spliced = splice_step(held, [StepChunk(splicer, 0, len(prompt))], backend=backend)
    assert torch.equal(held.cpu(), expected)
    assert torch.equal(spliced.deepstack.cpu(), expected_levels[:, visual])
    assert launches == ([] if backend == "torch" else [2, 5])


@pytest.mark.parametrize("backend", BACKENDS)
def test_p08_wide_rows_are_rounded_once_and_indices_keep_their_dtype(
    backend: Any, device: torch.device, generator: torch.Generator
) -> None:
    """float32 rows become bfloat16 as torch rounds them, to nearest even; token indices stay 64-bit integers
    that bfloat16 could not hold."""
    layout = RowsLayout(8, 1)
    prompt = make_prompt([(1025, 40)])
    (rows,) = rows_of(prompt, generator, layout.width)
    splicer = Splicer(prompt.spans, [rows.to(device)], layout, inputs_embeds_dtype=torch.bfloat16)
    held = torch.zeros(len(prompt), 8, dtype=torch.bfloat16, device=device)
    spliced = splice_step(held, [StepChunk(splicer, 0, len(prompt))], backend=backend)
    assert torch.equal(held[1025:].cpu(), rows[:, :8].bfloat16())
    assert torch.equal(spliced.deepstack[0].cpu(), rows[:, 8:].bfloat16())
    assert spliced.visual_tokens.dtype == torch.int64
    assert spliced.visual_tokens.tolist() == list(range(1025, 1065))
    assert int(torch.tensor(1025.0).bfloat16()) != 1025


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_without_visual_tokens(backend: Any, device: torch.device) -> None:
    layout = RowsLayout(8, 2)
    splicer = Splicer([], [], layout, inputs_embeds_dtype=torch.float32)
    held = torch.ones(3, 8, device=device)
    spliced = splice_step(held, [StepChunk(splicer, 0, 3)], backend=backend)
    assert tuple(spliced.deepstack.shape) == (2, 0, 8)
    assert spliced.visual_tokens.numel() == spliced.num_visual == 0
    buffer = torch.ones(2, 3, 8, device=device)
    splice_step(held, [StepChunk(splicer, 0, 3)], deepstack_LTD=buffer, backend=backend)
    assert not buffer.any()
    assert (held == 1).all()
    assert splice_step(held, [], backend=backend).num_visual == 0


def test_errors_name_both_figures_and_nothing_is_written(device: torch.device) -> None:
    prompt = make_prompt([(1, 2)])
    splicer = Splicer(
        prompt.spans, [torch.ones(2, 16, device=device)], RowsLayout(8, 1), inputs_embeds_dtype=torch.float32
    )
    other = Splicer([], [], RowsLayout(8, 2), inputs_embeds_dtype=torch.float32)
    held = torch.zeros(3, 8, device=device)

    def refused(match: str, chunks: list[StepChunk], **kwargs: Any) -> None:
        with pytest.raises(InvalidRequest, match=match):
            splice_step(held, chunks, backend="triton", **kwargs)
        assert not held.any()

    refused(r"4 tokens, inputs_embeds has 3", [StepChunk(splicer, 0, 3), StepChunk(splicer, 0, 1)])
    refused(r"request 0 has -1 tokens", [StepChunk(splicer, 0, -1)])
    refused(r"width 24, request 0 of 16", [StepChunk(splicer, 0, 2), StepChunk(other, 0, 1)])
    refused(r"token 0 or later, got -1", [StepChunk(splicer, -1, 2)])
    buffer = torch.zeros(2, 3, 8, device=device)
    refused(r"\[2, 3, 8\], needs torch.float32 \[1, 3, 8\]", [StepChunk(splicer, 0, 3)], deepstack_LTD=buffer)
    with pytest.raises(InvalidRequest, match="backend is 'cuda'"):
        splice_step(held, [StepChunk(splicer, 0, 3)], backend="cuda")  # type: ignore[arg-type]


class OnAGpu(torch.Tensor):
    """Rows that say they are on a GPU: what is copied from them without a wait has not arrived yet."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda:0")

    def to(self, device: torch.device, *, non_blocking: bool = False) -> torch.Tensor:  # type: ignore[override]
        plain = self.as_subclass(torch.Tensor)
        return torch.full_like(plain, torch.nan) if non_blocking else plain.clone()


def test_rows_of_a_gpu_have_arrived_when_the_embeddings_are_the_hosts(generator: torch.Generator) -> None:
    prompt = make_prompt([(1, 3), (2, 2)])
    rows = rows_of(prompt, generator, 16)
    on_gpu = [one.as_subclass(OnAGpu) for one in rows]
    splicer = Splicer(prompt.spans, on_gpu, RowsLayout(8, 1), inputs_embeds_dtype=torch.float32)
    held = torch.zeros(len(prompt), 8)
    spliced = splice_step(held, [StepChunk(splicer, 0, len(prompt))], backend="torch")
    expected, levels, visual = expected_step(torch.zeros(len(prompt), 8), [(prompt, rows, 0, len(prompt))], 1)
    assert torch.equal(held, expected)
    assert torch.equal(spliced.deepstack, levels[:, visual])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("memory", ["device", "pinned", "pageable", "apart"])
def test_on_a_gpu_no_rows_are_waited_for(
    device: torch.device, generator: torch.Generator, memory: str, backend: Any, dtype: torch.dtype
) -> None:
    """The step is queued behind slow work and returns while that runs. apart: pageable rows with something
    between them. dtype: of inputs_embeds; the rows are of float32."""
    layout = RowsLayout(64, 2)
    prompt = make_prompt([(3, 400), (2, 200)], 4)
    rows = rows_of(prompt, generator, layout.width)
    stored = {
        "device": lambda one: one.to(device),
        "pinned": lambda one: one.pin_memory(),
        "pageable": lambda one: one,
        "apart": lambda one: torch.cat([one, one], dim=1)[:, : layout.width],
    }[memory]
    splicer = Splicer(prompt.spans, [stored(r) for r in rows], layout, inputs_embeds_dtype=dtype)
    held = torch.zeros(len(prompt), 64, device=device, dtype=dtype)
    chunks = [StepChunk(splicer, 0, len(prompt))]
    splice_step(held, chunks, backend=backend)  # compiles, and has pinned memory to use again
    held.zero_()
    torch.cuda.synchronize(device)
    torch.cuda._sleep(300_000_000)  # type: ignore[no-untyped-call]
    spliced = splice_step(held, chunks, backend=backend)
    assert not torch.cuda.current_stream(device).query(), "the host waited for the stream"
    expected, expected_levels, visual = expected_step(
        torch.zeros(len(prompt), 64), [(prompt, rows, 0, len(prompt))], 2
    )
    assert torch.equal(held.cpu(), expected.to(dtype))
    assert torch.equal(spliced.deepstack.cpu(), expected_levels[:, visual].to(dtype))


@pytest.mark.gpu
def test_on_a_gpu_steps_that_follow_at_once_do_not_rewrite_each_others_tables(
    device: torch.device, generator: torch.Generator
) -> None:
    """Thirty steps queued behind slow work: each step's pinned table must last until its copy has run."""
    layout = RowsLayout(32, 1)
    prompt = make_prompt([(1, 40)])
    busy = torch.randn(6000, 6000, device=device)
    steps = []
    for _ in range(3):
        busy = busy @ busy * 1e-4
    for _ in range(30):
        rows = rows_of(prompt, generator, layout.width)
        splicer = Splicer(
            prompt.spans, [r.to(device) for r in rows], layout, inputs_embeds_dtype=torch.float32
        )
        held = torch.zeros(len(prompt), 32, device=device)
        spliced = splice_step(held, [StepChunk(splicer, 0, len(prompt))])
        steps.append((rows, held, spliced))
        del splicer
    for rows, held, spliced in steps:
        assert torch.equal(held[1:].cpu(), rows[0][:, :32])
        assert torch.equal(spliced.deepstack[0].cpu(), rows[0][:, 32:])
