"""The plugin in LMDeploy's own server, scheduler and model classes: tokens, caches, and what fails.

One server for all tests, with its rows from the session's encoder; at that encoder's address there are
made-up ones in turn.
"""

from __future__ import annotations

import http.client
import json
import random
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors import safe_open

from bench.harness.engine_checkpoints import TOWER_PREFIXES
from bench.harness.lmdeploy import SERVING, SMALL, Lmdeploy
from bench.harness.processes import data_url
from bench.harness.vllm import Encoder
from bench.harness.waiting import wait_until
from lm_adapter import DigestItem, ItemFailed, VisionEncoderClient
from lm_adapter.testing import Fault
from tests.engines.faults import FAULTS, GRID, OTHER_MODELS, answer_to, in_place_of, new_picture, script_for
from tests.engines.pictures import picture
from tests.engines.stack import TIMEOUT_S
from tests.lmdeploy.answers import AT_ONCE, CASES, ONE, TEXT, num_cached
from tests.sglang.reference import IMAGE, Reference, prompt

pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="session")
def server(
    checkpoint: Path, encoder: Encoder, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Lmdeploy]:
    """Prefill is in chunks of 64 tokens."""
    arguments = [*SERVING, *SMALL, "--enable-prefix-caching", "--max-prefill-token-num", "64"]
    arguments += ["--cache-block-seq-len", "16"]
    settings: dict[str, Any] = {"timeout_s": TIMEOUT_S, "retry_s": 2.0, "finite": True}
    with Lmdeploy(
        checkpoint, tmp_path_factory.mktemp("server"), encoder.target, arguments, **settings
    ) as running:
        yield running


@pytest.fixture
def lives_on(server: Lmdeploy, reference: Reference) -> Iterator[None]:
    """The engine answers after the test: text, and an image."""
    yield
    image, _ = new_picture()
    assert server.tokens(TEXT, []) == reference.tokens(TEXT, [])
    assert server.tokens(ONE, [image]) == reference.tokens(ONE, [image])


def num_in_progress(server: Lmdeploy) -> int:
    """Requests that LMDeploy has not ended yet."""
    text = httpx.get(f"{server.url}/metrics", follow_redirects=True, timeout=60).text
    values = re.findall(
        r"^lmdeploy:num_(?:api_)?requests_(?:routed|waiting|running){.*} (.*)$", text, re.MULTILINE
    )
    assert len(values) == 4, text
    return sum(int(float(value)) for value in values)


def rejected(response: httpx.Response, status: int, *words: str) -> None:
    assert response.status_code == status, response.text
    assert all(word in response.text for word in words), response.text


def test_tokens_are_those_of_transformers(
    server: Lmdeploy, reference: Reference, images: list[bytes]
) -> None:
    """Prefill is chunked. The second time with the prefix cache; then all in the same batches, text beside
    images."""
    expected = [reference.tokens(text, [images[index] for index in chosen]) for text, chosen in CASES]
    assert len({tuple(tokens) for tokens in expected}) == len(CASES)
    # Rows that are lost or zero give other tokens, also in the tests below.
    assert all(reference.needs_rows(text, [images[index] for index in chosen]) for text, chosen in CASES)

    def ask(number: int) -> list[int]:
        text, chosen = CASES[number]
        return server.tokens(text, [images[index] for index in chosen])

    for _ in range(2):
        assert [ask(number) for number in range(len(CASES))] == expected
    numbers = [random.choice(AT_ONCE) for _ in range(16)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, numbers)) == [expected[number] for number in numbers]


def test_prompts_of_ids(server: Lmdeploy, reference: Reference, images: list[bytes]) -> None:
    """Before and after the expansion of placeholders."""
    text, chosen = CASES[2]
    mine = [images[index] for index in chosen]
    expanded = reference.ids(text, mine)
    short = [token for token, before in zip(expanded, [None, *expanded], strict=False) if token != before]
    for ids in (expanded, short):
        assert server.tokens(ids, mine) == reference.tokens(text, mine)


def test_no_tower_is_built(server: Lmdeploy, checkpoint: Path) -> None:
    """The module tree has as many parameters as the checkpoint has without its tower."""
    num_parameters = 0
    for path in checkpoint.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            num_parameters += sum(
                np.prod(file.get_slice(name).get_shape())
                for name in file.keys()  # noqa: SIM118 - no mapping
                if not name.startswith(TOWER_PREFIXES)
            )
    (reported,) = re.findall(r"is built without a vision tower: (\d+) parameters", server.log)
    assert int(reported) == num_parameters


def test_rows_come_through_shared_memory(server: Lmdeploy, encoder: Encoder) -> None:
    """Once the client has attached itself, which the first image begins."""

    def is_attached() -> bool:
        server.tokens(ONE, [new_picture()[0]])
        return encoder.num_read() > 0

    wait_until(is_attached, "rows by shared memory")


def test_p12_a_second_turn_reuses_the_first_images_prefix(server: Lmdeploy, reference: Reference) -> None:
    """By content: of another picture of the same size nothing is taken."""
    image, other = (new_picture()[0] for _ in range(2))
    num_rows = 80
    assert num_cached(server, image) < num_rows
    assert num_cached(server, other, "A wave.", "And now?") < num_rows
    assert num_cached(server, image, "A wave.", "And now?") > num_rows
    # A hit gives the tokens of a whole prefill.
    turns = f"{ONE}A wave.<|im_end|>\n{prompt(IMAGE, 'And this one?')}"
    server.tokens(ONE, [image])
    for first in (image, other):
        assert server.tokens(turns, [first, other]) == reference.tokens(turns, [first, other])


@pytest.mark.usefixtures("lives_on")
def test_p33_what_a_client_may_not_send(server: Lmdeploy, images: list[bytes], reference: Reference) -> None:
    rejected(server.generate(ONE, [b"no image at all"]), 400, "cannot identify")
    broken = new_picture()[0]
    broken = broken[: len(broken) // 2]
    for answer in (
        server.generate(ONE, [broken]),
        server.generate(ONE, [broken], stream=True),
        server.chat(broken),
        server.chat(broken, stream=True),
        server.message(broken),
        server.message(broken, stream=True),
    ):
        rejected(answer, 400, "damaged")
    rejected(server.generate(ONE, images[:2]), 400, "1 placeholders", "2 items")
    rejected(server.generate(TEXT, images[:1]), 400, "placeholders")
    # In a batch with an image its placeholder would get a row of that image.
    rejected(server.generate(ONE, []), 400, "1 image placeholders and no image")
    rejected(server.post("/get_ppl", {"input": ONE}), 400, "1 image placeholders and no image")
    # LMDeploy's engine would end at the embedding.
    for number, chosen in ((1 << 20, []), (-1, []), (1 << 20, images[:1])):
        ids = [*reference.ids(ONE if chosen else TEXT, chosen), number]
        rejected(server.generate(ids, chosen), 400, "the prompt has ids from", str(number))
    system = [
        {"role": "system", "content": [{"type": "image_url", "image_url": {"url": data_url(images[0])}}]}
    ]
    asked = [{"role": "user", "content": "What is it?"}]
    rejected(server.chat(images[0], messages=[*system, *asked]), 400, "images in messages of a user")
    for name in ("mm_processor_kwargs", "media_io_kwargs"):
        fields = {name: {"image": {"max_pixels": 10000}}}
        rejected(server.generate(ONE, images[:1], **fields), 400, name)
    clip = [{"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}]
    rejected(server.chat(images[0], messages=[{"role": "user", "content": clip}]), 400, "clips")


@pytest.mark.usefixtures("lives_on")
def test_a_prompt_that_is_too_long_is_refused_before_its_images_are_encoded(
    server: Lmdeploy, encoder: Encoder, reference: Reference
) -> None:
    image, digest = new_picture()
    ids = reference.ids(ONE, [image])
    rejected(server.generate([*ids, *ids[-1:] * (2048 - len(ids))], [image]), 400, "2048 tokens")
    with VisionEncoderClient(encoder.target) as client:
        (held,) = client.encode([DigestItem(digest)])
    assert isinstance(held, ItemFailed)


@pytest.mark.usefixtures("lives_on")
def test_p32_an_encoder_that_is_killed_and_comes_back(
    server: Lmdeploy, encoder: Encoder, reference: Reference
) -> None:
    """Whole answers and streams of all interfaces; text meanwhile."""
    image, _ = new_picture()
    assert server.generate(ONE, [image]).status_code == 200
    encoder.kill()
    try:
        started_s = time.monotonic()
        with ThreadPoolExecutor(8) as pool:
            asked: list[Any] = []
            for is_stream in (False, True):
                fields: Any = {"stream": is_stream}
                asked.append(pool.submit(server.generate, ONE, [new_picture()[0]], **fields))
                asked += [
                    pool.submit(ask, new_picture()[0], **fields) for ask in (server.chat, server.message)
                ]
            text = pool.submit(server.tokens, TEXT, [])
            for answer in asked:
                rejected(answer.result(), 503, "UNAVAILABLE")
        assert time.monotonic() - started_s < 2 * TIMEOUT_S
        assert text.result() == reference.tokens(TEXT, [])
    finally:
        encoder.start()
    assert server.tokens(ONE, [image]) == reference.tokens(ONE, [image])


@pytest.mark.usefixtures("lives_on")
def test_p22_p32_rows_of_a_broken_encoder_fail_their_request_alone(
    server: Lmdeploy, encoder: Encoder
) -> None:
    """Each beside one whose rows are right; then encoders of other models, and one that does not answer."""
    image, digest = new_picture()
    with in_place_of(encoder, script_for(digest)) as fake:
        for fault, (status, *words) in FAULTS.items():
            answer = answer_to(fault, fake, lambda image: server.generate(ONE, [image]))
            rejected(answer, status, *words)
        for changes, grid, texts in OTHER_MODELS:
            fake.stop()
            fake.script = script_for(digest, grid, **changes)
            fake.start()
            rejected(server.generate(ONE, [image]), 502, *texts)

        image, digest = new_picture()
        fake.script.grids[digest], fake.script.faults[digest] = GRID, Fault.HANG
        with ThreadPoolExecutor(1) as pool:
            slow = pool.submit(server.generate, ONE, [image])
            assert server.generate(TEXT, []).status_code == 200
            assert not slow.done()
            rejected(slow.result(), 504, "DEADLINE_EXCEEDED")


@pytest.mark.usefixtures("lives_on")
@pytest.mark.parametrize("is_stream", [True, False])
def test_a_client_that_hangs_up(server: Lmdeploy, encoder: Encoder, is_stream: bool) -> None:
    """While its image is encoded."""
    num_asked = encoder.num_asked()
    image = picture(random.getrandbits(32), 1344, 1344)
    body = {"prompt": ONE, "image_data": [data_url(image)], "max_tokens": 400, "ignore_eos": True}
    caller = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    caller.request(
        "POST", "/generate", json.dumps(body | {"stream": is_stream}), {"Content-Type": "application/json"}
    )
    wait_until(lambda: encoder.num_asked() > num_asked, "the call")
    caller.close()
    wait_until(lambda: num_in_progress(server) == 0, "the end of its request")
