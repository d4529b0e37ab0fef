"""What users of vLLM run beside the plugin, all on one server: several API servers, n-gram speculation, an
adapter, priorities, resets of caches, sleep, clients that leave, other requests and APIs, vLLM's own limits.

Tokens are those of the full model in transformers."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import io
import json
import re
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from bench.harness.processes import START_S, data_url
from bench.harness.reference import import_reference
from bench.harness.vllm import Encoder
from bench.harness.waiting import PATIENCE_S, wait_until
from lm_adapter.testing import FakeEncoder, Fault
from tests.engines.agreement import NEAR, of_response
from tests.engines.faults import GRID, in_place_of, new_picture, script_for
from tests.engines.pictures import TEXT, Case, with_pixels
from tests.engines.stack import Stack, chat_body, metric
from tests.parity.full_model import FullModel

FAMILY = "qwen3_vl"
pytestmark = [
    pytest.mark.timeout(600),
    # Of transformers, in this process.
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.parametrize("family", [FAMILY], indirect=True, scope="session"),
]
since_033 = pytest.mark.skipif(version("vllm").startswith("0.32"), reason="vLLM 0.33 has it")

ONE = Case("one image", (0, "What is in the picture?"))
TWO = Case("two images", (0, 1, "Compare the two."))
THREE = Case("three images", ("First", 0, "then", 1, "and at last", 2, "which is the largest?"))
MAX_TOKENS = 40
ADAPTER = "adapter"
RANK = 8
# Of more than two images, and fewer than three. A request of three gets its rows when no other has any.
RESIDENT_BYTES = 160_000
# Blocks of KV for five requests of one image, before their answers grow.
FEW_BLOCKS = ("--block-size", "32", "--num-gpu-blocks-override", "24", "--max-model-len", "640")
NGRAMS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
ARGUMENTS = (
    *("--api-server-count", "2", "--scheduling-policy", "priority", *FEW_BLOCKS),
    *("--speculative-config", json.dumps(NGRAMS), "--max-num-seqs", "8"),
    *("--enable-lora", "--max-lora-rank", str(RANK)),
)
LIMITS = {
    "VLLM_MAX_MEDIA_REQUEST_DOWNLOAD_SIZE_MB": "1",
    "VLLM_MAX_MEDIA_REQUEST_DECODE_BYTES": "100000",
}
"""Of vLLM 0.33. No other test downloads, or has vLLM decode."""


class Reference:
    """The full model of a checkpoint in transformers, in float32. adapter: a folder; its adapter is added to
    the model's weights."""

    def __init__(self, checkpoint: Path, adapter: Path | None = None) -> None:
        self._processor = import_reference().AutoProcessor.from_pretrained(checkpoint)
        self._model = FullModel(FAMILY, checkpoint).model
        if adapter is not None:
            weights = dict(self._model.named_parameters())
            for name, (lora_a, lora_b) in adapter_weights(adapter).items():
                weights[f"{name}.weight"].data += lora_b @ lora_a

    def check(self, case: Case, images: Sequence[bytes], found: dict[str, Any], num_tokens: int) -> None:
        """Raises AssertionError unless each token of the answer is the likeliest after those before it."""
        self.check_messages(with_pixels(case, images), found, num_tokens)

    @torch.no_grad()
    def check_messages(
        self, messages: Sequence[dict[str, Any]], found: dict[str, Any], num_tokens: int
    ) -> None:
        """As ``check``, of a request's messages."""
        inputs = self._processor.apply_chat_template(
            [{**message, "content": [decoded(part) for part in message["content"]]} for message in messages],
            add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt",
        )  # fmt: skip
        num_prompt = inputs["input_ids"].shape[1]
        assert (found["num_prompt"], len(found["tokens"])) == (num_prompt, num_tokens)
        tokens = torch.tensor([found["tokens"]])
        added = {"input_ids": tokens, "attention_mask": tokens * 0 + 1, "mm_token_type_ids": tokens * 0}
        whole = {name: torch.cat((inputs[name], more), 1) for name, more in added.items()}
        self._model.model.rope_deltas = None
        logits = self._model(**{**inputs, **whole}).logits[0, num_prompt - 1 : -1]
        behind = logits.max(-1).values - logits.gather(1, tokens.T)[:, 0]
        assert behind.max() < NEAR["float32"], (found["tokens"], logits.argmax(-1).tolist())


def decoded(part: dict[str, Any]) -> dict[str, Any]:
    """A part of a message as transformers takes it."""
    if part["type"] == "text":
        return part
    file = base64.b64decode(part["image_url"]["url"].partition(",")[2])
    return {"type": "image", "image": Image.open(io.BytesIO(file))}


def write_adapter(folder: Path, checkpoint: Path) -> Path:
    """Random LoRA weights for q and v of each layer of the language model, in the layout of PEFT."""
    chance = torch.Generator().manual_seed(5)
    tensors = {}
    for name, tensor in (
        pair for path in sorted(checkpoint.glob("*.safetensors")) for pair in load_file(path).items()
    ):
        if re.search(r"language_model\.layers\.\d+\.self_attn\.[qv]_proj\.weight$", name):
            (num_out, num_in), stem = tensor.shape, f"base_model.model.{name.removesuffix('.weight')}"
            tensors[f"{stem}.lora_A.weight"] = torch.randn(RANK, num_in, generator=chance) / num_in**0.5
            tensors[f"{stem}.lora_B.weight"] = torch.randn(num_out, RANK, generator=chance) / RANK**0.5
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    # An alpha as large as the rank scales nothing.
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["q_proj", "v_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def adapter_weights(folder: Path) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """By the model's name of the weight: A [rank, in] and B [out, rank]."""
    tensors = load_file(folder / "adapter_model.safetensors")
    stems = sorted({name.partition(".lora_")[0] for name in tensors})
    return {
        stem.removeprefix("base_model.model."): (
            tensors[f"{stem}.lora_A.weight"],
            tensors[f"{stem}.lora_B.weight"],
        )
        for stem in stems
    }


@pytest.fixture(scope="module")
def adapter(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapter(tmp_path_factory.mktemp("lora") / ADAPTER, checkpoints[FAMILY])


@pytest.fixture(scope="module")
def reference(checkpoints: dict[str, Path]) -> Reference:
    return Reference(checkpoints[FAMILY])


@pytest.fixture(scope="module")
def beside(
    encoder: Encoder,
    adapter: Path,
    checkpoints: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Stack]:
    arguments = (*ARGUMENTS, "--lora-modules", f"{ADAPTER}={adapter}")
    server = Stack(
        encoder, checkpoints[FAMILY], "float32", tmp_path_factory.mktemp("beside"),
        arguments=arguments, variables=LIMITS, timeout_s=PATIENCE_S, max_resident_bytes=RESIDENT_BYTES,
    )  # fmt: skip
    with server as running:
        yield running


def post(beside: Stack, path: str) -> httpx.Response:
    response = httpx.post(f"{beside.vllm.url}/{path}", timeout=PATIENCE_S)
    assert response.status_code == 200, response.text
    return response


def new_pictures(number: int) -> list[bytes]:
    return [new_picture()[0] for _ in range(number)]


def ask(beside: Stack, case: Case, images: Sequence[bytes], **fields: Any) -> dict[str, Any]:
    return beside.answer(with_pixels(case, images), **{"max_tokens": MAX_TOKENS, **fields})


def wait_until_waiting(beside: Stack, number: int = 1) -> None:
    wait_until(lambda: metric(beside, "num_requests_waiting") == number, f"{number} requests that wait")


def ask_by_some_server(beside: Stack, image: bytes) -> tuple[dict[str, Any], int]:
    """The answer, and the process that gave it."""
    with httpx.Client(timeout=2 * PATIENCE_S) as client:
        body = chat_body(with_pixels(ONE, [image]), max_tokens=MAX_TOKENS)
        response = client.post(f"{beside.vllm.url}/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        _, port = response.extensions["network_stream"].get_extra_info("client_addr")
        connections = psutil.net_connections("tcp")
        (pid,) = {one.pid for one in connections if one.raddr == ("127.0.0.1", port)}
    return of_response(response.json()), pid


def test_both_api_servers_send_images_and_each_is_encoded_once(
    beside: Stack, encoder: Encoder, reference: Reference
) -> None:
    """Then a server may meet images that the other one has sent."""
    servers: set[int] = set()

    def ask_all(images: Sequence[bytes]) -> None:
        with ThreadPoolExecutor(len(images)) as pool:
            answers = list(pool.map(functools.partial(ask_by_some_server, beside), images))
        for image, (found, server) in zip(images, answers, strict=True):
            reference.check(ONE, [image], found, MAX_TOKENS)
            servers.add(server)

    def have_both_sent() -> bool:
        images = new_pictures(8)
        num_encoded, num_sent = encoder.num_encoded(), encoder.num_prefetches()
        ask_all(images)
        # A read that overtakes the announcement of its file has the file sent again.
        assert len(images) <= encoder.num_prefetches() - num_sent < 2 * len(images)
        ask_all(images)
        assert encoder.num_encoded() - num_encoded == len(images)
        return len(servers) == 2

    # Of several requests at once each server gets some, as a rule.
    wait_until(have_both_sent, "images by both API servers", START_S)


def test_drafts_of_ngrams_are_accepted_and_change_nothing(beside: Stack, reference: Reference) -> None:
    """Rows of three images come in portions, and a step cuts images."""
    images = new_pictures(3)
    names = "spec_decode_num_accepted_tokens_total", "spec_decode_num_draft_tokens_total"
    before = [metric(beside, name) for name in names]
    for case in (ONE, TWO, THREE, Case("text", (TEXT[0]["content"],))):
        reference.check(case, images, ask(beside, case, images), MAX_TOKENS)
    num_accepted, num_drafts = (metric(beside, name) - old for name, old in zip(names, before, strict=True))
    assert 0 < num_accepted < num_drafts


def test_an_adapter_of_the_language_model_uses_the_same_rows(
    beside: Stack, encoder: Encoder, reference: Reference, adapter: Path, checkpoints: dict[str, Path]
) -> None:
    """One after the other: on a CPU vLLM 0.32 applies an adapter to all of a batch, texts included."""
    images = new_pictures(2)
    num_encoded = encoder.num_encoded()
    plain, adapted = (ask(beside, TWO, images, model=name) for name in ("model", ADAPTER))
    assert encoder.num_encoded() - num_encoded == len(images)
    reference.check(TWO, images, plain, MAX_TOKENS)
    Reference(checkpoints[FAMILY], adapter).check(TWO, images, adapted, MAX_TOKENS)
    assert plain["tokens"] != adapted["tokens"]


def test_requests_of_a_low_priority_are_preempted_and_go_on(
    beside: Stack, encoder: Encoder, reference: Reference
) -> None:
    """There are blocks of KV for one and a half of the long answers, which begin together. The urgent request
    comes last."""
    images, num_tokens = new_pictures(5), [400, 400, 400, 400, 50]
    *low, urgent = range(5)
    done: list[int] = []

    def answer(number: int) -> dict[str, Any]:
        fields = {"priority": 0 if number == urgent else 9, "max_tokens": num_tokens[number]}
        found = ask(beside, ONE, [images[number]], **fields)
        done.append(number)
        return found

    before = metric(beside, "num_preemptions_total")
    with ThreadPoolExecutor(5) as pool:
        with encoder.paused():
            asked = [pool.submit(answer, number) for number in low]
            wait_until_waiting(beside, len(low))
            asked.append(pool.submit(answer, urgent))
            wait_until_waiting(beside, 5)
        found = [future.result() for future in asked]
    wait_until(lambda: metric(beside, "num_preemptions_total") > before, "the metric of preemptions")
    assert done.index(urgent) < 3  # two of those that came before it end later
    for image, one, number in zip(images, found, num_tokens, strict=True):
        reference.check(ONE, [image], one, number)


def reset_all(beside: Stack) -> None:
    assert post(beside, "reset_prefix_cache").json() == {"success": True}
    for name in "encoder", "mm":
        post(beside, f"reset_{name}_cache")


def test_after_a_reset_of_all_caches_rows_are_read_again(
    beside: Stack, encoder: Encoder, reference: Reference
) -> None:
    """Without an encode. A reset while rows are awaited changes nothing for their request."""
    images, awaited = new_pictures(3), new_pictures(2)
    ask(beside, THREE, images)
    num_hits = metric(beside, "prefix_cache_hits_total")
    with ThreadPoolExecutor(1) as pool, encoder.paused():
        asked = pool.submit(ask, beside, TWO, awaited)
        wait_until_waiting(beside)
        reset_all(beside)
    reference.check(TWO, awaited, asked.result(), MAX_TOKENS)
    num_encoded = encoder.num_encoded()
    num_read = encoder.num_read() + encoder.num_inline()
    reference.check(THREE, images, ask(beside, THREE, images), MAX_TOKENS)
    assert metric(beside, "prefix_cache_hits_total") == num_hits
    wait_until(lambda: encoder.num_read() + encoder.num_inline() >= num_read + 3, "reads of all three")
    assert encoder.num_encoded() == num_encoded


# What happens to a request that waits when the engine is put to sleep -> how its answer ends.
SLEEPS = {"abort": "abort", "wait": "length", "keep": "length"}


@pytest.mark.parametrize("mode", SLEEPS)
def test_a_sleep_while_rows_are_awaited_ends_well(
    mode: str, beside: Stack, encoder: Encoder, reference: Reference
) -> None:
    """A request that comes meanwhile is answered after the sleep, too."""
    images = new_pictures(2)
    with ThreadPoolExecutor(3) as pool:
        with encoder.paused():
            asked = pool.submit(beside.chat, with_pixels(ONE, images), max_tokens=MAX_TOKENS)
            wait_until_waiting(beside)
            asleep = pool.submit(post, beside, f"sleep?level=1&mode={mode}")
            if mode != "wait":
                asleep.result()
        asleep.result()
        assert httpx.get(f"{beside.vllm.url}/is_sleeping", timeout=PATIENCE_S).json() == {"is_sleeping": True}
        meanwhile = pool.submit(ask, beside, ONE, images[1:])
        if mode == "keep":
            assert not asked.done()
        post(beside, "wake_up")
        (choice,) = asked.result().json()["choices"]
        assert choice["finish_reason"] == SLEEPS[mode]
        reference.check(ONE, images[1:], meanwhile.result(), MAX_TOKENS)
    if mode != "abort":
        reference.check(ONE, images, of_response(asked.result().json()), MAX_TOKENS)
    reference.check(ONE, images, ask(beside, ONE, images), MAX_TOKENS)


def test_clients_that_leave_while_rows_are_awaited_leave_nothing_behind(
    beside: Stack, encoder: Encoder, reference: Reference
) -> None:
    """Two of them wait for rows that never come, two for room; a text of the lowest priority waits for none
    of them. Afterwards three images get their rows, for which all of the room has to be free."""
    with in_place_of(encoder, script_for(b"")) as fake:
        pictures = [new_picture() for _ in range(4)]
        fake.script.grids |= {digest: GRID for _, digest in pictures}
        fake.script.faults |= {digest: Fault.HANG for _, digest in pictures}
        asyncio.run(ask_and_leave(beside, [image for image, _ in pictures], fake))
        for name in "running", "waiting":
            wait_until(lambda: metric(beside, f"num_requests_{name}") == 0, f"no request {name}")  # noqa: B023
        # The end of one may have given its room to another.
        wait_until(lambda: not fake.num_hanging_now, "the end of the calls")
    images = new_pictures(3)
    for case in ONE, THREE:
        reference.check(case, images, ask(beside, case, images, timeout_s=PATIENCE_S), MAX_TOKENS)


async def ask_and_leave(beside: Stack, images: Sequence[bytes], fake: FakeEncoder) -> None:
    url = f"{beside.vllm.url}/v1/chat/completions"
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
        bodies = [chat_body(with_pixels(ONE, [image])) for image in images]
        asking = [asyncio.create_task(client.post(url, json=body)) for body in bodies]
        await asyncio.to_thread(wait_until_waiting, beside, len(images))
        await asyncio.to_thread(wait_until, lambda: fake.num_hanging == 2, "the reads")
        text = await client.post(url, json=chat_body(TEXT, priority=9))
        assert text.status_code == 200, text.text
        assert not any(task.done() for task in asking)
        for task in asking:
            task.cancel()


# Roles and parts. Templates decide which roles may have images: the checkpoint's lets all.
CONVERSATIONS: dict[str, list[tuple[str, tuple[str | int, ...]]]] = {
    "the system prompt": [
        ("system", ("This is our mascot:", 0, "Mention it.")),
        ("user", ("What is in the picture?", 1)),
    ],
    "earlier turns": [
        ("assistant", ("I have drawn this:", 0)),
        ("user", (1, "Was it this one?")),
        ("assistant", ("It was.",)),
        ("system", ("Now it is evening.", 2)),
        ("user", ("Compare all of them.",)),
    ],
}


@pytest.mark.parametrize("place", CONVERSATIONS)
def test_messages_of_any_role_may_have_images(place: str, beside: Stack, reference: Reference) -> None:
    images = new_pictures(3)
    messages = [
        {"role": role, "content": with_pixels(Case(role, parts), images)[0]["content"]}
        for role, parts in CONVERSATIONS[place]
    ]
    reference.check_messages(messages, beside.answer(messages, max_tokens=MAX_TOKENS), MAX_TOKENS)


def messages_body(image: bytes, **fields: Any) -> dict[str, Any]:
    """Of ``/v1/messages``, as ``ONE``."""
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(image).decode()}
    parts = [{"type": "image", "source": source}, {"type": "text", "text": ONE.parts[1]}]
    messages = [{"role": "user", "content": parts}]
    return {"model": "model", "max_tokens": MAX_TOKENS, "temperature": 0, "messages": messages, **fields}


def test_the_messages_api_takes_images(beside: Stack) -> None:
    url = f"{beside.vllm.url}/v1/messages"
    image = new_picture()[0]
    response = httpx.post(url, json=messages_body(image), timeout=PATIENCE_S)
    assert response.status_code == 200, response.text
    chat = beside.chat(with_pixels(ONE, [image]), max_tokens=MAX_TOKENS, ignore_eos=False).json()
    message = response.json()
    assert len(message["content"][0]["text"]) > 0
    assert message["content"][0]["text"] == chat["choices"][0]["message"]["content"]
    assert message["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]
    refused = httpx.post(url, json=messages_body(image[:-200]), timeout=PATIENCE_S)
    assert refused.status_code == 400, refused.text
    assert "damaged" in refused.json()["error"]["message"]


def test_the_responses_api_takes_images(beside: Stack) -> None:
    """Whole and streamed."""
    url = f"{beside.vllm.url}/v1/responses"

    def responses_body(image: bytes, **fields: Any) -> dict[str, Any]:
        parts = [
            {"type": "input_image", "image_url": data_url(image)},
            {"type": "input_text", "text": ONE.parts[1]},
        ]
        messages = [{"role": "user", "content": parts}]
        limit = {"model": "model", "max_output_tokens": MAX_TOKENS, "temperature": 0}
        return {**limit, "input": messages, **fields}

    image = new_picture()[0]
    chat = beside.chat(with_pixels(ONE, [image]), max_tokens=MAX_TOKENS, ignore_eos=False).json()
    expected = chat["choices"][0]["message"]["content"]
    assert len(expected) > 0
    response = httpx.post(url, json=responses_body(image), timeout=PATIENCE_S)
    assert response.status_code == 200, response.text
    (message,) = response.json()["output"]
    assert [part["text"] for part in message["content"]] == [expected]
    assert response.json()["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]
    streamed = httpx.post(url, json=responses_body(image, stream=True), timeout=PATIENCE_S).text
    events = [
        json.loads(line.removeprefix("data: "))
        for line in streamed.splitlines()
        if line.startswith("data: {")
    ]
    assert "".join(event["delta"] for event in events if "delta" in event) == expected
    refused = httpx.post(url, json=responses_body(image[:-200]), timeout=PATIENCE_S)
    assert refused.status_code == 400, refused.text
    assert "damaged" in refused.json()["error"]["message"]


@since_033
def test_a_stream_of_the_messages_api_says_what_is_wrong(beside: Stack) -> None:
    body = messages_body(new_picture()[0][:-200], stream=True)
    streamed = httpx.post(f"{beside.vllm.url}/v1/messages", json=body, timeout=PATIENCE_S).text
    events = [
        json.loads(line.removeprefix("data: "))
        for line in streamed.splitlines()
        if "error" in line and line.startswith("data: ")
    ]
    assert [event["error"]["type"] for event in events] == ["invalid_request_error"]
    assert "damaged" in events[0]["error"]["message"]


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a server of these files."""
    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def media(kind: str, *urls: str) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = [{"type": f"{kind}_url", f"{kind}_url": {"url": url}} for url in urls]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "What is it?"}]}]


@since_033
def test_vllms_limits_on_the_media_of_one_request_are_the_clients_fault(
    beside: Stack, tmp_path: Path
) -> None:
    """On what it downloads, though it decodes none of it, and on what it decodes itself."""
    out = io.BytesIO()
    Image.open(io.BytesIO(new_picture()[0])).resize((96, 64)).save(out, "JPEG")
    frame = base64.b64encode(out.getvalue()).decode()
    # Each has more than half of the limit: a clip of three frames, and a PNG with zeros behind it.
    clip = f"data:video/jpeg;base64,{','.join([frame] * 3)}"
    for name in "abc":
        (tmp_path / name).write_bytes(new_picture()[0] + bytes(600_000))
    with served(tmp_path) as url:
        for few, many, status, words in (
            (media("image", f"{url}/a"), media("image", f"{url}/b", f"{url}/c"), 422, "DOWNLOAD_SIZE_MB=1"),
            (media("video", clip), media("video", clip, clip), 400, "DECODE_BYTES=100000"),
        ):
            assert beside.chat(few).status_code == 200
            refused = beside.chat(many)
            assert refused.status_code == status, refused.text
            assert words in refused.json()["error"]["message"]
