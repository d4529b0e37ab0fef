"""Qwen3-Omni, of which the encoder has the vision tower: tokens are those of SGLang's own tower."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.harness.engine_checkpoints import write_checkpoint
from bench.harness.sglang import Sglang, language_model_arguments, plugin_variables
from tests.engines.pictures import picture
from tests.sglang.conftest import running_encoder

FAMILY = "qwen3_omni_moe"
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
PROMPTS = ((f"Look: {IMAGE}", (0,)), (f"{IMAGE} and {IMAGE}", (1, 0)))

pytestmark = [
    pytest.mark.extended,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),
]


def test_tokens_are_those_of_sglangs_own_tower_and_sound_is_refused(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", FAMILY)
    images = [picture(seed, 96, 70 + 32 * seed) for seed in range(2)]
    arguments = language_model_arguments(FAMILY)

    def ask(server: Sglang) -> list[list[int]]:
        return [server.tokens(text, [images[index] for index in chosen]) for text, chosen in PROMPTS]

    with Sglang(checkpoint, tmp_path, arguments) as own:
        expected = ask(own)
    folder = tmp_path / "plugin"
    folder.mkdir()
    with running_encoder(checkpoint, folder) as encoder:
        variables = plugin_variables(encoder.target, timeout_s=20.0, retry_s=2.0, finite=True)
        with Sglang(checkpoint, folder, arguments, variables) as plugin:
            assert ask(plugin) == expected
            refused = plugin.generate("<|audio_start|><|audio_pad|><|audio_end|>", [], audio_data=["a.wav"])
            assert refused.status_code == 400, refused.text
            assert "audio_data is not accepted" in refused.text
