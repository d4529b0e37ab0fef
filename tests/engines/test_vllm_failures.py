"""What fails, fails alone: encoders that are away, slow, new or wrong, and a vLLM that answers meanwhile.

One server of Qwen3-VL; at its encoder's address there are real and made-up encoders in turn.
"""

from __future__ import annotations

import random
import re
import secrets
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from itertools import islice
from typing import Any

import httpx
import pytest

from lm_adapter import ImageItem, VisionEncoderClient
from lm_adapter.engines.vllm_items import transfer_params
from lm_adapter.errors import ItemFailed
from lm_adapter.items import Grid
from lm_adapter.testing import FakeEncoder, FakeScript, Fault, fake_model
from tests.engines.agreement import of_response
from tests.engines.pictures import TEXT, Case, picture, with_pixels, with_rows
from tests.engines.processes import Encoder, Stack, TextRequests

FAMILY = "qwen3_vl"
pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.parametrize("family", [FAMILY], indirect=True, scope="session"),
]
ONE = Case("one image", (0, "What is in the picture?"))
GRID = Grid(1, 8, 12)
# The geometry of the tiny checkpoint.
WIDTH = {"out_width": 64, "num_deepstack_levels": 2, "dtype": "float32"}


@contextmanager
def in_place_of(encoder: Encoder, script: FakeScript) -> Iterator[FakeEncoder]:
    """A made-up encoder at the real one's address, then the real one again."""
    encoder.stop()
    try:
        with FakeEncoder(encoder.target, script=script) as fake:
            with VisionEncoderClient(encoder.target) as client:
                client.wait_ready(30)
            yield fake
    finally:
        encoder.start()


def script_for(digest: bytes, **changes: Any) -> FakeScript:
    return FakeScript(model=fake_model(**{**WIDTH, **changes}), grids={digest: GRID})


def ask_for(stack: Stack, target: str, digest: bytes, **fields: Any) -> httpx.Response:
    """A metadata-only request for an image that the encoder at the target was told of."""
    with VisionEncoderClient(target) as client:
        status = client.prefetch([ImageItem(b"content", digest=digest)])[0]
    assert not isinstance(status, ItemFailed)
    messages, used = with_rows(ONE, [(status.key, GRID)], FAMILY)
    return stack.chat(messages, direct=True, ec_transfer_params=transfer_params(used), **fields)


def rejected(stack: Stack, response: httpx.Response, *words: str) -> None:
    """vLLM's own answer says nothing; its log names the reason and both figures."""
    assert response.status_code == 500
    line = next(
        line
        for line in reversed(stack.vllm.log.splitlines())
        if "is rejected, its image rows cannot be had" in line
    )
    assert all(word in line for word in words), line


@pytest.fixture(scope="class")
def fake(encoder: Encoder) -> Iterator[FakeEncoder]:
    with in_place_of(encoder, script_for(b"")) as running:
        yield running


class TestFaults:
    """One made-up encoder that misbehaves for some images and serves others."""

    @pytest.mark.parametrize(
        ("fault", "words"),
        [
            (Fault.WRONG_NUM_ROWS, ("25 rows", "needs 24")),
            (Fault.WRONG_WIDTH, ("width", "192")),
            (Fault.WRONG_LEVELS, ("num_deepstack_levels",)),
            (Fault.WRONG_GRID, ("grid_thw",)),
            (Fault.WRONG_DTYPE, ("dtype",)),
            (Fault.NON_FINITE, ("finite",)),
            (Fault.SHORT_CHUNK, ()),
            (Fault.MISSING_ITEM, ()),
            (Fault.GARBAGE, ()),
            (Fault.ABORT, ()),
        ],
    )
    def test_p22_p32_rows_that_do_not_fit_fail_their_request_alone(
        self,
        fault: Fault,
        words: tuple[str, ...],
        stack: Stack,
        encoder: Encoder,
        fake: FakeEncoder,
        meanwhile: TextRequests,
    ) -> None:
        bad, good = secrets.token_bytes(32), secrets.token_bytes(32)
        fake.script.grids |= {bad: GRID, good: GRID}
        fake.script.faults[bad] = fault
        with ThreadPoolExecutor(2) as pool:
            asked = [pool.submit(ask_for, stack, encoder.target, digest) for digest in (bad, good)]
            answers = [future.result() for future in asked]
        assert answers[1].status_code == 200, answers[1].text
        rejected(stack, answers[0], *words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"out_width": 48}, ("width is 144, expected 192",)),
        ({"num_deepstack_levels": 1}, ("num_deepstack_levels is 1, expected 2",)),
        ({"dtype": "bfloat16"}, ("dtype is bfloat16, expected float32",)),
    ],
)
def test_p22_an_encoder_of_another_model_fails_requests_and_no_engine(
    changes: dict[str, Any], words: tuple[str, ...], stack: Stack, encoder: Encoder, meanwhile: TextRequests
) -> None:
    digest = secrets.token_bytes(32)
    with in_place_of(encoder, script_for(digest, **changes)):
        rejected(stack, ask_for(stack, encoder.target, digest), *words)


def test_p32_a_missing_item_is_rejected_with_its_reason(stack: Stack, meanwhile: TextRequests) -> None:
    messages, used = with_rows(ONE, [(secrets.token_bytes(32), GRID)], FAMILY)
    response = stack.chat(messages, direct=True, ec_transfer_params=transfer_params(used))
    rejected(stack, response, "UNKNOWN_KEY")


def test_p32_an_encoder_that_is_away_fails_in_seconds_and_the_front_says_why(
    stack: Stack, encoder: Encoder, meanwhile: TextRequests
) -> None:
    image = picture(random.getrandbits(32))
    encoder.kill()
    try:
        response = stack.chat(with_pixels(ONE, [image]))
        messages, used = with_rows(ONE, [(secrets.token_bytes(32), GRID)], FAMILY)
        direct = stack.chat(messages, direct=True, ec_transfer_params=transfer_params(used))
    finally:
        encoder.start()
    assert response.status_code in (503, 504)
    assert response.json()["error"]["code"] in ("UNAVAILABLE", "DEADLINE_EXCEEDED")
    assert direct.status_code == 500
    assert response.elapsed.total_seconds() < 10
    assert direct.elapsed.total_seconds() < 10
    assert stack.chat(with_pixels(ONE, [image])).status_code == 200


def test_p32_a_slow_encoder_delays_its_own_requests_only(stack: Stack, encoder: Encoder) -> None:
    """Three images that never come, and one of text meanwhile: the scheduler waits for nothing."""
    digests = [secrets.token_bytes(32) for _ in range(3)]
    script = script_for(digests[0])
    script.grids |= dict.fromkeys(digests, GRID)
    script.faults = dict.fromkeys(digests, Fault.HANG)
    with in_place_of(encoder, script), ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(ask_for, stack, encoder.target, digest) for digest in digests]
        soon = stack.chat(TEXT, direct=True, max_tokens=4)
        assert soon.status_code == 200
        assert not any(future.done() for future in waiting)
        answers = [future.result() for future in waiting]
    for answer in answers:
        rejected(stack, answer, "DEADLINE_EXCEEDED")
    assert soon.elapsed < min(answer.elapsed for answer in answers) / 2


def test_p32_an_encoder_that_restarts_between_encode_and_fetch_is_asked_again(
    stack: Stack, encoder: Encoder, meanwhile: TextRequests
) -> None:
    """Rows known to vLLM by key are gone with the old process; the front sends the image anew."""
    image = picture(random.getrandbits(32))
    first = of_response(stack.chat(with_pixels(ONE, [image])).json())
    encoder.kill()
    encoder.start()
    again = of_response(stack.chat(with_pixels(ONE, [image])).json())
    assert again["tokens"] == first["tokens"]


def wait_for_transport(stack: Stack, name: str) -> None:
    """Rows come inline until it is found out what is possible; each request is answered meanwhile."""
    for _ in range(60):
        answer = stack.chat(with_pixels(ONE, [picture(random.getrandbits(32))]), max_tokens=1)
        assert answer.status_code == 200, answer.text
        if re.findall(r"image rows come by (\w+):", stack.vllm.log)[-1] == name:
            return
        time.sleep(0.25)
    raise AssertionError(f"rows do not come by {name}")


def test_p21_a_broker_killed_under_load_and_one_that_does_not_come_back(
    stack: Stack, encoder: Encoder, meanwhile: TextRequests
) -> None:
    """Rows come through shared memory, until the process behind it is killed; then inline."""
    wait_for_transport(stack, "host")
    images = [picture(random.getrandbits(32)) for _ in range(24)]
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(stack.chat, with_pixels(ONE, [image])) for image in images]
        for answered in islice(as_completed(asked), 3):  # whichever are first
            assert answered.result().status_code == 200
        encoder.kill()
        encoder.start(with_broker=False)
        statuses = [future.result().status_code for future in asked]
    assert set(statuses) <= {200, 502, 503, 504}
    assert statuses.count(200) >= 3
    inline = stack.chat(with_pixels(ONE, [picture(random.getrandbits(32))]))
    assert inline.status_code == 200
    wait_for_transport(stack, "inline")
    encoder.stop()
    encoder.start()
    wait_for_transport(stack, "host")


@pytest.mark.parametrize(
    ("params", "word"),
    [
        (None, "1 images without pixels"),
        ({"vision_encoder": {"items": [{"key": "ab", "grid_thw": [1, 8, 12]}]}}, "1 bytes"),
        ({"vision_encoder": {"items": [{"key": "ab" * 32, "grid_thw": [1, 8, 14]}]}}, "[1, 8, 14]"),
    ],
)
def test_p33_parameters_without_meaning_fail_their_request(
    params: dict[str, Any] | None, word: str, stack: Stack, meanwhile: TextRequests
) -> None:
    messages, _ = with_rows(ONE, [(secrets.token_bytes(32), GRID)], FAMILY)
    response = stack.chat(messages, direct=True, **({"ec_transfer_params": params} if params else {}))
    rejected(stack, response, word)


def test_p33_an_image_that_is_none_is_refused_before_vllm(stack: Stack, meanwhile: TextRequests) -> None:
    response = stack.chat(with_pixels(ONE, [b"no image at all"]))
    assert response.status_code == 400
    assert response.json()["error"]["code"]


def test_a_client_that_leaves_takes_its_fetch_along(
    stack: Stack, encoder: Encoder, meanwhile: TextRequests
) -> None:
    digest = secrets.token_bytes(32)
    script = script_for(digest)
    script.faults[digest] = Fault.HANG
    with in_place_of(encoder, script) as fake:
        with pytest.raises(httpx.ReadTimeout):
            ask_for(stack, encoder.target, digest, timeout_s=1.5)
        for _ in range(100):
            if fake.num_cancelled["Fetch"]:
                break
            threading.Event().wait(0.05)
        assert fake.num_cancelled["Fetch"] == 1


def test_p18_one_name_for_two_images_is_refused_and_shares_nothing(stack: Stack, encoder: Encoder) -> None:
    """p12: a client's UUID is a name in vLLM's caches; the first key it stood for keeps it."""
    with VisionEncoderClient(encoder.target) as client:
        statuses = client.prefetch([ImageItem(picture(random.getrandbits(32))) for _ in range(2)])
    (first, second) = [(status.key, status.grid_thw) for status in statuses]  # type: ignore[union-attr]
    messages, used = with_rows(ONE, [first], FAMILY)
    assert stack.chat(messages, direct=True, ec_transfer_params=transfer_params(used)).status_code == 200
    reused = stack.chat(messages, direct=True, ec_transfer_params=transfer_params([second]))
    rejected(stack, reused, "IDENTIFIER_REUSED")


def test_p12_a_request_of_another_grid_fails_alone_and_leaves_no_kv(
    stack: Stack, encoder: Encoder, meanwhile: TextRequests
) -> None:
    """One UUID, one key, and a grid that the rows do not have: of as many placeholders, and of fewer. Beside
    a request that holds the rows, and at once with one that is right."""
    right, turned, smaller = Grid(1, 12, 120), Grid(1, 120, 12), Grid(1, 12, 60)
    held, fresh, slow = (secrets.token_bytes(32) for _ in range(3))
    script = script_for(slow)
    script.grids = dict.fromkeys((held, fresh, slow), right)
    script.faults[slow] = Fault.HANG
    with in_place_of(encoder, script) as fake, ThreadPoolExecutor(3) as pool:
        with VisionEncoderClient(encoder.target) as client:
            statuses = client.prefetch([ImageItem(b"content", digest=one) for one in (held, fresh, slow)])
        key, fresh_key, slow_key = [status.key for status in statuses]  # type: ignore[union-attr]

        def ask(*rows: tuple[bytes, Grid], name: str = "") -> httpx.Response:
            case = Case("images", (*range(len(rows)), "What is in the picture?"))
            messages, used = with_rows(case, rows, FAMILY)
            if name:
                messages[0]["content"][0]["uuid"] = name
            return stack.chat(messages, direct=True, ec_transfer_params=transfer_params(used))

        holder = pool.submit(ask, (key, right), (slow_key, right))
        while fake.num_calls["Fetch"] < 2:
            time.sleep(0.01)
        time.sleep(0.5)
        for wrong in (turned, smaller):
            rejected(stack, ask((key, wrong)), str(list(wrong)), str(list(right)))
        innocent = ask((key, right))
        at_once = [pool.submit(ask, (fresh_key, grid)) for grid in (turned, right)]
        assert [future.result().status_code for future in at_once] == [500, 200]
        references = [ask((one, right), name=secrets.token_hex(32)) for one in (key, fresh_key)]
        assert not holder.done() or holder.result().status_code == 500
    for answer, reference in zip((innocent, at_once[1].result()), references, strict=True):
        assert answer.status_code == reference.status_code == 200, answer.text
        assert of_response(answer.json())["tokens"] == of_response(reference.json())["tokens"]


def cached_tokens(stack: Stack) -> int:
    """Prompt tokens that vLLM took from its prefix cache so far."""
    text = httpx.get(f"{stack.vllm.url}/metrics", timeout=10).text
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
    answers = [of_response(stack.chat(with_pixels(lead, [first])).json())]
    before = cached_tokens(stack)
    answers.append(of_response(stack.chat(with_pixels(lead, [second])).json()))
    apart = cached_tokens(stack) - before
    stack.chat(with_pixels(other_words, [first]))
    shared = cached_tokens(stack) - before - apart
    assert apart == 0
    # 361 tokens of the image; the cache holds whole blocks of 128.
    assert shared >= 256
    repeated = of_response(stack.chat(with_pixels(lead, [second])).json())
    assert repeated["tokens"] == answers[1]["tokens"]
    assert answers[0]["tokens"] != answers[1]["tokens"]


def test_streams_are_passed_on_and_a_rejected_one_has_a_status(stack: Stack, encoder: Encoder) -> None:
    image = picture(random.getrandbits(32))
    whole = of_response(stack.chat(with_pixels(ONE, [image])).json())
    body = {
        "model": "model",
        "messages": with_pixels(ONE, [image]),
        "max_tokens": 12,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    url = f"{stack.front_url}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, timeout=60) as response:
        events = [line for line in response.iter_lines() if line.startswith("data: ")]
    assert response.status_code == 200
    assert events[-1] == "data: [DONE]"
    assert len(events) > len(whole["tokens"]) / 2
    digest = secrets.token_bytes(32)
    with in_place_of(encoder, script_for(digest, out_width=48)):
        refused = httpx.post(url, json=body, timeout=60)
    assert refused.status_code == 502
    assert refused.json()["error"]["code"] == "INVALID_ROWS"
    assert "144" in refused.json()["error"]["message"]
