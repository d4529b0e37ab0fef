"""Rows fetched on the connector's thread, from a made-up encoder; and the worker's side, without vLLM."""

from __future__ import annotations

import pickle
import secrets
import time
from collections.abc import Iterator

import grpc
import numpy as np
import pytest
import torch

from lm_adapter import ImageItem, VisionEncoderClient
from lm_adapter.engines.vllm_connector import HostRows, StepRows
from lm_adapter.engines.vllm_fetch import Fetched, Fetcher, FetchSettings
from lm_adapter.engines.vllm_items import Geometry, WantedRows
from lm_adapter.errors import EncoderOverloaded, InvalidRequest, InvalidRows, ItemFailed
from lm_adapter.items import Grid
from lm_adapter.testing import FakeEncoder, FakeScript, Fault, fake_model, fake_rows
from lm_adapter.types import EncodedRows
from tests.unit.lm_adapter.connector_rig import BUSY, Engine, engine_config

GRID = Grid(1, 4, 6)
NUM_ROWS = 6
WIDTH = 128
GEOMETRY = Geometry(width=WIDTH, dtype="float32", num_levels=3, merge_size=2, merges_time=False)


@pytest.fixture
def encoder() -> Iterator[FakeEncoder]:
    with FakeEncoder(model=fake_model("qwen3_vl")) as fake:
        yield fake


@pytest.fixture
def fetcher(encoder: FakeEncoder) -> Iterator[Fetcher]:
    found = Fetcher(FetchSettings(target=encoder.target, timeout_s=20.0, retry_s=10.0), GEOMETRY)
    yield found
    found.close()


def key_of(encoder: FakeEncoder, digest: bytes) -> bytes:
    encoder.script.grids[digest] = GRID
    with VisionEncoderClient(encoder.target) as client:
        key: bytes = client.prefetch([ImageItem(b"x", digest=digest)])[0].key  # type: ignore[union-attr]
    return key


def wanted(key: bytes) -> WantedRows:
    return WantedRows("name", 6, key, GRID, NUM_ROWS * WIDTH * 4)


def next_ended(fetcher: Fetcher) -> Fetched:
    deadline = time.monotonic() + 30
    while not fetcher.ended:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return fetcher.ended.popleft()


def test_rows_arrive_checked(encoder: FakeEncoder, fetcher: Fetcher) -> None:
    digest = secrets.token_bytes(32)
    handle = object()
    fetcher.start(handle, wanted(key_of(encoder, digest)))
    ended = next_ended(fetcher)
    assert ended.handle is handle
    assert isinstance(ended.outcome, EncodedRows)
    assert (ended.outcome.numpy() == fake_rows(digest, NUM_ROWS, WIDTH)).all()


@pytest.mark.parametrize("fault", [Fault.WRONG_WIDTH, Fault.WRONG_DTYPE, Fault.WRONG_NUM_ROWS, Fault.GARBAGE])
def test_p22_rows_that_do_not_fit_end_as_errors(fault: Fault, encoder: FakeEncoder, fetcher: Fetcher) -> None:
    digest = secrets.token_bytes(32)
    key = key_of(encoder, digest)
    encoder.script.faults[digest] = fault
    fetcher.start("one", wanted(key))
    assert not isinstance(next_ended(fetcher).outcome, EncodedRows)
    del encoder.script.faults[digest]
    fetcher.start("two", wanted(key))
    assert isinstance(next_ended(fetcher).outcome, EncodedRows)


def test_p22_rows_of_another_model_than_vllms_are_refused_with_both_figures(encoder: FakeEncoder) -> None:
    smaller = Geometry(width=96, dtype="float32", num_levels=3, merge_size=2, merges_time=False)
    fetcher = Fetcher(FetchSettings(target=encoder.target), smaller)
    fetcher.start("one", wanted(key_of(encoder, secrets.token_bytes(32))))
    outcome = next_ended(fetcher).outcome
    fetcher.close()
    assert isinstance(outcome, InvalidRows)
    assert "width is 128, expected 96" in outcome.message


def test_a_new_encoders_rows_are_not_held_to_the_old_ones_figures(encoder: FakeEncoder) -> None:
    """The client knows the geometry that the encoder before announced; asked again it knows the new one."""
    wide = Geometry(width=256, dtype="float32", num_levels=3, merge_size=2, merges_time=False)
    fetcher = Fetcher(FetchSettings(target=encoder.target, timeout_s=20.0, retry_s=10.0), wide)
    fetcher.start("old", wanted(key_of(encoder, secrets.token_bytes(32))))
    assert isinstance(next_ended(fetcher).outcome, InvalidRows)
    encoder.stop()
    encoder.script = FakeScript(model=fake_model("qwen3_vl", out_width=64))
    encoder.start()
    fetcher.start("new", wanted(key_of(encoder, secrets.token_bytes(32))))
    assert isinstance(next_ended(fetcher).outcome, EncodedRows)
    fetcher.close()


def test_p32_an_encoder_that_comes_back_is_waited_for(encoder: FakeEncoder, fetcher: Fetcher) -> None:
    digest = secrets.token_bytes(32)
    key = key_of(encoder, digest)
    encoder.stop()
    fetcher.start("one", wanted(key))
    time.sleep(0.3)
    assert not fetcher.ended
    encoder.start()
    assert key_of(encoder, digest) == key
    outcome = next_ended(fetcher).outcome
    # The fake holds nothing when it starts: which of the two came first is open.
    assert isinstance(outcome, EncodedRows) or outcome.reason == "UNKNOWN_KEY"


def test_a_cancelled_fetch_ends_its_call_and_nothing_comes_of_it(
    encoder: FakeEncoder, fetcher: Fetcher
) -> None:
    digest = secrets.token_bytes(32)
    key = key_of(encoder, digest)
    encoder.script.faults[digest] = Fault.HANG
    fetcher.start("one", wanted(key))
    while not encoder.num_calls["Fetch"]:
        time.sleep(0.005)
    fetcher.cancel("one")
    while not encoder.num_cancelled["Fetch"]:
        time.sleep(0.005)
    assert not fetcher.ended


def test_closing_ends_the_thread_with_fetches_under_way(encoder: FakeEncoder) -> None:
    fetcher = Fetcher(FetchSettings(target=encoder.target), GEOMETRY)
    digest = secrets.token_bytes(32)
    key = key_of(encoder, digest)
    encoder.script.faults[digest] = Fault.HANG
    fetcher.start("one", wanted(key))
    fetcher.close()
    fetcher.close()
    assert not fetcher.ended


def test_p32_a_server_that_asks_for_a_long_pause_is_not_waited_for_past_the_time(
    encoder: FakeEncoder,
) -> None:
    """Otherwise an item is held for as long as the server says, whatever timeout_s is."""
    failure = ItemFailed("come back later", reason="BUSY", status=8, retryable=True, retry_after_ms=60_000)
    key = key_of(encoder, secrets.token_bytes(32))
    encoder.script.call_failures["Fetch"] = (grpc.StatusCode.RESOURCE_EXHAUSTED, failure)
    fetcher = Fetcher(FetchSettings(target=encoder.target, timeout_s=20.0, retry_s=5.0), GEOMETRY)
    begun_s = time.monotonic()
    fetcher.start("one", wanted(key))
    outcome = next_ended(fetcher).outcome
    fetcher.close()
    assert isinstance(outcome, EncoderOverloaded)
    assert outcome.retry_after_ms == 60_000
    assert time.monotonic() - begun_s < 5


def test_p32_a_thread_that_cannot_be_prepared_fails_its_items_and_says_why(encoder: FakeEncoder) -> None:
    """A request whose rows nobody fetches would be scheduled never."""

    def prepare() -> None:
        raise RuntimeError("no such device")

    fetcher = Fetcher(FetchSettings(target=encoder.target), GEOMETRY, prepare_thread=prepare)
    fetcher.start("one", wanted(key_of(encoder, secrets.token_bytes(32))))
    outcome = next_ended(fetcher).outcome
    fetcher.close()
    assert isinstance(outcome, ItemFailed)
    assert "no such device" in outcome.message


@pytest.mark.parametrize("backend", ["uni", "mp"])
def test_rows_go_from_the_schedulers_side_into_the_encoder_cache(backend: str, encoder: FakeEncoder) -> None:
    """In one process as they are, else through a pickle; the cache owns what it gets."""
    engine = Engine(engine_config(encoder.target, backend))
    digest = secrets.token_bytes(32)
    key = key_of(encoder, digest)
    request = engine.request("r", [(key, GRID)])
    engine.fetch(request)
    assert engine.scheduler.has_cache_item(key.hex())
    step = engine.schedule(request)
    assert engine.scheduler.build_connector_meta(BUSY).rows == {}
    engine.load(step)
    assert (engine.encoder_cache[key.hex()].numpy() == fake_rows(digest, NUM_ROWS, WIDTH)).all()
    engine.finish(request)
    assert not engine.scheduler.has_cache_item(key.hex())
    assert engine.scheduler.take_unavailable_requests() == set()
    engine.close()


def test_a_producer_is_refused(encoder: FakeEncoder) -> None:
    with pytest.raises(InvalidRequest, match="ec_both"):
        Engine(engine_config(encoder.target, "uni", "ec_both"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_rows_travel_bit_by_bit(dtype: str) -> None:
    payload = np.frombuffer(secrets.token_bytes(6 * 4 * (4 if dtype == "float32" else 2)), dtype=np.uint8)
    rows = EncodedRows(b"", b"", GRID, 6, 4, dtype, 0, payload)
    step = pickle.loads(pickle.dumps(StepRows({"name": HostRows.of(rows)})))
    tensor = step.rows["name"].torch()
    assert tensor.dtype == getattr(torch, dtype)
    assert tensor.shape == (6, 4)
    assert (tensor.view(torch.uint8).numpy().reshape(-1) == payload).all()
