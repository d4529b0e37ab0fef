"""An encoder of another model, dtype or protocol: at an engine's start, and at its first image."""

from __future__ import annotations

import dataclasses
import logging
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from lm_adapter.client import AsyncVisionEncoderClient
from lm_adapter.engines.sglang.settings import VARIABLE
from lm_adapter.engines.sglang.settings import Settings as SglangSettings
from lm_adapter.engines.shared import first_contact
from lm_adapter.engines.shared.agreement import Agreement
from lm_adapter.engines.shared.encoder_thread import EncoderThread
from lm_adapter.engines.shared.error_text import status_of
from lm_adapter.engines.shared.first_contact import check_encoder
from lm_adapter.engines.shared.geometry import Geometry
from lm_adapter.engines.shared.rows import RowReader
from lm_adapter.engines.vllm.api_server.contact import check_early
from lm_adapter.engines.vllm.settings import Settings
from lm_adapter.errors import ModelMismatch, ProtocolMismatch
from lm_adapter.items import Grid, ImageItem
from lm_adapter.testing import FakeEncoder, fake_model
from lm_adapter.types import PrefetchStatus
from tests.unit.lm_adapter.connector_rig import Engine, Image, engine_config

MODEL = fake_model("qwen3_vl")
GEOMETRY = Geometry("qwen3_vl", 128, "float32", num_levels=3, merge_size=2, merges_time=False)
LOGGER = logging.getLogger("vllm.vision_encoder")
GRID = Grid(1, 4, 6)
NOWHERE = "127.0.0.1:1"
BFLOAT16 = dataclasses.replace(MODEL, dtype="bfloat16")


@pytest.fixture
def fake() -> Iterator[FakeEncoder]:
    with FakeEncoder() as running:
        yield running


@pytest.fixture(autouse=True)
def _all_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


def lines(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == level]


def thread_of(target: str, geometry: Geometry = GEOMETRY, **settings: Any) -> EncoderThread:
    agreement = Agreement(Settings(target=target, **settings), geometry)
    return EncoderThread(agreement, name="test", logger=LOGGER)


def prefetched(thread: EncoderThread, data: bytes) -> Any:
    """The outcome of one image."""

    async def call(client: AsyncVisionEncoderClient, left_s: float) -> Any:
        (status,) = await client.prefetch([ImageItem(data)], timeout_s=left_s)
        return status

    return thread.submit_future(call).result(30)


@pytest.mark.parametrize(
    ("encoder", "engine", "sentence"),
    [
        (
            {"family": "qwen3_5"},
            {},
            "rows of the family qwen3_5, vLLM's model takes qwen3_vl: start the encoder, which has "
            "fake-qwen3_5, with vLLM's checkpoint as its --model, or set target in "
            "ec_connector_extra_config to an encoder that has it",
        ),
        (
            {"num_deepstack_levels": 1},
            {},
            "rows with 1 deepstack levels, vLLM's model takes 3: start the encoder, which has fake-qwen3_vl, "
            "with vLLM's checkpoint",
        ),
        (
            {"out_width": 48},
            {},
            "rows of 192 elements, vLLM's model takes 128: start the encoder, which has fake-qwen3_vl, with "
            "vLLM's checkpoint",
        ),
        (
            {},
            {"dtype": "bfloat16"},
            "rows in float32, vLLM's model takes bfloat16: start the encoder with --dtype bfloat16, or vLLM "
            "with --dtype float32",
        ),
        # The encoder has no such dtype.
        (
            {"dtype": "bfloat16"},
            {"dtype": "float16"},
            "rows in bfloat16, vLLM's model takes float16: start vLLM with --dtype bfloat16",
        ),
    ],
    ids=["family", "levels", "width", "dtype", "float16"],
)
def test_a_start_is_refused_with_both_figures_and_the_option(
    encoder: dict[str, Any], engine: dict[str, Any], sentence: str, fake: FakeEncoder
) -> None:
    fake.script.model = fake_model(**{"family": "qwen3_vl", **encoder})
    with pytest.raises(ModelMismatch) as refused:
        check_encoder(thread_of(fake.target, dataclasses.replace(GEOMETRY, **engine)), fake.target, LOGGER)
    assert refused.value.message.startswith(f"the encoder at {fake.target} serves {sentence}")
    assert status_of(refused.value) == 502


def test_a_start_is_refused_for_another_protocol(fake: FakeEncoder) -> None:
    fake.script.protocol_version = fake.script.min_protocol_version = 7
    with pytest.raises(
        ProtocolMismatch, match="versions 7 to 7, this adapter 1 to 1: install the server's version"
    ):
        check_encoder(thread_of(fake.target), fake.target, LOGGER)


def test_a_start_is_refused_for_a_model_that_the_encoder_lacks(fake: FakeEncoder) -> None:
    thread = thread_of(fake.target, model="other")
    with pytest.raises(
        ModelMismatch, match=r"'other' names 0 models.*served: fake-qwen3_vl: set model in ec_conn"
    ):
        check_encoder(thread, fake.target, LOGGER)


@pytest.mark.parametrize("gateway", [{"fleet": True}, {"fallback_target": ""}])
def test_a_start_is_refused_through_a_gateway(gateway: dict[str, Any], fake: FakeEncoder) -> None:
    """Also where the encoder of this node is away."""
    if "fallback_target" in gateway:
        thread = thread_of(NOWHERE, fallback_target=fake.target)
    else:
        thread = thread_of(fake.target, **gateway)
    fake.script.model = BFLOAT16
    with pytest.raises(ModelMismatch, match=f"the encoder at {fake.target} serves rows in bfloat16"):
        check_encoder(thread, fake.target, LOGGER)


def test_a_start_goes_on_while_the_encoder_is_away(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It waits for no answer longer than a bound. One line says that the comparison is to come."""
    monkeypatch.setattr(first_contact, "ANSWER_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for target in (NOWHERE, f"127.0.0.1:{silent.getsockname()[1]}"):
            thread, started_s = thread_of(target), time.monotonic()
            check_encoder(thread, target, LOGGER)
            assert time.monotonic() - started_s < 5
            thread.close()
            (line,) = lines(caplog, logging.WARNING)
            assert f"the encoder at {target} cannot be asked yet" in line
            assert "checked with the first image" in line
            caplog.clear()


def test_images_fail_at_once_until_an_encoder_that_agrees_comes(
    fake: FakeEncoder, caplog: pytest.LogCaptureFixture
) -> None:
    """Without an encode, whose rows would be refused one by one."""
    fake.script.model = BFLOAT16
    thread = thread_of(fake.target)
    for number in range(3):
        outcome = prefetched(thread, bytes([number]))
        assert isinstance(outcome, ModelMismatch)
        assert "in bfloat16, vLLM's model takes float32" in outcome.message
    assert set(fake.num_calls) == {"GetServerInfo"}
    (line,) = lines(caplog, logging.ERROR)
    assert outcome.message in line
    fake.script.model = MODEL
    fake.restart()
    assert isinstance(prefetched(thread, b"image"), PrefetchStatus)
    assert lines(caplog, logging.INFO) == [f"the encoder at {fake.target} serves this model's rows now"]
    fake.script.model = BFLOAT16
    fake.restart()
    assert isinstance(thread.contact(10), ModelMismatch)
    for number in range(3):
        outcome = prefetched(thread, bytes([9, number]))
    assert isinstance(outcome, ModelMismatch)
    assert len(lines(caplog, logging.ERROR)) == 2
    thread.close()


def test_sglangs_sentence_names_sglangs_options(fake: FakeEncoder) -> None:
    geometry = dataclasses.replace(GEOMETRY, family="kimi_k25")
    with pytest.raises(ModelMismatch, match=f"SGLang's model takes kimi_k25.* target in {VARIABLE} "):
        RowReader(SglangSettings(target=fake.target), geometry, logging.getLogger("test"))


def test_vllm_asks_before_it_loads_a_model(fake: FakeEncoder, caplog: pytest.LogCaptureFixture) -> None:
    """In a process of its own. Settings and geometry arrive there."""
    settings = Settings(target=fake.target, namespace="tenant", transports=("host", "inline"))
    agreement = Agreement(settings, GEOMETRY)
    check_early(agreement)
    fake.script.model = BFLOAT16
    with pytest.raises(
        ModelMismatch, match="start the encoder with --dtype float32, or vLLM with --dtype bfloat16"
    ):
        check_early(agreement)
    fake.stop()
    check_early(agreement)
    assert not lines(caplog, logging.WARNING)


def test_vllms_scheduler_refuses_an_encoder_that_came_while_the_model_was_loaded(
    fake: FakeEncoder, caplog: pytest.LogCaptureFixture
) -> None:
    """The reason has a line of its own above the traceback."""
    with pytest.raises(ModelMismatch):
        Engine(engine_config(fake.target, dtype="bfloat16"))
    (line,) = lines(caplog, logging.ERROR)
    assert line.startswith(f"vLLM does not start: the encoder at {fake.target} serves rows in float32")


def test_vllms_requests_fail_with_the_sentence_when_the_encoder_is_replaced(fake: FakeEncoder) -> None:
    """Scheduler and rank hold the former encoder's description."""
    with Engine(engine_config(fake.target)) as engine:
        images = [Image(bytes([number]), GRID) for number in range(4)]
        fake.script.grids = {image.digest: GRID for image in images}
        request = engine.request(images[0])
        engine.fetch(request)
        engine.load(engine.schedule(request))
        engine.finish(request)
        fake.script.model = BFLOAT16
        fake.restart()
        for image in images[1:3]:
            failure = engine.failure(engine.request(image))
            assert failure.startswith("MODEL_MISMATCH: ")
            assert "--dtype float32" in failure
        fake.script.model = MODEL
        fake.restart()
        request = engine.request(images[3])
        engine.fetch(request)
        engine.load(engine.schedule(request))
        engine.finish(request)
        engine.wait_empty()
