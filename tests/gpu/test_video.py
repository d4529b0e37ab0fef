"""Clips on a GPU: pieces replay graphs beside images, rows equal the float32 tower's, also under a lease."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from encoder_service.ingest.decode import DecodeLimits
from encoder_service.ingest.registry import load_preprocessor
from encoder_service.towers.registry import load_tower
from encoder_service.towers.synthetic import FAMILIES, make_checkpoint
from encoder_service.types import EncodedFile, PreprocessOptions
from lm_adapter import ClipItem, EncodedRows, ImageItem, VisionEncoderClient
from tests.integration.conftest import running
from tests.unit.ingest import clip_files, image_files

pytestmark = pytest.mark.gpu


def float32_rows(checkpoint: Path, family: str, data: bytes) -> torch.Tensor:
    """By the plain tower, piece after piece."""
    loaded = load_tower(checkpoint, device=torch.device("cpu"), dtype=torch.float32)
    preprocessor = load_preprocessor(checkpoint, family, DecodeLimits(1 << 28, 1 << 26))
    assert preprocessor.clips is not None
    clip = preprocessor.clips.open(EncodedFile(data), PreprocessOptions())
    rows = []
    while (piece := clip.read_piece(256)) is not None:
        inputs = loaded.tower.prepare([piece.grid]).with_pixels(preprocessor.patchify(piece.frames_THWC))
        rows.append(loaded.tower(inputs))
    return torch.cat(rows)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shared", [False, True])
def test_p26_p28_clips_replay_graphs_beside_images(
    family: str, shared: bool, device: torch.device, tmp_path: Path
) -> None:
    checkpoint = tmp_path / family
    make_checkpoint(checkpoint, family, "tiny", 3)
    data = clip_files.encode(clip_files.moving(40, 96, 128), fps=8)
    picture = np.random.default_rng().integers(0, 256, (90, 120, 3), dtype=np.uint8)
    settings: dict[str, object] = {"dtype": "bfloat16", "clip_piece_patches": 256}
    if shared:
        settings["broker_path"] = str(tmp_path / "b.sock")
    with running(checkpoint, device, **settings) as service, VisionEncoderClient(service.target) as client:
        if shared:
            client.wait_transport(30)
        found = client.encode([ClipItem(data), ImageItem(image_files.ppm(picture)), ClipItem(data)])
        pipeline = service.service.pipeline
        assert pipeline is not None
        assert pipeline.engine.graphs is not None
        assert sum(pipeline.engine.graphs.counters.replays.values()) > 0
        assert pipeline.engine.graphs.counters.eager_runs == 0
    with torch.inference_mode():
        expected = float32_rows(checkpoint, family, data).double()
    for rows in (found[0], found[2]):
        assert isinstance(rows, EncodedRows)
        difference = rows.torch().cpu().double() - expected
        assert float(difference.norm() / expected.norm()) < 2e-2
