"""Checkpoints that vLLM's CPU build loads, an encoder per family, and one vLLM server at a time.

Collected only where vLLM is installed: `make test-engines` runs this folder in its own environment.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    from tests.engines.checkpoints import write_checkpoint
    from tests.engines.pictures import TEXT
    from tests.engines.processes import Encoder, Stack, TextRequests

FAMILIES = ("qwen3_vl", "qwen3_5", "kimi_k25")
DTYPES = {"qwen3_vl": "float32", "qwen3_5": "bfloat16", "kimi_k25": "bfloat16"}


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Per family a whole model, and ``<family>-lm``: the same without the tower's tensors."""
    root = tmp_path_factory.mktemp("engines")
    found = {}
    for family in FAMILIES:
        found[family] = write_checkpoint(root / family, family)
        found[f"{family}-lm"] = write_checkpoint(root / f"{family}-lm", family, with_tower=False)
    return found


@pytest.fixture(scope="session", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    """Tests are ordered by it, so that one server of each serves all of them."""
    name: str = request.param
    return name


@pytest.fixture(scope="session")
def encoder(
    family: str, checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Encoder]:
    """An encoder of the family with a broker."""
    with Encoder(checkpoints[family], DTYPES[family], tmp_path_factory.mktemp("encoder")) as running:
        yield running


@pytest.fixture(scope="session")
def stack(
    family: str,
    encoder: Encoder,
    checkpoints: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Stack]:
    """The encoder, vLLM without a tower, and the front before both."""
    with Stack(
        encoder, checkpoints[f"{family}-lm"], DTYPES[family], family, tmp_path_factory.mktemp("stack")
    ) as running:
        yield running


@pytest.fixture
def meanwhile(stack: Stack) -> Iterator[TextRequests]:
    """The engine lives on: it answers text during the test and after it."""
    requests = TextRequests(stack)
    yield requests
    requests.end()
    assert stack.vllm.is_running
    assert stack.chat(TEXT, direct=True).status_code == 200
