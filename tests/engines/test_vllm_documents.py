"""The commands of docs/vllm.md as they stand: only ports and MODEL are replaced, on both sides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.harness.engine_checkpoints import write_checkpoint
from bench.harness.vllm import Encoder, VllmServer
from bench.harness.waiting import wait_until
from tests.engines.agreement import agree, of_response
from tests.engines.faults import new_picture
from tests.engines.pictures import Case, picture, with_pixels
from tests.engines.stack import chat_body

pytestmark = pytest.mark.timeout(1200)
ONE = Case("one image", (0, "What is in the picture?"))
SIZES = ((200, 260), (330, 180), (224, 160), (448, 448))


def answer(server: VllmServer, checkpoint: Path, image: bytes) -> dict[str, Any]:
    body = chat_body(with_pixels(ONE, [image]), model=str(checkpoint))
    response = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120)
    assert response.status_code == 200, response.text
    return of_response(response.json())


def test_the_documents_commands_give_the_answers_of_vllms_own_tower(tmp_path: Path) -> None:
    """In the checkpoint's dtype, bfloat16, with rows by shared memory. Nobody told the encoder a device, a
    dtype or a socket."""
    checkpoint = write_checkpoint(tmp_path / "checkpoint", "qwen3_vl")
    images = [picture(seed, *size) for seed, size in enumerate(SIZES)]
    tower = VllmServer(checkpoint, None, None, tmp_path)
    try:
        tower.wait_ready()
        expected = [answer(tower, checkpoint, image) for image in images]
    finally:
        tower.stop()

    with Encoder(checkpoint, None, tmp_path) as encoder:
        server = VllmServer(checkpoint, None, {"target": encoder.target}, tmp_path)
        try:
            server.wait_ready()

            def is_attached() -> bool:
                answer(server, checkpoint, new_picture()[0])
                return encoder.num_read() > 0

            wait_until(is_attached, "rows by shared memory")
            num_inline, num_read = encoder.num_inline(), encoder.num_read()
            found = [answer(server, checkpoint, image) for image in images]
            wait_until(lambda: encoder.num_read() >= num_read + len(images), "the reports of the reads")
            assert encoder.num_inline() == num_inline
        finally:
            server.stop()
    agree(expected, found, "bfloat16")
    assert len({tuple(one["tokens"]) for one in expected}) == len(images)
