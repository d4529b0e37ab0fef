"""SGLang's own encoder, `--encoder-only`, beside the service: the same requests, the same messages."""

from __future__ import annotations

import importlib
import io
import pickle
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import zmq

from bench.harness.sglang import Encoder, Sglang
from tests.engines.pictures import clip, data_url
from tests.sglang.frames import CLASSES, message_of
from tests.sglang.reference import Reference

pytestmark = pytest.mark.timeout(600)

FAMILY = "qwen3_vl"


class GoldenUnpickler(pickle.Unpickler):
    """Of messages of SGLang's own encoder: tensors are among their fields."""

    def find_class(self, module: str, name: str) -> Any:
        known = CLASSES.get((module, name))
        if known is None:
            assert module.partition(".")[0] in ("torch", "collections", "numpy"), (module, name)
            known = getattr(importlib.import_module(module), name)
        return known


@pytest.fixture(scope="module")
def golden(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sglang]:
    arguments = ["--encoder-only", "--encoder-transfer-backend", "zmq_to_tokenizer"]
    with Sglang(checkpoints[FAMILY], tmp_path_factory.mktemp("golden"), arguments) as running:
        yield running


def exchange(url: str, items: list[Any], modality: str = "IMAGE") -> tuple[httpx.Response, list[bytes]]:
    """A request's answer, and the frames that come of it; none after a refusal."""
    with zmq.Context() as context, context.socket(zmq.PULL) as socket:
        socket.linger = 0
        body = {
            "mm_items": items,
            "modality": modality,
            "req_id": "r_local_part_1",
            "num_parts": 3,
            "part_idx": 1,
            "prefill_host": "127.0.0.1",
            "embedding_port": socket.bind_to_random_port("tcp://127.0.0.1"),
            "encoder_idx": 0,
            "encoder_url": url,
            "time_stats_json": None,
        }
        answer = httpx.post(f"{url}/encode", json=body, timeout=60)
        if answer.status_code != 200:
            return answer, []
        assert socket.poll(60_000)
        return answer, socket.recv_multipart()


def compared(golden: Sglang, encoder: Encoder, items: list[Any], modality: str) -> torch.Tensor:
    """Our rows of a request, after the comparison of both answers and both messages."""
    theirs_answer, (head, data) = exchange(golden.url, items, modality)
    ours_answer, frames = exchange(encoder.sglang_url, items, modality)
    assert (ours_answer.status_code, ours_answer.content) == (
        theirs_answer.status_code,
        theirs_answer.content,
    )
    theirs = vars(GoldenUnpickler(io.BytesIO(head)).load())
    ours, rows = message_of(frames)
    theirs["grid_dim"] = [torch.as_tensor(grid).tolist() for grid in theirs["grid_dim"]]
    assert ours == theirs
    golden_rows = torch.frombuffer(bytearray(data), dtype=theirs["dtype"]).reshape(theirs["shape"])
    assert (rows - golden_rows).abs().max() <= 1e-5
    return rows


@pytest.mark.parametrize("family", [FAMILY], indirect=True)
def test_the_same_requests_give_the_same_messages(
    golden: Sglang, encoder: Encoder, reference: Reference, images: list[bytes]
) -> None:
    items: list[Any] = [data_url(images[0]), {"url": data_url(images[1]), "detail": "low"}]
    rows = compared(golden, encoder, items, "IMAGE")
    expected = torch.cat([reference.rows(image)[0] for image in images[:2]])
    assert (rows - expected).abs().max() <= 1e-5

    broken: list[Any] = [
        [data_url(images[0][:300])],
        [{"url": data_url(images[0]), "content_hash": f"sha256:{'11' * 32}"}],
    ]
    for refused in broken:
        theirs_answer, _ = exchange(golden.url, refused)
        ours_answer, _ = exchange(encoder.sglang_url, refused)
        assert ours_answer.status_code == theirs_answer.status_code == 400
        assert ours_answer.json().keys() == theirs_answer.json().keys()
    for url in (golden.url, encoder.sglang_url):
        assert httpx.get(f"{url}/health", timeout=60).status_code == 200


@pytest.mark.parametrize("family", [FAMILY], indirect=True)
def test_the_same_clips_give_the_same_messages(golden: Sglang, encoder: Encoder) -> None:
    """Of a size and length where SGLang's own rules choose the pixels and frames of the reference: sides are
    multiples of 28 and 32 with at least 100352 pixels, and the frames to sample lie at whole indices."""
    clips = [clip(7, 7, Fraction(7, 2), width=448, height=224), clip(8, 10, 2, width=448, height=224)]
    compared(golden, encoder, [data_url(data, "video/mp4") for data in clips], "VIDEO")
