"""SMG's gateway, encoders and a prefill worker as processes, and what the gateway sends to an encoder."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent import futures
from pathlib import Path
from typing import Any, NamedTuple, Self

import grpc
import httpx
import numpy as np
import torch
from PIL import Image

from bench.harness.ports import free_port
from bench.harness.processes import ROOT, Process, answers, data_url
from bench.harness.waiting import PATIENCE_S, wait_until
from encoder_service.types import Grid
from vision_encoder.tokenspeed import tokenspeed_encoder_pb2 as encoder

DOCUMENT = ROOT / "docs" / "tokenspeed.md"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
SHM = Path("/dev/shm")
UNLIMITED = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)


def documented(beginning: str, replaced: Mapping[str, str]) -> list[str]:
    """The command of docs/tokenspeed.md that begins so, as a shell would take it, with other values."""
    command: str = next(block for block in blocks("console") if block.startswith(beginning))
    for old, new in replaced.items():
        assert old in command, f"{beginning} has no {old} in {DOCUMENT}"
        command = command.replace(old, new)
    return shlex.split(command.replace("\\\n", " "))


class Sent(NamedTuple):
    """An item as the gateway sent it. via: inline or shm."""

    pixels: torch.Tensor
    grid: Grid
    via: str
    encoder: int


class Recorder:
    """Passes the gateway's calls on to an encoder, and keeps the items by their rooms."""

    def __init__(self, index: int, target: str, sent: dict[int, Sent]) -> None:
        self._index, self._sent = index, sent
        self._channel = grpc.insecure_channel(target, UNLIMITED)
        self._server = grpc.server(futures.ThreadPoolExecutor(96), options=UNLIMITED)
        self._server.add_generic_rpc_handlers((_Handler(self),))
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()

    def stop(self) -> None:
        self._server.stop(0)
        self._channel.close()

    def pass_on(self, method: str, request: bytes, context: grpc.ServicerContext) -> bytes:
        if method.endswith("/Encode"):
            self._keep(encoder.EncodeRequest.FromString(request))
        try:
            call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = self._channel.unary_unary(method)
            return call(request, timeout=PATIENCE_S)
        except grpc.RpcError as error:
            context.abort(error.code(), error.details() or "")
            raise

    def _keep(self, request: encoder.EncodeRequest) -> None:
        (item,), (room,) = request.mm_inputs.items, (each.bootstrap_room for each in request.items)
        tensor, via = item.encoder_input, item.encoder_input.WhichOneof("payload") or ""
        data = tensor.inline
        if via == "shm":
            with (SHM / tensor.shm.name.lstrip("/")).open("rb") as file:
                file.seek(tensor.shm.offset)
                data = file.read(tensor.shm.nbytes)
        pixels = torch.frombuffer(bytearray(data), dtype=DTYPES[tensor.dtype]).reshape(tuple(tensor.shape))
        names = ("image_grid_thw", "video_grid_thw", "grid_thws")
        grid = next(tensor for name, tensor in item.model_specific_tensors.items() if name in names)
        self._sent[room] = Sent(pixels, Grid(*np.frombuffer(grid.inline, "<i8").tolist()), via, self._index)


class _Handler(grpc.GenericRpcHandler):
    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        method = details.method
        if not method.startswith("/tokenspeed."):
            return None
        return grpc.unary_unary_rpc_method_handler(
            lambda request, context: self._recorder.pass_on(method, request, context)
        )


class Encoder:
    """The service as an encode worker, by the document's command."""

    def __init__(self, checkpoint: Path, dtype: str, log: Path) -> None:
        self.port, self.bootstrap_port = free_port(), free_port(2)
        self.admin = f"http://127.0.0.1:{free_port()}"
        replaced = {
            "MODEL": str(checkpoint),
            "NAME": checkpoint.name,
            "127.0.0.1:32000": f"127.0.0.1:{self.port}",
        }
        self._process = Process(
            [
                *("-m", "encoder_service", *documented("vision-encoder serve", replaced)[1:]),
                *(
                    "--dtype",
                    dtype,
                    "--listen",
                    "127.0.0.1:0",
                    "--admin-listen",
                    self.admin.removeprefix("http://"),
                ),
            ],
            log,
            {**ENVIRONMENT, "VE_TOKENSPEED_BOOTSTRAP_PORT": str(self.bootstrap_port)},
        )

    def wait_ready(self) -> None:
        self._process.wait_for(lambda: answers(f"{self.admin}/readyz"), "an encoder")

    @property
    def is_running(self) -> bool:
        return self._process.is_running

    def metric(self, line: str) -> float:
        text = httpx.get(f"{self.admin}/metrics", timeout=PATIENCE_S).text
        return sum(float(found.rpartition(" ")[2]) for found in text.splitlines() if found.startswith(line))

    def kill(self) -> None:
        self._process.kill()


class ReceivingEngine:
    """A process with Mooncake's engine and memory that rows may be written to; ``session`` and ``memory`` are
    where."""

    SCRIPT = """
import sys
import numpy as np
from mooncake.engine import TransferEngine

memory, engine = np.zeros(1 << 20, np.uint8), TransferEngine()
assert not engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "")
assert not engine.register_memory(memory.ctypes.data, memory.nbytes)
print(f"127.0.0.1:{engine.get_rpc_port()}", memory.ctypes.data, flush=True)
sys.stdin.read()
"""

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-c", self.SCRIPT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.session, address = self._process.stdout.readline().split()
        self.memory = int(address).to_bytes(8, "little")
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate(timeout=PATIENCE_S)


class PrefillWorker:
    """Stand-ins of TokenSpeed's prefill and decode workers with its own receiver (``receiver``)."""

    def __init__(self, checkpoints: Mapping[str, Path], folder: Path) -> None:
        self.folder = folder
        self.ports = {family: (free_port(), free_port()) for family in checkpoints}
        workers = []
        for family, checkpoint in checkpoints.items():
            config = json.loads((checkpoint / "config.json").read_text())
            levels = len(config["vision_config"].get("deepstack_visual_indexes") or ())
            width = config["text_config"]["hidden_size"]
            for role, port in zip(("prefill", "decode"), self.ports[family], strict=True):
                model = {"model": str(checkpoint), "width": width, "levels": levels}
                workers.append({"role": role, "port": port, **model})
        path = folder / "config.json"
        path.write_text(json.dumps({"folder": str(folder), "workers": workers}))
        self._process = Process(
            ["-m", "bench.harness.tokenspeed_receiver", str(path)],
            folder / "prefill.log",
            # The receiver asks Mooncake for RDMA.
            {**ENVIRONMENT, "MC_FORCE_TCP": "1", "HF_HUB_OFFLINE": "1"},
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()

    def wait_ready(self) -> None:
        self._process.wait_for(lambda: "ready" in self._process.tail(), "the prefill worker")

    def rows(self, room: int) -> torch.Tensor:
        """What the receiver got, as bfloat16."""
        path = self.folder / f"{room}.npy"
        wait_until(path.exists, f"the rows of room {room}")
        return torch.from_numpy(np.load(path)).view(torch.bfloat16)


class Gateway:
    """SMG's gateway of one model. sent: what it has sent to encoders, by room."""

    def __init__(
        self,
        family: str,
        checkpoint: Path,
        way: str,
        encoders: Sequence[Encoder],
        prefill: PrefillWorker,
        log: Path,
    ) -> None:
        """way: how it sends pixels, as its option names it."""
        self.sent: dict[int, Sent] = {}
        self.encoders = list(encoders)
        self.recorders = [
            Recorder(index, f"127.0.0.1:{each.port}", self.sent) for index, each in enumerate(encoders)
        ]
        self._family, self._checkpoint, self._way = family, checkpoint, way
        self._prefill, self._log = prefill, log
        self.url = f"http://127.0.0.1:{free_port()}"
        self._process: Process | None = None
        self._lock = threading.Lock()

    def start(self) -> None:
        prefill_port, decode_port = self._prefill.ports[self._family]
        command = documented(
            "python -m smg.launch_router",
            {
                "MODEL": str(self._checkpoint),
                "grpc://PREFILL:32001": f"grpc://127.0.0.1:{prefill_port}",
                "grpc://DECODE:32002": f"grpc://127.0.0.1:{decode_port}",
                "auto": self._way,
                "--port 30000": f"--port {self.url.rpartition(':')[2]}",
            },
        )
        index = command.index("--encode")
        urls = [
            word
            for recorder, each in zip(self.recorders, self.encoders, strict=True)
            for word in ("--encode", f"grpc://127.0.0.1:{recorder.port}", str(each.bootstrap_port))
        ]
        command[index : index + 3] = urls
        self._process = Process(
            [
                *(*command[1:], "--host", "127.0.0.1", "--prometheus-port", str(free_port())),
                # By default three; a worker on a loaded machine says nothing for longer.
                *("--worker-wedge-secs", "60"),
            ],
            self._log,
            ENVIRONMENT,
        )

    def wait_ready(self) -> None:
        assert self._process is not None
        self._process.wait_for(lambda: answers(f"{self.url}/readiness") and self._has_workers(), "SMG")

    def _has_workers(self) -> bool:
        workers = httpx.get(f"{self.url}/workers", timeout=PATIENCE_S).json()
        return len(workers["workers"]) == len(self.encoders) + 2

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
        for recorder in self.recorders:
            recorder.stop()

    def ask(self, *media: bytes) -> httpx.Response:
        """One user turn with images (JPEG) and clips (MP4)."""
        parts = [
            {"type": "video_url", "video_url": {"url": data_url(each, "video/mp4")}}
            if each[4:8] == b"ftyp"
            else {"type": "image_url", "image_url": {"url": data_url(each, "image/jpeg")}}
            for each in media
        ]
        content = [*parts, {"type": "text", "text": "What is it?"}]
        body: dict[str, Any] = {
            "model": self._checkpoint.name,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": 4,
        }
        return httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=PATIENCE_S)

    def rooms_of(self, *media: bytes) -> list[int]:
        """The rooms of a request that has to succeed; no other is running."""
        before = set(self.sent)
        response = self.ask(*media)
        assert response.status_code == 200, response.text
        return [room for room in self.sent if room not in before]


def jpeg(seed: int, width: int = 224, height: int = 160) -> bytes:
    """Smooth random colours."""
    small = np.random.default_rng(seed).integers(0, 255, (height // 16, width // 16, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC).save(out, "JPEG", quality=90)
    return out.getvalue()
