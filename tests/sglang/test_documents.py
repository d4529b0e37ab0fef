"""The commands of docs/sglang.md as they stand, and examples/sglang.sh.

The encoder has no option of a device, a dtype or a socket. Only SGLang gets options, for a CPU and a small
model.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.harness.ports import free_port
from bench.harness.processes import ROOT
from bench.harness.sglang import (
    FORKED,
    LANGUAGE_MODEL,
    NUM_TOKENS,
    PROGRAM,
    DocumentedEncoder,
    Sglang,
    generate_body,
    plugin_variables,
    protocol_arguments,
)
from bench.harness.waiting import wait_until
from lm_adapter.engines.sglang.families import SERVED
from tests.engines.agreement import agree
from tests.engines.faults import new_picture
from tests.engines.near_model import ARCHITECTURE, write_near_checkpoint
from tests.sglang.leaving import ONE
from tests.shell import ENCODER, run, shell_with

pytestmark = pytest.mark.timeout(900)
FIRST_S = 240
"""Limit on SGLang's tower, whose first image takes long."""
# The harness has float32, for tests of equal tokens; "auto" is SGLang's own default, here bfloat16.
ARGUMENTS = [*LANGUAGE_MODEL, "--dtype", "auto"]


def answers(server: Sglang, images: list[bytes], *, of_own_tower: bool = False) -> list[dict[str, Any]]:
    """In the form of ``agree``. of_own_tower: the server has an encoder, but computes several samples of a
    prompt with its own tower."""
    sampling = {"temperature": 0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True, "n": 1 + of_own_tower}
    found = []
    for image in images:
        body = generate_body(ONE, [image], sampling_params=sampling, return_logprob=True, top_logprobs_num=8)
        response = server.post("/generate", body, timeout_s=FIRST_S)
        assert response.status_code == 200, response.text
        answer = response.json()[0] if of_own_tower else response.json()
        steps = answer["meta_info"]["output_top_logprobs"]
        found.append(
            {
                "tokens": answer["output_ids"],
                "logprobs": [{str(token): value for value, token, _ in step} for step in steps],
                "num_prompt": answer["meta_info"]["prompt_tokens"],
            }
        )
    return found


def test_both_ways_give_the_answers_of_sglangs_own_tower(
    checkpoints: dict[str, Path], images: list[bytes], tmp_path: Path
) -> None:
    checkpoint = checkpoints["qwen3_vl"]
    (tmp_path / "protocol").mkdir()
    (tmp_path / "plugin").mkdir()
    with DocumentedEncoder(checkpoint, tmp_path / "protocol", "protocol") as encoder:
        arguments = [*ARGUMENTS, *protocol_arguments(encoder.sglang_url)]
        with Sglang(checkpoint, tmp_path / "protocol", arguments, FORKED) as server:
            expected = answers(server, images, of_own_tower=True)
            assert encoder.total("ve_items_total") == 0
            agree(expected, answers(server, images), "bfloat16")
            assert encoder.total("ve_items_total") == len(images)
    assert len({tuple(one["tokens"]) for one in expected}) == len(images)

    with (
        DocumentedEncoder(checkpoint, tmp_path / "plugin", "plugin") as encoder,
        Sglang(checkpoint, tmp_path / "plugin", ARGUMENTS, plugin_variables(encoder.target)) as server,
    ):

        def num_read() -> float:
            return encoder.metrics()["ve_directory_reads_total"]

        def num_inline() -> float:
            return encoder.metrics().get('ve_deliveries_total{transport="inline"}', 0.0)

        def is_attached() -> bool:
            server.tokens(ONE, [new_picture()[0]])
            return num_read() > 0

        wait_until(is_attached, "rows by shared memory")
        before, inline_before = num_read(), num_inline()
        agree(expected, answers(server, images), "bfloat16")
        wait_until(lambda: num_read() >= before + len(images), "the reports of the reads")
        assert num_inline() == inline_before


def test_a_start_beside_an_encoder_of_another_dtype_says_which_option_to_change(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """The harness gives SGLang float32. The line stands above SGLang's traceback."""
    checkpoint = checkpoints["qwen3_vl"]
    sentence = (
        "SGLang does not start: the encoder at {} serves rows in bfloat16, SGLang's model takes float32: "
        "start the encoder with --dtype float32, or SGLang with --dtype bfloat16"
    )
    with (
        DocumentedEncoder(checkpoint, tmp_path, "plugin") as encoder,
        pytest.raises(AssertionError, match="SGLang ended"),
        Sglang(checkpoint, tmp_path, LANGUAGE_MODEL, FORKED | plugin_variables(encoder.target)),
    ):
        pass
    log = (tmp_path / "sglang.log").read_text()
    assert log.count(sentence.format(encoder.target)) == 1


def test_a_model_that_is_not_served_does_not_start_with_its_own_tower(tmp_path: Path) -> None:
    with (
        pytest.raises(AssertionError, match="SGLang ended"),
        Sglang(
            write_near_checkpoint(tmp_path / "model"),
            tmp_path,
            LANGUAGE_MODEL,
            plugin_variables("127.0.0.1:1"),
        ),
    ):
        pass
    sentence = f"SGLang does not start: the model is a {ARCHITECTURE}, image rows are for {', '.join(SERVED)}"
    assert (tmp_path / "sglang.log").read_text().count(sentence) == 1


@pytest.mark.extended
def test_the_example(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """One option is added: by itself SGLang's KV cache takes most of a machine's memory."""
    programs = {"vision-encoder": ENCODER, "sglang": PROGRAM}
    ports = {"ENCODER_PORT": str(free_port()), "PORT": str(free_port())}
    variables = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "SGLANG_USE_CPU_ENGINE": "1"}
    shell = shell_with(tmp_path, programs, variables | FORKED | ports)
    command = f"{ROOT}/examples/sglang.sh {checkpoints['qwen3_vl']} --max-total-tokens 4096"
    ended = run(command, shell, tmp_path)
    assert json.loads(ended.stdout)["choices"][0]["message"]["content"]
    assert "is built without a vision tower" in ended.stderr
