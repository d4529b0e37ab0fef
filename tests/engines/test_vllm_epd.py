"""Prefill and decode in two vLLM instances beside one encoder, as docs/vllm.md has them.

The KV goes from one to the other by NIXL. While KV waits to be fetched, for 30 s, the instance that holds it
keeps a core busy; the test that leaves KV unfetched comes last.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.harness.engine_checkpoints import write_checkpoint
from bench.harness.vllm import DECODE, DOCUMENT, PREFILL, Command, Encoder, VllmServer
from bench.harness.waiting import PATIENCE_S, settled
from tests.engines.agreement import agree, of_response
from tests.engines.conftest import DTYPES
from tests.engines.pictures import CASES, CLIP_CASES, picture, with_pixels
from tests.engines.stack import Stack, chat_body, metric

FAMILY = "qwen3_vl"
DTYPE = DTYPES[FAMILY]
pytestmark = [
    pytest.mark.timeout(1200),
    pytest.mark.parametrize("family", [FAMILY], indirect=True, scope="session"),
]
# Each test has a prompt of its own, of which the decode instance has no KV yet.
DOCUMENTED, AWAY, NAMED, THREE_IMAGES, NOT_LOADED = 0, 1, 2, 3, 6
CLIP = 2
# While NIXL waits, a rank's other threads can get no time for ten seconds on two busy cores.
ROWS_S = 60.0
MAX_HANDSHAKES = 4


def num_loaded(vllm: VllmServer) -> int:
    """Tokens of prompts whose KV came from outside."""
    text = httpx.get(f"{vllm.url}/metrics", timeout=PATIENCE_S).text
    (value,) = re.findall(r"^vllm:external_prefix_cache_hits_total{.*} (.*)$", text, re.MULTILINE)
    return int(float(value))


def with_names(messages: list[dict[str, Any]], *names: str) -> list[dict[str, Any]]:
    """The client's uuids of the images."""
    (turn,) = messages
    unused = iter(names)
    parts = [
        {**part, "uuid": next(unused)} if part["type"] == "image_url" else part for part in turn["content"]
    ]
    return [{**turn, "content": parts}]


@dataclass(frozen=True)
class Pair:
    prefill: Stack
    decode: Stack

    def prefilled(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        """The parameters that a proxy hands over."""
        params = {"do_remote_decode": True}
        response = self.prefill.chat(messages, max_completion_tokens=1, kv_transfer_params=params)
        assert response.status_code == 200, response.text
        found: dict[str, Any] = response.json()["kv_transfer_params"]
        return found

    def loaded(self, messages: list[dict[str, Any]], params: dict[str, Any]) -> dict[str, Any]:
        """The answer of a decode instance that computes nothing of the prompt."""
        before = num_loaded(self.decode.vllm)
        found = self.decode.answer(messages, kv_transfer_params=params)
        assert num_loaded(self.decode.vllm) - before == found["num_prompt"]
        return found

    def meet(self) -> None:
        """Exchanges requests until NIXL has connected the two. vLLM waits five seconds for the other's answer
        to its handshake, which may come later on two busy cores. D then computes the prompt from rows,
        although vLLM counts the KV as loaded."""
        for _ in range(MAX_HANDSHAKES):
            messages = with_pixels(CASES[0], [picture(random.getrandbits(32))])
            params, num_asked = self.prefilled(messages), settled(self.encoder.num_asked)
            num_failed = self._num_failed()
            self.decode.answer(messages, kv_transfer_params=params)
            has_failed = self._num_failed() > num_failed
            assert (settled(self.encoder.num_asked) > num_asked) == has_failed
            if not has_failed:
                return
        pytest.fail("a handshake of NIXL did not come within vLLM's five seconds")

    def _num_failed(self) -> int:
        return metric(self.decode, "nixl_num_failed_transfers_total")

    @property
    def encoder(self) -> Encoder:
        return self.decode.encoder


@pytest.fixture(scope="module")
def pair(encoder: Encoder, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Both start at the same time, with one path of the model, which NIXL compares."""
    folder = tmp_path_factory.mktemp("pair")
    checkpoint = write_checkpoint(folder / "checkpoint", FAMILY, with_tower=False)

    def stack(name: str, command: Command) -> Stack:
        (folder / name).mkdir()
        return Stack(encoder, checkpoint, DTYPE, folder / name, timeout_s=ROWS_S, command=command)

    with ExitStack() as running:
        stacks = [stack("prefill", PREFILL), stack("decode", DECODE)]
        for each in stacks:
            running.callback(each.vllm.stop)
        found = Pair(*(running.enter_context(each) for each in stacks))
        found.meet()
        yield found


def test_the_documents_two_calls(
    pair: Pair, encoder: Encoder, tower: dict[str, Any], images: list[bytes], tmp_path: Path
) -> None:
    """The KV of the image comes with the rest: the second call asks nothing of the encoder."""
    blocks = re.findall(r"^```console\n(.*?)^```$", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)
    (block,) = (block for block in blocks if block.startswith("jq "))
    for old, stack in (("8100", pair.prefill), ("8200", pair.decode)):
        assert old in block
        block = block.replace(f":{old}/", f":{stack.vllm.port}/")
    to_prefill, end, to_decode = block.partition("> kv.json\n")
    (tmp_path / "request.json").write_text(json.dumps(chat_body(with_pixels(CASES[DOCUMENTED], images))))

    def run(command: str) -> str:
        ended = subprocess.run(
            ["bash", "-c", f"set -o pipefail; {command}"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    run(to_prefill + end)
    num_asked, before = settled(encoder.num_asked), num_loaded(pair.decode.vllm)
    assert num_asked > 0
    found = of_response(json.loads(run(to_decode)))
    agree([tower["answers"][DOCUMENTED]], [found], DTYPE)
    assert num_loaded(pair.decode.vllm) - before == found["num_prompt"]
    assert encoder.num_asked() == num_asked


def test_three_images(pair: Pair, encoder: Encoder, tower: dict[str, Any], images: list[bytes]) -> None:
    messages = with_pixels(CASES[THREE_IMAGES], images)
    params, num_asked = pair.prefilled(messages), settled(encoder.num_asked)
    agree([tower["answers"][THREE_IMAGES]], [pair.loaded(messages, params)], DTYPE)
    assert encoder.num_asked() == num_asked


def test_images_that_the_client_names(
    pair: Pair, encoder: Encoder, tower: dict[str, Any], images: list[bytes]
) -> None:
    messages = with_names(with_pixels(CASES[NAMED], images), "one", "other")
    params, num_asked = pair.prefilled(messages), settled(encoder.num_asked)
    agree([tower["answers"][NAMED]], [pair.loaded(messages, params)], DTYPE)
    assert encoder.num_asked() == num_asked


def test_of_a_clip_the_encoder_is_asked_for_the_frames_times(
    pair: Pair, encoder: Encoder, tower: dict[str, Any], image_sets: list[list[bytes]], clips: list[bytes]
) -> None:
    messages = with_pixels(CLIP_CASES[CLIP], image_sets[0], clips)
    params, num_asked = pair.prefilled(messages), settled(encoder.num_asked)
    agree([tower["clips"][CLIP]], [pair.loaded(messages, params)], DTYPE)
    assert encoder.num_asked() == num_asked + 1


def test_an_encoder_that_ends_between_the_two_calls(
    pair: Pair,
    encoder: Encoder,
    tower: dict[str, Any],
    images: list[bytes],
    image_sets: list[list[bytes]],
    clips: list[bytes],
) -> None:
    """An image's KV is enough. A clip's prompt is not known without the encoder."""
    messages = with_pixels(CASES[AWAY], images)
    of_clip = with_pixels(CLIP_CASES[CLIP], image_sets[0], clips)
    params = pair.prefilled(messages)
    encoder.kill()
    try:
        agree([tower["answers"][AWAY]], [pair.loaded(messages, params)], DTYPE)
        # Although the instance has computed with its KV before.
        refused = pair.decode.chat(of_clip)
        assert refused.status_code == 503, refused.text
        assert "UNAVAILABLE" in refused.text
    finally:
        encoder.start()


def test_kv_that_cannot_be_loaded_is_computed_from_rows(
    pair: Pair, encoder: Encoder, tower: dict[str, Any], images: list[bytes]
) -> None:
    """Without the encoder the request fails alone. Nothing is asked of it before the KV has failed."""
    messages = with_pixels(CASES[NOT_LOADED], images)
    params = {**pair.prefilled(messages), "remote_engine_id": "of another instance"}
    encoder.kill()
    try:
        refused = pair.decode.chat(messages, kv_transfer_params=params)
        assert refused.status_code == 503, refused.text
        assert "UNAVAILABLE" in refused.text
    finally:
        encoder.start()
    assert encoder.num_asked() == 0
    found = pair.decode.answer(messages, kv_transfer_params=params)
    agree([tower["answers"][NOT_LOADED]], [found], DTYPE)
    assert encoder.num_asked() > 0


@pytest.mark.extended
def test_named_images_share_a_store_with_a_vllm_that_has_its_tower(
    encoder: Encoder, checkpoints: dict[str, Path], images: list[bytes], tmp_path: Path
) -> None:
    """The tower's vLLM fills a store of KV by content. The other finds the KV of an image by the client's
    name, and not by the image."""
    config = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "store")},
    }
    # The store takes the KV of prompts that are computed in one step.
    arguments = [
        *("--max-num-batched-tokens", "1024", "--block-size", "32"),
        *("--kv-transfer-config", json.dumps(config)),
    ]
    messages = with_pixels(CASES[DOCUMENTED], images)
    named = with_names(messages, "of the store")
    for name in ("tower", "plugin"):
        (tmp_path / name).mkdir()
    tower = VllmServer(checkpoints[FAMILY], DTYPE, None, tmp_path / "tower", arguments)
    try:
        tower.wait_ready()
        url = f"{tower.url}/v1/chat/completions"
        bodies = [httpx.post(url, json=chat_body(each), timeout=120).json() for each in (messages, named)]
    finally:
        tower.stop()
    with Stack(
        encoder, checkpoints[FAMILY], DTYPE, tmp_path / "plugin", arguments=arguments, announces=False
    ) as stack:
        num_asked = settled(encoder.num_asked)
        found = stack.answer(named)
        assert num_loaded(stack.vllm) > 0
        assert encoder.num_asked() == num_asked
        num_of_store = num_loaded(stack.vllm)
        computed = stack.answer(messages)
        assert num_loaded(stack.vllm) == num_of_store
        assert encoder.num_asked() > num_asked
    agree([of_response(body) for body in bodies], [computed, found], DTYPE)
