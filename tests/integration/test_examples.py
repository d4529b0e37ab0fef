"""The examples against a service. tests/engines runs vllm.sh, tests/sglang sglang.sh."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from bench.harness.processes import environment
from encoder_service.checkpoints.synthetic import make_checkpoint
from lm_adapter import ImageItem, VisionEncoderClient
from lm_adapter.engines.hf import RemoteItem, load_language_model
from tests.integration.conftest import RunningService, running
from tests.integration.images import photo

pytestmark = pytest.mark.without_device
EXAMPLES = Path(__file__).parents[2] / "examples"
OF_ENGINES = {"vllm.sh", "sglang.sh"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("examples")
    make_checkpoint(found / "checkpoint", "qwen3_vl", "tiny", 0, with_lm=True)
    (found / "photos").mkdir()
    for number in range(3):
        (found / "photos" / f"{number}.jpg").write_bytes(photo(64 + 8 * number, 48, image_format="JPEG"))
    return found


@pytest.fixture(scope="module")
def found(folder: Path) -> Iterator[RunningService]:
    with running(folder / "checkpoint", torch.device("cpu"), http_listen="127.0.0.1:0") as found:
        yield found


def run(folder: Path, *words: str, **variables: str) -> str:
    program = [sys.executable] if words[0].endswith(".py") else []
    ended = subprocess.run(
        [*program, EXAMPLES / words[0], *words[1:]],
        cwd=folder,
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_every_example_is_run() -> None:
    source = Path(__file__).read_text()
    names = {path.name for path in EXAMPLES.iterdir()} - OF_ENGINES - {"README.md"}
    assert all(f'"{name}"' in source for name in names)
    assert all(name in (EXAMPLES / "README.md").read_text() for name in names | OF_ENGINES)


def test_a_file(folder: Path, found: RunningService) -> None:
    assert "rows of" in run(folder, "encode_file.py", "photos/0.jpg", "--server", found.target)


def test_a_folder_and_what_is_left_of_it(folder: Path, found: RunningService) -> None:
    words = ("folder_job.py", "photos", "out", "--server", found.target)
    run(folder, *words)
    os.remove(folder / "out" / "1.jpg.npy")
    kept = (folder / "out" / "0.jpg.npy").stat().st_mtime_ns
    run(folder, *words)
    assert (folder / "out" / "0.jpg.npy").stat().st_mtime_ns == kept
    with VisionEncoderClient(found.target) as client:
        rows = client.encode(ImageItem.from_path(folder / "photos" / "1.jpg"))
    assert np.array_equal(np.load(folder / "out" / "1.jpg.npy"), rows.numpy())


def test_an_engine_of_one_s_own_generates_the_tokens_of_ours(folder: Path, found: RunningService) -> None:
    words = ("own_engine.py", "checkpoint", "photos/2.jpg", "--server", found.target)
    tokens = ast.literal_eval(run(folder, *words))
    model = load_language_model(folder / "checkpoint")
    with VisionEncoderClient(found.target) as client:
        rows = client.encode(ImageItem.from_path(folder / "photos" / "2.jpg"))
    prompt = [11, 22, model.interface.image_placeholder_id, 33]
    assert [tokens] == model.generate([prompt], [[RemoteItem.from_encoded(rows)]], max_new_tokens=8)


def test_rows_over_http(folder: Path, found: RunningService) -> None:
    run(folder, "curl.sh", "photos/0.jpg", SERVER=found.service.addresses["http"])
    with VisionEncoderClient(found.target) as client:
        rows = client.encode(ImageItem.from_path(folder / "photos" / "0.jpg"))
    assert torch.equal(load_file(folder / "rows.safetensors")["rows.0"], rows.torch())
