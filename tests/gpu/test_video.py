"""Clips on a GPU: pieces replay graphs beside images. Rows equal the float32 tower's, by every transport."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from encoder_service.checkpoints.synthetic import make_checkpoint
from encoder_service.ingest.decode import DecodeLimits
from encoder_service.ingest.registry import load_preprocessor
from encoder_service.towers.registry import load_tower
from encoder_service.types import EncodedFile, PreprocessOptions
from lm_adapter import ClipItem, EncodedRows, ImageItem, VisionEncoderClient
from tests.families import REPRESENTATIVE
from tests.integration.conftest import running
from tests.unit.ingest import clip_files, image_files
from tests.unit.transport.broker_rig import socket_folder

pytestmark = pytest.mark.gpu


def float32_rows(checkpoint: Path, family: str, data: bytes) -> torch.Tensor:
    """By the plain tower, piece after piece."""
    loaded = load_tower(checkpoint, device=torch.device("cpu"), dtype=torch.float32)
    preprocessor = load_preprocessor(checkpoint, family, DecodeLimits(1 << 28, 1 << 26))
    clip = preprocessor.open_clip(EncodedFile(data), PreprocessOptions())
    rows = []
    for piece in clip.pieces(256):
        inputs = loaded.tower.prepare([piece.grid]).with_pixels(preprocessor.patchify(piece.frames_THWC))
        rows.append(loaded.tower(inputs))
    return torch.cat(rows)


@pytest.mark.parametrize("family", REPRESENTATIVE)
@pytest.mark.parametrize("kind", ["inline", "device"])
def test_p26_p28_clips_replay_graphs_beside_images(
    family: str, kind: str, device: torch.device, tmp_path: Path
) -> None:
    checkpoint = tmp_path / family
    make_checkpoint(checkpoint, family, "tiny", 3)
    data = clip_files.encode(clip_files.moving(40, 96, 128), fps=8)
    picture = np.random.default_rng().integers(0, 256, (90, 120, 3), dtype=np.uint8)
    with socket_folder() as folder:
        settings: dict[str, object] = {"dtype": "bfloat16"}
        if kind == "device":
            settings["broker_path"] = str(folder / "broker.sock")
        with (
            running(checkpoint, device, **settings) as service,
            VisionEncoderClient(
                service.target, transports=(kind,), device=device if kind == "device" else None, timeout_s=120
            ) as client,
        ):
            found = client.encode([ClipItem(data), ImageItem(image_files.ppm(picture)), ClipItem(data)])
            again = client.encode_one(ClipItem(data))
            engine = service.service.engine
            assert engine is not None
            assert engine.graphs is not None
            assert engine.graphs.counters.replays.total() > 0
            assert engine.graphs.counters.eager_runs == 0
    with torch.inference_mode():
        expected = float32_rows(checkpoint, family, data).double()
    for rows in (found[0], found[2], again):
        assert isinstance(rows, EncodedRows)
        if kind == "device":
            assert rows.torch().device == device
        assert rows.timestamps_s
        difference = rows.torch().cpu().double() - expected
        assert float(difference.norm() / expected.norm()) < 2e-2
