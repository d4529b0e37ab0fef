"""vLLM's connector on a GPU, with rows from device memory: streams, memory and graphs of its engine."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from lm_adapter import EncodedRows, ImageItem, VisionEncoderClient
from lm_adapter.items import Grid
from tests.integration.conftest import RunningService, running
from tests.integration.images import photo
from tests.unit.lm_adapter.connector_rig import Engine, engine_config
from tests.unit.transport.broker_rig import socket_folder

pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings", exc_type=ImportError)
pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda:0")
SIDES = (128, 512)
# A forward pass in the engine's stream; far longer than a fetch.
BUSY_CYCLES = 1_000_000_000
PATIENCE_S = 30.0


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
    """Its connector has attached to the encoder's memory. vLLM's device has no index (p39)."""
    hf_config = json.loads((checkpoint / "config.json").read_text())
    config = engine_config(
        service.target, "uni", hf_config=hf_config, dtype="bfloat16", device=torch.device("cuda")
    )
    found = Engine(config)
    try:
        items, _ = images(service, 2)
        ends_s = time.monotonic() + PATIENCE_S
        number = 0
        while True:
            request = found.request(f"warm {(number := number + 1)}", items)
            found.fetch(request)
            step = found.schedule(request)
            found.finish(request)
            if all(rows.is_cuda for rows in step.rows.values()):
                break
            assert time.monotonic() < ends_s, "the connector did not attach to device memory"
            time.sleep(0.05)
        yield found
    finally:
        found.close()


def images(
    service: RunningService, num_images: int
) -> tuple[list[tuple[bytes, Grid]], dict[str, torch.Tensor]]:
    """Keys and grids of fresh images whose rows are in the device arena, and their rows, read inline."""
    items = [ImageItem(photo(SIDES[index % 2], SIDES[index % 2])) for index in range(num_images)]
    with (
        VisionEncoderClient(service.target, device=CUDA, transports=("device",), timeout_s=60) as shared,
        VisionEncoderClient(service.target, transports=("inline",), timeout_s=60) as inline,
    ):
        rows = rows_of(shared.encode(items))
        copies = rows_of(inline.fetch([one.key for one in rows]))
    torch.cuda.synchronize()
    return [(one.key, one.grid_thw) for one in rows], {one.key.hex(): one.torch() for one in copies}


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
    items, expected = images(service, 6)
    request = engine.request("request", items)
    engine.fetch(request)
    step = engine.schedule(request)
    assert {rows.device for rows in step.rows.values()} == {CUDA}
    fetched = {name: rows.data_ptr() for name, rows in step.rows.items()}
    engine.load(step)
    assert {name: rows.data_ptr() for name, rows in engine.encoder_cache.items()} == fetched
    assert_equal(engine.encoder_cache, expected)
    engine.finish(request)


def test_rows_arrive_while_the_engines_stream_computes(service: RunningService, engine: Engine) -> None:
    items, expected = images(service, 4)
    request = engine.request("request", items)
    computed = torch.cuda.Event()  # type: ignore[no-untyped-call]
    torch.cuda._sleep(BUSY_CYCLES)  # type: ignore[no-untyped-call]
    computed.record()
    engine.fetch(request)
    engine.load(engine.schedule(request))
    assert not computed.query(), "the fetch waited for the forward pass"
    computed.synchronize()
    assert_equal(engine.encoder_cache, expected)
    engine.finish(request)


def test_p20_memory_of_rows_is_used_anew_only_after_the_engine_has_read_it(
    service: RunningService, engine: Engine
) -> None:
    """vLLM drops rows from its cache while the step that reads them still runs."""
    items, expected = images(service, 8)
    first = engine.request("first", items[:4])
    engine.fetch(first)
    engine.load(engine.schedule(first))
    torch.cuda._sleep(BUSY_CYCLES)  # type: ignore[no-untyped-call]
    read = {name: rows.clone() for name, rows in engine.encoder_cache.items()}
    computed = torch.cuda.Event()  # type: ignore[no-untyped-call]
    computed.record()
    engine.encoder_cache.clear()
    engine.finish(first)
    second = engine.request("second", items[4:])
    engine.fetch(second)
    step = engine.schedule(second)
    assert not computed.query(), "the step was over too early to prove anything"
    engine.load(step)
    torch.cuda.synchronize()
    assert_equal({**read, **engine.encoder_cache}, expected)
    engine.finish(second)


def test_p24_graphs_of_the_engine_are_undisturbed(service: RunningService, engine: Engine) -> None:
    """Rows arrive while a graph is captured, as vLLM does when it starts, and between its replays."""
    items, expected = images(service, 6)
    number, doubled = torch.ones(4096, device=CUDA), torch.zeros(4096, device=CUDA)
    graph = torch.cuda.CUDAGraph()
    request = engine.request("request", items)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        torch.mul(number, 2, out=doubled)
        engine.fetch(request)
    engine.load(engine.schedule(request))
    for value in (3.0, 5.0):
        number.fill_(value)
        graph.replay()
        torch.cuda.synchronize()
        assert bool((doubled == 2 * value).all())
    assert_equal(engine.encoder_cache, expected)
    engine.finish(request)
