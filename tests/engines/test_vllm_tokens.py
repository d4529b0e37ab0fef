"""vLLM's own tower against rows from us, for all models: the tokens are the same, whatever is asked."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file

from bench.harness.engine_checkpoints import MIXTURES, TOWER_PREFIXES
from bench.harness.vllm import Encoder
from bench.harness.waiting import wait_until
from tests.engines.agreement import agree, compared, of_response
from tests.engines.conftest import (
    CALL,
    DTYPES,
    FAMILIES,
    FURTHER,
    GLM,
    SAMPLING,
    TOOLS,
    clip_cases,
    options_of,
)
from tests.engines.pictures import CASES, CLIP_CASES, TEXT, picture, with_pixels
from tests.engines.stack import Stack, chat_body, figures_of, metric

pytestmark = pytest.mark.timeout(600)
with_clips = pytest.mark.parametrize(
    "family",
    ["qwen3_vl", *(pytest.param(name, marks=pytest.mark.extended) for name in ("qwen3_5", "qwen2_5_vl"))],
    indirect=True,
    scope="session",
)


with_glm = pytest.mark.parametrize(
    "family",
    [FAMILIES[0], *(pytest.param(name, marks=pytest.mark.extended) for name in (*FAMILIES[1:], *GLM))],
    indirect=True,
    scope="session",
)


@pytest.mark.parametrize(
    "family",
    [
        FAMILIES[0],
        *(pytest.param(name, marks=pytest.mark.extended) for name in (*FAMILIES[1:], *MIXTURES, *FURTHER)),
    ],
    indirect=True,
    scope="session",
)
def test_rows_give_the_tokens_of_the_tower(
    family: str, tower: dict[str, Any], images: list[bytes], stack: Stack
) -> None:
    """Chunked prefill is on, and cuts images. The second time rows and KV come out of vLLM's caches."""
    for _ in range(2):
        found = [stack.answer(with_pixels(case, images)) for case in CASES]
        agree(tower["answers"], found, DTYPES[family])


@with_glm
def test_no_vision_tower_is_loaded(
    family: str, tower: dict[str, Any], stack: Stack, checkpoints: dict[str, Path]
) -> None:
    """What the log says is saved is the tower of the checkpoint, of which a process with rows has nothing."""
    num_elements = sum(
        tensor.numel()
        for path in checkpoints[family].glob("*.safetensors")
        for name, tensor in load_file(path).items()
        if name.startswith(TOWER_PREFIXES)
    )
    num_mib = num_elements * getattr(torch, DTYPES[family]).itemsize / 2**20
    assert f"no vision tower is loaded, which saves {num_mib:.0f} MiB here" in stack.vllm.log
    assert tower["tower"]["present"] > 0
    if "by_encoder" in tower:
        assert tower["by_encoder"]["tower"] == {"present": 0, "missing": num_elements}


def test_other_pictures_would_be_noticed(
    family: str, tower: dict[str, Any], images: list[bytes], stack: Stack
) -> None:
    found = [stack.answer(with_pixels(case, images)) for case in CASES]
    with pytest.raises(AssertionError):
        agree(tower["others"], found, DTYPES[family])


@with_glm
def test_processor_options_of_a_request(
    family: str, tower: dict[str, Any], images: list[bytes], stack: Stack
) -> None:
    for (number, options), expected in zip(options_of(family), tower["with_options"], strict=False):
        found = stack.answer(with_pixels(CASES[number], images), mm_processor_kwargs=options)
        compared(expected, found, DTYPES[family])
    refused = stack.chat(with_pixels(CASES[0], images), mm_processor_kwargs={"do_resize": False})
    assert refused.status_code == 400
    assert "do_resize" in refused.text


@pytest.mark.parametrize(
    "family",
    [
        "qwen3_vl",
        *(pytest.param(name, marks=pytest.mark.extended) for name in ("qwen3_5", "qwen2_5_vl", *GLM)),
    ],
    indirect=True,
    scope="session",
)
def test_clips_give_the_tokens_of_the_tower(
    family: str, tower: dict[str, Any], image_sets: list[list[bytes]], clips: list[bytes], stack: Stack
) -> None:
    """Alone, by two, and beside an image; all at once, and again out of vLLM's caches. Decoders differ in
    nothing here: the clips are lossless RGB."""
    requests = [with_pixels(case, image_sets[0], clips) for case in clip_cases(family)]
    with ThreadPoolExecutor(len(requests)) as pool:
        agree(tower["clips"], list(pool.map(stack.answer, requests)), DTYPES[family])
    found = [stack.answer(request) for request in requests]
    agree(tower["clips"], found, DTYPES[family])
    with pytest.raises(AssertionError):
        agree(tower["other_clips"], found, DTYPES[family])


@with_clips
def test_sampling_options_of_a_request_with_clips(
    family: str, tower: dict[str, Any], image_sets: list[list[bytes]], clips: list[bytes], stack: Stack
) -> None:
    requests = [with_pixels(case, image_sets[0], clips) for case in CLIP_CASES]
    found = [stack.answer(request, media_io_kwargs={"video": SAMPLING}) for request in requests]
    agree(tower["sampled_clips"], found, DTYPES[family])
    lengths = [[answer["num_prompt"] for answer in tower[name]] for name in ("sampled_clips", "clips")]
    assert all(longer > shorter for longer, shorter in zip(*lengths, strict=True))
    for options, words in (
        ({"media_io_kwargs": {"video": {"num_frames": 8}}}, "num_frames"),
        ({"mm_processor_kwargs": {"fps": 1.0}}, "media_io_kwargs"),
        ({"mm_processor_kwargs": {"max_pixels": 70000}}, "--mm-processor-kwargs"),
    ):
        refused = stack.chat(requests[0], **options)
        assert refused.status_code == 400, refused.text
        assert words in refused.json()["error"]["message"]


@pytest.mark.extended
@pytest.mark.parametrize("family", ["kimi_k25", "ling_vl"], indirect=True, scope="session")
def test_clips_of_a_model_of_which_vllm_takes_none_are_refused(
    family: str, clip_sets: list[list[bytes]], stack: Stack
) -> None:
    refused = stack.chat(with_pixels(CLIP_CASES[0], [], clip_sets[0]))
    assert refused.status_code == 400, refused.text
    # vLLM's own words where its model has no clips at all.
    reason = "At most 0 video(s)" if family == "ling_vl" else "vLLM takes no video with this model"
    assert reason in refused.json()["error"]["message"]


@pytest.mark.extended
@pytest.mark.parametrize("family", ["qwen3_omni_moe"], indirect=True, scope="session")
def test_sound_and_clips_of_qwen3_omni_are_refused_by_name(
    family: str, clip_sets: list[list[bytes]], stack: Stack
) -> None:
    sound = {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}}
    for messages, words in (
        (
            [{"role": "user", "content": [sound]}],
            "audio is not accepted: the encoder has Qwen3-Omni's vision",
        ),
        (with_pixels(CLIP_CASES[0], [], clip_sets[0]), "video is not accepted: the encoder takes images"),
    ):
        refused = stack.chat(messages)
        assert refused.status_code == 400, refused.text
        assert words in refused.json()["error"]["message"]
    assert stack.chat(TEXT).status_code == 200


def test_sixteen_at_once_are_not_mixed_up(
    family: str, tower: dict[str, Any], images: list[bytes], stack: Stack
) -> None:
    """p02, p25: requests of all kinds in the same batches."""
    numbers = [random.randrange(len(CASES)) for _ in range(32)]
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda number: stack.answer(with_pixels(CASES[number], images)), numbers))
    agree([tower["answers"][number] for number in numbers], found, DTYPES[family])
    assert stack.vllm.is_running


def test_a_conversation_of_several_turns_streams(
    family: str, tower: dict[str, Any], images: list[bytes], stack: Stack
) -> None:
    """p01: images of an earlier turn stay where they were."""
    first = with_pixels(CASES[0], images)
    reply = {"role": "assistant", "content": "A picture."}
    turns = [*first, reply, *with_pixels(CASES[1], images)]
    whole = stack.answer(turns)
    steps = [
        step
        for choice in streamed(stack, turns)
        for step in (choice.get("logprobs") or {"content": []})["content"]
    ]
    tokens = [int(step["token"].removeprefix("token_id:")) for step in steps]
    if DTYPES[family] == "float32":
        assert tokens == whole["tokens"]
    assert len(tokens) == len(whole["tokens"])


def streamed(stack: Stack, messages: list[dict[str, Any]], **fields: Any) -> list[dict[str, Any]]:
    """The choices of a stream's events."""
    body = chat_body(messages, stream=True, **fields)
    with httpx.stream("POST", f"{stack.vllm.url}/v1/chat/completions", json=body, timeout=60) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    assert response.status_code == 200
    assert lines[-1] == "[DONE]"
    return [choice for line in lines[:-1] for choice in json.loads(line)["choices"]]


@pytest.mark.parametrize("family", ["qwen3_vl"], indirect=True, scope="session")
def test_all_samples_of_a_request_use_the_same_rows(family: str, encoder: Encoder, stack: Stack) -> None:
    """vLLM schedules each sample as a request of its own, and all of them wait for the rows."""
    images, num_samples = [picture(random.getrandbits(32)) for _ in range(2)], 2
    messages = with_pixels(CASES[2], images)
    num_encoded, before = encoder.num_encoded(), figures_of(stack)
    # vLLM refuses several samples of temperature 0.
    fields = {"n": num_samples, "temperature": 1, "top_k": 1}
    with ThreadPoolExecutor(1) as pool:
        with encoder.paused():
            asked = pool.submit(stack.chat, messages, **fields)
            wait_until(lambda: metric(stack, "num_requests_waiting") == num_samples, "samples that wait")
        response = asked.result()
    assert response.status_code == 200, response.text
    assert (figures_of(stack) - before)["cache_queries_total"] == num_samples * len(images)
    body = response.json()
    samples = [of_response({**body, "choices": [choice]}) for choice in body["choices"]]
    plain = stack.answer(messages)
    agree([plain] * num_samples, samples, DTYPES[family])
    assert encoder.num_encoded() - num_encoded == len(images)


@pytest.mark.parametrize("family", ["qwen3_vl"], indirect=True, scope="session")
def test_functions_are_called_as_with_the_tower(
    family: str, tower: dict[str, Any], image_sets: list[list[bytes]], images: list[bytes], stack: Stack
) -> None:
    """By vLLM's own parser, whole and streamed. Where the model may choose, it calls none, and answers as
    without tools."""
    fields: dict[str, Any] = {**CALL, "ignore_eos": False}
    first, second = (with_pixels(case, image_sets[0]) for case in CASES[:2])
    whole = stack.chat(first, **fields)
    assert whole.status_code == 200, whole.text
    (call,) = whole.json()["choices"][0]["message"]["tool_calls"]
    deltas = [choice["delta"] for choice in streamed(stack, second, **fields)]
    parts = [part["function"] for delta in deltas for part in delta.get("tool_calls") or []]
    joined = {name: "".join(part.get(name) or "" for part in parts) for name in ("name", "arguments")}
    found, expected = (
        # Spaces in a stream are the model's.
        [(one["name"], json.loads(one["arguments"])) for one in calls]
        for calls in ((call["function"], joined), tower["calls"])
    )
    assert found == expected
    assert found[0] != found[1]
    chosen = stack.answer(with_pixels(CASES[0], images), tools=TOOLS)
    agree(tower["answers"][:1], [chosen], DTYPES[family])


@pytest.mark.parametrize("family", ["qwen3_vl"], indirect=True, scope="session")
def test_every_form_of_media_that_vllm_takes(family: str, tower: dict[str, Any]) -> None:
    """p02, p05: offline, in one process: Pillow images, arrays, names of earlier images, prompts that are
    already expanded, several samples of one prompt, decoded clips and files of them; rows from anywhere else
    are refused, and frames without the metadata that vLLM needs."""
    answers = tower["by_encoder"]
    for name in ("clips", "sampled_clips"):
        agree(tower[name], answers[name], DTYPES[family])
    expected, found = tower["inputs"], answers["inputs"]
    for name in ("images", "clips", "samples"):
        agree(expected[name], found[name], DTYPES[family])
    assert len(found["samples"]) == 3
    *as_rows, as_frames, without_metadata = found["refused"]
    assert all("rows come from the encoder" in words for words in as_rows)
    assert "a clip is a ndarray, needs" in as_frames
    assert "lack ['fps', 'frames_indices', 'total_num_frames']" in without_metadata


@pytest.mark.parametrize("family", ["qwen3_vl"], indirect=True, scope="session")
def test_an_image_that_the_client_names_has_the_identifier_of_a_vllm_with_its_tower(
    family: str, tower: dict[str, Any]
) -> None:
    """A store that finds KV by content serves both. Without names, identifiers are of a file and of
    pixels."""
    named, with_option, unnamed = tower["by_encoder"]["identifiers"]
    assert [named, with_option] == tower["identifiers"][:2]
    assert named == "a name" != with_option
    assert unnamed != tower["identifiers"][2]
