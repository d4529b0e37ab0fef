"""The plugin in vLLM's own registries, without a server: what it replaces, leaves, and refuses."""

from __future__ import annotations

import asyncio
import functools
import importlib
import inspect
import json
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm
from safetensors.torch import save_file

from bench.harness.processes import START_S, environment
from bench.harness.vllm import VLLM_ENVIRONMENT, VllmServer
from bench.harness.waiting import wait_until
from lm_adapter.engines.shared.agreement import Agreement
from lm_adapter.engines.shared.checkpoint import read_config
from lm_adapter.engines.shared.geometry import Geometry
from lm_adapter.engines.shared.images import ImageFile
from lm_adapter.engines.vllm import models
from lm_adapter.engines.vllm.connector import ConnectorMethods
from lm_adapter.engines.vllm.interfaces import INTERFACES
from lm_adapter.engines.vllm.models import ARCHITECTURES, check_model
from lm_adapter.engines.vllm.settings import CONNECTOR, MODULE, Settings, mark
from lm_adapter.engines.vllm.step_rows import StepRows
from lm_adapter.engines.vllm.worker.without_tower import TOWER_PREFIXES
from lm_adapter.errors import InvalidRequest, ItemFailed
from tests.engines.near_model import ARCHITECTURE, write_near_checkpoint
from tests.published import MODELS, PUBLISHED
from tests.unit.lm_adapter.connector_rig import engine_config

# Importing vLLM warns of what is deprecated in torch.
pytestmark = pytest.mark.filterwarnings("ignore")
QWEN = "Qwen3VLForConditionalGeneration"


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    models.register()
    models.register()


def config(
    architecture: str = QWEN,
    *,
    is_marked: bool = True,
    runner: str = "generate",
    num_nodes: int = 1,
    backend: str = "mp",
    module_path: str | None = MODULE,
) -> Any:
    mm_config = SimpleNamespace(
        mm_processor_cache_type="lru", mm_processor_kwargs=None, is_multimodal_pruning_enabled=lambda: False
    )
    if is_marked:
        mark(mm_config)
    transfer = SimpleNamespace(
        ec_connector=CONNECTOR,
        ec_connector_module_path=module_path,
        ec_connector_extra_config={"target": "127.0.0.1:1"},
    )
    return SimpleNamespace(
        ec_transfer_config=transfer,
        compilation_config=SimpleNamespace(cudagraph_mm_encoder=False),
        kv_transfer_config=None,
        lora_config=None,
        parallel_config=SimpleNamespace(nnodes_within_dp=num_nodes, distributed_executor_backend=backend),
        model_config=SimpleNamespace(
            **vars(engine_config("127.0.0.1:1").model_config),
            max_model_len=2048,
            architecture=architecture,
            runner_type=runner,
            get_multimodal_config=lambda: mm_config,
        ),
    )


@pytest.mark.parametrize(
    "architecture", sorted(ARCHITECTURES.keys() & vllm.ModelRegistry.get_supported_archs())
)
def test_classes_have_the_names_that_vllm_looks_for(architecture: str) -> None:
    """Its drafting code tells models apart by the name of their class."""
    model = getattr(models, architecture)
    assert model.__name__ == architecture
    assert model.__mro__[1].__module__.startswith("vllm.")
    check_model(config(architecture))


@pytest.mark.parametrize("model", MODELS)
def test_published_configurations_name_classes_of_the_plugin(model: str) -> None:
    """By vLLM's reader of config.json and its registry."""
    from vllm import ModelRegistry
    from vllm.transformers_utils.config import get_config

    if model.startswith("Intern-"):  # whose configuration is code of the hub's
        (architecture,) = read_config(PUBLISHED / model)["architectures"]
    else:
        (architecture,) = get_config(str(PUBLISHED / model), trust_remote_code=False).architectures
    assert ModelRegistry.models[architecture].load_model_cls() is getattr(models, architecture)
    check_model(config(architecture))


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        (
            {"architecture": "LlamaForCausalLM"},
            "LlamaForCausalLM, image rows are for Qwen3VL",
        ),
        ({"is_marked": False}, "hook"),
        # By ECConnectorFactory.register_connector, vLLM finds the class without the path.
        (
            {"is_marked": False, "module_path": None},
            f"ec_connector_module_path None: set them to {CONNECTOR} and {MODULE}",
        ),
        ({"runner": "pooling"}, "pooling"),
        ({"num_nodes": 2}, "several nodes"),
        ({"backend": "ray"}, "ray"),
        ({"backend": "external_launcher"}, "external_launcher"),
    ],
)
def test_what_cannot_work_is_refused(changed: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidRequest, match=text):
        check_model(config(**changed))


def test_this_vllm_has_what_the_plugin_uses() -> None:
    assert INTERFACES.first_difference() == ""


def connector_class() -> Any:
    from lm_adapter.engines.vllm import VisionEncoderConnector

    return VisionEncoderConnector


@pytest.mark.parametrize(
    ("module", "path"),
    [
        ("vllm.model_executor.models.interfaces", "SupportsMultiModal._mark_tower_model"),
        ("vllm.model_executor.models.config", "VerifyAndUpdateConfig.verify_and_update_config"),
        ("vllm.model_executor.models.config", "VerifyAndUpdateConfig.verify_and_update_model_config"),
        ("vllm.multimodal.inputs", "PlaceholderRange.get_num_embeds"),
        ("vllm.multimodal.media", "MediaConnector.fetch_video_async"),
        *(
            ("vllm.multimodal.inputs", f"MultiModalFeatureSpec.{name}")
            for name in ("data", "identifier", "mm_position", "modality")
        ),
        *(("vllm.config", f"ModelConfig.{name}") for name in ("dtype", "hf_config")),
    ],
)
def test_what_a_vllm_lacks_is_named(module: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Methods, and fields of dataclasses, with a default and without."""
    class_name, name = path.split(".")
    owner = getattr(importlib.import_module(module), class_name)
    fields = getattr(owner, "__dataclass_fields__", {})
    if name in fields:
        monkeypatch.delitem(fields, name)
    if name in vars(owner):
        monkeypatch.delattr(owner, name)
    assert INTERFACES.first_difference() == f"its {module} has no {path}"


def test_methods_take_the_keywords_of_the_base_class() -> None:
    """vLLM may pass any argument by name."""
    from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase

    def names(method: Any) -> list[str]:
        parameters = inspect.signature(method).parameters.values()
        return [one.name for one in parameters if one.kind is not one.VAR_KEYWORD]

    overridden = [
        name
        for name in vars(ConnectorMethods).keys() & vars(ECConnectorBase).keys()
        if callable(getattr(ECConnectorBase, name)) and name not in vars(object)
    ]
    assert {"build_prom_metrics", "ensure_cache_available", "start_load_caches"} <= set(overridden)
    for name in ("__init__", *overridden):
        assert names(getattr(ConnectorMethods, name)) == names(getattr(ECConnectorBase, name)), name


def test_what_vllm_gets_are_instances_of_its_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
    from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase, ECConnectorMetadata
    from vllm.distributed.ec_transfer.ec_connector.metrics import ECConnectorPromMetrics, ECConnectorStats

    from lm_adapter.engines.vllm.api_server.server import ApiServer

    monkeypatch.setattr(ApiServer, "current", None)
    kind, registry = connector_class(), CollectorRegistry()
    assert issubclass(kind, ECConnectorBase)
    assert isinstance(StepRows(), ECConnectorMetadata)
    stats = kind.build_ec_connector_stats({"queries": {"": 2}})
    assert isinstance(stats, ECConnectorStats)
    assert stats.aggregate(kind.build_ec_connector_stats()).reduce() == {"Num items": 2}
    types = {one: functools.partial(one, registry=registry) for one in (Counter, Gauge, Histogram)}
    metrics = kind.build_prom_metrics(
        vllm_config=config(), metric_types=types, labelnames=["engine"], per_engine_labelvalues={0: ["0"]}
    )
    assert isinstance(metrics, ECConnectorPromMetrics)
    metrics.observe(transfer_stats_data=stats.data, engine_idx=0)
    assert registry.get_sample_value("vllm:vision_encoder_cache_queries_total", {"engine": "0"}) == 2


@pytest.mark.parametrize(
    "architecture", ["Qwen3VLForConditionalGeneration", "KimiK25ForConditionalGeneration"]
)
def test_vllms_own_code_leaves_the_tower_out(architecture: str) -> None:
    """From this plugin's stand-in for the configuration."""
    from vllm.model_executor.models.utils import StageMissingLayer

    model = object.__new__(getattr(models, architecture))
    torch.nn.Module.__init__(model)
    model._consumes_rows = True
    with model._mark_tower_model(SimpleNamespace(), {"image", "video"}):
        model.visual = torch.nn.Linear(2, 2)
    assert isinstance(model.visual, StageMissingLayer)


AS_A_NEWER_VLLM = """
import vllm
vllm.__version__ = "0.99.1"
{change}
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm import ModelRegistry
print(ModelRegistry.models["Qwen3VLForConditionalGeneration"].module_name)
"""


@pytest.mark.parametrize(
    ("change", "registered", "log"),
    [
        ("", models.__name__, "0.32 and 0.33. It has all that the plugin uses"),
        (
            "from vllm.multimodal.media import MediaConnector as c; del c.load_from_url",
            "vllm.model_executor.models.qwen3_vl",
            "vllm.multimodal.media has no MediaConnector.load_from_url:",
        ),
    ],
)
def test_a_newer_vllm_runs_with_the_plugin_unless_it_lacks_something(
    change: str, registered: str, log: str
) -> None:
    """In a process of its own: vLLM loads plugins before most of its modules."""
    code = AS_A_NEWER_VLLM.format(change=change)
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(**VLLM_ENVIRONMENT), capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert ended.stdout.splitlines()[-1:] == [registered], ended.stderr
    assert log in ended.stdout + ended.stderr


class Encoder:
    """Counts what is sent to it, at once, in place of the thread of the API server's calls."""

    def __init__(self, *, is_away: bool = False) -> None:
        self.is_away = is_away
        self.sent: list[bytes] = []
        self.completed: list[object] = []
        self.num_pending = 0

    async def prefetch(self, items: list[Any], **_: Any) -> list[Any]:
        self.sent += [item.digest for item in items]
        return [ItemFailed("it is full") if self.is_away else None]

    def submit(self, handle: object, call: Any) -> None:
        asyncio.run(call(self, 1.0))


def api_server(monkeypatch: pytest.MonkeyPatch, encoder: Encoder, **changes: Any) -> Any:
    from lm_adapter.engines.vllm.api_server import server

    found = config()
    found.kv_transfer_config = changes.get("kv_transfer_config")
    found.ec_transfer_config.ec_connector_extra_config |= changes.get("settings", {})
    monkeypatch.setattr(server.EncoderThreads, "get", lambda *_: encoder)
    return server.ApiServer(found)


def test_an_image_is_sent_once_unless_the_encoder_refused_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that vLLM's own cache holds are not encoded again by an encoder that has restarted."""
    encoder = Encoder(is_away=True)
    server = api_server(monkeypatch, encoder)
    first, second = (ImageFile(b"", 8, 8, digest=bytes([number])) for number in (1, 2))
    assert server.prefetch(first)
    encoder.is_away = False
    assert all(server.prefetch(image) for image in (first, first, second, first, second))
    assert encoder.sent == [first.digest, first.digest, second.digest]


@pytest.mark.parametrize(
    ("changes", "announces"),
    [
        ({}, True),
        ({"kv_transfer_config": SimpleNamespace(kv_role="kv_producer")}, True),
        ({"kv_transfer_config": SimpleNamespace(kv_role="kv_both")}, True),
        ({"kv_transfer_config": SimpleNamespace(kv_role="kv_consumer")}, False),
        ({"kv_transfer_config": SimpleNamespace(kv_role="kv_both"), "settings": {"announces": False}}, False),
    ],
)
def test_an_instance_whose_kv_comes_from_another_announces_no_image(
    changes: dict[str, Any], announces: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = Encoder()
    server = api_server(monkeypatch, encoder, **changes)
    assert server.prefetch(ImageFile(b"", 8, 8, digest=b"1")) is announces
    assert len(encoder.sent) == announces


def test_only_the_latest_images_are_remembered_as_sent() -> None:
    from lm_adapter.engines.vllm.api_server.server import Announced

    announced = Announced(2)
    for digest in (b"1", b"2"):
        announced.add(digest)
    assert announced.has(b"1")
    announced.add(b"3")
    assert [announced.has(digest) for digest in (b"1", b"2", b"3")] == [True, False, True]


def test_a_plugin_that_was_left_out_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import ModelRegistry

    monkeypatch.delitem(ModelRegistry.models, QWEN)
    with pytest.raises(InvalidRequest, match="was not loaded"):
        check_model(config())


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            lambda found: setattr(found.compilation_config, "cudagraph_mm_encoder", True),
            "cudagraph_mm_encoder",
        ),
        (
            lambda found: setattr(
                found.model_config.get_multimodal_config(), "is_multimodal_pruning_enabled", lambda: True
            ),
            "video pruning",
        ),
        (lambda found: found.ec_transfer_config.ec_connector_extra_config.clear(), "target"),
    ],
)
def test_the_configuration_is_checked_where_it_is_made(
    change: Any, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    monkeypatch.delenv("VLLM_MEDIA_CONNECTOR", raising=False)
    found = config(is_marked=False)
    MODELS_CONFIG_MAP[QWEN].verify_and_update_config(found)
    check_model(found)
    change(found)
    with pytest.raises(InvalidRequest, match=text):
        MODELS_CONFIG_MAP[QWEN].verify_and_update_config(found)


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        (None, {}),
        ({"do_normalize": False}, {}),
        (
            {"max_pixels": 70000, "size": {"shortest_edge": 9, "longest_edge": 5}},
            {"min_pixels": 9, "max_pixels": 70000},
        ),
        ({"min_pixels": 4, "videos_kwargs": {"min_pixels": 7}}, {"min_pixels": 7}),
        ({"images_kwargs": {"min_pixels": 4}}, {}),
    ],
)
def test_sizes_of_clips_are_those_of_the_start(
    options: dict[str, Any] | None, sizes: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's processor, which has a request's own, comes after the encoder was asked."""
    from lm_adapter.engines.vllm.api_server.server import ApiServer, configure

    monkeypatch.delenv("VLLM_MEDIA_CONNECTOR", raising=False)
    monkeypatch.setattr(ApiServer, "current", None)
    found = config(is_marked=False)
    found.model_config.get_multimodal_config().mm_processor_kwargs = options
    configure(found)
    assert ApiServer.current is not None
    assert ApiServer.current.clip_sizes == sizes


def test_threads_that_read_the_first_media_at_once_share_one_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """gRPC does not work on two event loops of one process."""
    from lm_adapter.engines.vllm.api_server import server

    threads = server.EncoderThreads()
    num_threads = 8
    together = threading.Barrier(num_threads)

    def slow_thread(*_: Any, **__: Any) -> object:
        time.sleep(0.05)  # as long as a thread takes to start
        return object()

    def ask(_: int) -> object:
        together.wait()
        geometry = Geometry("qwen3_5", 64, "float32", 0, 2, merges_time=False)
        return threads.get(Agreement(Settings(target="127.0.0.1:2"), geometry))

    monkeypatch.setattr(server, "EncoderThread", slow_thread)
    with ThreadPoolExecutor(num_threads) as pool:
        assert len(set(pool.map(ask, range(num_threads)))) == 1


@pytest.mark.parametrize(
    ("geometry", "grids", "shapes"),
    [
        (
            Geometry("qwen3_5", 64, "float32", 0, 2, merges_time=False),
            {"image_grid_thw": [[1, 4, 6]]},
            [(6, 64)],
        ),
        (
            Geometry("qwen3_vl", 64 * 4, "bfloat16", 3, 2, merges_time=False),
            {"video_grid_thw": [[5, 4, 6], [1, 2, 2]]},
            [(30, 256), (1, 256)],
        ),
        (Geometry("kimi_k25", 64, "float16", 0, 2, merges_time=True), {"grid_thws": [[3, 4, 6]]}, [(6, 64)]),
    ],
)
def test_memory_is_measured_with_rows_of_full_size(
    geometry: Geometry, grids: dict[str, Any], shapes: list[tuple[int, int]]
) -> None:
    """Where vLLM embeds its largest item, all levels of the rows take their memory."""
    model = object.__new__(getattr(models, QWEN))
    model.__dict__ |= {"_consumes_rows": True, "_geometry": geometry}
    found = model.embed_multimodal(**{name: torch.tensor(grid) for name, grid in grids.items()})
    assert [tuple(rows.shape) for rows in found] == shapes
    assert {str(rows.dtype) for rows in found} == {f"torch.{geometry.dtype}"}
    assert not any(rows.any() for rows in found)


def test_without_the_connector_all_is_vllms_own(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    from vllm.model_executor.models import qwen3_vl
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    from lm_adapter.engines.vllm.api_server.processor import factories

    monkeypatch.delenv("VLLM_MEDIA_CONNECTOR", raising=False)
    found = config(is_marked=False)
    found.ec_transfer_config = None
    MODELS_CONFIG_MAP[QWEN].verify_and_update_config(found)
    assert "VLLM_MEDIA_CONNECTOR" not in os.environ
    context = SimpleNamespace(get_mm_config=found.model_config.get_multimodal_config)
    *_, dummy_inputs = factories(qwen3_vl, "Qwen3VLForConditionalGeneration")
    built = dummy_inputs(SimpleNamespace(ctx=context))
    assert type(built) is qwen3_vl.Qwen3VLDummyInputsBuilder


def test_reasons_take_the_place_of_vllms_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """p32: and only where there is one."""
    from vllm.entrypoints.generate.base.serving import GenerateBaseServing
    from vllm.exceptions import GenerationError, VLLMValidationError

    from lm_adapter.engines.vllm.failures import listening, send_report
    from lm_adapter.errors import EncoderUnavailable, ItemFailed

    serving: Any = object.__new__(GenerateBaseServing)
    serving._raise_if_error("stop", "chatcmpl-1")
    with pytest.raises(GenerationError, match="Internal server error"):
        serving._raise_if_error("error", "chatcmpl-1")
    send_report(listening().name, "chatcmpl-1-0a1b2c3d", EncoderUnavailable("it is away"))
    with pytest.raises(GenerationError, match="UNAVAILABLE: it is away") as away:
        serving._raise_if_error("error", "chatcmpl-1")
    assert away.value.status_code == 503
    send_report(listening().name, "chatcmpl-2-0a1b2c3d", ItemFailed("no image", reason="X", status=3))
    with pytest.raises(VLLMValidationError, match="X: no image"):
        serving._raise_if_error("error", "chatcmpl-2")


def test_lora_adapters_load_without_their_part_of_the_tower(tmp_path: Path) -> None:
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    settings = {"r": 1, "lora_alpha": 1, "target_modules": ["q_proj", "qkv"], "peft_type": "LORA"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    modules = "language_model.layers.0.self_attn.q_proj", "visual.blocks.0.attn.qkv"
    tensors = {
        f"base_model.model.model.{name}.lora_{side}.weight": torch.ones(1, 1)
        for name in modules
        for side in "AB"
    }
    save_file(tensors, tmp_path / "adapter_model.safetensors")

    def load(skipped: list[str]) -> Any:
        helper = PEFTHelper.from_local_dir(str(tmp_path), max_position_embeddings=64)
        return LoRAModel.from_local_checkpoint(
            str(tmp_path), {"q_proj"}, helper, device="cpu", skip_prefixes=skipped
        )

    with pytest.raises(ValueError, match=r"attn\.qkv"):
        load([])
    (loaded,) = load(list(TOWER_PREFIXES)).loras
    assert loaded.endswith("q_proj")
    refusing = config()
    refusing.lora_config = SimpleNamespace(enable_tower_connector_lora=True)
    with pytest.raises(InvalidRequest, match="enable_tower_connector_lora"):
        check_model(refusing)


def test_a_model_that_is_not_served_does_not_start(tmp_path: Path) -> None:
    checkpoint = write_near_checkpoint(tmp_path / "model")
    vllm = VllmServer(checkpoint, "float32", {"target": "127.0.0.1:1"}, tmp_path)
    try:
        wait_until(lambda: not vllm.is_running, "the end of the start", START_S)
        served = ", ".join(ARCHITECTURES)
        assert f"vLLM does not start: the model is a {ARCHITECTURE}, image rows are for {served}" in vllm.log
    finally:
        vllm.stop()
