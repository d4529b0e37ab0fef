"""Clips on a GPU: pieces replay graphs beside images, rows equal the float32 tower's, also under a lease."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from encoder_service.clip_run import Pieces
from encoder_service.ingest.decode import DecodeLimits
from encoder_service.ingest.registry import load_preprocessor
from encoder_service.ingest.video.clip import Clip
from encoder_service.store.rows_prefix import RowsPrefix
from encoder_service.towers.registry import load_tower
from encoder_service.towers.synthetic import FAMILIES, make_checkpoint
from encoder_service.types import EncodedFile, FrameItem, PreprocessOptions
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
    for piece in clip.pieces(256):
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


def test_who_joins_a_leased_clip_late_has_its_rows_as_they_come(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pieces are written to the device arena; who joins has those that are there, and the rest."""
    checkpoint = tmp_path / "qwen3_vl"
    make_checkpoint(checkpoint, "qwen3_vl", "tiny", 3)
    data = clip_files.encode(clip_files.moving(40, 96, 128), fps=8)
    num_read = 0
    third, joined = threading.Event(), threading.Event()
    read_piece, follow = Clip._read_piece, Pieces._follow

    def read(self: Clip, max_patches: int) -> FrameItem | None:
        nonlocal num_read
        num_read += 1
        if num_read == 3:  # on one worker after the other
            third.set()
            assert joined.wait(60)
        return read_piece(self, max_patches)

    async def counted(self: Pieces, *given: RowsPrefix) -> None:
        joined.set()
        await follow(self, *given)

    monkeypatch.setattr(Clip, "_read_piece", read)
    monkeypatch.setattr(Pieces, "_follow", counted)
    settings = {"dtype": "bfloat16", "clip_piece_patches": 64, "broker_path": str(tmp_path / "b.sock")}
    with (
        running(checkpoint, device, **settings) as service,
        VisionEncoderClient(service.target, timeout_s=60) as leasing,
        VisionEncoderClient(service.target, timeout_s=60, transports=("inline",)) as late,
        ThreadPoolExecutor(1) as threads,
    ):
        leasing.wait_transport(30)
        first = threads.submit(leasing.encode_one, ClipItem(data))
        assert third.wait(60)
        rows = late.encode_one(ClipItem(data))
        leased = first.result(60).torch()
        assert leased.device == device
        assert torch.equal(rows.torch().cpu(), leased.cpu())
