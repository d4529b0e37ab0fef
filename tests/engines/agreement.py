"""When two answers are the same: token by token, up to a tie that 16-bit rows may break either way."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

# Nats by which two tokens may differ in likelihood and still be called equally likely. Logits of these models
# are up to 16 in size, where bfloat16 counts in steps of 1/16, and rows of two towers in it agree to about
# 2%, through which random weights of a handful of layers move a likelihood by a few tenths, seldom by more.
TIES = {"float32": 0.0, "bfloat16": 1.0}
# Of the likelihoods of the tokens that are the same, the median difference in nats.
NEAR = {"float32": 1e-3, "bfloat16": 0.3}
MIN_COMPARED = 3


def agree(references: Sequence[dict[str, Any]], answers: Sequence[dict[str, Any]], dtype: str) -> None:
    """Raises AssertionError where answers part at a token that the reference finds clearly less likely than
    its own, where too little could be compared, or where likelihoods differ. In float32 all tokens are the
    same."""
    differences = [
        difference
        for reference, answer in zip(references, answers, strict=True)
        for difference in compared(reference, answer, dtype)
    ]
    num_tokens = sum(len(reference["tokens"]) for reference in references)
    if dtype == "float32":
        assert len(differences) == num_tokens
    assert len(differences) >= MIN_COMPARED * len(references), (len(differences), num_tokens)
    assert statistics.median(differences) <= NEAR[dtype], differences


def compared(reference: dict[str, Any], found: dict[str, Any], dtype: str) -> list[float]:
    """Nats between the likelihoods of each token that is the same, until the answers part. Raises
    AssertionError where they part at no tie."""
    assert found["num_prompt"] == reference["num_prompt"]
    assert len(found["tokens"]) == len(reference["tokens"])
    differences = []
    for step, (expected, token) in enumerate(zip(reference["tokens"], found["tokens"], strict=True)):
        likely, found_likely = (
            {int(name): value for name, value in answer["logprobs"][step].items()}
            for answer in (reference, found)
        )
        if token != expected:
            behind = likely[expected] - likely.get(token, float("-inf"))
            assert behind <= TIES[dtype], (
                f"step {step}: {token} for {expected}, which is {behind} nats likelier: "
                f"{found['tokens']} for {reference['tokens']}"
            )
            break
        differences.append(abs(likely[expected] - found_likely[token]))
    return differences


def num_decided(answer: dict[str, Any], dtype: str) -> int:
    """Tokens up to the first that another is as likely as, to the tie: those that are sure to be compared."""
    for step, (token, logprobs) in enumerate(zip(answer["tokens"], answer["logprobs"], strict=True)):
        others = [value for name, value in logprobs.items() if int(name) != token]
        if logprobs[str(token)] - max(others) <= TIES[dtype]:
            return step
    return len(answer["tokens"])


def of_response(body: dict[str, Any]) -> dict[str, Any]:
    """The answer of the HTTP server in the form of offline.py."""
    steps = body["choices"][0]["logprobs"]["content"]

    def number(entry: dict[str, Any]) -> int:
        return int(entry["token"].removeprefix("token_id:"))

    return {
        "tokens": [number(step) for step in steps],
        "logprobs": [{str(number(top)): top["logprob"] for top in step["top_logprobs"]} for step in steps],
        "num_prompt": body["usage"]["prompt_tokens"],
    }
