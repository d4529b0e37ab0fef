"""Rows for a request: which are refused, how many are held at once, and the ids of the prompt."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from bench.harness.waiting import wait_until
from encoder_service.checkpoints.synthetic import make_checkpoint
from lm_adapter.engines.sglang.prompt import with_line_breaks, with_placeholders
from lm_adapter.engines.sglang.settings import Settings
from lm_adapter.engines.shared.checkpoint import VisionInterface
from lm_adapter.engines.shared.geometry import Geometry
from lm_adapter.engines.shared.images import ImageFile
from lm_adapter.engines.shared.prompt import ImagePrompt
from lm_adapter.engines.shared.rows import ByteLimit, RowReader
from lm_adapter.errors import DeadlineExceeded, EncoderError, InvalidRequest, InvalidRows
from lm_adapter.items import Grid
from lm_adapter.keys import content_digest
from lm_adapter.testing import FakeEncoder, Fault, fake_model, fake_rows
from lm_adapter.types import EncodedRows

pytestmark = pytest.mark.anyio
MODEL = fake_model("qwen3_vl")
GEOMETRY = Geometry("qwen3_vl", MODEL.width, "float32", MODEL.num_deepstack_levels, 2, merges_time=False)
GRID = Grid(1, 4, 6)
LOGGER = logging.getLogger("test")
PAD = "<|image_pad|>"
MARKED = f"<|vision_start|>{PAD}<|vision_end|>"


def image(content: bytes) -> ImageFile:
    """The fake encoder decodes nothing."""
    return ImageFile(content, 96, 64, content_digest(content))


async def read(reader: RowReader, images: list[ImageFile], grids: list[Grid]) -> list[EncodedRows]:
    async with reader.read(images, grids) as rows:
        return rows


@pytest.fixture
def fake() -> Iterator[FakeEncoder]:
    with FakeEncoder() as running:
        running.script.grids = {content_digest(bytes([number])): GRID for number in range(8)}
        yield running


@pytest.fixture
def reader(fake: FakeEncoder) -> Iterator[RowReader]:
    reader = RowReader(Settings(target=fake.target, timeout_s=10.0, retry_s=5.0), GEOMETRY, LOGGER)
    yield reader
    reader.close()


async def test_rows_of_each_image_in_order(fake: FakeEncoder, reader: RowReader) -> None:
    fake.script.order = "reverse"
    images = [image(bytes([number])) for number in (3, 1, 3)]
    rows = await read(reader, images, [GRID] * 3)
    for received, requested in zip(rows, images, strict=True):
        assert received.content_digest == requested.digest
        assert (received.numpy() == fake_rows(requested.digest, 6, MODEL.width)).all()
    assert rows[0].key == rows[2].key != rows[1].key


async def test_p11_rows_of_another_grid_are_refused(reader: RowReader) -> None:
    with pytest.raises(InvalidRows, match=r"\(1, 4, 6\), expected \(1, 6, 4\)"):  # as many rows
        await read(reader, [image(b"\0")], [Grid(1, 6, 4)])


async def test_p32_an_encoder_that_is_away_or_slow_fails_in_time(fake: FakeEncoder) -> None:
    reader = RowReader(Settings(target=fake.target, timeout_s=0.5, retry_s=0.1), GEOMETRY, LOGGER)
    fake.script.faults[content_digest(b"\0")] = Fault.HANG
    with pytest.raises(DeadlineExceeded):
        await read(reader, [image(b"\0")], [GRID])
    fake.stop()
    with pytest.raises(EncoderError, match=f"no encoder answers at {fake.target} "):
        await read(reader, [image(b"\1")], [GRID])
    reader.close()


async def test_a_caller_that_leaves_takes_its_call_along(fake: FakeEncoder, reader: RowReader) -> None:
    fake.script.faults[content_digest(b"\0")] = Fault.HANG
    reading = asyncio.create_task(read(reader, [image(b"\0")], [GRID]))
    await asyncio.to_thread(wait_until, lambda: fake.num_calls["Encode"] == 1)
    reading.cancel()
    await asyncio.to_thread(wait_until, lambda: fake.num_cancelled["Encode"] == 1)


async def test_p17_rows_at_once_have_a_limit_in_bytes(
    fake: FakeEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 40 requests at once two have room. Rows count until they are handed over."""
    monkeypatch.setattr("lm_adapter.engines.shared.rows.MAX_ROWS_BYTES", 2 * GEOMETRY.num_bytes(GRID))
    reader = RowReader(Settings(target=fake.target), GEOMETRY, LOGGER)
    num_started, entered, go_on = 0, list[int](), asyncio.Event()

    async def ask(number: int) -> None:
        nonlocal num_started
        num_started += 1
        async with reader.read([image(bytes([number % 8]))], [GRID]):
            entered.append(number)
            await go_on.wait()

    tasks = [asyncio.create_task(ask(number)) for number in range(40)]
    await asyncio.to_thread(wait_until, lambda: num_started == 40 and len(entered) == 2)
    assert fake.num_calls["Encode"] == 2
    go_on.set()
    await asyncio.gather(*tasks)
    assert sorted(entered) == [*range(40)]
    reader.close()


async def test_p17_requests_wait_for_room_in_their_order() -> None:
    """A request that is cancelled or late leaves the queue; one above the limit is alone."""
    limit, entered = ByteLimit(10), list[str]()

    async def hold(name: str, num_bytes: int, until: asyncio.Event) -> None:
        give_back = await limit.take(num_bytes, timeout_s=20)
        entered.append(name)
        await until.wait()
        give_back()

    first, go_on = asyncio.Event(), asyncio.Event()
    tasks = [
        asyncio.create_task(hold(name, num_bytes, first if name == "a" else go_on))
        for name, num_bytes in (("a", 6), ("large", 30), ("b", 4), ("c", 4))
    ]
    await asyncio.to_thread(wait_until, lambda: entered == ["a"])
    with pytest.raises(DeadlineExceeded, match=r"no room for 4 bytes within 0\.01 s, 10 bytes"):
        await limit.take(4, timeout_s=0.01)
    assert entered == ["a"]  # b and c would fit, but the large one is before them
    tasks[1].cancel()
    await asyncio.to_thread(wait_until, lambda: entered == ["a", "b"])
    first.set()
    await asyncio.to_thread(wait_until, lambda: entered == ["a", "b", "c"])
    tasks.append(asyncio.create_task(hold("large", 30, go_on)))
    go_on.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert entered[-1] == "large"
    await limit.take(10, timeout_s=20)  # all bytes are free again


async def test_any_event_loop_may_ask(reader: RowReader) -> None:
    """SGLang's offline engine makes its own."""
    for _ in range(2):
        rows = await asyncio.to_thread(lambda: asyncio.run(read(reader, [image(b"\0")], [GRID])))
        assert rows[0].num_rows == 6


def test_device_memory_alone_needs_a_gpu() -> None:
    with pytest.raises(InvalidRequest, match="SGLang takes rows from host memory: set --another"):
        RowReader(
            Settings(target="127.0.0.1:1", transports=("device",)), GEOMETRY, LOGGER, remedy="set --another"
        )


QWEN = VisionInterface(
    "qwen3_vl", "qwen3_vl", 500, 501, 2, merges_time=False, uses_mrope=True, num_deepstack_levels=3
)
KIMI = VisionInterface(
    "kimi_k25", "kimi_k25", 500, 500, 2, merges_time=True, uses_mrope=False, num_deepstack_levels=0
)


@pytest.fixture(scope="module")
def lings_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("ling")
    make_checkpoint(folder, "ling_vl", "tiny", 0)
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"before{MARKED}after", f"before{MARKED}\nafter"),
        (f"before{PAD}after", f"before{MARKED}\nafter"),
        (f"before{MARKED}\nafter", f"before{MARKED}\n\nafter"),
        (f"{MARKED}{MARKED}after", f"{MARKED}\n{MARKED}\nafter"),
        ("no image", "no image"),
        (PAD, f"{MARKED}\n"),
    ],
)
def test_lings_prompts_have_a_line_break_after_each_image(
    lings_tokenizer: Any, text: str, expected: str
) -> None:
    """As vLLM and the checkpoint's processor write them. Without it the model sees another prompt."""
    ids, pad = lings_tokenizer.encode(text), lings_tokenizer.convert_tokens_to_ids(PAD)
    found = with_line_breaks(ids, pad, MARKED, text.count(PAD), lings_tokenizer)
    assert found == lings_tokenizer.encode(expected)
    # With a placeholder for each row the prompt is complete.
    expanded = [token for one in found for token in [one] * (4 if one == pad else 1)]
    assert with_line_breaks(expanded, pad, MARKED, text.count(PAD), lings_tokenizer) == expanded


def test_p05_ids_before_and_after_expansion() -> None:
    short = [1, 500, 2, 500, 500, 3]
    grids = [GRID, Grid(1, 2, 2), Grid(1, 2, 4)]
    prompt = ImagePrompt.of(short, grids, QWEN)
    assert prompt.ids == [1, *[500] * 6, 2, *[500] * 3, 3]
    assert prompt.offsets == [(1, 6), (8, 8), (9, 10)]
    again = ImagePrompt.of(prompt.ids, grids, QWEN)
    assert (again.ids, again.offsets) == (prompt.ids, prompt.offsets)
    assert again.positions is not None
    assert prompt.positions is not None
    assert np.array_equal(again.positions.prompt, prompt.positions.prompt)
    assert prompt.positions.delta == 3 + 1 + 2 - 9


def test_kimi_has_plain_positions() -> None:
    prompt = ImagePrompt.of([1, 500, 2], [GRID], KIMI)
    assert prompt.ids == [1, *[500] * 6, 2]
    assert prompt.positions is None


def test_sglangs_own_word_for_an_image() -> None:
    assert with_placeholders("a <image> b", "<pad>", "[<pad>]") == "a [<pad>] b"
    assert with_placeholders("a [<pad>] <image>", "<pad>", "[<pad>]") == "a [<pad>] <image>"
