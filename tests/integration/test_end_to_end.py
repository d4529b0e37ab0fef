"""Files over gRPC, rows spliced into a language model without a tower: what the full model says with pixels.

Decode, resize, patchify, tower, wire, splice, positions and decoding are all ours here; the reference does
every one of those steps itself, from the same files.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image, ImageOps

from bench.harness.reference import import_reference
from lm_adapter import EncodedRows, ImageItem, VisionEncoderClient
from lm_adapter.engines.hf import RemoteItem, RemoteVisionLM, load_language_model
from tests.families import REPRESENTATIVE
from tests.integration.conftest import running
from tests.parity.full_model import FullModel

PHOTOS = Path(__file__).resolve().parents[1] / "data" / "photos"
NEW_TOKENS = 8

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


def photographs() -> list[bytes]:
    """The shipped photographs as files of other sizes: JPEG, PNG with alpha, EXIF-rotated JPEG."""
    files = []
    for path, side in (("astronaut.jpg", 300), ("coffee.jpg", 260), ("chelsea_exif_rotated.jpg", None)):
        if side is None:
            files.append((PHOTOS / path).read_bytes())
            continue
        out = io.BytesIO()
        image = Image.open(PHOTOS / path)
        image.resize((side, side * image.height // image.width)).save(out, "JPEG", quality=90)
        files.append(out.getvalue())
    return [*files, (PHOTOS / "rocket_alpha.png").read_bytes()]


def on_white(image: Image.Image) -> Image.Image:
    above = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", above.size, "white"), above).convert("RGB")


class Reference:
    """The full model and its processor."""

    def __init__(self, family: str, checkpoint: Path) -> None:
        self.model = FullModel(family, checkpoint).model
        self.processor = import_reference().AutoProcessor.from_pretrained(checkpoint)

    def prompt(self, num_images: int, text: str) -> str:
        content = [{"type": "image"}] * num_images + [{"type": "text", "text": text}]
        found: str = self.processor.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
        )
        return found

    def inputs(self, prompt: str, files: list[bytes]) -> Any:
        # On white here: transformers' load_image and its processors before 5.23 drop alpha.
        images = [on_white(ImageOps.exif_transpose(Image.open(io.BytesIO(data)))) for data in files]
        return self.processor(text=[prompt], images=images, return_tensors="pt")

    @torch.no_grad()
    def logits(self, inputs: Any) -> torch.Tensor:
        self.model.model.rope_deltas = None
        found: torch.Tensor = self.model(**inputs).logits[0]
        return found

    def generate(self, inputs: Any) -> list[int]:
        self.model.model.rope_deltas = None
        output = self.model.generate(
            **inputs, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False
        )
        return list(output[0, inputs["input_ids"].shape[1] :].tolist())


@pytest.fixture(scope="module", params=REPRESENTATIVE)
def rig(
    request: pytest.FixtureRequest, checkpoints: dict[str, Path], device: torch.device
) -> Iterator[tuple[Reference, RemoteVisionLM, VisionEncoderClient]]:
    family = request.param
    with (
        running(checkpoints[family], device) as service,
        VisionEncoderClient(service.target, timeout_s=120) as client,
    ):
        yield Reference(family, checkpoints[family]), load_language_model(checkpoints[family]), client


def remote_items(client: VisionEncoderClient, files: list[bytes]) -> list[RemoteItem]:
    outcomes = client.encode([ImageItem(data) for data in files])
    assert all(isinstance(outcome, EncodedRows) for outcome in outcomes)
    return [RemoteItem.from_encoded(rows) for rows in outcomes if isinstance(rows, EncodedRows)]


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float(torch.linalg.norm(found - expected) / torch.linalg.norm(expected))


def test_p01_logits_and_tokens_of_a_prompt_with_several_images(
    rig: tuple[Reference, RemoteVisionLM, VisionEncoderClient],
) -> None:
    reference, language_model, client = rig
    files = photographs()
    prompt = reference.prompt(len(files), "What differs between these?")
    single = reference.processor.tokenizer(prompt)["input_ids"]
    inputs = reference.inputs(prompt, files)
    expanded = inputs["input_ids"][0].tolist()
    assert len(single) < len(expanded)
    items = remote_items(client, files)

    expected = reference.logits(inputs)
    for ids in (single, expanded):
        state = language_model.prefill([ids], [items], all_logits=True)
        assert state.prompt_logits_NV is not None
        error = relative_error(state.prompt_logits_NV[0], expected)
        print(f"relative error of logits: {error:.2e}")
        assert error < 2e-5
    assert language_model.generate([single], [items], max_new_tokens=NEW_TOKENS) == [
        reference.generate(inputs)
    ]
