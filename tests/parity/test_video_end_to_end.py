"""Rows and logits of clips sent over the wire, encoded in pieces, equal the reference's, with timestamps."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.harness.reference import import_reference
from encoder_service import startup
from encoder_service.checkpoints.synthetic import make_checkpoint
from encoder_service.rpc import convert
from lm_adapter import ClipItem, PreprocessOptions, VisionEncoderClient
from lm_adapter.engines.hf import RemoteItem, load_language_model
from lm_adapter.items import Grid, Modality
from lm_adapter.prefill.clip_texts import kimi_chunk_texts, qwen_frame_texts
from lm_adapter.types import EncodedRows
from tests.families import REPRESENTATIVE
from tests.integration.conftest import RunningService, running
from tests.parity.full_model import FullModel, Picture
from tests.parity.tower_cases import assert_close
from tests.unit.ingest import clip_files

RELATIVE = 1e-5
FPS = 8

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


class Served:
    """One family's service with pieces so small that every clip has several, and the reference's parts."""

    def __init__(self, family: str, checkpoint: Path, service: RunningService) -> None:
        self.family, self.checkpoint, self.service = family, checkpoint, service
        transformers = import_reference()
        transformers.logging.set_verbosity_error()
        self.full = FullModel(family, checkpoint)
        if family == "kimi_k25":
            from transformers.models.kimi_k25.video_processing_kimi_k25 import Kimi_K25VideoProcessor

            # What the published file says, which the reference does not read by itself.
            self.processor = Kimi_K25VideoProcessor(image_mean=[0.5] * 3, image_std=[0.5] * 3)
        else:
            self.processor = transformers.Qwen3VLVideoProcessor.from_pretrained(checkpoint)

    def rows(self, pixels: torch.Tensor, grids: list[Grid]) -> torch.Tensor:
        """[R, D * (1 + L)] by the full model's own tower."""
        parts = pixels.split([grid.num_patches for grid in grids])
        items = [
            self.full.item(Picture((grid.t, grid.h, grid.w), part, Modality.VIDEO))
            for grid, part in zip(grids, parts, strict=True)
        ]
        return torch.cat([item.rows for item in items])

    def reference(self, data: bytes, path: Path, fps: float) -> tuple[torch.Tensor, list[Grid], Any]:
        """(pixels [P, patch_dim], grids, metadata) of a file by the reference's reader and processor."""
        from transformers.video_utils import load_video

        path.write_bytes(data)
        sample = partial(self.processor.sample_frames, fps=fps)
        frames, metadata = load_video(str(path), backend="pyav", sample_indices_fn=sample)
        batch = self.processor(
            videos=[torch.from_numpy(frames).permute(0, 3, 1, 2)],
            video_metadata=[metadata],
            do_sample_frames=False,
            return_metadata=True,
            return_tensors="pt",
            input_data_format="channels_first",
        )
        pixels = batch["pixel_values_videos"]
        grids = [Grid(*grid) for grid in batch["video_grid_thw"].tolist()]
        return pixels.reshape(pixels.shape[0], -1), grids, batch["video_metadata"][0]


@pytest.fixture(scope="module", params=REPRESENTATIVE)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    family = request.param
    checkpoint = tmp_path_factory.mktemp("clips") / family
    make_checkpoint(checkpoint, family, "tiny", seed=random.randrange(1000), with_lm=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(startup, "CLIP_PIECE_PATCHES", 64)
        patch.setattr(convert, "CHUNK_BYTES", 4096)
        with running(checkpoint, torch.device("cpu")) as service:
            yield Served(family, checkpoint, service)


def clip_of(served: Served, num_frames: int | None = None) -> bytes:
    frames = clip_files.moving(num_frames or random.randint(30, 60), 64, 96)
    return clip_files.encode(frames, "h264.mp4", fps=FPS, key_every=7)


def prompt_of(served: Served, rows: EncodedRows, metadata: Any) -> list[int]:
    """Timestamps of the frames that were sampled, between the placeholders of their rows."""
    full = served.full
    tokenizer = import_reference().AutoTokenizer.from_pretrained(served.checkpoint)
    if served.family == "kimi_k25":
        texts, num_units = kimi_chunk_texts(rows.timestamps_s), len(rows.chunk_grids)
    else:
        texts, num_units = qwen_frame_texts(rows.timestamps_s), rows.grid_thw.t
        from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

        times = Qwen3VLProcessor._calculate_timestamps(None, list(metadata.frames_indices), metadata.fps, 2)
        assert texts == [f"<{at_s:.1f} seconds>" for at_s in times]
    assert len(texts) == num_units
    ids = [20, 21]
    for text in texts:
        ids += tokenizer.encode(text, add_special_tokens=False)
        ids += [7, *[full.video_id] * (rows.num_rows // num_units), 8]
    ids += [30, 31, 32]
    return ids


@pytest.mark.parametrize("fps", [2.0, 1.5])
def test_p07_p11_a_file_gives_the_references_rows_and_prompt(
    served: Served, tmp_path: Path, fps: float
) -> None:
    """Rows, ids, positions and logits: timestamps of the frames sampled between the rows of a clip. fps: of
    the request; 2 is the default, and the key covers it."""
    data = clip_of(served, random.randint(25, 40))
    pixels, grids, metadata = served.reference(data, tmp_path / "clip.mp4", fps)
    options = PreprocessOptions(fps=None if fps == 2.0 else fps)
    with VisionEncoderClient(served.service.target) as client:
        plain, rows = client.encode([ClipItem(data), ClipItem(data, options=options)])
    assert isinstance(plain, EncodedRows)
    assert isinstance(rows, EncodedRows)
    assert (plain.key == rows.key) == (fps == 2.0)
    assert plain.content_digest == rows.content_digest
    assert list(rows.timestamps_s) == metadata.timestamps
    is_kimi = served.family == "kimi_k25"
    assert list(rows.chunk_grids) == (grids if is_kimi else [])
    assert rows.grid_thw == (sum(grid.t for grid in grids), *grids[0][1:])
    assert_close(served.family, rows.torch(), served.rows(pixels, grids), RELATIVE)
    full, remote = served.full, load_language_model(served.checkpoint)
    ids = prompt_of(served, rows, metadata)
    pieces = grids if is_kimi else [rows.grid_thw]
    pictures, items = [], []
    parts = pixels.split([grid.num_patches for grid in pieces])
    of_pieces = rows.torch().split(rows.num_rows // len(pieces))
    for grid, part, part_rows in zip(pieces, parts, of_pieces, strict=True):
        pictures.append(Picture((grid.t, grid.h, grid.w), part, Modality.VIDEO))
        items.append(RemoteItem(grid, part_rows, Modality.VIDEO, rows.num_deepstack_levels))
    prompt = [full.image_id if is_kimi and token == full.video_id else token for token in ids]
    for chunk_size in (None, 7):
        found = remote.prefill([prompt], [items], chunk_size=chunk_size, all_logits=True)
        assert found.prompt_logits_NV is not None
        expected = full.logits(ids, pictures)
        assert_close(f"logits of {served.family}", found.prompt_logits_NV[0], expected, RELATIVE)
