"""Pixel tensors in a gateway's shared memory, through a whole service: the same rows, and nothing left."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from encoder_service.ingest import pixel_segments
from tests.integration.conftest import RunningService, Serve, connected
from tests.integration.held import wait_until_free
from vision_encoder.layout.host import host_id
from vision_encoder.v1 import encoder_pb2 as pb

PREFIX = "gateway-"
GRID = pb.GridTHW(t=1, h=8, w=12)
PATCH_DIM = 3 * 2 * 16 * 16


@pytest.fixture
def sharing(serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningService]:
    monkeypatch.setattr(pixel_segments, "FOLDER", str(tmp_path))
    defaults: Any = pixel_segments.PixelSegments.__init__.__kwdefaults__
    monkeypatch.setitem(defaults, "folder", str(tmp_path))
    with serve(shm_prefixes=(PREFIX,)) as found:
        yield found


def pixels(shm: pb.ShmTensor | None = None, inline: bytes = b"") -> pb.Item:
    tensor = pb.InlineTensor(dtype=pb.DTYPE_FLOAT32, shape=[8 * 12, PATCH_DIM], data=inline)
    source = {"inline": tensor} if shm is None else {"shm": shm}
    return pb.Item(modality=pb.MODALITY_IMAGE, pixels=pb.PixelTensor(grid_thw=GRID, **source))  # type: ignore[arg-type]


def test_p19_rows_are_those_of_the_same_pixels_inline(sharing: RunningService, tmp_path: Path) -> None:
    data = torch.randn(8 * 12, PATCH_DIM).numpy().tobytes()
    name = PREFIX + secrets.token_hex(4)
    (tmp_path / name).write_bytes(bytes(64) + data)
    shm = pb.ShmTensor(name=name, offset_bytes=64, dtype=pb.DTYPE_FLOAT32, shape=[8 * 12, PATCH_DIM])
    missing = pb.ShmTensor(name=PREFIX + "missing", dtype=pb.DTYPE_FLOAT32, shape=[8 * 12, PATCH_DIM])
    with connected(sharing) as stub:
        info = stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=30).pixel_input
        assert (info.host_id, list(info.name_prefixes)) == (host_id(), [PREFIX])
        request = pb.EncodeRequest(items=[pixels(shm), pixels(missing)])
        events = list(stub.Encode(request, timeout=30))
        (again,) = (
            event.result
            for event in stub.Encode(pb.EncodeRequest(items=[pixels(inline=data)]), timeout=30)
            if event.HasField("result")
        )
    (result,) = (event.result for event in events if event.HasField("result"))
    (failure,) = (event.failure for event in events if event.HasField("failure"))
    assert result.key == again.key
    assert again.tier == pb.CACHE_TIER_HOST
    assert failure.reason == "TRANSPORT_UNAVAILABLE"
    assert failure.details["pixels"] == "NOT_FOUND"
    assert (tmp_path / name).read_bytes() == bytes(64) + data, "its owner unlinks it"
    wait_until_free(sharing)
    for outcome in ("copied", "NOT_FOUND"):
        assert sharing.metric(f've_pixel_segments_total{{outcome="{outcome}"}}') == 1
