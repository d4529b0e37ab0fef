"""Rows that are still coming: who waits for them, and a splice that asks before it writes."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lm_adapter import ArrivingRows, EncodedRows, InvalidRequest, ItemFailed
from lm_adapter.errors import CallFailed, DeadlineExceeded
from lm_adapter.placeholders import PromptItem, expand_placeholders
from lm_adapter.splice import RowsLayout, Splicer

D = 4
LAYOUT = RowsLayout(out_width=D)


def rows_of(num_rows: int) -> Any:
    rows = object.__new__(EncodedRows)
    object.__setattr__(rows, "num_rows", num_rows)
    return rows


def test_a_reader_waits_for_as_many_rows_as_it_needs() -> None:
    arriving, rows = ArrivingRows(), rows_of(6)
    found: list[int] = []

    def read() -> None:
        assert arriving.begin(20) is rows
        arriving.wait(4, 20)
        found.append(arriving.num_ready)

    thread = threading.Thread(target=read)
    thread.start()
    arriving.on_rows(0, rows, 2)
    arriving.on_rows(1, rows_of(9), 9)
    assert arriving.num_ready == 2
    with pytest.raises(DeadlineExceeded, match=r"2 rows came within 0.05 s, 4 are needed"):
        arriving.wait(4, 0.05)
    arriving.on_rows(0, rows, 5)
    thread.join(20)
    assert found == [5]
    arriving.end(rows)
    arriving.wait(6, 0)


def test_rows_that_come_whole_are_all_there() -> None:
    arriving, rows = ArrivingRows(), rows_of(3)
    arriving.run(lambda: rows)
    assert arriving.begin(0) is rows
    arriving.wait(3, 0)


@pytest.mark.parametrize("told", [0, 2])
def test_a_failure_reaches_whoever_waits_for_more(told: int) -> None:
    arriving = ArrivingRows()
    failed = ItemFailed("the clip is damaged", reason="UNDECODABLE_CLIP")
    if told:
        arriving.on_rows(0, rows_of(6), told)
    arriving.end(failed)
    arriving.fail(CallFailed("later"))
    if told:
        arriving.wait(told, 0)
    with pytest.raises(ItemFailed, match="damaged") as found:
        arriving.wait(told + 1, 20)
    assert found.value is failed


def test_a_call_that_raises_is_told() -> None:
    arriving = ArrivingRows()

    def call() -> EncodedRows:
        raise CallFailed("the encoder is gone")

    arriving.run(call)
    with pytest.raises(CallFailed, match="gone"):
        arriving.begin(20)


@pytest.mark.parametrize("pruned", [False, True])
def test_a_splice_asks_for_what_a_chunk_needs_before_it_writes(pruned: bool) -> None:
    keep = np.array([True, False, True, True, False, True]) if pruned else np.ones(6, dtype=np.bool_)
    num_kept = int(keep.sum())
    prompt = expand_placeholders([1, 900, 2], [PromptItem(900, (num_kept,))])
    rows = torch.arange(6.0)[:, None].expand(6, D).contiguous()
    asked: list[int] = []
    refuses = SimpleNamespace(at=99)

    def ready(num_rows: int) -> None:
        asked.append(num_rows)
        if num_rows >= refuses.at:
            raise ItemFailed("the clip is damaged", reason="UNDECODABLE_CLIP")

    splicer = Splicer(
        prompt.spans, [rows], LAYOUT, inputs_embeds_dtype=torch.float32, keep=[keep], ready=[ready]
    )
    embeds = torch.full((3, D), -1.0)
    splicer.splice(embeds, 0)
    assert embeds[:, 0].tolist() == [-1, 0, 2 if pruned else 1]
    assert asked == [3 if pruned else 2]
    refuses.at = 6
    embeds = torch.full((len(prompt) - 3, D), -1.0)
    with pytest.raises(ItemFailed):
        splicer.splice(embeds, 3)
    assert asked[-1] == 6
    assert (embeds == -1).all()


def test_items_and_their_readiness_are_as_many() -> None:
    prompt = expand_placeholders([900], [PromptItem(900, (2,))])
    with pytest.raises(InvalidRequest, match="prompt has 1 items, 2 say when they are ready"):
        Splicer(
            prompt.spans,
            [torch.zeros(2, D)],
            LAYOUT,
            inputs_embeds_dtype=torch.float32,
            ready=[None, None],
        )
