"""Clips through the wire: the adapter's digests and keys are the service's, and so is what items say."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from encoder_service import types as service
from encoder_service.errors import InvalidRequest, TransportUnavailable
from encoder_service.ingest import identity
from encoder_service.rpc import convert as service_convert
from lm_adapter import ClipItem, FramesItem, PreprocessOptions, convert, keys
from lm_adapter.checks import RowsHeader, check_header, check_models
from lm_adapter.errors import InvalidRequest as RefusedHere
from lm_adapter.errors import InvalidRows
from lm_adapter.items import Grid
from lm_adapter.testing import fake_model
from vision_encoder.v1 import encoder_pb2 as pb

FINGERPRINTS = {"model_fingerprint": b"m" * 32, "preprocess_fingerprint": b"p" * 32}


def frames() -> np.ndarray:
    shape = (random.randint(1, 5), random.randint(1, 9), random.randint(1, 9), 3)
    return np.random.default_rng().integers(0, 256, shape, dtype=np.uint8)


def items() -> list[ClipItem | FramesItem]:
    array = frames()
    at_s = tuple(sorted(random.uniform(0, 100) for _ in array))
    return [
        ClipItem(random.randbytes(50)),
        ClipItem(random.randbytes(50), options=PreprocessOptions(fps=1.5, max_frames=7)),
        FramesItem(array),
        FramesItem(array, fps=24000 / 1001),
        FramesItem(array, timestamps_s=at_s),
        FramesItem(torch.from_numpy(array), fps=2, options=PreprocessOptions(min_frames=2)),
        FramesItem(array, fps=2, digest=b"d" * 32),
    ]


@pytest.mark.parametrize("place", range(7))
def test_p11_keys_of_clips_are_equal_through_the_wire(place: int) -> None:
    item = items()[place]
    theirs = service_convert.item_from_proto(convert.item_message(item))
    assert theirs.modality is service.Modality.VIDEO
    expected = identity.embedding_key(
        theirs, identity.content_digest(theirs), namespace="n", dtype=torch.float32, **FINGERPRINTS
    )
    assert keys.item_key(item, fake_model(dtype="float32", **FINGERPRINTS), namespace="n") == expected


def test_p11_frames_without_a_rate_share_the_rows_of_the_rate_that_they_count_as() -> None:
    array = frames()
    info = fake_model(dtype="float32", **FINGERPRINTS)
    found = [keys.item_key(FramesItem(array, fps=fps), info, namespace="n") for fps in (None, 24, 24.0, 25.0)]
    assert found[0] == found[1] == found[2] != found[3]
    theirs = [identity.source_text(service.FrameArray(torch.zeros(1), fps)) for fps in (None, 24.0)]
    assert theirs == [FramesItem(array).source] * 2


def test_p10_frames_of_another_shape_are_another_content() -> None:
    array = np.zeros((2, 4, 6, 3), np.uint8)
    digests = {keys.frames_digest(FramesItem(array.reshape(shape))) for shape in [(2, 4, 6, 3), (2, 6, 4, 3)]}
    assert len(digests) == 2


def test_frames_come_as_they_were_sent() -> None:
    array = frames()
    at_s = tuple(float(place) for place in range(len(array)))
    theirs = service_convert.item_from_proto(convert.item_message(FramesItem(array, timestamps_s=at_s)))
    assert isinstance(theirs.content, service.FrameArray)
    assert np.array_equal(theirs.content.frames_THWC.numpy(), array)
    assert theirs.content.timestamps_s == at_s
    assert theirs.content.fps is None


@pytest.mark.parametrize(
    ("item", "text"),
    [
        (FramesItem(np.zeros((2, 4, 4, 3), np.float32)), r"float32 \[2, 4, 4, 3\], needed are uint8"),
        (FramesItem(np.zeros((2, 4, 4), np.uint8)), r"uint8 \[2, 4, 4\], needed"),
        (FramesItem(np.zeros((0, 4, 4, 3), np.uint8)), r"\[0, 4, 4, 3\], needed"),
        (FramesItem(np.zeros((2, 4, 4, 3), np.uint8), timestamps_s=(1.0,)), "2 frames have 1 timestamps"),
        (FramesItem(np.zeros((1, 4, 4, 3), np.uint8), 2.0, (1.0,)), "1 timestamps and fps 2.0"),
        (FramesItem(np.zeros((1, 4, 4, 3), np.uint8), 0.0), "have fps 0.0, needed is a number above 0"),
    ],
)
def test_frames_that_say_nothing_are_refused_before_they_travel(item: FramesItem, text: str) -> None:
    with pytest.raises(RefusedHere, match=text):
        convert.item_message(item)


@pytest.mark.parametrize(
    ("fps", "timestamps_s", "text"),
    [(0.0, None, "fps 0.0"), (-1.0, None, "fps -1.0"), (2.0, (1.0,), "fps 2.0"), (None, (), "0 timestamps")],
)
def test_frames_whose_digest_is_known_have_no_key_either(
    fps: float | None, timestamps_s: tuple[float, ...] | None, text: str
) -> None:
    """Their key would name rows of other frames, or none that there can be."""
    item = FramesItem(np.zeros((1, 4, 4, 3), np.uint8), fps, timestamps_s, digest=bytes(32))
    with pytest.raises(RefusedHere, match=text):
        keys.item_key(item, fake_model("qwen3_vl"))


def test_messages_of_frames_without_meaning() -> None:
    tensor = pb.InlineTensor(dtype=pb.DTYPE_UINT8, shape=[1, 2, 2, 3], data=bytes(12))
    good = pb.FrameArray(inline=tensor)
    for message, error, text in [
        (pb.Item(modality=pb.MODALITY_IMAGE, frames=good), InvalidRequest, "modality to video"),
        (pb.Item(modality=pb.MODALITY_VIDEO, frames=pb.FrameArray()), InvalidRequest, "no source"),
        (
            pb.Item(modality=pb.MODALITY_VIDEO, frames=pb.FrameArray(shm=pb.ShmTensor(name="x"))),
            TransportUnavailable,
            "shared memory are not taken",
        ),
        (
            pb.Item(
                modality=pb.MODALITY_VIDEO, frames=pb.FrameArray(inline=tensor, fps=2, timestamps_s=[0.0])
            ),
            InvalidRequest,
            "2.0 fps and 1 timestamps",
        ),
    ]:
        with pytest.raises(error, match=text):
            service_convert.item_from_proto(message)


def header(grid: Grid, num_rows: int, chunks: tuple[Grid, ...]) -> RowsHeader:
    return RowsHeader(grid, num_rows, 16, "float32", 0, num_rows * 64, chunks)


def test_p22_chunks_have_to_make_up_their_clip() -> None:
    kimi = fake_model(
        dtype="float32", out_width=16, num_deepstack_levels=0, spatial_merge_size=2, merges_time=True
    )
    grid, chunks = Grid(6, 4, 4), (Grid(4, 4, 4), Grid(2, 4, 4))
    good = header(grid, 8, chunks)
    check_models(good, [kimi])
    check_header(good)
    for wrong in [
        header(grid, 4, chunks),
        header(Grid(7, 4, 4), 8, chunks),
        header(grid, 8, (Grid(4, 4, 4), Grid(2, 4, 2))),
        header(grid, 12, (*chunks, Grid(0, 4, 4))),
        header(grid, 8, ()),
    ]:
        with pytest.raises(InvalidRows):
            check_models(wrong, [kimi])
    with pytest.raises(InvalidRows, match="chunks"):
        check_models(
            header(grid, 24, chunks),
            [fake_model(dtype="float32", out_width=16, num_deepstack_levels=0, merges_time=False)],
        )
