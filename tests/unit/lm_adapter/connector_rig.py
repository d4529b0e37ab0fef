"""A whole engine without vLLM: both halves of its connector, and what they read of vLLM.

Owns vLLM's configuration, requests, the order of calls and the transfer of a step's metadata. The halves, the
socket between them and their clients are real."""

from __future__ import annotations

import pickle
import secrets
from collections import UserDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace
from typing import Any, NamedTuple, Self
from unittest import mock

import torch

from bench.harness.waiting import PATIENCE_S, wait_until
from lm_adapter.engines.shared.geometry import Geometry
from lm_adapter.engines.vllm import connector as connector_module
from lm_adapter.engines.vllm.connector import ConnectorMethods
from lm_adapter.engines.vllm.failures import listening
from lm_adapter.engines.vllm.file_items import FILE_FIELD, GRID_FIELDS, FileItem
from lm_adapter.engines.vllm.step_rows import StepRows
from lm_adapter.engines.vllm.worker.ranks import RankReader
from lm_adapter.items import Grid
from lm_adapter.keys import content_digest

BUSY = SimpleNamespace(
    total_num_scheduled_tokens=1,
    scheduled_encoder_inputs={},
    free_encoder_mm_hashes=[],
    num_scheduled_tokens={},
)


class Base:
    """vLLM's connector base class."""

    def __init__(self, vllm_config: Any, role: Any) -> None:
        self._vllm_config = vllm_config

    def bind_connector_metadata(self, metadata: StepRows | None) -> None:
        self._connector_metadata = metadata


class Connector(ConnectorMethods, Base):
    """As ``lm_adapter.engines.vllm`` joins it."""


class Image(NamedTuple):
    """grid: of the prompt."""

    data: bytes
    grid: Grid

    @property
    def digest(self) -> bytes:
        return content_digest(self.data)

    @property
    def identifier(self) -> str:
        return self.digest.hex()


class Element(NamedTuple):
    """vLLM's MultiModalFieldElem."""

    data: torch.Tensor


class Fields(UserDict[str, Element]):
    """vLLM's MultiModalKwargsItem."""


@dataclass(frozen=True)
class Position:
    """vLLM's PlaceholderRange. num_text: of the tokens those that are not the item's rows."""

    offset: int
    length: int
    num_text: int = 0

    def get_num_embeds(self) -> int:
        return self.length - self.num_text


@dataclass
class Feature:
    """vLLM's MultiModalFeatureSpec."""

    data: Fields | None
    modality: str
    identifier: str
    mm_position: Position


class RequestStatus(Enum):
    WAITING = "waiting"
    WAITING_FOR_REMOTE_KVS = "waiting for remote kvs"
    RUNNING = "running"
    PREEMPTED = "preempted"


@dataclass(eq=False)
class Request:
    mm_features: list[Any]
    """Of ``Feature``."""
    request_id: str = field(default_factory=lambda: f"request-{secrets.token_hex(8)}")
    status: Enum = RequestStatus.WAITING
    num_computed_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        """Two tokens of text are behind the last feature."""
        last: Position = self.mm_features[-1].mm_position
        return last.offset + last.length + 2


def engine_config(
    target: str,
    *,
    num_ranks: int = 1,
    role: str = "ec_consumer",
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
            engine_id=secrets.token_hex(8),
            is_ec_producer=role != "ec_consumer",
            ec_role=role,
            ec_connector_extra_config={"target": target, **extra},
        ),
        ec_manager_config=SimpleNamespace(encoder_cache_manager_cls=None, manager_config={}),
        model_config=SimpleNamespace(
            hf_config=SimpleNamespace(to_dict=lambda: config, get_text_config=lambda: text),
            dtype=f"torch.{dtype}",
        ),
        device_config=SimpleNamespace(device=torch.device(device)),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=num_ranks,
            prefill_context_parallel_size=1,
            data_parallel_index=0,
            data_parallel_size=1,
        ),
        max_concurrent_batches=1,
        scheduler_config=SimpleNamespace(max_num_batched_tokens=8192),
        num_prefill_lookahead_tokens=0,
    )


class Engine:
    """The scheduler's half and one worker half for each rank, in this process. A context manager. caches:
    vLLM's encoder cache of each worker."""

    def __init__(self, config: Any, *, num_workers: int | None = None) -> None:
        """num_workers: that start at once; by default as many as the configuration has ranks."""
        self.config = config
        self.geometry = Geometry.of_model(config.model_config)
        self.workers: list[Any] = []
        self.caches: list[dict[str, torch.Tensor]] = []
        self.scheduler: Any = self._half("SCHEDULER", config)
        num_ranks = config.parallel_config.tensor_parallel_size
        for _ in range(num_ranks if num_workers is None else num_workers):
            self.start_worker()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def start_worker(self, **changes: Any) -> None:
        """changes: of this worker's ``ec_connector_extra_config``."""
        transfer = self.config.ec_transfer_config
        extra = {**transfer.ec_connector_extra_config, **changes}
        own = SimpleNamespace(**{**vars(transfer), "ec_connector_extra_config": extra})
        self.workers.append(
            self._half("WORKER", SimpleNamespace(**{**vars(self.config), "ec_transfer_config": own}))
        )
        self.caches.append({})

    @property
    def readers(self) -> list[RankReader]:
        return [worker.reader for worker in self.workers]

    def request(self, *images: Image) -> Request:
        """As vLLM's scheduler gets it: two tokens of text before each image."""
        features, offset = [], 2
        for image in images:
            packed = FileItem(image.data, image.digest, reply=listening().name).packed()
            data = Fields(
                {
                    GRID_FIELDS[0]: Element(torch.tensor([image.grid])),
                    FILE_FIELD: Element(torch.from_numpy(packed)),
                }
            )
            num_rows = self.geometry.num_rows(image.grid)
            features.append(Feature(data, "image", image.identifier, Position(offset, num_rows)))
            offset += num_rows + 2
        return Request(features)

    def is_ready(self, request: Request) -> bool:
        """Whether vLLM may schedule the request."""
        return bool(self.scheduler.ensure_cache_available(request, 0))

    def fetch(self, request: Request) -> None:
        """Waits until the request is ready."""

        def is_ready() -> bool:
            ready = self.is_ready(request)
            assert self.scheduler.take_unavailable_requests() == set(), listening().take(request.request_id)
            return ready

        wait_until(is_ready, "the rows")

    def failure(self, request: Request, timeout_s: float = PATIENCE_S) -> str:
        """Waits until the request is rejected. Returns reason and message, as the API server gets them."""
        rejected: set[str] = set()

        def is_rejected() -> bool:
            assert not self.is_ready(request)
            rejected.update(self.scheduler.take_unavailable_requests())
            return bool(rejected)

        wait_until(is_rejected, "the rejection", timeout_s)
        assert rejected == {request.request_id}
        report = listening().take(request.request_id)
        assert report is not None
        self.scheduler.request_finished(request)
        return report[1]

    def schedule(self, *requests: Request) -> StepRows:
        """The metadata of one step with every feature of the requests, as other processes get it."""
        for request in requests:
            for index in range(len(request.mm_features)):
                self.scheduler.update_state_after_alloc(request, index)
        step = self.scheduler.build_connector_meta(BUSY)
        found: StepRows = pickle.loads(pickle.dumps(step, protocol=5))
        return found

    def load(self, step: StepRows) -> None:
        """The step begins in every worker: rows go into their encoder caches."""
        for worker, cache in zip(self.workers, self.caches, strict=True):
            worker.bind_connector_metadata(step)
            worker.start_load_caches(cache)

    def finish(self, request: Request) -> None:
        """vLLM has computed past every feature."""
        for index in range(len(request.mm_features)):
            self.scheduler.update_state_after_free(request, index)
        assert self.scheduler.request_finished(request) == (False, None)

    def wait_empty(self, timeout_s: float = PATIENCE_S) -> None:
        """Waits until no rank reads or holds rows, after one more step. All requests are over."""
        assert self.scheduler.take_unavailable_requests() == set()
        self.load(self.schedule())
        assert self.scheduler.tracker.used_bytes == 0

        def is_empty() -> bool:
            return not any(reader.is_reading or reader.rows for reader in self.readers)

        wait_until(is_empty, "the drops", timeout_s)

    def close(self) -> None:
        for half in (self.scheduler, *self.workers):
            half.shutdown()

    def _half(self, name: str, config: Any) -> Any:
        with (
            mock.patch.object(connector_module, "check_model"),
            mock.patch.object(connector_module, "computes_embeddings", return_value=True),
        ):
            return Connector(config, SimpleNamespace(name=name))
