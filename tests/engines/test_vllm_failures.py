"""What fails, fails alone: encoders that are away, slow, new or wrong, and a vLLM that answers meanwhile.

One server of Qwen3-VL; at its encoder's address there are real and made-up encoders in turn.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from fractions import Fraction
from functools import partial
from itertools import islice
from typing import Any

import httpx
import pytest

from bench.harness.processes import START_S
from bench.harness.vllm import Encoder, VllmServer
from bench.harness.waiting import PATIENCE_S, wait_until
from lm_adapter.keys import content_digest
from lm_adapter.testing import FakeEncoder, Fault
from tests.engines.agreement import of_response
from tests.engines.faults import (
    FAULTS,
    GRID,
    NUM_BYTES,
    OTHER_MODELS,
    answer_to,
    in_place_of,
    new_picture,
    script_for,
)
from tests.engines.pictures import TEXT, Case, Clip, clip, picture, with_damaged_end, with_pixels
from tests.engines.stack import TIMEOUT_S, Stack, TextRequests, chat_body, figures_of

FAMILY = "qwen3_vl"
pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.parametrize("family", [FAMILY], indirect=True, scope="session"),
]
ONE = Case("one image", (0, "What is in the picture?"))
ONE_CLIP = Case("one clip", (Clip(0), "What happens?"))
# vLLM's prefix cache has nothing of its image.
OTHER_TEXT = Case("text first", ("Look at this:", 0))
NUM_PICTURES = 8


def ask(stack: Stack, image: bytes, **fields: Any) -> httpx.Response:
    return stack.chat(with_pixels(ONE, [image]), **fields)


def ask_clip(stack: Stack, data: bytes, **fields: Any) -> httpx.Response:
    return stack.chat(with_pixels(ONE_CLIP, [], [data]), **fields)


def refused(response: httpx.Response, status: int, *words: str) -> None:
    """The client is told the reason."""
    assert response.status_code == status, response.text
    message = response.json()["error"]["message"]
    assert all(word in message for word in words), message


@pytest.fixture(scope="class")
def fake(encoder: Encoder) -> Iterator[FakeEncoder]:
    with in_place_of(encoder, script_for(b"")) as running:
        yield running


def clip_is_refused(stack: Stack, words: Sequence[str]) -> bool:
    """For the first second the API server has the description of the encoder that was there before, and the
    answer of the new one does not fit it."""
    response = ask_clip(stack, clip(random.getrandbits(32)))
    assert response.status_code == 502, response.text
    return all(word in response.json()["error"]["message"] for word in words)


def num_errors(stack: Stack, words: str) -> int:
    return sum(words in line and "ERROR" in line for line in stack.vllm.log.splitlines())


class TestFaults:
    """One made-up encoder that misbehaves for some images and serves others."""

    @pytest.mark.parametrize("fault", FAULTS)
    def test_p22_p32_rows_that_do_not_fit_fail_their_request_alone(
        self, fault: Fault, stack: Stack, fake: FakeEncoder, meanwhile: TextRequests
    ) -> None:
        status, *words = FAULTS[fault]
        refused(answer_to(fault, fake, partial(ask, stack)), status, *words)

    def test_most_files_are_sent_once(self, stack: Stack, fake: FakeEncoder) -> None:
        """A read that overtakes the announcement of its file has the file sent again."""
        num_before = fake.num_calls["Prefetch"]
        for _ in range(NUM_PICTURES):
            image, digest = new_picture()
            fake.script.grids[digest] = GRID
            assert ask(stack, image, max_tokens=1).status_code == 200
        assert NUM_PICTURES <= fake.num_calls["Prefetch"] - num_before < 2 * NUM_PICTURES

    def test_p22_an_encoder_that_says_nothing_of_clips_fails_their_requests(
        self, stack: Stack, fake: FakeEncoder, meanwhile: TextRequests
    ) -> None:
        data = clip(random.getrandbits(32))
        fake.script.grids[content_digest(data)] = GRID
        refused(ask_clip(stack, data), 502, "states no timestamps")

    def test_p32_a_slow_encoder_delays_its_own_requests_only(self, stack: Stack, fake: FakeEncoder) -> None:
        """Three images that never come, and one of text meanwhile: the scheduler waits for nothing."""
        pictures = [new_picture() for _ in range(3)]
        fake.script.grids |= {digest: GRID for _, digest in pictures}
        fake.script.faults |= {digest: Fault.HANG for _, digest in pictures}
        with ThreadPoolExecutor(3) as pool:
            waiting = [pool.submit(ask, stack, image) for image, _ in pictures]
            soon = stack.chat(TEXT, max_tokens=4)
            assert soon.status_code == 200
            assert not any(future.done() for future in waiting)
            answers = [future.result() for future in waiting]
        for answer in answers:
            refused(answer, 504, "DEADLINE_EXCEEDED")
        assert soon.elapsed < min(answer.elapsed for answer in answers) / 2

    def test_a_client_that_leaves_takes_its_calls_along(
        self, stack: Stack, fake: FakeEncoder, meanwhile: TextRequests
    ) -> None:
        """While its rows are read."""
        image, digest = new_picture()
        fake.script.grids[digest] = GRID
        fake.script.faults[digest] = Fault.HANG
        num_hanging, num_cancelled = fake.num_hanging, fake.num_cancelled["Fetch"]

        async def leave() -> None:
            body = chat_body(with_pixels(ONE, [image]))
            async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
                asking = asyncio.create_task(client.post(f"{stack.vllm.url}/v1/chat/completions", json=body))
                await asyncio.to_thread(wait_until, lambda: fake.num_hanging > num_hanging, "the read")
                asking.cancel()

        asyncio.run(leave())
        wait_until(lambda: fake.num_cancelled["Fetch"] > num_cancelled, "the end of the call")

    def test_p22_an_encoder_of_another_model_fails_requests_and_no_engine(
        self, stack: Stack, fake: FakeEncoder, meanwhile: TextRequests
    ) -> None:
        """One after the other at one address; at last one whose grid is another one (p11). Clips fail alike.
        The log has one error line for each."""
        image, digest = new_picture()
        for changes, grid, words in OTHER_MODELS:
            fake.stop()
            fake.script = script_for(digest, grid, **changes)
            fake.start()
            refused(ask(stack, image), 502, *words)
            if words[0] == "MODEL_MISMATCH":
                refused(ask(stack, image), 502, *words)
                wait_until(partial(clip_is_refused, stack, words), "the same reason for clips")
                wait_until(lambda: num_errors(stack, words[1]), "the line of the log")  # noqa: B023
                assert num_errors(stack, words[1]) == 1


def test_p32_an_encoder_that_is_away_fails_in_seconds(
    stack: Stack, encoder: Encoder, meanwhile: TextRequests
) -> None:
    image, _ = new_picture()
    moving = clip(random.getrandbits(32))
    before = figures_of(stack)
    encoder.kill()
    try:
        # Nobody asks for an image meanwhile.
        wait_until(lambda: not figures_of(stack)["reachable"], "the metric of an encoder that is away")
        with ThreadPoolExecutor(2) as pool:
            responses = list(
                pool.map(lambda call: call(), (partial(ask, stack, image), partial(ask_clip, stack, moving)))
            )
    finally:
        encoder.start()
    for response in responses:
        refused(response, 503, "UNAVAILABLE")
        assert response.elapsed.total_seconds() < 10
    wait_until(lambda: figures_of(stack)["reachable"], "the metric of an encoder that is back")
    assert ask(stack, image).status_code == 200
    assert ask_clip(stack, moving).status_code == 200
    failed = figures_of(stack) - before
    assert failed["failures_total UNAVAILABLE"] == 2


def test_p32_rows_that_an_encoders_restart_lost_are_encoded_again(
    stack: Stack, encoder: Encoder, meanwhile: TextRequests
) -> None:
    """The picture and the clip were sent before, but neither the encoder nor vLLM has their rows."""
    image, _ = new_picture()
    moving = clip(random.getrandbits(32))
    first = [of_response(response.json()) for response in (ask(stack, image), ask_clip(stack, moving))]
    for cache in "encoder", "prefix":
        assert httpx.post(f"{stack.vllm.url}/reset_{cache}_cache", timeout=60).status_code == 200
    encoder.kill()
    encoder.start()
    again = [of_response(ask(stack, image).json())]
    num_asked = encoder.num_asked()
    assert num_asked > 0
    again.append(of_response(ask_clip(stack, moving).json()))
    assert encoder.num_asked() > num_asked
    assert [answer["tokens"] for answer in again] == [answer["tokens"] for answer in first]
    # A key that the encoder lacks is an answer.
    assert encoder.num_failed() == 0


def test_p32_p43_an_encoder_that_stands_still_holds_requests_for_timeout_s(
    stack: Stack, encoder: Encoder, meanwhile: TextRequests
) -> None:
    image, moving = new_picture()[0], clip(random.getrandbits(32))
    with encoder.paused(), ThreadPoolExecutor(2) as pool:
        calls = partial(ask, stack, image), partial(ask_clip, stack, moving)
        responses = list(pool.map(lambda call: call(), calls))
    for response in responses:
        assert response.status_code in (503, 504), response.text
        assert "UNAVAILABLE" in response.text or "DEADLINE_EXCEEDED" in response.text
        assert response.elapsed.total_seconds() < 2 * TIMEOUT_S
    assert ask(stack, image).status_code == 200
    assert ask_clip(stack, moving).status_code == 200


def wait_for_transport(stack: Stack, name: str) -> None:
    """Rows come inline until it is found out what is possible; each request is answered meanwhile."""

    def is_used() -> bool:
        answer = ask(stack, new_picture()[0], max_tokens=1)
        assert answer.status_code == 200, answer.text
        return re.findall(r"image rows come by (\w+):", stack.vllm.log)[-1:] == [name]

    wait_until(is_used, f"rows by {name}")


def test_p21_p32_an_encoder_killed_under_load_and_a_broker_that_does_not_come_back(
    stack: Stack, encoder: Encoder, meanwhile: TextRequests
) -> None:
    """Rows come through shared memory, until the process behind it is killed during encodes and copies; then
    inline. It is away for longer than ``retry_s``."""
    wait_for_transport(stack, "host")
    images = [new_picture()[0] for _ in range(24)]
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(ask, stack, image) for image in images]
        for answered in islice(as_completed(asked), 3):  # whichever are first
            assert answered.result().status_code == 200
        encoder.kill()
        encoder.start(with_broker=False)
        answers = [future.result() for future in asked]
    for answer in answers:
        if answer.status_code != 200:
            refused(answer, 503, "UNAVAILABLE")
    assert ask(stack, new_picture()[0]).status_code == 200
    wait_for_transport(stack, "inline")
    encoder.stop()
    encoder.start()
    wait_for_transport(stack, "host")


def test_p32_images_that_vllm_holds_need_no_encoder(stack: Stack, encoder: Encoder) -> None:
    """Its prefix cache does not have them after another text, its cache of encoder outputs has. An encoder
    that has started meanwhile is not asked for them either."""
    image = new_picture()[0]
    assert ask(stack, image).status_code == 200
    encoder.stop()
    try:
        assert stack.chat(with_pixels(OTHER_TEXT, [image])).status_code == 200
        refused(ask(stack, new_picture()[0]), 503, "UNAVAILABLE")
    finally:
        encoder.start()
    before = encoder.num_asked()
    for text in "What is on the left?", "And on the right?":
        assert stack.chat(with_pixels(Case("text first", (text, 0)), [image])).status_code == 200
    assert encoder.num_asked() == before


def test_metrics_of_vllm_say_what_happened_to_images(stack: Stack, encoder: Encoder) -> None:
    """Two new ones, of which vLLM's cache has one for another text; a damaged image, and a damaged clip,
    which no scheduler gets. vLLM's log has a line of its own for them."""
    wait_for_transport(stack, "host")
    wait_until(lambda: figures_of(stack)["reachable"], "the metric of an encoder that is back")
    before, first = figures_of(stack), new_picture()[0]
    for image in first, new_picture()[0]:
        assert ask(stack, image).status_code == 200
    assert stack.chat(with_pixels(OTHER_TEXT, [first])).status_code == 200
    refused(ask(stack, picture(random.getrandbits(32))[:2000]), 400, "damaged")
    refused(ask_clip(stack, b"no clip"), 400, "UNDECODABLE_CLIP")
    happened = {
        "rows_wait_seconds_count": 2,
        "rows_bytes_total host": 2 * NUM_BYTES,
        "cache_queries_total": 4,
        "cache_hits_total": 1,
        "failures_total UNDECODABLE_IMAGE": 1,
        "failures_total UNDECODABLE_CLIP": 1,
    }
    wait_until(lambda: figures_of(stack) - before == happened, f"{happened}")
    wait_until(lambda: "EC Transfer metrics: Num waits for rows=" in stack.vllm.log, "the line of the log")


def test_p33_what_cannot_be_decoded_is_the_clients_fault(stack: Stack, meanwhile: TextRequests) -> None:
    """Found out from the header, or by the encoder."""
    refused(ask(stack, b"no image at all"), 400, "cannot identify")
    image = picture(random.getrandbits(32))
    for broken in (image[: len(image) // 2], image[: len(image) * 9 // 10]):
        for _ in range(2):
            refused(ask(stack, broken), 400, "damaged")
        body = chat_body(with_pixels(ONE, [broken]), stream=True)
        streamed = httpx.post(f"{stack.vllm.url}/v1/chat/completions", json=body, timeout=60)
        *_, event, done = [line for line in streamed.text.splitlines() if line.startswith("data: ")]
        assert done == "data: [DONE]"
        error = json.loads(event.removeprefix("data: "))["error"]
        assert error["code"] == 400
        assert "damaged" in error["message"]


def test_p33_clips_that_cannot_be_had_are_the_clients_fault(stack: Stack, meanwhile: TextRequests) -> None:
    """Found out from the container, or, where only a later frame is damaged, while it is decoded."""
    moving = clip(random.getrandbits(32))
    is_long = clip(random.getrandbits(32), 3, Fraction(1, 4000))
    for data, *words in (
        (b"no clip at all", "UNDECODABLE_CLIP", "which is no clip"),
        (picture(random.getrandbits(32)), "UNDECODABLE_CLIP", "PNG"),
        (moving[:-500], "UNDECODABLE_CLIP", "truncated", str(len(moving) - 500)),
        (is_long, "CLIP_TOO_LARGE", "12000.0 s, the limit is 7200.0 s"),
        (with_damaged_end(moving), "UNDECODABLE_CLIP", "damaged"),
    ):
        for _ in range(2):
            refused(ask_clip(stack, data), 400, *words)
    good, bad = picture(random.getrandbits(32)), moving[:-500]
    refused(stack.chat(with_pixels(Case("both", (0, Clip(0))), [good], [bad])), 400, "truncated")
    assert stack.chat(with_pixels(Case("both", (0, Clip(0))), [good], [moving])).status_code == 200


def test_p33_rows_from_anywhere_else_are_refused(stack: Stack, meanwhile: TextRequests) -> None:
    """A metadata-only request would name rows that nobody has. So are frames that are no images."""
    for part, words in (
        ({"type": "image_embeds", "image_embeds": {"image_grid_thw": [1, 8, 12]}}, "come from the encoder"),
        ({"type": "video_url", "video_url": {"url": "data:video/jpeg;base64,AAAA,AAAA"}}, "load image"),
    ):
        parts = [part, {"type": "text", "text": "What is it?"}]
        refused(stack.chat([{"role": "user", "content": parts}]), 400, words)


def cached_tokens(stack: Stack) -> int:
    """Prompt tokens that vLLM took from its prefix cache so far."""
    text = httpx.get(f"{stack.vllm.url}/metrics", timeout=PATIENCE_S).text
    return sum(
        int(float(line.rsplit(" ", 1)[1]))
        for line in text.splitlines()
        if line.startswith("vllm:prefix_cache_hits_total")
    )


def test_p12_images_share_kv_by_content_and_by_nothing_else(stack: Stack) -> None:
    """Two pictures of one size in one prompt: nothing of the second is taken from the first. The same picture
    again, with other words behind it: all but the end is."""
    lead = Case("lead", (0, "What is in the picture? " * 4))
    other_words = Case("other words", (0, "Which colours do you see? " * 4))
    first, second = (picture(random.getrandbits(32), 600, 600) for _ in range(2))
    answers = [stack.answer(with_pixels(lead, [first]))]
    before = cached_tokens(stack)
    answers.append(stack.answer(with_pixels(lead, [second])))
    apart = cached_tokens(stack) - before
    with_shared = stack.answer(with_pixels(other_words, [first]))
    shared = cached_tokens(stack) - before - apart
    assert apart == 0
    # 361 tokens of the image; the cache holds whole blocks of 128.
    assert shared >= 256
    # A salt of its own shares nothing.
    computed = stack.answer(with_pixels(other_words, [first]), cache_salt="of its own")
    assert cached_tokens(stack) - before - apart == shared
    assert with_shared["tokens"] == computed["tokens"]
    repeated = stack.answer(with_pixels(lead, [second]))
    assert repeated["tokens"] == answers[1]["tokens"]
    assert answers[0]["tokens"] != answers[1]["tokens"]


@pytest.mark.parametrize(
    ("dtype", "arguments", "reason"),
    [
        (
            "float32",
            ("--mm-processor-cache-type", "shm"),
            "--mm-processor-cache-type is shm, which hides files from the scheduler: use lru",
        ),
        (
            "bfloat16",
            (),
            "serves rows in float32, vLLM's model takes bfloat16: start the encoder with --dtype bfloat16, "
            "or vLLM with --dtype float32",
        ),
    ],
    ids=["an option that contradicts the plugin", "an encoder of another dtype"],
)
def test_a_start_that_cannot_work_says_why(
    dtype: str, arguments: tuple[str, ...], reason: str, stack: Stack, encoder: Encoder, tmp_path: Any
) -> None:
    """Before a model is loaded, in a line of its own above vLLM's traceback."""
    vllm = VllmServer(stack.checkpoint, dtype, {"target": encoder.target}, tmp_path, arguments)
    try:
        wait_until(lambda: not vllm.is_running, "the end of the start", START_S)
        line, *rest = [line for line in vllm.log.splitlines() if reason in line]
        assert "ERROR" in line
        assert "vLLM does not start: " in line
        assert not any("vLLM does not start" in line for line in rest)
        assert "no vision tower is loaded" not in vllm.log
    finally:
        vllm.stop()
