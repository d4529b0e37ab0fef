"""Readings of a prompt whose items may each have another form: what fits in two ways is never guessed."""

from __future__ import annotations

import itertools
import random

import pytest

from lm_adapter.errors import InvalidRequest
from lm_adapter.placeholders import PromptItem, expand_placeholders

IMAGE, VIDEO, TEXT = 900, 901, 5


def read(lengths: list[int], *items: tuple[int, ...]) -> list[list[int]]:
    """Per item the runs that its frames are in, for clips in runs of these lengths with text between."""
    ids = [token for length in lengths for token in [*[VIDEO] * length, TEXT]]
    prompt = expand_placeholders(ids, [PromptItem(VIDEO, rows) for rows in items])
    run_of = list(itertools.accumulate(token == TEXT for token in prompt.ids.tolist()))
    return [[run_of[segment.start] for segment in span.segments] for span in prompt.spans]


@pytest.mark.parametrize("seed", range(4))
def test_prompts_as_processors_write_them_are_read(seed: int) -> None:
    """A timestamp before each frame, or clips apart; of any number of frames and rows."""
    rng = random.Random(seed)
    for _ in range(200):
        items = [(rng.randint(1, 9),) * rng.randint(1, 9) for _ in range(rng.randint(1, 5))]
        frames = [len(rows) for rows in items]
        runs = itertools.count()
        stamped = [[next(runs) for _ in rows] for rows in items]
        assert read([1] * sum(frames), *items) == stamped
        apart = [[place] * len(rows) for place, rows in enumerate(items)]
        assert read([1] * len(items), *items) == apart
        assert read([sum(rows) for rows in items], *items) == apart
        assert read([rows[0] for rows in items for _ in rows], *items) == stamped
        large = [tuple(64 + row for row in rows) for rows in items]
        assert read(frames, *large) == apart  # one id per frame, side by side


def test_whatever_form_each_item_has_no_prompt_is_misread() -> None:
    rng = random.Random(3)
    num_read, reasons = 0, set()
    for _ in range(2500):
        ids: list[int] = []
        items: list[PromptItem] = []
        truth: list[int | None] = []  # the item of each row, None for text
        for place in range(rng.randint(0, 4)):
            text = [TEXT] * rng.choice([0, 0, 1, 3])
            ids += text
            truth += [None] * len(text)
            placeholder = rng.choice([IMAGE, VIDEO])
            rows = (rng.choice([1, 2, 3, 4, 6, 9]),) * (rng.randint(1, 4) if placeholder == VIDEO else 1)
            items.append(PromptItem(placeholder, rows))
            form = rng.choice(["full", "item", "frame"])
            ids += [placeholder] * (form == "item")
            for num_rows in rows:
                if form != "item" and placeholder == VIDEO and rng.random() < 0.6:
                    ids.append(TEXT)
                    truth.append(None)
                ids += [placeholder] * {"full": num_rows, "item": 0, "frame": 1}[form]
                truth += [place] * num_rows
        try:
            prompt = expand_placeholders(ids, items, [IMAGE, VIDEO])
        except InvalidRequest as error:
            reasons.add(error.reason)
            continue
        num_read += 1
        found: list[int | None] = [None] * len(prompt)
        for span in prompt.spans:
            for segment in span.segments:
                found[segment.start : segment.end] = [span.item] * segment.length
        assert found == truth, (ids, items)
    assert reasons == {"PLACEHOLDER_AMBIGUOUS"}
    assert num_read > 2000
