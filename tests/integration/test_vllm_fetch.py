"""The connector's fetching thread, and both halves of the connector, against a scripted encoder."""

from __future__ import annotations

import pickle
import secrets
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest
import torch

from lm_adapter import ImageItem, VisionEncoderClient
from lm_adapter.engines.vllm_connector import HostRows, StepRows
from lm_adapter.engines.vllm_fetch import Fetcher
from lm_adapter.engines.vllm_items import Geometry, WantedRows
from lm_adapter.engines.vllm_settings import FetchSettings
from lm_adapter.errors import EncoderError, EncoderOverloaded, InvalidRequest, InvalidRows, ItemFailed
from lm_adapter.items import Grid
from lm_adapter.testing import FakeEncoder, FakeScript, Fault, fake_model, fake_rows
from lm_adapter.types import EncodedRows
from tests.unit.lm_adapter.connector_rig import BUSY, Engine, engine_config

GRID = Grid(1, 4, 6)
NUM_ROWS = 6
WIDTH = 128
GEOMETRY = Geometry(width=WIDTH, dtype="float32", num_levels=3, merge_size=2, merges_time=False)

NewFetcher = Callable[..., Fetcher]


@pytest.fixture
def encoder() -> Iterator[FakeEncoder]:
    with FakeEncoder() as fake:
        yield fake


@pytest.fixture
def new_fetcher(encoder: FakeEncoder) -> Iterator[NewFetcher]:
    fetchers: list[Fetcher] = []

    def make(geometry: Geometry = GEOMETRY, retry_s: float = 10.0, **options: Any) -> Fetcher:
        settings = FetchSettings(target=encoder.target, timeout_s=20.0, retry_s=retry_s)
        fetchers.append(Fetcher(settings, geometry, **options))
        return fetchers[-1]

    yield make
    for fetcher in fetchers:
        fetcher.close()


@pytest.fixture
def digest() -> bytes:
    return secrets.token_bytes(32)


def key_of(encoder: FakeEncoder, digest: bytes) -> bytes:
    encoder.script.grids[digest] = GRID
    with VisionEncoderClient(encoder.target) as client:
        client.wait_ready(30)
        (status,) = client.prefetch([ImageItem(b"x", digest=digest)])
    assert not isinstance(status, ItemFailed)
    return status.key


def start(fetcher: Fetcher, key: bytes) -> None:
    fetcher.start(key, WantedRows("name", 6, key, GRID, NUM_ROWS * WIDTH * 4))


def outcome_of(fetcher: Fetcher, key: bytes) -> EncodedRows | EncoderError:
    start(fetcher, key)
    return next_outcome(fetcher, key)


def next_outcome(fetcher: Fetcher, key: bytes) -> EncodedRows | EncoderError:
    fetcher.wait(30)
    ended = fetcher.ended.popleft()
    assert ended.handle == key
    return ended.outcome


@pytest.mark.parametrize("fault", [Fault.WRONG_WIDTH, Fault.WRONG_DTYPE, Fault.WRONG_NUM_ROWS, Fault.GARBAGE])
def test_p22_rows_arrive_checked(
    fault: Fault, encoder: FakeEncoder, new_fetcher: NewFetcher, digest: bytes
) -> None:
    fetcher, key = new_fetcher(), key_of(encoder, digest)
    encoder.script.faults[digest] = fault
    assert not isinstance(outcome_of(fetcher, key), EncodedRows)
    del encoder.script.faults[digest]
    rows = outcome_of(fetcher, key)
    assert isinstance(rows, EncodedRows)
    assert (rows.numpy() == fake_rows(digest, NUM_ROWS, WIDTH)).all()


def test_p22_rows_of_another_model_are_refused_and_a_new_encoders_are_compared_with_its_own(
    encoder: FakeEncoder, new_fetcher: NewFetcher, digest: bytes
) -> None:
    """The client has compared rows with the model of the former encoder."""
    fetcher = new_fetcher(Geometry(width=256, dtype="float32", num_levels=3, merge_size=2, merges_time=False))
    outcome = outcome_of(fetcher, key_of(encoder, digest))
    assert isinstance(outcome, InvalidRows)
    assert "width is 128, expected 256" in outcome.message
    encoder.stop()
    encoder.script = FakeScript(model=fake_model("qwen3_vl", out_width=64))
    encoder.start()
    assert isinstance(outcome_of(fetcher, key_of(encoder, secrets.token_bytes(32))), EncodedRows)


def test_p32_an_encoder_that_comes_back_is_waited_for(
    encoder: FakeEncoder, new_fetcher: NewFetcher, digest: bytes
) -> None:
    fetcher, key = new_fetcher(), key_of(encoder, digest)
    encoder.stop()
    start(fetcher, key)
    fetcher.wait(0.3)
    assert not fetcher.ended
    encoder.start()
    assert key_of(encoder, digest) == key
    outcome = next_outcome(fetcher, key)
    # The fake starts empty, and the fetch may come before the prefetch.
    assert isinstance(outcome, EncodedRows) or outcome.reason == "UNKNOWN_KEY"


def test_p32_a_requested_pause_longer_than_the_retries_is_not_waited_for(
    encoder: FakeEncoder, new_fetcher: NewFetcher, digest: bytes
) -> None:
    failure = ItemFailed("come back later", reason="BUSY", status=8, retryable=True, retry_after_ms=60_000)
    key = key_of(encoder, digest)
    encoder.script.call_failures["Fetch"] = (grpc.StatusCode.RESOURCE_EXHAUSTED, failure)
    started_s = time.monotonic()
    outcome = outcome_of(new_fetcher(retry_s=30.0), key)
    assert isinstance(outcome, EncoderOverloaded)
    assert outcome.retry_after_ms == 60_000
    assert time.monotonic() - started_s < 30


def test_cancelled_fetches_end_their_calls_without_an_outcome(
    encoder: FakeEncoder, new_fetcher: NewFetcher, digest: bytes
) -> None:
    fetcher, key = new_fetcher(), key_of(encoder, digest)
    encoder.script.faults[digest] = Fault.HANG
    for number, end in enumerate((lambda: fetcher.cancel(key), fetcher.close)):
        start(fetcher, key)
        while encoder.num_calls["Fetch"] == number:
            time.sleep(0.005)
        end()
        while encoder.num_cancelled["Fetch"] == number:
            time.sleep(0.005)
    assert not fetcher.ended


def test_p32_a_thread_that_cannot_be_prepared_fails_its_items_with_the_reason(
    encoder: FakeEncoder, new_fetcher: NewFetcher, digest: bytes
) -> None:
    def prepare() -> None:
        raise RuntimeError("no such device")

    outcome = outcome_of(new_fetcher(prepare_thread=prepare), key_of(encoder, digest))
    assert isinstance(outcome, ItemFailed)
    assert "no such device" in outcome.message


@pytest.mark.parametrize("backend", ["uni", "mp"])
def test_rows_go_from_the_schedulers_half_into_the_encoder_cache(
    backend: str, encoder: FakeEncoder, digest: bytes
) -> None:
    engine = Engine(engine_config(encoder.target, backend))
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
def test_rows_for_another_process_keep_every_bit(dtype: str) -> None:
    payload = np.frombuffer(secrets.token_bytes(6 * 4 * (4 if dtype == "float32" else 2)), dtype=np.uint8)
    rows = EncodedRows(b"", b"", GRID, 6, 4, dtype, 0, payload)
    step = pickle.loads(pickle.dumps(StepRows({"name": HostRows.of(rows)})))
    tensor = step.rows["name"].torch()
    assert tensor.dtype == getattr(torch, dtype)
    assert tensor.shape == (6, 4)
    assert (tensor.view(torch.uint8).numpy().reshape(-1) == payload).all()
