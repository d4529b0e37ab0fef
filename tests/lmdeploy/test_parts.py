"""Parts of the plugin over LMDeploy's own classes, without a server: handles of rows, versions, models."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import logging
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench.harness.engine_checkpoints import write_checkpoint
from bench.harness.processes import environment
from lm_adapter.engines.lmdeploy.interfaces import INTERFACES
from lm_adapter.engines.lmdeploy.module_map import CUSTOM_MODULE_MAP
from lm_adapter.engines.lmdeploy.rows_file import RowsFile, RowsHandle
from lm_adapter.engines.lmdeploy.settings import VARIABLE
from lm_adapter.errors import InvalidRequest
from lm_adapter.items import Grid
from lm_adapter.types import EncodedRows

pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]
WIDTH = 24


def encoded(num_rows: int, seed: int) -> EncodedRows:
    payload = np.random.default_rng(seed).integers(0, 255, num_rows * WIDTH * 2, dtype=np.uint8)
    return EncodedRows(b"k", b"d", Grid(1, 2, 2 * num_rows), num_rows, WIDTH, "bfloat16", 0, payload)


def bits(rows: torch.Tensor) -> bytes:
    return rows.contiguous().view(torch.uint8).numpy().tobytes()


def test_rows_arrive_by_their_handles_and_are_freed_with_the_request() -> None:
    given_back: list[bool] = []

    async def run() -> None:
        sent = [encoded(3, 0), encoded(7, 1)]
        file: RowsFile | None = RowsFile(sent, lambda: given_back.append(True))
        assert file is not None
        handles = file.write()
        file = None
        received: list[RowsHandle] = pickle.loads(pickle.dumps(handles))
        opened = [handle.open() for handle in received]
        assert [bits(one) for one in opened] == [one.raw().tobytes() for one in sent]
        assert [one.shape for one in opened] == [(3, WIDTH), (7, WIDTH)]
        assert not given_back
        handles.clear()
        gc.collect()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert given_back == [True]
        # Who has mapped the rows keeps them; who comes later gets an error, not other rows.
        assert bits(opened[0]) == sent[0].raw().tobytes()
        for handle in received:
            with pytest.raises(OSError, match=r"No such file|other content"):
                handle.open()

    asyncio.run(run())


def test_a_handle_whose_descriptor_is_another_file_by_now_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "other").open("wb") as other:
        other.write(bytes(1 << 16))
        other.flush()
        handle = RowsHandle(os.getpid(), other.fileno(), 1, 0, (3, WIDTH), "bfloat16")
        with pytest.raises(OSError, match="other content"):
            pickle.loads(pickle.dumps(handle)).open()


HOLDER = """
import asyncio, pickle, sys, time
from tests.lmdeploy.test_parts import encoded
from lm_adapter.engines.lmdeploy.module_map import CUSTOM_MODULE_MAP
from lm_adapter.engines.lmdeploy.rows_file import RowsFile

async def run():
    kept = RowsFile([encoded(300, 5)], lambda: None).write()
    sys.stdout.buffer.write(pickle.dumps(kept))
    sys.stdout.buffer.flush()
    time.sleep(600)

asyncio.run(run())
"""


def test_p13_nothing_is_left_of_a_process_that_is_killed() -> None:
    """Its handle is unpickled without an error, and opened with one."""
    holder = subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, env=environment())
    assert holder.stdout is not None
    data = os.read(holder.stdout.fileno(), 1 << 16)
    (handle,) = pickle.loads(data)
    assert bits(handle.open()) == encoded(300, 5).raw().tobytes()
    assert "/dev/shm/" not in Path(f"/proc/{holder.pid}/maps").read_text()
    holder.send_signal(signal.SIGKILL)
    holder.wait(30)
    holder.stdout.close()
    (handle,) = pickle.loads(data)
    with pytest.raises(OSError, match="No such file"):
        handle.open()


def test_p32_a_request_whose_rows_are_gone_ends_alone() -> None:
    """In the engine's process, before LMDeploy's scheduler gets it."""
    from lmdeploy.messages import ResponseType
    from lmdeploy.pytorch.engine.engine_instance import EngineInstance

    from lm_adapter.engines.lmdeploy import install

    install()
    handle = RowsHandle(os.getpid(), 1 << 20, 1, 0, (3, WIDTH), "bfloat16")

    async def run() -> list[Any]:
        outputs = EngineInstance.async_stream_infer(
            None, 1, input_ids=[1], multimodal=[{"pixel_values": handle}]
        )
        return [output.status async for output in outputs]

    assert asyncio.run(run()) == [ResponseType.INTERNAL_ENGINE_ERROR]


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


RANK = """
import pickle, sys
for config in pickle.loads(sys.stdin.buffer.read()):
    from lmdeploy.pytorch.models import patch
    patch.update_custom_module_map(config.custom_module_map)
    model = patch._get_model_class(config.hf_config, patch._get_module_map())
    print(model.__module__, model.__name__)
"""
"""What an actor of Ray does with the configuration that it gets; it has not imported the plugin."""


def test_ranks_in_other_processes_find_the_classes_without_towers(tmp_path: Path) -> None:
    from lmdeploy.pytorch.config import ModelConfig

    from lm_adapter.engines.lmdeploy import install

    install()
    families = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "kimi_k25")
    checkpoints = [write_checkpoint(tmp_path / family, family) for family in families]
    configs = [ModelConfig.from_pretrained(str(checkpoint)) for checkpoint in checkpoints]
    ended = subprocess.run(
        [sys.executable, "-c", RANK], env=environment(), input=pickle.dumps(configs),
        capture_output=True, timeout=200, check=False,
    )  # fmt: skip
    names = [config.hf_config.architectures[0] for config in configs]
    assert set(names) == set(CUSTOM_MODULE_MAP)
    lines = [f"lm_adapter.engines.lmdeploy.models {name}" for name in names]
    assert ended.stdout.decode().splitlines()[-len(lines) :] == lines, ended.stderr.decode()


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
