"""vLLM's connector with rows by device lease: streams, memory and graphs of the engine that it lives in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from encoder_service.store.cuda_memory import CudaMemory
from lm_adapter import ImageItem, VisionEncoderClient
from lm_adapter.testing import fake_model
from lm_adapter.items import Grid
from tests.unit.lm_adapter.connector_rig import Engine, engine_config
from tests.unit.lm_adapter.shared_rig import SharingFake, sharing_fake
from tests.unit.lm_adapter.test_client import digest_of

pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings", exc_type=ImportError)
pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda:0")
# Copies of up to 1 MiB are waited for on the client's loop, larger ones beside it.
GRIDS = (Grid(1, 32, 32), Grid(1, 64, 64))
# A forward pass in the engine's stream; far longer than a fetch.
BUSY_CYCLES = 1_000_000_000
CONFIG = {
    "model_type": "qwen3_vl",
    "image_token_id": 5,
    "vision_config": {"spatial_merge_size": 2, "deepstack_visual_indexes": [1, 2, 3]},
    "text_config": {"hidden_size": 256},
}


@pytest.fixture
def encoder() -> Iterator[SharingFake]:
    with sharing_fake(kind="device", new_memory=lambda: CudaMemory(128 << 20, CUDA)) as running:
        running.fake.script.model = fake_model("qwen3_vl", out_width=256, dtype="bfloat16")
        yield running


@pytest.fixture
def engine(encoder: SharingFake) -> Iterator[Engine]:
    """Whose connector has found its way to the encoder's memory."""
    config = engine_config(encoder.target, "uni", hf_config=CONFIG, dtype="bfloat16", device=CUDA)
    running = Engine(config)
    try:
        items, _ = images(encoder, range(900, 901))
        warm = running.request("warm", items)
        running.fetch(warm)
        running.finish(warm)
        client = running.scheduler._fetcher._source._client
        assert client._session.transports.wait(30).name == "device", client.transport
        yield running
    finally:
        running.close()


def images(
    encoder: SharingFake, numbers: Sequence[int]
) -> tuple[list[tuple[bytes, Grid]], dict[str, torch.Tensor]]:
    """Keys and grids of images, whose rows lie in the arena now; and their rows, read inline."""
    digests = [digest_of(number) for number in numbers]
    grids = {digest: GRIDS[number % 2] for digest, number in zip(digests, numbers, strict=True)}
    encoder.fake.script.grids.update(grids)
    with VisionEncoderClient(encoder.target, transports=("inline",), timeout_s=60) as client:
        found: list[Any] = client.encode([ImageItem(b"x", digest=digest) for digest in digests])
    with VisionEncoderClient(encoder.target, device=CUDA, transports=("device",), timeout_s=60) as client:
        client.wait_transport()
        client.fetch([one.key for one in found])  # the encoder's copies wait for whatever runs here
    torch.cuda.synchronize()
    return [(one.key, one.grid_thw) for one in found], {one.key.hex(): one.torch() for one in found}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, rows in expected.items():
        assert torch.equal(found[name].cpu(), rows), name


def test_rows_are_leased_and_handed_over_without_a_copy(encoder: SharingFake, engine: Engine) -> None:
    items, expected = images(encoder, range(6))
    request = engine.request("request", items)
    placed = encoder.num_placed
    engine.fetch(request)
    step = engine.schedule(request)
    assert {rows.device for rows in step.rows.values()} == {CUDA}
    fetched = {name: rows.data_ptr() for name, rows in step.rows.items()}
    engine.load(step)
    assert {name: rows.data_ptr() for name, rows in engine.encoder_cache.items()} == fetched
    assert_equal(engine.encoder_cache, expected)
    assert encoder.num_placed == placed + len(items), "each row by lease, once"
    engine.finish(request)


def test_rows_arrive_while_the_engines_stream_computes(encoder: SharingFake, engine: Engine) -> None:
    items, expected = images(encoder, range(6, 10))
    request = engine.request("request", items)
    computed = torch.cuda.Event()
    torch.cuda._sleep(BUSY_CYCLES)
    computed.record()
    engine.fetch(request)
    engine.load(engine.schedule(request))
    assert not computed.query(), "the fetch waited for the forward pass"
    computed.synchronize()
    assert_equal(engine.encoder_cache, expected)
    engine.finish(request)


def test_p20_memory_of_rows_is_used_anew_only_after_the_engine_has_read_it(
    encoder: SharingFake, engine: Engine
) -> None:
    """vLLM drops rows from its cache while the step that reads them still runs."""
    items, expected = images(encoder, range(10, 18))
    first = engine.request("first", items[:4])
    engine.fetch(first)
    engine.load(engine.schedule(first))
    torch.cuda._sleep(BUSY_CYCLES)
    read = {name: rows.clone() for name, rows in engine.encoder_cache.items()}
    computed = torch.cuda.Event()
    computed.record()
    engine.encoder_cache.clear()
    engine.finish(first)
    second = engine.request("second", items[4:])
    engine.fetch(second)
    step = engine.schedule(second)
    assert not computed.query(), "the test says nothing: the step was over"
    engine.load(step)
    torch.cuda.synchronize()
    assert_equal({**read, **engine.encoder_cache}, expected)
    engine.finish(second)


def test_p24_graphs_of_the_engine_are_undisturbed(encoder: SharingFake, engine: Engine) -> None:
    """Rows arrive while a graph is captured, as vLLM does when it starts, and between its replays."""
    items, expected = images(encoder, range(18, 24))
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
