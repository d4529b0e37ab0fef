"""vLLM in this process: with its own tower, and where an encoder is given also with its rows.

A script: reads its settings as JSON from standard input, prints the answers as one line of JSON at the end.
Of several sets of pictures, and of clips, the one is taken that leaves the least to chance: whose answers
have the most tokens that no other is as likely as.
"""

from __future__ import annotations

import base64
import io
import json
import sys
from typing import Any

from tests.engines.agreement import num_decided

MAX_TOKENS = 12
NUM_LOGPROBS = 8
OPTION = {"max_pixels": 50000}
# Smaller than an image's placeholders: prefill goes in chunks, and cuts images.
MAX_BATCHED_TOKENS = 48


def answer(output: Any, number: int = 0) -> dict[str, Any]:
    completion = output.outputs[number]
    logprobs = [{str(token): found.logprob for token, found in step.items()} for step in completion.logprobs]
    return {
        "tokens": list(completion.token_ids),
        "logprobs": logprobs,
        "num_prompt": len(output.prompt_token_ids),
    }


def pillow_image(url: str) -> Any:
    from PIL import Image

    return Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))


def main() -> None:
    settings = json.load(sys.stdin)
    answers = answers_of(settings, None)
    if settings["encoder"]:
        from vllm.distributed import cleanup_dist_env_and_memory

        cleanup_dist_env_and_memory()
        few = {
            "sets": [settings["sets"][0][:1]],
            "clips": [settings["clips"][answers["chosen_clips"]]],
            "calls": None,
        }
        answers["by_encoder"] = answers_of({**settings, **few, "options": []}, settings["encoder"])
    sys.stdout.write("\n" + json.dumps(answers) + "\n")


def answers_of(settings: dict[str, Any], target: str | None) -> dict[str, Any]:
    """target: of the encoder; None for the model's own tower."""
    from vllm import LLM, SamplingParams

    transfer = {
        "ec_connector": "VisionEncoderConnector",
        "ec_role": "ec_consumer",
        "ec_connector_module_path": "lm_adapter.engines.vllm",
        "ec_connector_extra_config": {"target": target, "finite": True},
    }
    language_model = LLM(
        settings["model"],
        dtype=settings["dtype"],
        max_model_len=2048,
        max_num_batched_tokens=MAX_BATCHED_TOKENS,
        max_num_seqs=16,
        enforce_eager=True,
        enable_chunked_prefill=True,
        **settings["engine"],
        **({"ec_transfer_config": transfer} if target else {}),
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, logprobs=NUM_LOGPROBS, ignore_eos=True)

    def ask(conversations: list[Any], **options: Any) -> list[dict[str, Any]]:
        calls = [[one] for one in conversations] if settings["one_by_one"] else [conversations]
        found = [language_model.chat(call, sampling, use_tqdm=False, **options) for call in calls]
        return [answer(output) for outputs in found for output in outputs]

    def best_of(sets: list[Any]) -> tuple[int, list[int], list[Any]]:
        by_set = [ask(conversations) for conversations in sets]
        decided = [sum(num_decided(one, settings["dtype"]) for one in answers) for answers in by_set]
        return decided.index(max(decided)), decided, by_set

    chosen, decided, by_set = best_of(settings["sets"])
    (tower,) = language_model.apply_model(tower_elements)
    answers = {
        "tower": tower,
        "chosen": chosen,
        "decided": decided,
        "answers": by_set[chosen],
        "others": by_set[chosen - 1],
        "with_options": [
            ask([settings["sets"][chosen][number]], mm_processor_kwargs=options)[0]
            for number, options in settings["options"]
        ],
    }
    if settings["calls"]:
        answers["calls"] = [
            call_of(language_model, conversation, settings["calls"])
            for conversation in settings["sets"][0][:2]
        ]
    if settings["clips"]:
        chosen, decided, by_set = best_of(settings["clips"])
        answers |= {
            "chosen_clips": chosen,
            "decided_clips": decided,
            "clips": by_set[chosen],
            "other_clips": by_set[chosen - 1],
        }
        mm_config = language_model.model_config.get_multimodal_config()
        # As --media-io-kwargs, for want of options of one call.
        mm_config.media_io_kwargs = {"video": settings["sampling"]}
        answers["sampled_clips"] = ask(settings["clips"][chosen])
        mm_config.media_io_kwargs = {}
    if settings["encoder"]:
        answers["inputs"] = ask_in_other_forms(
            language_model, sampling, settings["inputs"], with_encoder=bool(target)
        )
        answers["identifiers"] = identifiers_of(language_model, sampling, settings["inputs"])
    return answers


def identifiers_of(language_model: Any, sampling: Any, url: str) -> list[str]:
    """Of one picture in vLLM's caches: as the client names it, alone and with an option, and without a
    name."""
    core, identifiers = language_model.llm_engine.engine_core, []
    add_request = core.add_request

    def recorded(request: Any) -> None:
        identifiers.extend(feature.identifier for feature in request.mm_features)
        add_request(request)

    core.add_request = recorded
    part = {"type": "image_url", "image_url": {"url": url}}
    for extra, options in (({"uuid": "a name"}, None), ({"uuid": "a name"}, OPTION), ({}, None)):
        turn = {"role": "user", "content": [{**part, **extra}]}
        language_model.chat([[turn]], sampling, use_tqdm=False, mm_processor_kwargs=options)
    core.add_request = add_request
    return identifiers


def tower_elements(model: Any) -> dict[str, int]:
    """Elements of the tower's parameters that are in memory, and of those that only have a shape."""
    numbers = {"present": 0, "missing": 0}
    for name, layer in model.named_children():
        if name in ("visual", "vision_tower", "mm_projector"):
            # vLLM hides a module that it leaves out.
            for parameter in layer.__dict__.get("module", layer).parameters():
                numbers["missing" if parameter.is_meta else "present"] += parameter.numel()
    return numbers


def call_of(language_model: Any, conversation: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """The function that the model calls, as vLLM's HTTP server gets it of a request with these fields."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.parser import ParserManager

    kind = ParserManager.get_parser(tool_parser_name="hermes", enable_auto_tools=True)
    request = ChatCompletionRequest.model_validate({"messages": conversation, **fields})
    parser = kind(language_model.get_tokenizer(), request.tools)
    request = parser.adjust_request(request)
    sampling = request.to_sampling_params(fields["max_tokens"], {})
    (output,) = language_model.chat([conversation], sampling, use_tqdm=False, tools=fields["tools"])
    _, _, (call,) = parser.parse(output.outputs[0].text, request, enable_auto_tools=True)
    return {"name": call.name, "arguments": call.arguments}


def ask_in_other_forms(
    language_model: Any, sampling: Any, url: str, *, with_encoder: bool
) -> dict[str, list[Any]]:
    """One picture in every form of images and clips that vLLM takes besides a file, and what only an encoder
    refuses."""
    import numpy as np
    import torch
    from PIL import Image
    from vllm import SamplingParams

    image = pillow_image(url)
    pixels = np.asarray(image)
    prompt = "<|vision_start|><|image_pad|><|vision_end|>What is in the picture?"

    def ask(images: Any, parameters: Any = sampling, text: str = prompt, **fields: Any) -> Any:
        request = {"prompt": text, "multi_modal_data": {"image": images}, **fields}
        (output,) = language_model.generate([request], parameters, use_tqdm=False)
        return output

    def ask_clip(frames: Any, **metadata: Any) -> Any:
        known = {"fps": 4.0, "frames_indices": [0, 3, 5], "total_num_frames": 3, "duration": 1.5, **metadata}
        clip = {"video": (frames, known)}
        return ask(None, text=prompt.replace("image", "video"), multi_modal_data=clip)

    def refused(images: Any, **fields: Any) -> str:
        try:
            ask(images, **fields)
        except ValueError as error:
            return str(error)
        raise AssertionError("it was not refused")

    frames = np.stack([pixels, pixels[::-1], 255 - pixels])
    files = []
    for frame in frames:
        files.append(io.BytesIO())
        Image.fromarray(frame).save(files[-1], "JPEG")
    parts = ",".join(base64.b64encode(file.getvalue()).decode() for file in files)
    sequence = {"type": "video_url", "video_url": {"url": f"data:video/jpeg;base64,{parts}"}}
    chat = [{"role": "user", "content": [sequence, {"type": "text", "text": "What happens?"}]}]
    rows, grid = torch.zeros(1, 24, 64), {"image_grid_thw": torch.tensor([[1, 8, 12]])}
    first = ask(image)
    expanded = [{"prompt_token_ids": first.prompt_token_ids, "multi_modal_data": {"image": image}}]
    # The likeliest token each time: vLLM takes no n with a temperature of 0, and no seed on a CPU.
    several = SamplingParams(top_k=1, n=3, max_tokens=MAX_TOKENS, logprobs=NUM_LOGPROBS, ignore_eos=True)
    samples = ask(image, several)
    return {
        "images": [
            answer(output)
            for output in (
                first,
                ask(pixels),
                ask([pixels]),
                ask(np.moveaxis(pixels, -1, 0)),
                ask([image], multi_modal_uuids={"image": ["a name"]}),
                ask([None], multi_modal_uuids={"image": ["a name"]}),
                language_model.generate(expanded, sampling, use_tqdm=False)[0],
                ask(pixels.astype(np.float32)),
            )
        ],
        "clips": [
            answer(output)
            for output in (
                ask_clip(frames),
                ask_clip(torch.from_numpy(frames).permute(0, 3, 1, 2)),
                ask_clip(frames.astype(np.float32)),
                ask_clip([Image.fromarray(frame) for frame in frames]),
                ask_clip(np.repeat(frames, 4, 0), total_num_frames=12, do_sample_frames=True),
                language_model.chat([chat], sampling, use_tqdm=False)[0],
            )
        ],
        "samples": [answer(samples, number) for number in range(3)],
        "refused": [
            refused(rows),
            refused(grid),
            *(refused(image, multi_modal_data={"video": clip}) for clip in (rows, frames, (frames, {}))),
        ]
        if with_encoder
        else [],
    }


if __name__ == "__main__":
    main()
