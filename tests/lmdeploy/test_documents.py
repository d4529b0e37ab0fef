"""The commands of docs/lmdeploy.md as they stand, and what ends a start.

The encoder has no option of a device, a dtype or a socket; the variables of this environment only give
LMDeploy a CPU.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.harness.lmdeploy import ENVIRONMENT, Lmdeploy
from bench.harness.processes import environment
from bench.harness.vllm import Encoder
from lm_adapter.engines.lmdeploy.settings import VARIABLE
from tests.engines.agreement import agree
from tests.engines.near_model import ARCHITECTURE, write_near_checkpoint
from tests.lmdeploy.answers import LOGPROBS, ONE, answer

pytestmark = pytest.mark.timeout(600)


def test_the_documents_commands_give_the_answers_of_lmdeploys_own_tower(
    checkpoint: Path, images: list[bytes], tmp_path: Path
) -> None:
    """Both in the checkpoint's bfloat16."""
    with Lmdeploy(checkpoint, tmp_path, None, LOGPROBS, {}) as own:
        expected = [answer(own, ONE, [image]) for image in images]
    assert len({tuple(one["tokens"]) for one in expected}) == len(images)
    (tmp_path / "plugin").mkdir()
    with (
        Encoder(checkpoint, None, tmp_path) as encoder,
        Lmdeploy(checkpoint, tmp_path / "plugin", encoder.target, LOGPROBS, {}) as server,
    ):
        agree(expected, [answer(server, ONE, [image]) for image in images], "bfloat16")
        assert encoder.num_encoded() == len(images)


def start(checkpoint: Path, *arguments: str, variable: str | None = None, **variables: str) -> str:
    """The log of a start that has to end by itself."""
    variables = {**ENVIRONMENT, **variables}
    if variable is not None:
        variables[VARIABLE] = variable
    command = [sys.executable, "-m", "lm_adapter.engines.lmdeploy.serve", "api_server", str(checkpoint)]
    ended = subprocess.run(
        [*command, *arguments],
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 1, ended.stderr
    assert "Traceback" not in ended.stdout + ended.stderr
    (line,) = [
        line for line in (ended.stdout + ended.stderr).splitlines() if "LMDeploy does not start: " in line
    ]
    return line


AWAY = json.dumps({"target": "127.0.0.1:1"})


@pytest.mark.parametrize(
    ("variable", "arguments", "words"),
    [
        (None, (), f"{VARIABLE} is not set"),
        ('{"target": "a:1", "fleets": 1}', (), "fleets"),
        (AWAY, ("--backend", "pytorch", "--language-model-only"), "start LMDeploy without it"),
    ],
)
def test_what_cannot_work_ends_the_start_with_the_reason(
    checkpoint: Path, variable: str | None, arguments: tuple[str, ...], words: str
) -> None:
    assert words in start(checkpoint, *arguments, variable=variable)


def test_a_model_that_is_not_served_does_not_start_with_its_own_tower(tmp_path: Path) -> None:
    line = start(write_near_checkpoint(tmp_path / "model"), "--backend", "pytorch", variable=AWAY)
    assert f"the model is a {ARCHITECTURE}, image rows are for Qwen3VLForConditionalGeneration" in line


def test_a_start_beside_an_encoder_of_another_dtype_says_which_option_to_change(
    checkpoint: Path, encoder: Encoder
) -> None:
    line = start(checkpoint, "--backend", "pytorch", variable=json.dumps({"target": encoder.target}))
    assert (
        f"the encoder at {encoder.target} serves rows in float32, LMDeploy's model takes bfloat16: start the "
        "encoder with --dtype bfloat16"
    ) in line
