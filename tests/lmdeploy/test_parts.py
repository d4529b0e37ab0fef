"""Parts of the plugin over LMDeploy's own classes, without a server: handles of rows, versions, models, and
LMDeploy's engine with its ranks in Ray's actors."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import json
import logging
import pickle
import shutil
import tempfile
import weakref
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from transformers import AutoConfig

from bench.harness.engine_checkpoints import write_checkpoint
from bench.harness.lmdeploy import FLOAT32
from bench.harness.ports import free_port
from bench.harness.processes import Process
from bench.harness.waiting import wait_until
from lm_adapter.engines.lmdeploy import module_map
from lm_adapter.engines.lmdeploy import rank as rank_module
from lm_adapter.engines.lmdeploy.interfaces import INTERFACES
from lm_adapter.engines.lmdeploy.module_map import CUSTOM_MODULE_MAP
from lm_adapter.engines.lmdeploy.orders import HeldRows, RowOrders, RowsHandle
from lm_adapter.engines.lmdeploy.rank import ImageRows, Rank
from lm_adapter.engines.lmdeploy.settings import SOCKET_VARIABLE, VARIABLE, Settings
from lm_adapter.engines.shared import rows as shared_rows
from lm_adapter.engines.shared.error_text import status_of
from lm_adapter.engines.shared.geometry import Geometry
from lm_adapter.engines.shared.images import ImageFile
from lm_adapter.errors import InvalidRequest, ItemFailed
from lm_adapter.items import Grid
from lm_adapter.keys import content_digest
from lm_adapter.testing import FakeEncoder, FakeScript, Fault, fake_model, fake_rows

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]
WIDTH = 24


GEOMETRY: dict[str, Any] = {"out_width": 64, "num_deepstack_levels": 2, "dtype": "float32"}
"""Of the tiny checkpoint of Qwen3-VL."""
GRID, NUM_ROWS = Grid(1, 4, 6), 6
LOGGER = logging.getLogger("of a test")


def an_image(content: bytes) -> ImageFile:
    """The made-up encoder decodes nothing."""
    return ImageFile(content, 96, 64, content_digest(content))


IMAGES = [an_image(bytes([number])) for number in range(3)]


def rows_of(image: ImageFile) -> np.ndarray[Any, Any]:
    return fake_rows(image.digest, NUM_ROWS, 3 * 64)


@pytest.fixture(scope="module")
def model_config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    checkpoint = write_checkpoint(tmp_path_factory.mktemp("model") / "qwen3_vl", "qwen3_vl")
    return SimpleNamespace(hf_config=AutoConfig.from_pretrained(checkpoint), dtype="float32")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeEncoder]:
    grids = {image.digest: GRID for image in IMAGES}
    with FakeEncoder(script=FakeScript(model=fake_model(**GEOMETRY), grids=grids)) as running:
        monkeypatch.setenv(VARIABLE, json.dumps({"target": running.target}))
        yield running


@pytest.fixture
def orders(fake: FakeEncoder, model_config: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[RowOrders]:
    """Those of the API server. There is room for three images."""
    geometry = Geometry.of_model(model_config)
    monkeypatch.setattr(shared_rows, "MAX_ROWS_BYTES", 3 * geometry.num_bytes(GRID))
    monkeypatch.setenv(SOCKET_VARIABLE, "")
    orders = RowOrders(Settings(target=fake.target, timeout_s=10.0, retry_s=5.0), geometry, LOGGER)
    yield orders
    orders.close()


@pytest.fixture
def rank(orders: RowOrders, model_config: Any) -> Iterator[Rank]:
    """That of the engine's process, whose socket is that of ``orders``."""
    rank = Rank(model_config, is_alone=True)
    yield rank
    rank.close()


def sent(held: HeldRows) -> list[RowsHandle]:
    """The request's handles, as the engine's process unpickles them."""
    handles: list[RowsHandle] = pickle.loads(pickle.dumps(held.handles()))
    return handles


async def test_rows_of_a_request_are_taken_in_the_engines_process(orders: RowOrders, rank: Rank) -> None:
    """In the images' order."""
    held = await orders.hold([*IMAGES[:2], IMAGES[0]], [GRID] * 3)
    for image, handle in zip([*IMAGES[:2], IMAGES[0]], sent(held), strict=True):
        assert (rank.take(handle).to("cpu").numpy() == rows_of(image)).all()


async def test_requests_for_the_same_images_share_rows(
    fake: FakeEncoder, orders: RowOrders, rank: Rank
) -> None:
    """As the choices of one request are, which LMDeploy prepares at once and begins together: of four with
    two images three would find no room. One of them leaves while the images are encoded."""
    fake.script.latency_s = 0.3
    asking = [asyncio.create_task(orders.hold(IMAGES[:2], [GRID] * 2)) for _ in range(4)]
    await asyncio.sleep(0.1)
    asking.pop(0).cancel()
    held = await asyncio.gather(*asking)
    later = await orders.hold(IMAGES[:2], [GRID] * 2)
    assert {id(one) for one in (*held, later)} == {id(later)}
    assert fake.num_calls["Prefetch"] == 1
    for one in held:
        assert (rank.take(sent(one)[1]).to("cpu").numpy() == rows_of(IMAGES[1])).all()
    asking.clear()
    held.clear()
    one = later
    waiting = asyncio.create_task(orders.hold([IMAGES[2], IMAGES[1]], [GRID] * 2))
    await asyncio.sleep(0.2)
    assert not waiting.done()
    del one, later
    await waiting


async def test_p32_a_call_that_nobody_waits_for_ends(
    fake: FakeEncoder, orders: RowOrders, rank: Rank
) -> None:
    fake.script.faults[IMAGES[0].digest] = Fault.HANG
    asking = [asyncio.create_task(orders.hold(IMAGES[:1], [GRID])) for _ in range(2)]
    await asyncio.to_thread(wait_until, lambda: fake.num_hanging_now > 0)
    for one in asking:
        one.cancel()
    await asyncio.to_thread(wait_until, lambda: fake.num_hanging_now == 0)
    fake.script.faults.clear()
    await orders.hold(IMAGES, [GRID] * 3)


async def test_p17_images_wait_for_room_as_long_as_text_would(
    fake: FakeEncoder, model_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longer than timeout_s, which counts from there on."""
    geometry = Geometry.of_model(model_config)
    monkeypatch.setattr(shared_rows, "MAX_ROWS_BYTES", geometry.num_bytes(GRID))
    monkeypatch.setenv(SOCKET_VARIABLE, "")
    orders = RowOrders(Settings(target=fake.target, timeout_s=1.0, retry_s=0.5), geometry, LOGGER)
    rank = Rank(model_config, is_alone=True)
    held = await orders.hold(IMAGES[:1], [GRID])
    waiting = asyncio.create_task(orders.hold(IMAGES[1:2], [GRID]))
    await asyncio.sleep(1.5)
    assert not waiting.done()
    del held
    await waiting
    rank.close()
    orders.close()


async def test_p32_after_the_engines_end_nothing_is_encoded(
    fake: FakeEncoder, orders: RowOrders, rank: Rank
) -> None:
    """Rows that are read then do not come either."""
    await orders.hold(IMAGES[:1], [GRID])
    fake.script.faults[IMAGES[1].digest] = Fault.HANG
    reading = asyncio.create_task(orders.hold(IMAGES[1:2], [GRID]))
    await asyncio.to_thread(wait_until, lambda: fake.num_hanging_now > 0)
    rank.close()
    with pytest.raises(ItemFailed, match="the connection to a worker of the engine broke") as raised:
        await reading
    assert status_of(raised.value) == 503
    with pytest.raises(ItemFailed, match="LMDeploy's engine has ended") as raised:
        await orders.hold(IMAGES[1:], [GRID] * 2)
    assert status_of(raised.value) == 503
    assert fake.num_calls["Prefetch"] == 2


async def test_p32_a_request_that_joins_a_call_has_its_own_time(
    fake: FakeEncoder, orders: RowOrders, model_config: Any
) -> None:
    settings = Settings(target=fake.target, timeout_s=2.0, retry_s=0.1)
    impatient = RowOrders(settings, Geometry.of_model(model_config), LOGGER)
    rank = Rank(model_config, is_alone=True)
    fake.script.faults[IMAGES[0].digest] = Fault.HANG
    first = asyncio.create_task(impatient.hold(IMAGES[:1], [GRID]))
    await asyncio.to_thread(wait_until, lambda: fake.num_hanging_now > 0)
    later = [asyncio.create_task(impatient.hold(IMAGES[:1], [GRID])) for _ in range(3)]
    await asyncio.wait([first])
    assert isinstance(first.exception(), ItemFailed)
    fake.script.faults.clear()
    for held in await asyncio.gather(*later):
        assert (rank.take(sent(held)[0]).to("cpu").numpy() == rows_of(IMAGES[0])).all()
    assert fake.num_calls["Prefetch"] == 2
    rank.close()
    impatient.close()


async def test_the_images_of_a_failed_request_are_freed_at_once(
    fake: FakeEncoder, orders: RowOrders, model_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the encoder is away, clients may try again and again. orders: for its variables."""
    from lmdeploy.messages import PytorchEngineConfig
    from lmdeploy.serve.core.exceptions import RequestError

    from lm_adapter.engines.lmdeploy.encoder import RowEncoder

    for name, value in FLOAT32.items():
        monkeypatch.setenv(name, value)
    config = PytorchEngineConfig(session_len=256)
    encoder = RowEncoder(model_config.hf_config.name_or_path, "pytorch", backend_config=config)
    fake.script.faults[IMAGES[0].digest] = Fault.WRONG_GRID
    image = dataclasses.replace(IMAGES[0])
    freed = weakref.ref(image)
    message = {"role": "user", "content": [{"type": "image", "data": image}]}
    del image
    gc.disable()
    try:
        with pytest.raises(RequestError) as raised:
            await encoder.preprocess([message], [model_config.hf_config.image_token_id])
        assert raised.value.status_code == 502
        del raised, message
        await asyncio.to_thread(wait_until, lambda: freed() is None)
    finally:
        gc.enable()


async def test_p17_without_a_process_for_the_engine_rows_count_until_their_first_token(
    orders: RowOrders, rank: Rank
) -> None:
    """As in ``pipeline()``."""
    from lm_adapter.engines.lmdeploy import engine

    instance = SimpleNamespace(engine=SimpleNamespace(executor=SimpleNamespace(image_rows=rank)))

    async def stock(*_arguments: Any, **_options: Any) -> AsyncIterator[int]:
        await prefill.wait()
        yield 1
        await rest.wait()

    prefill, rest = asyncio.Event(), asyncio.Event()
    items = [{"pixel_values": handle} for handle in (await orders.hold(IMAGES, [GRID] * 3)).handles()]
    outputs = engine._reading_rows(stock)(instance, 1, [1], multimodal=items)
    del items
    first = asyncio.ensure_future(anext(outputs))
    waiting = asyncio.create_task(orders.hold(IMAGES[:1], [GRID]))
    await asyncio.sleep(0.2)
    assert not waiting.done()
    prefill.set()
    assert await first == 1
    await waiting
    rest.set()


async def test_p17_rows_count_until_the_request_has_let_go_of_them(
    fake: FakeEncoder, orders: RowOrders, rank: Rank
) -> None:
    """Also those of a request that was never sent: they leave the engine's process too."""
    held: HeldRows | None = await orders.hold(IMAGES, [GRID] * 3)
    assert held is not None
    (handle, *_), handles = sent(held), held.handles()
    waiting = asyncio.create_task(orders.hold(IMAGES[:1], [GRID]))
    await asyncio.sleep(0.2)
    held = None
    assert not waiting.done()
    assert fake.num_calls["Prefetch"] == 1
    handles.clear()
    assert (rank.take(sent(await waiting)[0]).to("cpu").numpy() == rows_of(IMAGES[0])).all()
    with pytest.raises(LookupError, match="have been dropped"):
        rank.take(handle)


async def test_p32_rows_of_a_request_that_fails_or_leaves_are_dropped(
    fake: FakeEncoder, orders: RowOrders, rank: Rank
) -> None:
    """One of its images has wrong rows; then its client leaves while one is read."""
    fake.script.faults[IMAGES[1].digest] = Fault.WRONG_WIDTH
    with pytest.raises(ItemFailed, match="width is 195, expected 192"):
        await orders.hold(IMAGES, [GRID] * 3)
    fake.script.faults[IMAGES[1].digest] = Fault.HANG
    leaving = asyncio.create_task(orders.hold(IMAGES, [GRID] * 3))
    await asyncio.to_thread(wait_until, lambda: fake.num_hanging_now > 0)
    leaving.cancel()
    await asyncio.wait([leaving])
    fake.script.faults.clear()
    held = await orders.hold(IMAGES, [GRID] * 3)
    last = sent(held)[-1].number
    for number in range(1, last - 2):
        with pytest.raises(LookupError):
            rank.take(RowsHandle(number))
    assert (rank.take(RowsHandle(last)).to("cpu").numpy() == rows_of(IMAGES[2])).all()


async def test_p32_rows_that_are_gone_before_they_are_read_are_encoded_again(
    fake: FakeEncoder, orders: RowOrders, rank: Rank
) -> None:
    class Once(dict[str, Any]):
        def __getitem__(self, method: str) -> Any:
            return self.pop(method)

    gone = ItemFailed("evicted", reason="UNKNOWN_KEY", status=5)
    fake.script.call_failures = Once(Fetch=(grpc.StatusCode.NOT_FOUND, gone))
    (handle,) = sent(await orders.hold(IMAGES[:1], [GRID]))
    assert (rank.take(handle).to("cpu").numpy() == rows_of(IMAGES[0])).all()
    assert fake.num_calls["Prefetch"] == 2


async def test_p32_without_the_engines_process_requests_end_in_time(
    fake: FakeEncoder, orders: RowOrders, rank: Rank
) -> None:
    rank.close()
    slow = Settings(target=fake.target, timeout_s=0.5, retry_s=0.1)
    other = RowOrders(slow, Geometry("qwen3_vl", 192, "float32", 2, 2, merges_time=False), LOGGER)
    with pytest.raises(ItemFailed, match="1 of 1 ranks are away"):
        await other.hold(IMAGES[:1], [GRID])
    other.close()


async def test_rows_above_the_limit_stay_off_the_gpu(orders: RowOrders, rank: Rank) -> None:
    held = await orders.hold([*IMAGES, IMAGES[0]], [GRID] * 4)
    assert all(order.on_host for order in held.orders)
    assert (rank.take(sent(held)[3]).to("cpu").numpy() == rows_of(IMAGES[0])).all()


async def test_p32_a_request_whose_rows_were_dropped_ends_alone(rank: Rank) -> None:
    """In the engine's process, before LMDeploy's scheduler gets it."""
    from lmdeploy.messages import ResponseType
    from lmdeploy.pytorch.engine.engine_instance import EngineInstance

    from lm_adapter.engines.lmdeploy import install

    install()
    instance: Any = SimpleNamespace(engine=SimpleNamespace(executor=SimpleNamespace(image_rows=rank)))
    outputs = EngineInstance.async_stream_infer(
        instance, 1, input_ids=[1], multimodal=[{"pixel_values": RowsHandle(1)}]
    )
    assert [output.status async for output in outputs] == [ResponseType.INTERNAL_ENGINE_ERROR]


class GpuRows:
    """In place of a tensor on a GPU."""

    is_cuda = True

    def __init__(self, *, has_room: bool = True) -> None:
        self.has_room = has_room
        self.calls: list[str] = []
        self.on_host = torch.zeros(1)

    def record_stream(self, _stream: Any) -> None:
        self.calls.append("recorded")

    def to(self, *, device: str, non_blocking: bool) -> Any:
        self.calls.append(f"to {device}")
        if device == "cpu" and not self.has_room:
            raise RuntimeError("CUDA error: out of memory")
        return self if device == "cuda" else self.on_host


@pytest.mark.parametrize("has_step", [True, False])
def test_rows_on_a_gpu_leave_it_with_their_step_or_the_first_token(
    has_step: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LMDeploy keeps them until the request ends, for a preemption."""
    waited: list[Any] = []
    moved = SimpleNamespace(record=lambda _stream: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(wait_event=waited.append))
    monkeypatch.setattr(torch.cuda, "Event", lambda: moved)
    on_gpu: Any = GpuRows()
    rows = ImageRows(on_gpu)
    if has_step:
        assert rows.to("cuda", non_blocking=True) is on_gpu
    rows.leave_gpu()
    assert on_gpu.calls == ["to cuda"] * has_step + ["recorded", "to cpu"]
    # After a preemption, once the copy has ended.
    assert not waited
    assert rows.to("cpu") is on_gpu.on_host
    assert waited == [moved]


def test_rows_stay_on_a_gpu_where_the_host_has_no_memory_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error would end LMDeploy's engine."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    on_gpu: Any = GpuRows(has_room=False)
    rows = ImageRows(on_gpu)
    for _ in range(2):
        assert rows.to("cuda") is on_gpu
        rows.leave_gpu()


@pytest.mark.parametrize(
    ("transports", "is_alone", "has_gpu", "device", "words"),
    [
        (("device", "host", "inline"), True, True, "cuda", "1024 MiB of it are reserved"),
        (("device", "host", "inline"), True, False, "cpu", "by host memory: there is no CUDA device"),
        (
            ("device", "host", "inline"),
            False,
            True,
            "cpu",
            "the model runs in other processes",
        ),
        (("host",), True, True, "cpu", "by host memory: transports is ['host']"),
        (
            ("device",),
            False,
            True,
            "",
            "as the model runs in other processes: add host or inline",
        ),
    ],
)
def test_where_rows_go_is_chosen_at_the_start(
    transports: tuple[str, ...], is_alone: bool, has_gpu: bool, device: str, words: str,
    model_config: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """In one line of the log, or in the reason why LMDeploy does not start."""
    found: list[Any] = []

    class Reader:
        def __init__(self, settings: Any, _geometry: Any, device: Any, _name: str, **options: Any) -> None:
            found.append((device.type, settings.transports))
            self.num_bytes = options["max_bytes"] if device.type == "cuda" else 0

        def reserve(self) -> int:
            return self.num_bytes

    monkeypatch.setenv(VARIABLE, json.dumps({"target": "127.0.0.1:1", "transports": transports}))
    monkeypatch.setenv(SOCKET_VARIABLE, "")
    monkeypatch.setattr(rank_module, "RankReader", Reader)
    monkeypatch.setattr(rank_module, "logger", LOGGER)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    if not device:
        with pytest.raises(InvalidRequest, match=words):
            Rank(model_config, is_alone=is_alone)
        return
    with caplog.at_level("INFO", LOGGER.name):
        Rank(model_config, is_alone=is_alone)
    assert words in caplog.text
    kept = transports if device == "cuda" else tuple(name for name in transports if name != "device")
    assert found == [(device, kept)]


@pytest.mark.parametrize(
    ("backend", "options", "words"),
    [
        ("turbomind", {}, "set --backend pytorch"),
        ("pytorch", {"mp_engine_backend": "ray"}, "mp_engine_backend"),
    ],
)
def test_an_engine_that_gets_no_rows_ends_the_start(
    backend: str, options: dict[str, str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TurboMind is LMDeploy's default for Qwen3.5 where its library loads, which needs CUDA 12."""
    from lmdeploy.messages import PytorchEngineConfig

    from lm_adapter.engines.lmdeploy.encoder import RowEncoder

    monkeypatch.setenv(VARIABLE, '{"target": "127.0.0.1:1"}')
    checkpoint = write_checkpoint(tmp_path / "model", "qwen3_5")
    with pytest.raises(InvalidRequest, match=words):
        RowEncoder(str(checkpoint), backend, backend_config=PytorchEngineConfig(**options))


def test_this_lmdeploy_has_what_the_plugin_uses() -> None:
    assert INTERFACES.first_difference() == ""


def test_other_versions_are_refused_or_taken_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert INTERFACES.refusal("0.18.3") == ""
    assert INTERFACES.refusal("0.17.0") == (
        "LMDeploy is 0.17.0, this plugin was tested with 0.18: install this one"
    )
    lacking = dataclasses.replace(INTERFACES, called={"lmdeploy.archs": ("no_such_name",)})
    assert "and its lmdeploy.archs has no no_such_name" in lacking.refusal("0.19.0")
    newer = dataclasses.replace(INTERFACES, logger=logging.getLogger("of a test"))
    assert newer.refusal("0.19.0") == ""
    (record,) = caplog.records
    assert "LMDeploy is 0.19.0" in record.getMessage()


@pytest.fixture
def ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Process]:
    """A Ray of its own, with GPUs that are not there, which starts beside the test. Its sockets have names of
    limited length."""
    address, folder = f"127.0.0.1:{free_port()}", tempfile.mkdtemp(prefix="ve-ray-")
    variables = {
        "RAY_AUTH_MODE": "disabled",  # else Ray writes a token into the home folder
        "RAY_enable_worker_prestart": "0",  # LMDeploy's actors have variables of their own
        "RAY_memory_monitor_refresh_ms": "0",  # it ends actors when the machine is short of memory
        "RAY_prestart_worker_first_driver": "0",
        **FLOAT32,
    }
    for name, value in {**variables, "RAY_ADDRESS": address}.items():
        monkeypatch.setenv(name, value)
    host, port = address.split(":")
    options = [
        "--node-ip-address",
        host,
        "--port",
        port,
        "--temp-dir",
        folder,
        "--num-cpus",
        "2",
        "--num-gpus",
        "2",
    ]
    options += [
        "--object-store-memory",
        str(100 << 20),
        "--include-dashboard",
        "false",
        "--disable-usage-stats",
    ]
    command = ["-m", "ray.scripts.scripts", "start", "--head", "--block", *options]
    process = Process(command, tmp_path / "ray.log")
    yield process
    process.kill()

    def is_removed() -> bool:
        shutil.rmtree(folder, ignore_errors=True)
        return not Path(folder).exists()

    wait_until(is_removed, "the end of Ray's processes, which write files")


@contextlib.asynccontextmanager
async def running(checkpoint: str, num_ranks: int) -> AsyncIterator[Any]:
    """LMDeploy's engine in this process."""
    from lmdeploy.messages import PytorchEngineConfig
    from lmdeploy.pytorch.engine import Engine

    from lm_adapter.engines.lmdeploy import install

    install()
    options = {"session_len": 256, "max_batch_size": 4, "max_prefill_token_num": 16, "block_size": 16}
    config = PytorchEngineConfig(tp=num_ranks, eager_mode=True, **options)
    lmdeploy_engine = Engine.from_pretrained(checkpoint, config)
    lmdeploy_engine.start_loop()
    try:
        yield lmdeploy_engine
    finally:
        lmdeploy_engine.close()
        with contextlib.suppress(asyncio.CancelledError):
            await lmdeploy_engine.wait_tasks()


async def tokens_of(
    engine: Any, orders: RowOrders, images: Sequence[ImageFile], placeholder: int
) -> list[int]:
    """Greedy ones of a prompt with the images."""
    from lmdeploy.messages import GenerationConfig

    sampling = GenerationConfig(max_new_tokens=8, ignore_eos=True, top_k=1)
    ids, multimodal = [7], []
    handles = sent(await orders.hold(images, [GRID] * len(images))) if images else []
    for image, handle in zip(images, handles, strict=True):
        fields = {"modality": "image", "image_token_id": placeholder, "content_hash": image.digest.hex()}
        offset = (len(ids), len(ids) + NUM_ROWS)
        multimodal.append(
            {**fields, "pixel_values": handle, "grid_thw": torch.tensor(GRID), "offset": offset}
        )
        ids += [*[placeholder] * NUM_ROWS, 8]
    tokens: list[int] = []
    outputs = engine.create_instance().async_stream_infer(1, ids, sampling, multimodal or None)
    async for output in outputs:
        tokens += output.token_ids
    return tokens


async def test_engines_of_one_process_have_their_own_rows(
    fake: FakeEncoder, orders: RowOrders, model_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As several ``pipeline()`` in a script do. Their rows have the same numbers. What an engine has of them
    goes with it."""
    for name, value in FLOAT32.items():
        monkeypatch.setenv(name, value)
    checkpoint, placeholder = model_config.hf_config.name_or_path, model_config.hf_config.image_token_id
    async with running(checkpoint, 1) as first:
        expected = [await tokens_of(first, orders, [image], placeholder) for image in IMAGES]
        assert len(set(map(tuple, expected))) == 3
        others = RowOrders(Settings(target=fake.target), Geometry.of_model(model_config), LOGGER)
        async with running(checkpoint, 1) as second:
            held = await orders.hold(IMAGES[:1], [GRID])
            assert await tokens_of(second, others, IMAGES[1:2], placeholder) == expected[1]
            assert await tokens_of(first, orders, IMAGES[:1], placeholder) == expected[0]
            del held
        with pytest.raises(ItemFailed, match="LMDeploy's engine has ended"):
            await others.hold(IMAGES[2:], [GRID])
        assert await tokens_of(first, orders, IMAGES[2:], placeholder) == expected[2]
        others.close()


async def test_two_ranks_in_rays_actors_give_the_tokens_of_one(
    ray: Process, orders: RowOrders, model_config: Any, tmp_path: Path
) -> None:
    """Ray, its actors and LMDeploy's executor are real; ranks reduce over gloo. The plugin is installed in no
    actor: they get all by what LMDeploy sends."""
    from lmdeploy.pytorch.config import ModelConfig

    def found_by(rank: Any, configs: Sequence[Any]) -> Any:
        """Runs in an actor, pickled by value."""
        import sys

        from lmdeploy.pytorch.models import patch

        model = rank.model_agent.patched_model.get_model()
        assert not any(name.startswith("visual") for name, _ in model.named_parameters())
        assert "lm_adapter.engines.lmdeploy.engine" not in sys.modules
        classes = [type(model)]
        for config in configs:
            patch.update_custom_module_map(config.custom_module_map)
            classes.append(patch._get_model_class(config.hf_config, patch._get_module_map()))
        return [f"{found.__module__}.{found.__name__}" for found in classes]

    checkpoint, placeholder = model_config.hf_config.name_or_path, model_config.hf_config.image_token_id
    requests = [[], *([image] for image in IMAGES), IMAGES]
    async with running(checkpoint, 1) as engine:
        expected = [await tokens_of(engine, orders, images, placeholder) for images in requests]
    assert len({tuple(tokens) for tokens in expected}) == len(requests)
    families = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "kimi_k25")
    checkpoints = [write_checkpoint(tmp_path / family, family) for family in families]
    configs = [ModelConfig.from_pretrained(str(checkpoint)) for checkpoint in checkpoints]
    ray.wait_for(lambda: "Ray runtime started" in ray.tail(), "Ray")
    async with running(checkpoint, 2) as engine:
        assert [await tokens_of(engine, orders, images, placeholder) for images in requests] == expected
        found = engine.executor.collective_rpc("__ray_call__", (found_by, configs))
    architectures = [config.hf_config.architectures[0] for config in configs]
    assert set(architectures) == set(CUSTOM_MODULE_MAP)
    names = [f"lm_adapter.engines.lmdeploy.models.{name}" for name in (architectures[0], *architectures)]
    assert found == [names] * 2
    # With what the engine's process compares rows.
    served = {Geometry.of_model(config).family for config in configs}
    assert served == {"qwen3_vl", "qwen3_5", "kimi_k25"}


@pytest.mark.parametrize(
    ("error", "is_explained"),
    [
        (ModuleNotFoundError("No module named 'lm_adapter'"), True),
        (AssertionError(f'custom module map path: "{module_map.__file__}" not exists.'), True),
        (ModuleNotFoundError("No module named 'flash_attn'"), False),
    ],
)
def test_a_rank_without_this_package_ends_the_start_with_the_reason(
    error: Exception, is_explained: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from ray.exceptions import RayTaskError

    from lm_adapter.engines.lmdeploy import engine

    class Executor:
        model_config = release = None

        def build_model(self) -> None:
            raise RayTaskError("build_model", f"Traceback\n{error}", error).as_instanceof_cause()

    monkeypatch.setattr(engine, "Rank", lambda *_, **__: None)
    executor = engine._with_rank(Executor)()
    with pytest.raises(InvalidRequest if is_explained else ModuleNotFoundError):
        executor.build_model()
    assert ("LMDeploy does not start: a rank has no lm_adapter at" in caplog.text) == is_explained


@pytest.mark.parametrize("architecture", [name for name in CUSTOM_MODULE_MAP if name.startswith("Qwen")])
def test_weights_of_the_tower_are_left_out_of_updates(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LMDeploy gives an update of the weights to the class without asking which modules it lacks."""
    from lm_adapter.engines.lmdeploy import models

    model = getattr(models, architecture)
    found: list[str] = []
    _, _, stock, *_ = model.__mro__
    monkeypatch.setattr(stock, "load_weights", lambda _self, weights: found.extend(dict(weights)))
    names = ["model.visual.patch_embed.proj.weight", "model.language_model.layers.0.mlp.up_proj.weight"]
    renamed = [model.rename_weight(name) if hasattr(model, "rename_weight") else name for name in names]
    model.load_weights(model.__new__(model), iter([(name, torch.zeros(1)) for name in renamed]))
    assert found == renamed[1:]


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5", "kimi_k25"])
def test_rows_take_the_place_of_the_towers_output(family: str) -> None:
    """What LMDeploy's scheduler keeps of an image, and what its model gets in place of the tower's output."""
    from types import SimpleNamespace

    from lm_adapter.engines.lmdeploy import models

    grid = torch.tensor([1, 4, 6])
    item: dict[str, Any] = {
        "modality": "image", "pixel_values": torch.randn(6, WIDTH), "grid_thw": grid, "offset": (2, 8),
        "image_token_id": 5, "content_hash": "0f",
    }  # fmt: skip
    inputs = models.KimiInputs() if family == "kimi_k25" else models.QwenInputs(None, None)
    result = inputs.preprocess_input([1, 2, *[5] * 6, 3], [item])
    ((name, (image,)),) = result.input_multimodals.items()
    assert name == ("image" if family == "kimi_k25" else "mm_data")
    assert (image.start, image.end, image.content_hash) == (2, 8, "0f")
    assert image.data is item["pixel_values"]
    if family == "kimi_k25":
        assert image.meta["grid_thws"].tolist() == [[1, 4, 6]]
        return
    assert image.mrope_pos_ids.tolist() == [[0, row, column] for row in range(2) for column in range(3)]
    rows = models.Rows(SimpleNamespace(spatial_merge_size=2), 2 if family == "qwen3_vl" else 0)
    assert not list(rows.parameters())
    if family == "qwen3_5":
        assert rows(image.data) is image.data
        return
    main, levels = rows(image.data, cu_seqlens=None)
    assert torch.equal(torch.cat([main, *levels], -1), image.data)
    assert len(levels) == 2
