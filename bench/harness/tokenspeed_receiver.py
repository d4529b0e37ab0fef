"""TokenSpeed's prefill worker on a CPU: its own receiver of rows, behind stand-ins of its workers.

A process: ``python -m bench.harness.tokenspeed_receiver CONFIG``. CONFIG is JSON: ``folder`` for received
rows, one file ROOM.npy for each, and ``workers``, each with ``port``, ``role``, ``model`` and ``width``,
``levels`` of rows.

TokenSpeed's kernels and its build of Mooncake need a GPU. Its receiver uses neither, but its modules import
them: stand-ins take their place.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import os
import sys
import threading
import time
import types
from collections.abc import Sequence
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from vision_encoder.tokenspeed import common_pb2 as common
from vision_encoder.tokenspeed import tokenspeed_scheduler_pb2 as scheduler

PACKAGES = ("tokenspeed_kernel", "tokenspeed_triton")
POOL_ROWS = 1 << 15
WAIT_S = 20.0


class Anything:
    """Stands for a function, a class or a value, whichever the importing module makes of it."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __getattr__(self, name: str) -> Anything:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()

    def __call__(self, *arguments: Any, **named: object) -> Any:
        is_decorator = len(arguments) == 1 and callable(arguments[0]) and not named
        return arguments[0] if is_decorator else Anything()

    def __bool__(self) -> bool:
        return False

    def __iter__(self) -> Any:
        return iter(())

    def __or__(self, _: object) -> Anything:
        return Anything()

    __ror__ = __and__ = __getitem__ = __or__

    def __mro_entries__(self, _: object) -> tuple[type, ...]:
        return (object,)


class StandIn(types.ModuleType):
    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Anything:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, path: object = None, target: object = None) -> Any:
        if fullname.partition(".")[0] not in PACKAGES:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None: ...


class Receiver:
    """TokenSpeed's receiver with memory for rows of one model."""

    def __init__(self, width: int, levels: int) -> None:
        from tokenspeed.runtime.epd.entities import EmbeddingArgs, EmbeddingManagerArgs
        from tokenspeed.runtime.epd.mooncake.prefill import MooncakeEmbeddingManagerPrefill

        self.main = np.zeros((POOL_ROWS, width), np.uint16)
        self.deepstack = np.zeros((POOL_ROWS, width * levels), np.uint16)
        self._next = 0
        self._lock = threading.Lock()
        self._manager = MooncakeEmbeddingManagerPrefill(
            EmbeddingManagerArgs(bootstrap_port=0, tp_size=1),
            EmbeddingArgs(
                engine_rank=0,
                gpu_id=0,
                ib_device=None,
                embedding_data_ptr=self.main.ctypes.data,
                embedding_data_len=self.main.nbytes,
                deepstack_data_ptr=self.deepstack.ctypes.data if levels else 0,
                deepstack_data_len=self.deepstack.nbytes,
            ),
        )

    def receive(self, info: Any, num_rows: int) -> np.ndarray[Any, Any]:
        """Bits of bfloat16 rows [R, D * (1 + L)]. Raises RuntimeError for a transfer that failed."""
        from tokenspeed.runtime.epd.mooncake.receiver import MooncakeEmbeddingReceiver
        from tokenspeed.runtime.pd.base.status import TransferPoll

        width = self.main.shape[1]
        with self._lock:
            first = self._next
            self._next += num_rows
            assert self._next <= POOL_ROWS
            address = f"{info.bootstrap_host}:{info.bootstrap_port}"
            receiver = MooncakeEmbeddingReceiver(self._manager, address, info.bootstrap_room)
            if receiver.poll() == TransferPoll.Failed:
                raise RuntimeError(self._manager.failure_records[info.bootstrap_room])
            receiver.pre_alloc(
                dst_embedding_ptr=self.main[first:].ctypes.data,
                n_tokens=num_rows,
                hidden=width,
                dtype="torch.bfloat16",
                dst_deepstack_ptr=self.deepstack[first:].ctypes.data if self.deepstack.size else 0,
                has_deepstack=self.deepstack.size > 0,
                row_start=0,
                span=num_rows,
            )
        ends_s = time.monotonic() + WAIT_S
        while (status := receiver.poll()) not in (TransferPoll.Success, TransferPoll.Failed):
            if time.monotonic() > ends_s:
                raise RuntimeError("no status came")
            time.sleep(0.001)
        if status == TransferPoll.Failed:
            raise RuntimeError("the encoder failed")
        rows = slice(first, first + num_rows)
        return np.concatenate([self.main[rows], self.deepstack[rows]], axis=1)


class Worker:
    """What the gateway asks of a prefill or a decode worker."""

    def __init__(self, role: str, model: Path, receiver: Receiver | None, folder: Path) -> None:
        self._role, self._model, self._receiver, self._folder = role, model, receiver, folder
        self._config = json.loads((model / "config.json").read_text())

    def health(self, _: object, __: object) -> scheduler.HealthCheckResponse:
        return scheduler.HealthCheckResponse(healthy=True)

    def model_info(self, _: object, __: object) -> scheduler.GetModelInfoResponse:
        text = self._config["text_config"]
        return scheduler.GetModelInfoResponse(
            model_path=str(self._model),
            tokenizer_path=str(self._model),
            served_model_name=self._model.name,
            model_type=self._config["model_type"],
            architectures=self._config["architectures"],
            max_context_length=65536,
            max_req_input_len=65536,
            vocab_size=text["vocab_size"],
            eos_token_ids=[text["eos_token_id"]],
            supports_vision=True,
            supports_multimodal=True,
            supported_modalities=[common.IMAGE, common.VIDEO],
            model_dtype="bfloat16",
            multimodal_encoder_dtype="bfloat16",
        )

    def server_info(self, _: object, __: object) -> scheduler.GetServerInfoResponse:
        answer = scheduler.GetServerInfoResponse(max_total_num_tokens=65536)
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        found = {
            "disaggregation_mode": self._role,
            "model_path": str(self._model),
            "shm_namespace_id": f"{boot_id}:{os.stat('/dev/shm').st_dev}",
        }
        answer.server_args.update(found)
        answer.scheduler_info.update(found)
        return answer

    def loads(self, _: object, __: object) -> scheduler.GetLoadsResponse:
        return scheduler.GetLoadsResponse(dp_rank_count=1)

    def abort(self, _: object, __: object) -> scheduler.AbortResponse:
        return scheduler.AbortResponse(success=True)

    def generate(self, request: scheduler.GenerateRequest, context: grpc.ServicerContext) -> Any:
        context.send_initial_metadata(())  # the gateway waits three seconds for a sign of life
        if self._receiver is not None:
            for info in request.encode_bootstrap_info.items:
                places = request.mm_inputs.items[info.item_index].placeholders
                try:
                    rows = self._receiver.receive(info, sum(place.length for place in places))
                except RuntimeError as error:
                    context.abort(grpc.StatusCode.ABORTED, f"room {info.bootstrap_room}: {error}")
                part = self._folder / f"{info.bootstrap_room}.part.npy"
                np.save(part, rows)
                part.rename(self._folder / f"{info.bootstrap_room}.npy")
        done = scheduler.GenerateComplete(output_ids=[70], finish_reason="stop", prompt_tokens=1)
        yield scheduler.GenerateResponse(request_id=request.request_id, complete=done)

    def serve(self, port: int) -> grpc.Server:
        unary = (
            ("HealthCheck", self.health, scheduler.HealthCheckRequest),
            ("GetModelInfo", self.model_info, scheduler.GetModelInfoRequest),
            ("GetServerInfo", self.server_info, scheduler.GetServerInfoRequest),
            ("GetLoads", self.loads, scheduler.GetLoadsRequest),
            ("Abort", self.abort, scheduler.AbortRequest),
        )
        handlers: dict[str, Any] = {
            name: grpc.unary_unary_rpc_method_handler(
                answer, request.FromString, lambda message: message.SerializeToString()
            )
            for name, answer, request in unary
        }
        handlers["Generate"] = grpc.unary_stream_rpc_method_handler(
            self.generate,
            scheduler.GenerateRequest.FromString,
            lambda message: message.SerializeToString(),
        )
        server = grpc.server(futures.ThreadPoolExecutor(96))
        service = "tokenspeed.grpc.scheduler.TokenSpeedScheduler"
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
        assert server.add_insecure_port(f"127.0.0.1:{port}") == port
        server.start()
        return server


def main(arguments: Sequence[str]) -> None:
    config = json.loads(Path(arguments[1]).read_text())
    sys.meta_path.insert(0, Finder())
    import mooncake.engine

    class Engine(mooncake.engine.TransferEngine):
        """With a method of TokenSpeed's build, which the receiver looks for and does not call."""

        batch_transfer_sync_write_pages = None

    mooncake.engine.TransferEngine = Engine
    servers = [
        Worker(
            each["role"],
            Path(each["model"]),
            Receiver(each["width"], each["levels"]) if each["role"] == "prefill" else None,
            Path(config["folder"]),
        ).serve(each["port"])
        for each in config["workers"]
    ]
    print("ready", flush=True)
    for server in servers:
        server.wait_for_termination()


if __name__ == "__main__":
    main(sys.argv)
