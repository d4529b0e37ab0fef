"""Checkpoints that vLLM's CPU build loads, an encoder per family, and one vLLM server at a time.

Collected only where vLLM is installed: `make test-engines` runs this folder in its own environment.
"""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    from bench.harness.engine_checkpoints import write_checkpoint
    from bench.harness.vllm import Encoder
    from tests.engines.pictures import (
        CASES,
        CLIP_CASES,
        CLIP_LENGTHS,
        SIZES,
        TEXT,
        Case,
        clip,
        data_url,
        picture,
        with_pixels,
    )
    from tests.engines.stack import Stack, TextRequests, run_offline

    INPUT = data_url(picture(7))

FAMILIES = ("qwen3_vl", "qwen3_5", "kimi_k25")
# Whose requests are as those of one of the families above: images, their tokens, and what is refused.
FURTHER = (
    *("interns1_pro", "intern_s2_preview", "qwen3_omni_moe", "kimi_vl", "glm4v", "glm_ocr", "ling_vl"),
    "qwen2_5_vl",
)
DTYPES = {
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "interns1_pro", "qwen3_omni_moe", "kimi_vl"), "float32"),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "intern_s2_preview", "kimi_k25", "ling_vl"), "bfloat16"),
    **dict.fromkeys(("glm4v", "glm_ocr", "qwen2_5_vl"), "float32"),
}
# Of the engine: published configurations with code of their own; a checkpoint without an audio tower.
ENGINE_OPTIONS: dict[str, dict[str, Any]] = {
    "interns1_pro": {"trust_remote_code": True},
    "intern_s2_preview": {"trust_remote_code": True},
    "qwen3_omni_moe": {"limit_mm_per_prompt": {"audio": 0}},
}
# vLLM's own tower of Kimi-VL needs the processor in the checkpoint.
WITH_TOWER_OPTIONS = ENGINE_OPTIONS | {"kimi_vl": {"trust_remote_code": True}}
WITHOUT_CLIPS = ("kimi_k25", "kimi_vl", "qwen3_omni_moe", "ling_vl")
"""Families of which vLLM takes no clips."""
# vLLM takes one clip of a prompt.
GLM = ("glm4v", "glm_ocr")
NUM_SETS = 4
# Processor options of a request, by number of its case.
OPTIONS: list[tuple[int, dict[str, Any]]] = [
    (2, {"min_pixels": 65536}),
    (3, {"max_pixels": 70000}),
    (0, {"size": {"shortest_edge": 90000}}),
    # Below the checkpoint's own least.
    (1, {"max_pixels": 50176}),
    (1, {"size": {"longest_edge": 40000}}),
]

# vLLM takes no other sizes of these.
BOTH_EDGES: list[tuple[int, dict[str, Any]]] = [
    (0, {"size": {"shortest_edge": 180000, "longest_edge": 9633792}}),
    (1, {"size": {"shortest_edge": 12544, "longest_edge": 80000}}),
]

# Of requests with tools: the model has to write the word.
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "name_it",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {"word": {"type": "string", "pattern": "^[a-z]{8}$"}},
                "required": ["word"],
                "additionalProperties": False,
            },
        },
    }
]
CALL = {
    "tools": TOOLS,
    "tool_choice": {"type": "function", "function": {"name": "name_it"}},
    "temperature": 0,
    "max_tokens": 128,
    # JSON may have any number of spaces between its signs, and a model of random weights may like them. The
    # tokens of single bytes have the bytes' numbers.
    "logit_bias": {str(byte): -100 for byte in b"\t\n\r "},
}
TOOL_ARGUMENTS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
# A user's own limits do not bring the tower back.
LIMITS = ("--limit-mm-per-prompt", '{"image": 9}')

# Of a request's clips: more frames than there are by default.
SAMPLING = {"fps": 3, "min_frames": 6, "max_frames": 11}


def options_of(family: str) -> list[tuple[int, dict[str, Any]]]:
    return BOTH_EDGES if family in (*GLM, "qwen2_5_vl") else OPTIONS


def clip_cases(family: str) -> list[Case]:
    return [case for case in CLIP_CASES if family not in GLM or len(case.clips) == 1]


class Checkpoints(dict[str, Path]):
    """Written when they are first asked for."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def __missing__(self, family: str) -> Path:
        self[family] = write_checkpoint(self._root / family, family)
        return self[family]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Per family a whole model."""
    return Checkpoints(tmp_path_factory.mktemp("engines"))


@pytest.fixture(
    scope="session",
    params=[FAMILIES[0], *(pytest.param(name, marks=pytest.mark.extended) for name in FAMILIES[1:])],
)
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
    """The encoder, and vLLM without a tower, whose weights its checkpoint lacks: vLLM refuses to start where
    weights of a built module are missing. The dummies of its start ask no encoder."""
    folder = tmp_path_factory.mktemp("stack")
    checkpoint = write_checkpoint(folder / "checkpoint", family, with_tower=False)
    before = encoder.num_asked()
    arguments = [*TOOL_ARGUMENTS, *LIMITS]
    if "trust_remote_code" in ENGINE_OPTIONS.get(family, ()):
        arguments.append("--trust-remote-code")
    with Stack(encoder, checkpoint, DTYPES[family], folder, arguments=arguments) as running:
        assert encoder.num_asked() == before
        running.answer(with_pixels(CASES[0], [picture(random.getrandbits(32))]))
        assert encoder.num_asked() > before
        yield running


@pytest.fixture(autouse=True)
def _same_draws(request: pytest.FixtureRequest) -> None:
    """The same pictures in every run, others in each test: whether tokens are equal or differ does not depend
    on luck."""
    random.seed(request.node.nodeid)


@pytest.fixture(scope="session")
def image_sets() -> list[list[bytes]]:
    """Of which one is taken for each family (offline.py). The same in all workers and runs."""
    chance = random.Random(1)
    return [[picture(chance.getrandbits(32), *size) for size in SIZES] for _ in range(NUM_SETS)]


@pytest.fixture(scope="session")
def images(image_sets: list[list[bytes]], tower: dict[str, Any]) -> list[bytes]:
    return image_sets[tower["chosen"]]


@pytest.fixture(scope="session")
def clip_sets() -> list[list[bytes]]:
    """As ``image_sets``."""
    chance = random.Random(2)
    return [[clip(chance.getrandbits(32), *length) for length in CLIP_LENGTHS] for _ in range(NUM_SETS)]


@pytest.fixture(scope="session")
def clips(clip_sets: list[list[bytes]], tower: dict[str, Any]) -> list[bytes]:
    return clip_sets[tower["chosen_clips"]]


@pytest.fixture(scope="session")
def tower(
    family: str,
    checkpoints: dict[str, Path],
    image_sets: list[list[bytes]],
    clip_sets: list[list[bytes]],
    encoder: Encoder,
    testrun_uid: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Any]:
    """Answers of a vLLM with its own tower. Clips are beside the first set of images. One worker asks for
    all."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    file = folder / f"tower-{family}-{testrun_uid}.json"
    with file.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not file.exists():
            answers = run_offline(tower_settings(family, checkpoints[family], image_sets, clip_sets, encoder))
            file.write_text(json.dumps(answers))
    answers = json.loads(file.read_text())
    print(f"tokens that are sure to be compared, by set of pictures: {answers['decided']}")
    return answers


def tower_settings(
    family: str,
    checkpoint: Path,
    image_sets: list[list[bytes]],
    clip_sets: list[list[bytes]],
    encoder: Encoder,
) -> dict[str, Any]:
    """Of offline.py."""
    has_clips = family not in WITHOUT_CLIPS
    return {
        "model": str(checkpoint),
        "dtype": DTYPES[family],
        "engine": WITH_TOWER_OPTIONS.get(family, {}),
        "sets": [[with_pixels(case, images) for case in CASES] for images in image_sets],
        "options": options_of(family) if has_clips else [],
        "clips": [
            [with_pixels(case, image_sets[0], clips) for case in clip_cases(family)] for clips in clip_sets
        ]
        if has_clips
        else [],
        "sampling": {} if family in GLM else SAMPLING,
        # On a CPU vLLM's language model of Kimi-VL answers several prompts of one step wrongly, texts too.
        "one_by_one": family == "kimi_vl",
        "calls": CALL if family == "qwen3_vl" else None,
        # Of Qwen3-VL also in other forms than files: test_every_form_of_media_that_vllm_takes.
        "encoder": encoder.target if family == "qwen3_vl" else None,
        "inputs": INPUT,
    }


@pytest.fixture
def meanwhile(stack: Stack) -> Iterator[TextRequests]:
    """The engine lives on: it answers text during the test and after it."""
    requests = TextRequests(stack)
    yield requests
    requests.end()
    assert stack.vllm.is_running
    assert stack.chat(TEXT).status_code == 200
