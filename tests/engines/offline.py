"""vLLM in this process, with its tower and as a consumer at once: pixels and rows answered side by side.

A script: reads its settings as JSON from standard input, prints the answers as one line of JSON at the end.
Of several sets of pictures the one is taken that leaves the least to chance: whose answers, by the tower
that is here, have the most tokens that no other is as likely as.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from tests.engines.agreement import num_decided

MAX_TOKENS = 12
NUM_LOGPROBS = 8
# Smaller than an image's placeholders: prefill goes in chunks, and cuts images.
MAX_BATCHED_TOKENS = 48


def answer(output: Any) -> dict[str, Any]:
    completion = output.outputs[0]
    logprobs = [{str(token): found.logprob for token, found in step.items()} for step in completion.logprobs]
    return {
        "tokens": list(completion.token_ids),
        "logprobs": logprobs,
        "num_prompt": len(output.prompt_token_ids),
    }


def main() -> None:
    settings = json.load(sys.stdin)
    from vllm import LLM, SamplingParams

    language_model = LLM(
        settings["model"],
        dtype=settings["dtype"],
        max_model_len=2048,
        max_num_batched_tokens=settings.get("max_num_batched_tokens", MAX_BATCHED_TOKENS),
        max_num_seqs=16,
        enforce_eager=True,
        enable_chunked_prefill=True,
        ec_transfer_config={
            "ec_connector": "VisionEncoderConnector",
            "ec_role": "ec_consumer",
            "ec_connector_module_path": "lm_adapter.engines.vllm",
            "ec_connector_extra_config": {"target": settings["encoder"], "finite": True},
        },
    )

    def ask(conversations: list[dict[str, Any]]) -> list[dict[str, Any]]:
        sampling = [
            SamplingParams(
                temperature=0.0,
                max_tokens=MAX_TOKENS,
                logprobs=NUM_LOGPROBS,
                ignore_eos=True,
                extra_args=conversation["extra"],
            )
            for conversation in conversations
        ]
        messages = [conversation["messages"] for conversation in conversations]
        return [answer(output) for output in language_model.chat(messages, sampling, use_tqdm=False)]

    by_pixels = [ask(conversations) for conversations in settings["pixels"]]
    decided = [sum(num_decided(one, settings["dtype"]) for one in answers) for answers in by_pixels]
    chosen = decided.index(max(decided))
    answers = {
        "chosen": chosen,
        "decided": decided,
        "pixels": by_pixels[chosen],
        "other pixels": by_pixels[chosen - 1],
        "rows": ask(settings["rows"][chosen]),
    }
    sys.stdout.write("\n" + json.dumps(answers) + "\n")


if __name__ == "__main__":
    main()
