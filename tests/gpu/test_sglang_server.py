"""A real SGLang and a real encoder on one GPU: rows come through device memory, and no failure ends SGLang.

Needs SGLang and its kernels for CUDA, which nothing here installs. SGLANG_GPU_ARGUMENTS: in place of
BACKENDS, where the machine has others.
"""

from __future__ import annotations

import os
import random
import re
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.harness.engine_checkpoints import write_checkpoint
from bench.harness.waiting import wait_until
from tests.engines.agreement import agree
from tests.engines.pictures import SIZES, picture

pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings", exc_type=ImportError)
pytest.importorskip("sglang", reason="needs SGLang", exc_type=ImportError)
pytest.importorskip("sgl_kernel", reason="needs SGLang's kernels", exc_type=ImportError)
pytest.importorskip("httpx", reason="needs httpx", exc_type=ImportError)
processes = pytest.importorskip("bench.harness.sglang")
reference = pytest.importorskip("tests.sglang.reference")
pytestmark = [pytest.mark.gpu, pytest.mark.whole_device, pytest.mark.timeout(900)]

DEVICE = "cuda"
DTYPE = "bfloat16"
SIZE = "small"
WAY = "device"
"""By which rows come to SGLang."""
BACKENDS = (
    "--attention-backend fa3 --mm-attention-backend fa3 --sampling-backend pytorch --grammar-backend none"
)
ARGUMENTS = [
    *("--dtype", DTYPE, "--mem-fraction-static", "0.3", "--context-length", "2048"),
    *os.environ.get("SGLANG_GPU_ARGUMENTS", BACKENDS).split(),
]
# Rows stay in device memory until SGLang's ranks have them.
PLUGIN_ARGUMENTS = [*ARGUMENTS, "--mm-feature-transport", "cuda_ipc"]
# SGLang's default is a compiled module that wants the torch of SGLang's own requirements.
ENVIRONMENT = {"SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python"}
NUM_ROUNDS = 3

IMAGE = reference.IMAGE
ONE = reference.prompt(IMAGE, "What is in the picture?")
TEXT = reference.prompt("Say something about waves.")
# Prompts, and which images they have.
CASES = (
    (ONE, (0,)),
    (reference.prompt("Look at this: ", IMAGE), (1,)),
    (reference.prompt(IMAGE, IMAGE, "Compare the two."), (0, 1)),
    (reference.prompt("First ", IMAGE, " then ", IMAGE, " and ", IMAGE), (2, 0, 2)),
    (TEXT, ()),
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "whole", "qwen3_vl", size=SIZE)


@pytest.fixture(scope="module")
def images() -> list[bytes]:
    return [new_picture(*size) for size in SIZES]


def new_picture(*size: int) -> bytes:
    return picture(random.getrandbits(32), *size)


def answer(server: Any, case: tuple[str, tuple[int, ...]], images: list[bytes]) -> dict[str, Any]:
    """Of a request that has to succeed, in the form that ``agree`` compares."""
    text, chosen = case
    sent = [images[index] for index in chosen]
    response = server.generate(text, sent, return_logprob=True, top_logprobs_num=8)
    assert response.status_code == 200, response.text
    found = response.json()["meta_info"]
    return {
        "tokens": [token for _, token, _ in found["output_token_logprobs"]],
        "logprobs": [{str(token): value for value, token, _ in top} for top in found["output_top_logprobs"]],
        "num_prompt": found["prompt_tokens"],
    }


def ways(server: Any) -> list[str]:
    """In which rows came, one after another."""
    return re.findall(r"rows come by (\w+):", server.log)


@pytest.fixture(scope="module")
def tower(
    checkpoint: Path, images: list[bytes], tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """Answers of an SGLang with its own tower."""
    folder = tmp_path_factory.mktemp("tower")
    with processes.Sglang(checkpoint, folder, ARGUMENTS, ENVIRONMENT, DEVICE) as server:
        return [answer(server, case, images) for case in CASES]


@pytest.fixture(scope="module")
def encoder(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("encoder")
    # A socket's name has a short limit, which pytest's folders exceed.
    with (
        tempfile.TemporaryDirectory(prefix="ve-sgl-") as sockets,
        processes.Encoder(
            checkpoint, folder, Path(sockets) / "broker.sock", device=DEVICE, dtype=DTYPE
        ) as running,
    ):
        yield running


def with_plugin(checkpoint: Path, folder: Path, encoder: Any, arguments: list[str]) -> Any:
    variables = processes.plugin_variables(encoder.target, timeout_s=20.0, retry_s=2.0, finite=True)
    return processes.Sglang(checkpoint, folder, arguments, ENVIRONMENT | variables, DEVICE)


@pytest.fixture(scope="module")
def server(
    tower: list[dict[str, Any]], checkpoint: Path, encoder: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    """After the tower's server, whose memory it needs."""
    folder = tmp_path_factory.mktemp("plugin")
    with with_plugin(checkpoint, folder, encoder, PLUGIN_ARGUMENTS) as running:
        yield running


def comes_in_memory(server: Any, encoder: Any) -> None:
    """Rows of new images come in WAY alone, once the client has attached itself, which an image begins."""
    assert server.generate(ONE, [new_picture()]).status_code == 200
    wait_until(lambda: ways(server)[-1:] == [WAY], "the attachment")

    def deliveries() -> dict[str, float]:
        return {
            name: value
            for name, value in encoder.metrics().items()
            if name.startswith("ve_deliveries_total{")
        }

    before = deliveries()
    for _ in range(NUM_ROUNDS):
        assert server.generate(ONE, [new_picture()]).status_code == 200
    added = {name: value - before.get(name, 0) for name, value in deliveries().items()}
    assert {name for name, value in added.items() if value} == {f've_deliveries_total{{transport="{WAY}"}}'}
    assert sum(added.values()) == NUM_ROUNDS
    assert ways(server)[-1] == WAY
    # Nor does SGLang's tokenizer process pass them on to its scheduler by the host.
    assert "MmItemMemoryPool has no free chunk" not in server.log


def test_p39_rows_give_the_tokens_of_the_tower(
    tower: list[dict[str, Any]], images: list[bytes], server: Any
) -> None:
    """Alone, again out of caches, and sixteen at once."""
    assert "is built without a vision tower" in server.log
    for _ in range(NUM_ROUNDS):
        agree(tower, [answer(server, case, images) for case in CASES], DTYPE)
    numbers = [random.randrange(len(CASES)) for _ in range(64)]
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda number: answer(server, CASES[number], images), numbers))
    agree([tower[number] for number in numbers], found, DTYPE)


def test_rows_come_through_device_memory(server: Any, encoder: Any) -> None:
    comes_in_memory(server, encoder)


def test_p32_failures_end_their_requests_alone(server: Any, encoder: Any) -> None:
    broken = new_picture()
    response = server.generate(ONE, [broken[: len(broken) * 9 // 10]])
    assert response.status_code == 400, response.text
    encoder.kill()
    try:
        away = server.generate(ONE, [new_picture()])
        assert away.status_code == 503, away.text
        assert server.generate(TEXT, []).status_code == 200
    finally:
        encoder.start()
    comes_in_memory(server, encoder)
    assert server.is_running


def test_p17_many_requests_at_once(server: Any) -> None:
    """More than SGLang runs: rows wait in its pool in device memory, or on the host where it is full."""
    with ThreadPoolExecutor(32) as pool:
        pictures = [new_picture(448, 448) for _ in range(128)]
        answers = list(pool.map(lambda one: server.generate(ONE, [one]), pictures))
    assert {answer.status_code for answer in answers} == {200}
    assert server.is_running


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_p24_two_ranks_share_the_rows_of_one_gpu(
    tower: list[dict[str, Any]],
    images: list[bytes],
    checkpoint: Path,
    encoder: Any,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """The encoder's GPU is the first rank's. The second rank copies rows from there to its own."""
    folder = tmp_path_factory.mktemp("ranks")
    with with_plugin(checkpoint, folder, encoder, [*PLUGIN_ARGUMENTS, "--tp", "2"]) as ranks:
        for _ in range(NUM_ROUNDS):
            agree(tower, [answer(ranks, case, images) for case in CASES], DTYPE)
        comes_in_memory(ranks, encoder)
