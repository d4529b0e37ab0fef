"""The part of vLLM that its connector's methods rely on: configuration, requests, and the order of calls."""

from __future__ import annotations

import pickle
import time
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from lm_adapter.engines import vllm_connector
from lm_adapter.engines.vllm_connector import ConnectorMethods
from lm_adapter.engines.vllm_items import Geometry, transfer_params
from lm_adapter.items import Grid

PATIENCE_S = 30.0
BUSY = SimpleNamespace(total_num_scheduled_tokens=1)


class Base:
    """vLLM's connector base class."""

    def __init__(self, vllm_config: Any, role: Any) -> None:
        self._vllm_config = vllm_config


def engine_config(
    target: str,
    backend: str,
    role: str = "ec_consumer",
    *,
    hf_config: Mapping[str, Any] | None = None,
    dtype: str = "float32",
    device: torch.device | str = "cpu",
    **extra: Any,
) -> Any:
    """hf_config: of the model; by default a small Qwen3-VL with rows of 4 * 32 elements. extra: of
    ``ec_connector_extra_config``."""
    config = hf_config or {
        "model_type": "qwen3_vl",
        "image_token_id": 5,
        "vision_config": {"spatial_merge_size": 2, "deepstack_visual_indexes": [1, 2, 3]},
        "text_config": {"hidden_size": 32},
    }
    text = SimpleNamespace(**config["text_config"])
    return SimpleNamespace(
        ec_transfer_config=SimpleNamespace(
            is_ec_producer=role != "ec_consumer",
            ec_role=role,
            ec_connector_extra_config={"target": target, **extra},
        ),
        model_config=SimpleNamespace(
            hf_config=SimpleNamespace(to_dict=lambda: config, get_text_config=lambda: text),
            dtype=f"torch.{dtype}",
        ),
        device_config=SimpleNamespace(device=torch.device(device)),
        parallel_config=SimpleNamespace(distributed_executor_backend=backend),
    )


class Engine:
    """Both halves of the connector in one process, as vLLM calls them. backend: with ``uni`` the metadata
    reaches the worker as it is, with ``mp`` through a pickle."""

    def __init__(self, config: Any) -> None:
        connector: Any = type("Connector", (ConnectorMethods, Base), {})
        self.backend = config.parallel_config.distributed_executor_backend
        self.geometry = Geometry.of_model(config.model_config)
        with mock.patch.object(vllm_connector, "check_model", return_value=False):
            self.scheduler = connector(config, SimpleNamespace(name="SCHEDULER"))
            self.worker = connector(config, SimpleNamespace(name="WORKER"))
        self.encoder_cache: dict[str, torch.Tensor] = {}

    def request(self, name: str, items: Sequence[tuple[bytes, Grid]]) -> Any:
        """Images whose identifiers are their keys."""
        features, offset = [], 2
        for key, grid in items:
            num_rows = self.geometry.num_rows(grid)
            position = SimpleNamespace(
                offset=offset, length=num_rows, get_num_embeds=lambda num_rows=num_rows: num_rows
            )
            features.append(SimpleNamespace(identifier=key.hex(), mm_position=position, data=None))
            offset += num_rows + 2
        return SimpleNamespace(
            request_id=name, mm_features=features, ec_transfer_params=transfer_params(items)
        )

    def fetch(self, request: Any) -> None:
        """Waits until vLLM may schedule the request."""
        deadline = time.monotonic() + PATIENCE_S
        while not self.scheduler.ensure_cache_available(request, 0):
            assert time.monotonic() < deadline
            assert self.scheduler.take_unavailable_requests() == set()
            time.sleep(0.001)

    def schedule(self, request: Any) -> Any:
        """The metadata of one step with every feature of the request, as the worker gets it."""
        for index in range(len(request.mm_features)):
            self.scheduler.update_state_after_alloc(request, index)
        step = self.scheduler.build_connector_meta(BUSY)
        return step if self.backend == "uni" else pickle.loads(pickle.dumps(step, protocol=5))

    def load(self, step: Any) -> None:
        """Rows of the step into the encoder cache."""
        self.worker._connector_metadata = step
        self.worker.start_load_caches(self.encoder_cache)

    def finish(self, request: Any) -> None:
        """vLLM has computed past every feature."""
        for index in range(len(request.mm_features)):
            self.scheduler.update_state_after_free(request, index)
        assert self.scheduler.request_finished(request) == (False, None)

    def close(self) -> None:
        self.scheduler.shutdown()
        self.worker.shutdown()
