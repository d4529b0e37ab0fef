"""SGLang's list of encoders in a real SGLang: of the command line, and of those that register themselves."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import httpx
import pytest

from bench.harness.ports import free_port
from bench.harness.sglang import FORKED, Sglang, language_model_arguments, protocol_arguments
from bench.harness.waiting import PATIENCE_S, wait_until
from tests.sglang.conftest import running_encoder
from tests.sglang.leaving import ONE
from tests.sglang.reference import IMAGE, Reference, prompt

FAMILY = "qwen3_vl"
TWO = prompt(IMAGE, "and", IMAGE, "Compare the two.")
INTERVAL = "SGLANG_ENCODER_BOOTSTRAP_HEALTH_CHECK_INTERVAL"
TTL = "SGLANG_ENCODER_BOOTSTRAP_EVICTED_TTL"

pytestmark = [
    pytest.mark.extended,
    pytest.mark.timeout(600),
    pytest.mark.parametrize("family", [FAMILY], indirect=True, scope="session"),
]


@pytest.mark.parametrize(
    ("settings", "are_forgotten"), [({}, False), ({TTL: "1"}, True)], ids=["within", "after"]
)
def test_encoders_that_come_back_within_the_time_and_after_it(
    checkpoint: Path,
    reference: Reference,
    images: list[bytes],
    tmp_path: Path,
    settings: Mapping[str, str],
    are_forgotten: bool,
) -> None:
    """After it only the one that registers itself. SGLang asks no other."""
    bootstrap = f"http://127.0.0.1:{free_port()}"

    def listed() -> set[str]:
        return set(httpx.get(f"{bootstrap}/list_encoder_urls", timeout=PATIENCE_S).json()["encoder_urls"])

    (tmp_path / "fixed").mkdir()
    (tmp_path / "own").mkdir()
    with (
        running_encoder(checkpoint, tmp_path / "fixed") as fixed,
        running_encoder(checkpoint, tmp_path / "own", registers_at=bootstrap) as registering,
    ):
        arguments = [
            *language_model_arguments(FAMILY),
            *protocol_arguments(fixed.sglang_url),
            *("--encoder-bootstrap-port", bootstrap.rpartition(":")[2]),
        ]
        environment = {**FORKED, INTERVAL: "0.5", **settings}
        with Sglang(checkpoint, tmp_path, arguments, environment) as server:
            both = {fixed.sglang_url, registering.sglang_url}
            wait_until(lambda: listed() == both, "the registration")
            assert server.tokens(TWO, images[:2]) == reference.tokens(TWO, images[:2])
            assert [one.total("ve_items_total") for one in (fixed, registering)] == [1, 1]

            fixed.kill()
            registering.kill()
            wait_until(lambda: not listed(), "the eviction")
            if are_forgotten:
                dropped = "permanently dropped"
                wait_until(
                    lambda: all(
                        any(dropped in line and url in line for line in server.log.splitlines())
                        for url in both
                    ),
                    "the end of the probes",
                )
            refused = server.generate(ONE, images[:1])
            assert refused.status_code == 503, refused.text
            assert "did not return multimodal embeddings" in refused.text

            fixed.start()
            registering.start()
            expected = {registering.sglang_url} if are_forgotten else both
            wait_until(lambda: listed() == expected, "the encoders that are back")
            assert server.tokens(TWO, images[:2]) == reference.tokens(TWO, images[:2])
            num_images = [one.total("ve_items_total") for one in (fixed, registering)]
            assert num_images == ([0, 2] if are_forgotten else [1, 1])
            assert listed() == expected
