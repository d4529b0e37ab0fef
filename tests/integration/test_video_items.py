"""Clips over real sockets: by place as inline, found again, wrong ones, and from the command line."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
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
from tests.integration.conftest import FAMILIES, RunningService, running
from tests.integration.test_process import command
from tests.unit.ingest import clip_files, image_files

CPU = torch.device("cpu")


def clip(num_frames: int = 30) -> bytes:
    return clip_files.encode(clip_files.moving(num_frames), fps=8)


def still() -> ImageItem:
    picture = np.random.default_rng().integers(0, 256, (40, 60, 3), dtype=np.uint8)
    return ImageItem(image_files.ppm(picture))


@pytest.mark.parametrize("family", FAMILIES)
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


@pytest.mark.parametrize("family", FAMILIES)
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


def test_limits_of_clips_are_announced_and_kept(checkpoints: dict[str, Path]) -> None:
    data = clip(40)
    limits = {"max_clip_bytes": len(data) - 1, "max_clip_patches": 4096}
    with running(checkpoints["qwen3_vl"], CPU, **limits) as service, Client(service.target) as client:
        announced = client.info().limits
        assert {name: getattr(announced, name) for name in limits} == limits
        assert (announced.max_clip_duration_s, announced.max_clip_frames) == (7200.0, 2048)
        short, long = client.encode([ClipItem(clip(20)), ClipItem(data)])
        assert isinstance(short, EncodedRows)
        assert isinstance(long, ItemFailed)
        assert long.reason == "CLIP_TOO_LARGE"
        assert f"{len(data)} bytes, the limit is {len(data) - 1}" in long.message


def test_a_clip_that_takes_long_to_decode_is_refused_at_once(checkpoints: dict[str, Path]) -> None:
    with (
        running(checkpoints["qwen3_vl"], CPU, max_clip_decoded_pixels=20 * 64 * 48) as service,
        Client(service.target) as client,
    ):
        gifs = [clip_files.encode(clip_files.moving(count), "gif.gif", fps=8) for count in (20, 40)]
        short, long = client.encode([ClipItem(data) for data in gifs])
        assert isinstance(short, EncodedRows)
        assert isinstance(long, ItemFailed)
        assert long.reason == "CLIP_TOO_LARGE"
        assert "takes 40 frames = 122880 pixels, the limit is 61440" in long.message


def test_p34_other_callers_do_not_wait_for_a_clip_that_is_read(service: RunningService) -> None:
    frames = np.random.default_rng().integers(0, 256, (60, 240, 320, 3), dtype=np.uint8)
    item = ClipItem(clip_files.encode(frames, fps=30), options=PreprocessOptions(fps=30.0))
    with (
        Client(service.target) as first,
        Client(service.target) as second,
        ThreadPoolExecutor(1) as pool,
    ):
        second.info()
        second.encode_one(still())
        reading = pool.submit(first.encode_one, item)
        assert isinstance(second.encode_one(still()), EncodedRows)
        assert not reading.done()
        assert isinstance(reading.result(), EncodedRows)


def test_the_command_line_encodes_clips(service: RunningService, tmp_path: Path) -> None:
    (tmp_path / "clip.mp4").write_bytes(clip())
    (tmp_path / "moving.gif").write_bytes(clip_files.encode(clip_files.moving(12), "gif.gif", fps=4))
    out = tmp_path / "rows.safetensors"
    given = (
        "encode",
        "--server",
        service.target,
        tmp_path / "clip.mp4",
        tmp_path / "moving.gif",
        "--out",
        out,
    )
    whole = command(*given, "--clip", "--fps", "1")
    assert whole.returncode == 0, whole.stderr
    with safe_open(out, "pt") as rows:
        assert len(rows.get_tensor("timestamps_s.0")) == 4
        assert rows.get_tensor("grid_thw.0")[0] == 2
        assert len(rows.get_tensor("timestamps_s.1")) == 4
    still_gif = command(*given)
    assert still_gif.returncode == 0, still_gif.stderr
    with safe_open(out, "pt") as rows:
        assert "timestamps_s.0" in rows.keys()  # noqa: SIM118
        assert "timestamps_s.1" not in rows.keys()  # noqa: SIM118
