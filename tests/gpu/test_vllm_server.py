"""A real vLLM and a real encoder on one GPU: rows come through device memory, and no failure ends the engine.

Needs vLLM's CUDA wheel, which nothing here installs. VLLM_GPU_ARGUMENTS: further arguments of both servers,
such as an attention backend that the machine has.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.harness.engine_checkpoints import write_checkpoint
from tests.engines.agreement import agree, of_response
from tests.engines.pictures import CASES, SIZES, TEXT, picture, with_pixels

pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings", exc_type=ImportError)
pytest.importorskip("vllm", reason="needs vLLM", exc_type=ImportError)
httpx = pytest.importorskip("httpx", reason="needs httpx", exc_type=ImportError)
vllm = pytest.importorskip("bench.harness.vllm")
stacks = pytest.importorskip("tests.engines.stack")
pytestmark = [pytest.mark.gpu, pytest.mark.whole_device, pytest.mark.timeout(900)]

DTYPE = "bfloat16"
SHARE = ("--gpu-memory-utilization", "0.3")
ARGUMENTS = (*SHARE, *os.environ.get("VLLM_GPU_ARGUMENTS", "").split())
NUM_ROUNDS = 3
RESIDENT_BYTES = 8 << 20
"""For rows that wait: a sixth of what 128 pictures of 448 pixels have."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "whole", "qwen3_vl", size="small")


@pytest.fixture(scope="module")
def images() -> list[bytes]:
    return [picture(random.getrandbits(32), *size) for size in SIZES]


@pytest.fixture(scope="module")
def tower(
    checkpoint: Path, images: list[bytes], tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """Answers of a vLLM with its own tower."""
    folder = tmp_path_factory.mktemp("tower")
    server = vllm.VllmServer(checkpoint, DTYPE, None, folder, ARGUMENTS, "cuda")
    try:
        server.wait_ready()
        answers = []
        for case in CASES:
            body = stacks.chat_body(with_pixels(case, images))
            response = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120)
            assert response.status_code == 200, response.text
            answers.append(of_response(response.json()))
        return answers
    finally:
        server.stop()


@pytest.fixture(scope="module")
def encoder(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with vllm.Encoder(checkpoint, DTYPE, tmp_path_factory.mktemp("encoder"), device="cuda") as running:
        yield running


@pytest.fixture(scope="module")
def stack(
    tower: list[dict[str, Any]], checkpoint: Path, encoder: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    """After the tower's server, whose memory it needs."""
    folder = tmp_path_factory.mktemp("stack")
    settings: dict[str, Any] = {"timeout_s": 20.0, "max_resident_bytes": RESIDENT_BYTES}
    with stacks.Stack(
        encoder, checkpoint, DTYPE, folder, arguments=ARGUMENTS, device="cuda", **settings
    ) as running:
        yield running


def test_the_documents_commands(
    tower: list[dict[str, Any]], images: list[bytes], checkpoint: Path, tmp_path: Path
) -> None:
    """Without an option that they do not have: the encoder is on the GPU in the checkpoint's dtype, and rows
    come through device memory. Before the other servers, as this vLLM takes the memory that is left."""
    with vllm.Encoder(checkpoint, None, tmp_path, device="cuda") as encoder:
        server = vllm.VllmServer(checkpoint, None, {"target": encoder.target}, tmp_path, (), "cuda")
        try:
            server.wait_ready()
            found = []
            for case in CASES:
                body = stacks.chat_body(with_pixels(case, images), model=str(checkpoint))
                response = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120)
                assert response.status_code == 200, response.text
                found.append(of_response(response.json()))
        finally:
            server.stop()
        ready = next(line for line in encoder.log.splitlines() if re.search(r"\bready\b.*dtype=", line))
    agree(tower, found, DTYPE)
    assert re.findall(r"image rows come by (\w+):", server.log)[-1] == "device"
    assert re.search(r"device=\S*cuda", ready), ready
    assert re.search(r"dtype=bfloat16\b", ready), ready


def test_p39_rows_give_the_tokens_of_the_tower(
    tower: list[dict[str, Any]], images: list[bytes], stack: Any
) -> None:
    """Alone, again out of caches, and sixteen at once; through device memory, as vLLM's metrics say too: only
    what comes before the rank is attached is inline."""
    for _ in range(NUM_ROUNDS):
        agree(tower, [stack.answer(with_pixels(case, images)) for case in CASES], DTYPE)
    numbers = [random.randrange(len(CASES)) for _ in range(64)]
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda number: stack.answer(with_pixels(CASES[number], images)), numbers))
    agree([tower[number] for number in numbers], found, DTYPE)
    assert re.findall(r"image rows come by (\w+):", stack.vllm.log)[-1] == "device"
    assert f"{RESIDENT_BYTES >> 20} MiB are reserved for rows" in stack.vllm.log
    figures = stacks.figures_of(stack)
    assert figures["rows_bytes_total device"] > 0
    assert figures["rows_bytes_total host"] == 0
    assert figures["rows_bytes_total inline"] < figures["rows_bytes_total device"]
    assert figures["cache_queries_total"] > figures["cache_hits_total"] > 0
    assert figures["reachable"] == 1


def test_p32_failures_end_their_requests_alone(stack: Any, encoder: Any) -> None:
    broken = picture(random.getrandbits(32))
    response = stack.chat(with_pixels(CASES[0], [broken[: len(broken) * 9 // 10]]))
    assert response.status_code == 400, response.text
    encoder.kill()
    away = stack.chat(with_pixels(CASES[0], [picture(random.getrandbits(32))]))
    assert away.status_code == 503, away.text
    assert stack.chat(TEXT).status_code == 200
    encoder.start()
    for _ in range(NUM_ROUNDS):
        stack.answer(with_pixels(CASES[0], [picture(random.getrandbits(32))]))
    assert stack.vllm.is_running


def test_p17_p24_more_rows_than_a_rank_may_hold_pass_through_it(stack: Any) -> None:
    """What stayed of one picture would end the others by their time limit."""
    with ThreadPoolExecutor(32) as pool:
        pictures = [picture(random.getrandbits(32), 448, 448) for _ in range(128)]
        answers = list(pool.map(lambda one: stack.chat(with_pixels(CASES[0], [one]), max_tokens=1), pictures))
    assert {answer.status_code for answer in answers} == {200}
    assert stack.vllm.is_running


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_p24_two_ranks_read_from_one_gpu(
    tower: list[dict[str, Any]],
    images: list[bytes],
    checkpoint: Path,
    encoder: Any,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """The encoder's GPU is the first rank's. The second rank copies rows from there to its own."""
    folder = tmp_path_factory.mktemp("ranks")
    arguments = (*ARGUMENTS, "--tensor-parallel-size", "2")
    with stacks.Stack(
        encoder, checkpoint, DTYPE, folder, timeout_s=20.0, arguments=arguments, device="cuda"
    ) as ranks:
        for _ in range(NUM_ROUNDS):
            agree(tower, [ranks.answer(with_pixels(case, images)) for case in CASES], DTYPE)
        ways = dict(re.findall(r"\(Worker\w* pid=(\d+)\).*image rows come by (\w+):", ranks.vllm.log))
    assert list(ways.values()) == ["device", "device"], ways
