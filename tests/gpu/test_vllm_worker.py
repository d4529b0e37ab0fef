"""vLLM's connector on a GPU, with rows from device memory: streams, memory and graphs of its engine."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.harness.waiting import wait_until
from lm_adapter import EncodedRows, ImageItem, VisionEncoderClient
from tests.integration.conftest import RunningService, running
from tests.integration.images import photo
from tests.unit.lm_adapter.connector_rig import Engine, Image, engine_config
from tests.unit.transport.broker_rig import socket_folder

pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings", exc_type=ImportError)
pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda:0")
SIDES = (128, 512)
# 4096 rows of 384 bytes: torch has another pool for what is not above one MiB.
# A forward pass in the engine's stream; far longer than a read.
BUSY_CYCLES = 1_000_000_000


@pytest.fixture(scope="module")
def service(checkpoint: Path) -> Iterator[RunningService]:
    with (
        socket_folder() as folder,
        running(
            checkpoint,
            CUDA,
            dtype="bfloat16",
            bucket_sizes="1024",
            broker_path=str(folder / "broker.sock"),
            device_arena_bytes=128 << 20,
        ) as found,
    ):
        yield found


@pytest.fixture
def engine(service: RunningService, checkpoint: Path) -> Iterator[Engine]:
    with new_engine(service, checkpoint) as found:
        yield found


def new_engine(service: RunningService, checkpoint: Path, transport: str = "device", **extra: Any) -> Engine:
    """An engine whose rank reads rows in this way. vLLM's device has no index (p39)."""
    config = engine_config(
        service.target,
        hf_config=json.loads((checkpoint / "config.json").read_text()),
        dtype="bfloat16",
        device=torch.device("cuda"),
        transports=list(dict.fromkeys((transport, "inline"))),
        **extra,
    )
    found = Engine(config)
    some, _ = images(service, SIDES)

    def reads_so() -> bool:
        request = found.request(*some)
        found.fetch(request)
        found.finish(request)
        return found.readers[0].transport == transport

    try:
        wait_until(reads_so, f"rows by {transport}", 30)
    except BaseException:
        found.close()
        raise
    return found


def images(service: RunningService, sides: Sequence[int]) -> tuple[list[Image], dict[str, torch.Tensor]]:
    """Fresh images whose rows are in the device arena, and these rows, read inline."""
    items = [ImageItem(photo(side, side)) for side in sides]
    with (
        VisionEncoderClient(service.target, device=CUDA, transports=("device",), timeout_s=60) as shared,
        VisionEncoderClient(service.target, transports=("inline",), timeout_s=60) as inline,
    ):
        rows = rows_of(shared.encode(items))
        copies = rows_of(inline.fetch([one.key for one in rows]))
    torch.cuda.synchronize()
    found = [Image(bytes(item.data), one.grid_thw) for item, one in zip(items, rows, strict=True)]
    return found, {image.identifier: one.torch() for image, one in zip(found, copies, strict=True)}


def rows_of(outcomes: Sequence[object]) -> list[EncodedRows]:
    found = [one for one in outcomes if isinstance(one, EncodedRows)]
    assert len(found) == len(outcomes), outcomes
    return found


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, rows in expected.items():
        assert torch.equal(found[name].cpu(), rows), name


def test_p39_rows_are_read_on_the_device_and_handed_over_without_a_copy(
    service: RunningService, engine: Engine
) -> None:
    chosen, expected = images(service, SIDES * 3)
    request = engine.request(*chosen)
    engine.fetch(request)
    step = engine.schedule(request)
    read = {identifier: engine.readers[0].rows[number] for number, identifier in step.hand_over}
    assert {rows.device for rows in read.values()} == {CUDA}
    engine.load(step)
    (cache,) = engine.caches
    assert all(cache[identifier] is rows for identifier, rows in read.items())
    assert_equal(cache, expected)
    engine.finish(request)


def test_rows_arrive_while_the_engines_stream_computes(service: RunningService, engine: Engine) -> None:
    chosen, expected = images(service, SIDES * 2)
    request = engine.request(*chosen)
    computed: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    torch.cuda._sleep(BUSY_CYCLES)  # type: ignore[no-untyped-call]
    computed.record()
    engine.fetch(request)
    engine.load(engine.schedule(request))
    assert not computed.query(), "the reads waited for the forward pass"
    computed.synchronize()
    assert_equal(engine.caches[0], expected)
    engine.finish(request)


def test_p20_memory_of_rows_is_used_anew_only_after_the_engine_has_read_it(
    service: RunningService, engine: Engine
) -> None:
    """vLLM drops rows from its cache while the step that reads them still runs."""
    chosen, expected = images(service, SIDES * 4)
    (cache,) = engine.caches
    first = engine.request(*chosen[:4])
    engine.fetch(first)
    engine.load(engine.schedule(first))
    torch.cuda._sleep(BUSY_CYCLES)  # type: ignore[no-untyped-call]
    read = {name: rows.clone() for name, rows in cache.items()}
    computed: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    computed.record()
    cache.clear()
    engine.finish(first)
    engine.wait_empty()
    second = engine.request(*chosen[4:])
    engine.fetch(second)
    step = engine.schedule(second)
    assert not computed.query(), "the step was over too early to prove anything"
    engine.load(step)
    torch.cuda.synchronize()
    assert_equal({**read, **cache}, expected)
    engine.finish(second)


def test_memory_of_waiting_rows_is_held_until_the_first_read(
    service: RunningService, checkpoint: Path
) -> None:
    """vLLM sizes its KV cache by what is in use after a model was loaded."""
    num_bytes = 512 << 20
    with new_engine(service, checkpoint, max_resident_bytes=num_bytes) as engine:
        (worker,) = engine.workers
        torch.cuda.empty_cache()
        before, reserved_before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        worker.start_worker_services()
        # Rows of the first request above may be released meanwhile.
        assert torch.cuda.memory_allocated() - before == pytest.approx(num_bytes, abs=4 << 20)
        chosen, expected = images(service, SIDES)
        request = engine.request(*chosen)
        engine.fetch(request)
        assert torch.cuda.memory_allocated() < before + num_bytes // 2
        # Nor does torch keep it, as rows are allocated for another stream.
        assert torch.cuda.memory_reserved() < reserved_before + num_bytes // 2
        engine.load(engine.schedule(request))
        assert_equal(engine.caches[0], expected)
        engine.finish(request)
