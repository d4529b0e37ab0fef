"""SGLang as it comes, without its tower (`--language-only --encoder-urls`), fed by its own protocol."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.harness.sglang import (
    FORKED,
    NUM_TOKENS,
    Encoder,
    Sglang,
    language_model_arguments,
    protocol_arguments,
)
from bench.harness.waiting import wait_until
from tests.engines.pictures import clip, data_url, picture
from tests.sglang.conftest import MAX_QUEUED_BYTES, Files, both_families
from tests.sglang.leaving import ONE, left_during_encode
from tests.sglang.reference import CLIP, IMAGE, Reference, prompt

pytestmark = pytest.mark.timeout(600)

TEXT = prompt("Say something about waves.")
TWO = prompt(IMAGE, "and", IMAGE, "Compare the two.")


@pytest.fixture(scope="session")
def server(
    family: str,
    checkpoint: Path,
    encoder: Encoder,
    other_encoder: Encoder,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Sglang]:
    """Two images go to two encoders, one to either."""
    urls = f"{encoder.sglang_url} {other_encoder.sglang_url}"
    arguments = [*language_model_arguments(family), *protocol_arguments(urls)]
    with Sglang(checkpoint, tmp_path_factory.mktemp("protocol"), arguments, FORKED) as running:
        yield running


@pytest.fixture(autouse=True)
def lives(server: Sglang) -> Iterator[None]:
    """After every test the server answers text."""
    yield
    assert server.is_running
    assert server.generate(TEXT, []).status_code == 200


def test_tokens_are_those_of_the_whole_model(
    server: Sglang, reference: Reference, images: list[bytes]
) -> None:
    assert server.tokens(TEXT, []) == reference.tokens(TEXT, [])
    for image in images:
        assert server.tokens(ONE, [image]) == reference.tokens(ONE, [image])
    for pair in (images[:2], images[1:], [images[2], images[2]]):
        assert server.tokens(TWO, pair) == reference.tokens(TWO, pair)


def test_tokens_of_clips_beside_images(server: Sglang, reference: Reference, images: list[bytes]) -> None:
    clips = [clip(5, num_frames=30, fps=6), clip(6, num_frames=13, fps=3)]
    urls = [data_url(one, "video/mp4") for one in clips]
    alone, beside = prompt(CLIP, "What happens?"), prompt(CLIP, IMAGE, CLIP, "Compare them.")
    assert server.tokens(alone, [], video_data=urls[:1]) == reference.tokens(alone, [], clips[:1])
    assert server.tokens(beside, images[:1], video_data=urls) == reference.tokens(beside, images[:1], clips)


@both_families
def test_text_images_and_clips_at_once(server: Sglang, reference: Reference) -> None:
    """p02, p25: every request's tokens are those that it has alone. The images are new to the encoders."""
    images = [picture(seed) for seed in range(40, 44)]
    cases: list[tuple[str, list[bytes], list[bytes]]] = [
        (TEXT, [], []),
        *((ONE, [image], []) for image in images),
        (TWO, images[:2], []),
        (TWO, images[1::-1], []),
        (prompt(CLIP, "What happens?"), [], [clip(9, num_frames=12, fps=6)]),
    ]
    expected = [reference.tokens(*case) for case in cases]
    assert len({tuple(tokens) for tokens in expected}) == len(cases)
    numbers = [*range(len(cases))] * 2
    random.shuffle(numbers)

    def ask(number: int) -> list[int]:
        text, sent, clips = cases[number]
        videos = {"video_data": [data_url(one, "video/mp4") for one in clips]} if clips else {}
        return server.tokens(text, sent, **videos)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, numbers)) == [expected[number] for number in numbers]


@both_families
def test_images_and_clips_by_url(
    server: Sglang, reference: Reference, images: list[bytes], files: Files
) -> None:
    """The encoder fetches them. A URL that it may not fetch fails its own request."""
    data = clip(10, num_frames=12, fps=6)
    image, video = files.add("a.png", images[0]), files.add("a.mp4", data)
    beside = prompt(CLIP, IMAGE, "Compare them.")
    tokens = server.tokens(beside, [], image_data=[image], video_data=[video])
    assert tokens == reference.tokens(beside, images[:1], [data])
    elsewhere = video.replace("127.0.0.1", "127.0.0.2")
    refused = server.generate(prompt(CLIP, "What happens?"), [], video_data=[elsewhere])
    assert refused.status_code == 503, refused.text


@both_families
def test_p17_a_request_larger_than_the_encoders_limit_is_answered_503(
    server: Sglang, encoder: Encoder, other_encoder: Encoder, reference: Reference, images: list[bytes]
) -> None:
    """Text and smaller images beside it are answered."""

    def num_refused() -> int:
        line = f"at most {MAX_QUEUED_BYTES} are taken"
        return sum(one.log.count(line) for one in (encoder, other_encoder))

    before = num_refused()
    large = random.randbytes(MAX_QUEUED_BYTES)  # more as base64
    with ThreadPoolExecutor(3) as pool:
        full = pool.submit(server.generate, ONE, [large])
        text = pool.submit(server.tokens, TEXT, [])
        image = pool.submit(server.tokens, ONE, images[:1])
        assert full.result().status_code == 503, full.result().text
        assert text.result() == reference.tokens(TEXT, [])
        assert image.result() == reference.tokens(ONE, images[:1])
    wait_until(lambda: num_refused() > before, "the line of the refusal")  # answers do not wait for lines
    assert num_refused() == before + 1


@both_families
def test_a_second_turn_reuses_the_first_ones_prefix(
    server: Sglang, family: str, reference: Reference, images: list[bytes]
) -> None:
    first, image = prompt(IMAGE, "Which colours has it?"), [images[0]]
    server.tokens(first, image)
    second = first + "Waves.<|im_end|>\n<|im_start|>user\nAnd shapes?<|im_end|>\n<|im_start|>assistant\n"
    answer = server.generate(second, image).json()
    assert answer["output_ids"] == reference.tokens(second, image)
    if family == "qwen3_vl":  # SGLang runs Qwen3.5 on a CPU without its prefix cache
        assert answer["meta_info"]["cached_tokens"] >= len(reference.ids(first, image)) - 1


@both_families
def test_a_conversation_states_the_contents_hash(server: Sglang, images: list[bytes]) -> None:
    """Verified as SGLang's own encoder does: a wrong one is refused and stores nothing."""

    def ask(digest: str) -> httpx.Response:
        url = {"url": data_url(images[1]), "content_hash": f"sha256:{digest}"}
        parts = [{"type": "image_url", "image_url": url}, {"type": "text", "text": "What is it?"}]
        body: dict[str, Any] = {"model": "model", "messages": [{"role": "user", "content": parts}]}
        return server.post("/v1/chat/completions", {**body, "max_tokens": 4, "temperature": 0})

    right, other = (hashlib.sha256(image).hexdigest() for image in (images[1], images[0]))
    assert ask(other).status_code == 503
    assert ask(right).status_code == 200
    assert ask(other).status_code == 503


@both_families
def test_an_image_that_is_none_fails_its_own_request(
    server: Sglang, reference: Reference, images: list[bytes]
) -> None:
    broken = images[0][:200]
    for prompt_text, sent in ((ONE, [broken]), (TWO, [images[0], broken])):
        refused = server.generate(prompt_text, sent)
        assert refused.status_code == 503
        assert "did not return multimodal embeddings" in refused.text
    assert server.tokens(ONE, images[:1]) == reference.tokens(ONE, images[:1])


@both_families
def test_several_samples_and_lists_of_prompts_are_computed_by_sglangs_own_tower(
    server: Sglang, encoder: Encoder, other_encoder: Encoder, reference: Reference, images: list[bytes]
) -> None:
    """docs/sglang.md: no encoder is asked."""

    def num_asked() -> float:
        return encoder.total("ve_requests_total") + other_encoder.total("ve_requests_total")

    before = num_asked()
    sampling = {"temperature": 0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True, "n": 2}
    samples = server.generate(ONE, images[:1], sampling_params=sampling)
    prompts = server.generate(
        "", [], text=[ONE, TWO], image_data=[[data_url(images[0])], [data_url(image) for image in images[1:]]]
    )
    expected = [reference.tokens(ONE, images[:1]), reference.tokens(TWO, images[1:])]
    for answer, tokens in ((samples, expected[:1] * 2), (prompts, expected)):
        assert answer.status_code == 200, answer.text
        assert [one["output_ids"] for one in answer.json()] == tokens
    assert num_asked() == before
    assert server.tokens(ONE, images[:1]) == expected[0]
    assert num_asked() == before + 1


@both_families
@pytest.mark.parametrize("is_stream", [True, False])
def test_a_client_that_hangs_up_during_the_encode(
    server: Sglang,
    encoder: Encoder,
    other_encoder: Encoder,
    reference: Reference,
    images: list[bytes],
    is_stream: bool,
) -> None:
    """SGLang ends the encode of a stream. Without one it looks for the client once it has the rows."""
    assert left_during_encode(server, [encoder, other_encoder], stream=is_stream) == is_stream
    assert server.tokens(TWO, images[:2]) == reference.tokens(TWO, images[:2])


@both_families
def test_an_encoder_that_is_killed_and_started_again(
    server: Sglang, encoder: Encoder, reference: Reference, images: list[bytes]
) -> None:
    encoder.kill()
    try:
        assert server.generate(TWO, images[:2]).status_code == 503
    finally:
        encoder.start()
    assert server.tokens(TWO, images[:2]) == reference.tokens(TWO, images[:2])
