"""vLLM and an encoder beside it as processes, started by the commands of docs/vllm.md."""

from __future__ import annotations

import functools
import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from bench.harness.ports import free_port
from bench.harness.processes import ROOT, Process, Restartable, answers, documented_in
from bench.harness.waiting import PATIENCE_S
from lm_adapter import DeadlineExceeded, VisionEncoderClient

DOCUMENT = ROOT / "docs" / "vllm.md"
# Of one rank on the CPU; imports are the longest part of a start, and forks do not repeat them.
VLLM_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    # Compiling the ranks of log-probabilities takes each server ten seconds at its first answer.
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_CACHE_ROOT": str(ROOT / "build" / "vllm-cache"),
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    # It has paths that empty its caches.
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "fork",
}
GPU_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}

documented = functools.partial(documented_in, DOCUMENT)


@dataclass(frozen=True)
class Command:
    """A command of the document that starts vLLM with the plugin. side_port: where a KV connector's peers ask
    for its addresses."""

    beginning: str
    port: str
    side_port: str | None = None


ALONE = Command("vllm serve", "8000")
PREFILL = Command("VLLM_NIXL_SIDE_CHANNEL_PORT=5600 vllm serve", "8100", "5600")
DECODE = Command("VLLM_NIXL_SIDE_CHANNEL_PORT=5601 vllm serve", "8200", "5601")


class Encoder(Restartable):
    """The service on a port that stays the same. ``with_broker`` decides at each start."""

    def __init__(
        self,
        checkpoint: Path,
        dtype: str | None,
        folder: Path,
        *,
        device: str = "cpu",
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """dtype: None runs the document's command without a further option. variables: further ones of its
        environment."""
        self.port = free_port()
        self.target = f"127.0.0.1:{self.port}"
        self.admin = f"127.0.0.1:{free_port()}"
        self._variables = dict(variables or {})
        # A socket's name has a short limit, which pytest's folders exceed.
        self._socket_folder = tempfile.TemporaryDirectory(prefix="ve-eng-")
        self.broker_path = f"{self._socket_folder.name}/broker.sock"
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._device = device
        super().__init__(folder / "encoder.log")

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._socket_folder.cleanup()

    def start(self, *, with_broker: bool = True) -> None:
        command = documented(
            "vision-encoder serve", {"MODEL": str(self._checkpoint), "127.0.0.1:50051": self.target}
        )
        if self._dtype is not None:
            command += ["--device", self._device, "--dtype", self._dtype]
            command += ["--broker-path", self.broker_path if with_broker else ""]
            if with_broker and self._device == "cpu":
                command += ["--arena-bytes", str(64 << 20)]
        variables = self._variables | {"VE_ADMIN_LISTEN": self.admin}
        if self._device == "cpu":
            variables["OMP_NUM_THREADS"] = "1"
        self.run(["-m", "encoder_service", *command[1:]], variables, self._is_ready, "the encoder")

    def num_asked(self) -> int:
        """Calls since its start that name an image or a clip."""
        return self._total(r'requests_total{method="(?:Encode|Prefetch|Fetch)".*}')

    def num_prefetches(self) -> int:
        """Calls since its start that send images or clips ahead."""
        return self._total(r'requests_total{method="Prefetch".*}')

    def num_encoded(self) -> int:
        """Images and clips through the tower, since its start."""
        return self._total("encoded_items_total")

    def num_read(self) -> int:
        """Images and clips that readers reported to have read from shared memory, since its start."""
        return self._total("directory_reads_total")

    def num_inline(self) -> int:
        """Images and clips whose rows were sent by gRPC, since its start."""
        return self._total('deliveries_total{transport="inline"}')

    def num_failed(self) -> int:
        """Failures of items and calls, since its start."""
        return self._total(r"item_failures_total{.*}") + self._total(r"call_failures_total{.*}")

    def _total(self, pattern: str) -> int:
        text = httpx.get(f"http://{self.admin}/metrics", timeout=PATIENCE_S).text
        values = re.findall(rf"^ve_{pattern} (.*)$", text, re.MULTILINE)
        return sum(int(float(value)) for value in values)

    def _is_ready(self) -> bool:
        with VisionEncoderClient(self.target) as client:
            try:
                client.wait_ready(0.5)
            except DeadlineExceeded:
                return False
        return True


class VllmServer:
    """``vllm serve``: with rows from an encoder, or, without ``extra_config``, as it comes. dtype: None runs
    the document's command without a further option."""

    def __init__(
        self,
        checkpoint: Path,
        dtype: str | None,
        extra_config: Mapping[str, Any] | None,
        folder: Path,
        arguments: Sequence[str] = (),
        device: str = "cpu",
        command: Command = ALONE,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """variables: further ones of its environment."""
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        words = serve_command(checkpoint, dtype, self.port, extra_config, command)
        first = words.index("vllm")
        own = dict(word.split("=", 1) for word in words[:first])
        own |= VLLM_ENVIRONMENT if device == "cpu" else GPU_ENVIRONMENT
        self._process = Process(
            ["-m", "vllm.entrypoints.cli.main", *words[first + 1 :], *arguments],
            folder / "vllm.log",
            own | dict(variables or {}),
        )

    def wait_ready(self) -> None:
        self._process.wait_for(lambda: answers(f"{self.url}/health"), "vLLM")

    @property
    def is_running(self) -> bool:
        return self._process.is_running

    @property
    def log(self) -> str:
        return self._process.tail(1 << 22)

    def stop(self) -> None:
        self._process.stop()


def serve_command(
    checkpoint: Path,
    dtype: str | None,
    port: int,
    extra_config: Mapping[str, Any] | None,
    command: Command = ALONE,
) -> list[str]:
    """Variables, program and arguments: a command of docs/vllm.md, for a tiny model on the CPU unless
    ``dtype`` is None; without ``extra_config`` no connector."""
    tiny = []
    if dtype is not None:
        tiny = [
            *("--host", "127.0.0.1", "--dtype", dtype, "--max-model-len", "2048", "--max-num-seqs", "16"),
            *("--max-num-batched-tokens", "48", "--enforce-eager", "--enable-chunked-prefill"),
            *("--served-model-name", "model", "--no-enable-log-requests", "--trust-request-mm-kwargs"),
        ]
    if extra_config is None:
        return ["vllm", "serve", str(checkpoint), "--port", str(port), *tiny]
    replaced = {
        "MODEL": str(checkpoint),
        f"--port {command.port}": f"--port {port}",
        "127.0.0.1:50051": str(extra_config["target"]),
    }
    if command.side_port is not None:
        replaced[f"PORT={command.side_port}"] = f"PORT={free_port()}"
    words = documented(command.beginning, replaced)
    index = words.index("--ec-transfer-config") + 1
    transfer = json.loads(words[index])
    transfer["ec_connector_extra_config"] |= extra_config
    words[index] = json.dumps(transfer)
    return [*words, *tiny]
