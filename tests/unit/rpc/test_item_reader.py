"""Items of calls: read from messages, segments and URLs, and counted for as long as they are held."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from encoder_service.errors import QueueFull, UnknownKey
from encoder_service.ingest.identity import content_digest
from encoder_service.ingest.pixel_segments import PixelSegments, SegmentTensor
from encoder_service.ingest.workers import MAX_COPIED_ON_LOOP_BYTES
from encoder_service.ops.shares import Holder
from encoder_service.rpc import convert
from encoder_service.rpc.item_reader import ItemReader
from encoder_service.scheduler.admission import Admission, Permit
from encoder_service.types import DigestOnly, EncodedFile, Item, Modality, PixelValues
from tests.unit.service.rig import until
from vision_encoder.v1 import encoder_pb2 as pb

pytestmark = pytest.mark.anyio

GRID = pb.GridTHW(t=1, h=2, w=2)
MAX_BYTES = 1000


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[ItemReader]:
    segments = PixelSegments(("gateway-",), max_tensor_bytes=1 << 20, folder=str(tmp_path))
    with ThreadPoolExecutor(1) as workers:
        yield ItemReader(Admission(0, MAX_BYTES), workers, segments)
    segments.close()


def shared(tmp_path: Path, tensor: torch.Tensor) -> pb.Item:
    (tmp_path / "gateway-1").write_bytes(tensor.numpy().tobytes())
    shm = pb.ShmTensor(name="gateway-1", dtype=pb.DTYPE_FLOAT32, shape=tensor.shape)
    return pb.Item(modality=pb.MODALITY_IMAGE, pixels=pb.PixelTensor(grid_thw=GRID, shm=shm))


def inline(tensor: torch.Tensor) -> pb.Item:
    data = pb.InlineTensor(dtype=pb.DTYPE_FLOAT32, shape=tensor.shape, data=tensor.numpy().tobytes())
    return pb.Item(modality=pb.MODALITY_IMAGE, pixels=pb.PixelTensor(grid_thw=GRID, inline=data))


async def same(item: Item, _: Permit | None) -> Item:
    return item


async def test_p19_a_segments_item_is_the_one_that_comes_inline(reader: ItemReader, tmp_path: Path) -> None:
    """Also by its digest, and so by its key. Its bytes count until the question is answered."""
    tensor = torch.randn(4, 6)

    async def question(item: Item, _: Permit | None) -> Item:
        assert reader.admission.num_bytes == tensor.nbytes
        return item

    found = await reader.use(shared(tmp_path, tensor), question)
    assert reader.admission.num_bytes == 0
    other = await reader.use(inline(tensor), same)
    assert isinstance(found.content, PixelValues)
    assert torch.equal(found.content.pixel_values, tensor)
    assert content_digest(found) == content_digest(other)
    assert (tmp_path / "gateway-1").exists()


async def test_a_large_tensor_is_converted_off_the_event_loop(
    reader: ItemReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    on: list[str] = []
    frombuffer = torch.frombuffer

    def noted(*arguments: Any, **options: Any) -> torch.Tensor:
        on.append(threading.current_thread().name)
        return frombuffer(*arguments, **options)

    monkeypatch.setattr(torch, "frombuffer", noted)
    for num_rows in (4, MAX_COPIED_ON_LOOP_BYTES // 16 + 1):
        await reader.use(inline(torch.zeros(num_rows, 4)), same)
    assert on[0] == threading.main_thread().name
    assert on[1] != on[0]


async def test_a_large_file_is_copied_off_the_event_loop(
    reader: ItemReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    on: list[str] = []
    converted = convert.item_from_proto

    def noted(*arguments: Any) -> Item:
        on.append(threading.current_thread().name)
        return converted(*arguments)

    monkeypatch.setattr(convert, "item_from_proto", noted)
    for num_bytes in (4, MAX_COPIED_ON_LOOP_BYTES + 1):
        await reader.use(pb.Item(modality=pb.MODALITY_IMAGE, encoded=bytes(num_bytes)), same)
    assert on[0] == threading.main_thread().name
    assert on[1] != on[0]


async def test_p17_shared_bytes_are_bounded_as_inline_bytes_are(reader: ItemReader, tmp_path: Path) -> None:
    permit = reader.admission.acquire(MAX_BYTES - 95)
    with pytest.raises(QueueFull, match="the item needs 96"):
        await reader.use(shared(tmp_path, torch.zeros(4, 6)), same)
    permit.release()
    assert reader.admission.num_bytes == 0


async def test_p17_bytes_count_until_the_worker_has_stopped_writing(
    reader: ItemReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, go_on = threading.Event(), threading.Event()
    read = PixelSegments.read

    def slowly(segments: PixelSegments, segment: SegmentTensor) -> torch.Tensor:
        reading.set()
        assert go_on.wait(20)
        return read(segments, segment)

    monkeypatch.setattr(PixelSegments, "read", slowly)
    task = asyncio.ensure_future(reader.use(shared(tmp_path, torch.zeros(4, 6)), same))
    await asyncio.to_thread(reading.wait, 20)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert reader.admission.num_bytes == 96
    go_on.set()
    await until(lambda: not reader.admission.num_bytes)


class Urls:
    """Stands for UrlFetcher. fetched: URLs in order, and their modalities and holders."""

    def __init__(self) -> None:
        self.fetched: list[str] = []
        self.modalities: list[Modality] = []
        self.holders: list[Holder] = []

    async def fetch(self, text: str, modality: Modality, count_bytes: Any, holder: Holder) -> bytes:
        self.fetched.append(text)
        self.holders.append(holder)
        self.modalities.append(modality)
        count_bytes(4)
        return b"file"


def with_urls(reader: ItemReader) -> tuple[ItemReader, Urls]:
    urls = Urls()
    return ItemReader(reader.admission, reader.workers, None, urls), urls  # type: ignore[arg-type]


async def test_a_url_is_fetched_only_where_its_rows_are_not_held(reader: ItemReader) -> None:
    with_fetcher, urls = with_urls(reader)
    asked: list[Item] = []

    async def question(item: Item, _: Permit | None) -> str:
        asked.append(item)
        if isinstance(item.content, DigestOnly):
            if len(asked) == 1:
                raise UnknownKey("not held")
            return "held"
        assert item.content == EncodedFile(b"file")
        assert reader.admission.num_bytes == 4
        return "encoded"

    message = pb.Item(modality=pb.MODALITY_IMAGE, url="http://x/a", content_digest=bytes(32))
    assert await with_fetcher.use(message, question) == "encoded"
    assert await with_fetcher.use(message, question) == "held"
    assert urls.fetched == ["http://x/a"]
    assert reader.admission.num_bytes == 0


@pytest.mark.parametrize(
    ("modality", "number"), [(Modality.IMAGE, pb.MODALITY_IMAGE), (Modality.VIDEO, pb.MODALITY_VIDEO)]
)
async def test_p51_a_url_is_fetched_by_its_modality_and_by_the_callers_share(
    reader: ItemReader, modality: Modality, number: pb.Modality.ValueType
) -> None:
    with_fetcher, urls = with_urls(reader)
    for holder in ((), (("peer", "namespace"),)):
        item = await with_fetcher.use(pb.Item(modality=number, url="http://x/a"), same, *holder)
        assert (item.modality, item.content) == (modality, EncodedFile(b"file"))
    assert urls.modalities == [modality] * 2
    assert urls.holders == [("",), ("peer", "namespace")]
