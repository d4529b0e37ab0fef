"""Answers of a server with the likelihoods of its tokens, and what it took from its prefix cache."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from bench.harness.lmdeploy import Lmdeploy
from bench.harness.processes import data_url
from tests.sglang.reference import IMAGE, prompt

ONE = prompt(IMAGE, "What is in the picture?")
TEXT = prompt("Say something about waves.")
CASES = (
    (ONE, (0,)),
    (prompt("Look at this: ", IMAGE), (1,)),
    (prompt(IMAGE, IMAGE, "Compare the two."), (0, 1)),
    (prompt("First ", IMAGE, " then ", IMAGE, " and ", IMAGE), (2, 0, 2)),
    (TEXT, ()),
)
"""Prompts, and which images they have."""
AT_ONCE = (0, 1, 2, 4)
"""Those that are sent beside others. LMDeploy 0.18 may put a prompt above a chunk, whose first chunk ends
early at an image, into a batch with others: whole, with the pages of that chunk. No tower takes part."""
LOGPROBS = ("--logprobs-mode", "raw_logprobs")
"""The option that a comparison needs."""


def answer(server: Lmdeploy, text: str, images: Sequence[bytes]) -> dict[str, Any]:
    """In the form of ``agree``."""
    response = server.generate(text, images, return_logprob=True, top_logprobs_num=8)
    assert response.status_code == 200, response.text
    found = response.json()
    steps = found["meta_info"]["output_top_logprobs"]
    return {
        "tokens": found["output_ids"],
        "logprobs": [{str(token): value for value, token in step} for step in steps],
        "num_prompt": found["meta_info"]["prompt_tokens"],
    }


def num_cached(server: Lmdeploy, image: bytes, *further: str) -> int:
    """Tokens of a conversation that the prefix cache had. further: turns after the first, alternating."""
    question = "What is in the picture? Describe it at length, as a poem in five lines."
    parts = [{"type": "image_url", "image_url": {"url": data_url(image)}}, {"type": "text", "text": question}]
    turns: list[dict[str, Any]] = [{"role": "user", "content": parts}]
    roles = ("assistant", "user") * len(further)
    turns += [{"role": role, "content": text} for role, text in zip(roles, further, strict=False)]
    fields = {"messages": turns, "stream": True, "max_tokens": 2, "stream_options": {"include_usage": True}}
    answer = server.chat(image, **fields)
    assert answer.status_code == 200, answer.text
    usages = [json.loads(line[6:]).get("usage") for line in answer.text.splitlines() if line[6:7] == "{"]
    (usage,) = filter(None, usages)
    return (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
