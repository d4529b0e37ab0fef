"""Clips over real sockets: by place as inline, found again, wrong ones, and from the command line."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from encoder_service import startup
from lm_adapter import (
    ClipItem,
    EncodedRows,
    FramesItem,
    ImageItem,
    ItemFailed,
    KeyState,
    PrefetchStatus,
    PreprocessOptions,
)
from lm_adapter import VisionEncoderClient as Client
from tests.families import REPRESENTATIVE
from tests.integration.conftest import RunningService, Serve, running
from tests.integration.test_process import client_command
from tests.unit.ingest import clip_files, image_files

CPU = torch.device("cpu")


def clip(num_frames: int = 30) -> bytes:
    return clip_files.encode(clip_files.moving(num_frames), fps=8)


def still() -> ImageItem:
    picture = np.random.default_rng().integers(0, 256, (40, 60, 3), dtype=np.uint8)
    return ImageItem(image_files.ppm(picture))


@pytest.mark.parametrize("family", REPRESENTATIVE)
def test_facts_of_a_clip_come_with_a_place_and_with_a_hit(
    family: str, checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(startup, "CLIP_PIECE_PATCHES", 64)
    data = clip()
    digest = random.randbytes(32)
    broker = {"broker_path": str(tmp_path / "broker.sock"), "arena_bytes": 8 << 20}
    with (
        running(checkpoints[family], CPU, **broker) as service,
        Client(service.target) as shared,
        Client(service.target, transports=("inline",)) as inline,
    ):
        shared.wait_transport(30)
        item = ClipItem(data, digest)
        found = [client.encode_one(item) for client in (inline, shared, shared, inline)]
        fetched = [client.fetch([found[0].key])[0] for client in (shared, inline)]
    for rows in (*found, *fetched):
        assert isinstance(rows, EncodedRows)
        assert rows.timestamps_s == found[0].timestamps_s
        assert rows.chunk_grids == found[0].chunk_grids
        assert np.array_equal(rows.numpy(), found[0].numpy())
    assert len(found[0].timestamps_s) == 7
    assert bool(found[0].chunk_grids) == (family == "kimi_k25")


@pytest.mark.parametrize("family", REPRESENTATIVE)
def test_prefetch_says_a_clips_grid_and_times_before_the_encode_and_after_it(
    family: str, checkpoints: dict[str, Path]
) -> None:
    with running(checkpoints[family], CPU) as service, Client(service.target) as client:
        item, other = ClipItem(clip()), ClipItem(clip(), options=PreprocessOptions(fps=4.0))
        before, image, broken = client.prefetch([item, still(), ClipItem(item.data[:-500])])
        rows = client.encode_one(item)
        after, faster = client.prefetch([item, other])
    assert isinstance(before, PrefetchStatus)
    assert (before.grid_thw, before.num_rows) == (rows.grid_thw, rows.num_rows)
    assert before.timestamps_s == rows.timestamps_s
    assert after == replace(before, state=KeyState.RESIDENT)
    assert isinstance(image, PrefetchStatus)
    assert image.timestamps_s == ()
    assert isinstance(broken, ItemFailed)
    assert broken.reason == "UNDECODABLE_CLIP"
    assert isinstance(faster, PrefetchStatus)
    assert len(faster.timestamps_s) == 2 * len(before.timestamps_s) + 1


def test_p33_a_bad_clip_fails_alone(service: RunningService) -> None:
    whole = clip()
    items: list[ClipItem | ImageItem | FramesItem] = [
        ClipItem(whole),
        ClipItem(whole[:-500]),
        ClipItem(clip_files.audio_only()),
        ClipItem(b"no clip at all"),
        still(),
        ClipItem(whole, options=PreprocessOptions(max_patches=3)),
        FramesItem(np.zeros((3, 2, 900, 3), np.uint8), fps=1.0),
        FramesItem(np.zeros((3, 40, 40, 3), np.uint8), timestamps_s=(0.0, 2.0, 1.0)),
        FramesItem(clip_files.moving(4), fps=2.0),
    ]
    with Client(service.target) as client:
        found = client.encode(items)
    reasons = {
        place: outcome.reason for place, outcome in enumerate(found) if isinstance(outcome, ItemFailed)
    }
    assert reasons == {
        1: "UNDECODABLE_CLIP",
        2: "UNDECODABLE_CLIP",
        3: "UNDECODABLE_CLIP",
        5: "INVALID_OPTION",
        6: "ASPECT_RATIO_EXCEEDED",
        7: "INVALID_REQUEST",
    }


def test_limits_of_clips_are_announced_and_kept(serve: Serve) -> None:
    gif = clip_files.encode(clip_files.moving(25), "gif.gif", fps=8)
    limits = {"max_clip_bytes": len(gif), "max_clip_patches": 4096}
    with serve(**limits, max_clip_decoded_pixels=20 * 64 * 48) as service, Client(service.target) as client:
        announced = client.info().limits
        assert {name: getattr(announced, name) for name in limits} == limits
        assert (announced.max_clip_duration_s, announced.max_clip_frames) == (7200.0, 2048)
        short, *refused = client.encode([ClipItem(data) for data in (clip(20), gif, gif + b"0")])
    assert isinstance(short, EncodedRows)
    assert [getattr(failure, "reason", None) for failure in refused] == ["CLIP_TOO_LARGE"] * 2
    assert "takes 25 frames = 76800 pixels, the limit is 61440" in str(refused[0])
    assert f"{len(gif) + 1} bytes, the limit is {len(gif)}" in str(refused[1])


def test_the_command_line_encodes_clips(service: RunningService, tmp_path: Path) -> None:
    (tmp_path / "clip.mp4").write_bytes(clip())
    (tmp_path / "moving.gif").write_bytes(clip_files.encode(clip_files.moving(12), "gif.gif", fps=4))
    out = tmp_path / "rows.safetensors"
    files = tmp_path / "clip.mp4", tmp_path / "moving.gif"
    given = ("encode", "--server", service.target, *files, "--out", out)
    whole = client_command(*given, "--clip", "--fps", "1")
    assert whole.exit_code == 0, whole.stderr
    with safe_open(out, "pt") as rows:
        assert len(rows.get_tensor("timestamps_s.0")) == 4
        assert rows.get_tensor("grid_thw.0")[0] == 2
        assert len(rows.get_tensor("timestamps_s.1")) == 4
    still_gif = client_command(*given)
    assert still_gif.exit_code == 0, still_gif.stderr
    with safe_open(out, "pt") as rows:
        assert "timestamps_s.0" in rows.keys()  # noqa: SIM118
        assert "timestamps_s.1" not in rows.keys()  # noqa: SIM118
