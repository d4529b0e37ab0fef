"""Encoder and vLLM as processes, started by the commands of docs/vllm.md."""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import httpx

from bench.harness.ports import free_port
from lm_adapter import DeadlineExceeded, VisionEncoderClient
from tests.engines.agreement import of_response
from tests.engines.pictures import TEXT

if TYPE_CHECKING:
    from tests.engines.replicas import Replicas

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "vllm.md"
# A start takes half a minute; on a machine with five times the work that its cores do, more than four.
START_S = 420.0
TIMEOUT_S = 10.0
"""Of an image's rows."""
STOP_S = 30.0
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
    "VLLM_WORKER_MULTIPROC_METHOD": "fork",
}


def environment(**extra: str) -> dict[str, str]:
    """This project comes first, then what the interpreter of these tests finds by PYTHONPATH."""
    paths = [str(ROOT), str(ROOT / "proto"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **extra}


def documented_in(document: Path, beginning: str, replaced: Mapping[str, str]) -> list[str]:
    """The first command of a document that begins so, as a shell would take it, with other values."""
    blocks = re.findall(r"^```console\n(.*?)^```$", document.read_text(), re.MULTILINE | re.DOTALL)
    command: str = next(block for block in blocks if block.startswith(beginning))
    for old, new in replaced.items():
        assert old in command, f"{beginning} has no {old} in {document}"
        command = command.replace(old, new)
    return shlex.split(command.replace("\\\n", " "))


documented = functools.partial(documented_in, DOCUMENT)


class Process:
    """A process in a session of its own, with its output in a file."""

    def __init__(self, arguments: Sequence[str], log: Path, extra: Mapping[str, str] | None = None) -> None:
        self.log = log
        self._file = log.open("ab")
        self._process = subprocess.Popen(
            [sys.executable, *arguments],
            stdout=self._file,
            stderr=subprocess.STDOUT,
            env=environment(**(extra or {})),
            cwd=ROOT,
            start_new_session=True,
        )

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def wait_for(self, is_ready: Any, what: str, timeout_s: float = START_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not is_ready():
            assert self.is_running, f"{what} ended:\n{self.tail()}"
            assert time.monotonic() < deadline, f"{what} is not ready after {timeout_s} s:\n{self.tail()}"
            time.sleep(0.1)

    def tail(self, num_bytes: int = 6000) -> str:
        return self.log.read_bytes()[-num_bytes:].decode(errors="replace")

    def kill(self) -> None:
        """At once, its children too: they are of its session alone."""
        if self.is_running:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(STOP_S)
        self._file.close()

    def send_signal(self, number: int) -> None:
        self._process.send_signal(number)

    def stop(self) -> None:
        if self.is_running:
            self._process.terminate()
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait(STOP_S)
        self._file.close()


class Restartable:
    """A process that stops and starts again with the same addresses and log."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._process: Process | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        raise NotImplementedError

    def run(
        self, arguments: Sequence[str], extra: Mapping[str, str], is_ready: Callable[[], bool], what: str
    ) -> None:
        """Starts the process and waits until it is ready."""
        self._process = Process(arguments, self._log, extra)
        try:
            self._process.wait_for(is_ready, what)
        except BaseException:
            self.kill()
            raise

    def stop(self) -> None:
        if self._process is not None:
            self._process.stop()
            self._process = None

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """It stands still, with its connections open."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    @property
    def log(self) -> str:
        return self._log.read_text()


class Encoder(Restartable):
    """The service on a port that stays the same. ``with_broker`` decides at each start."""

    def __init__(self, checkpoint: Path, dtype: str, folder: Path, *, device: str = "cpu") -> None:
        self.port = free_port()
        self.target = f"127.0.0.1:{self.port}"
        self._admin = f"127.0.0.1:{free_port()}"
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
        replaced = {"MODEL": str(self._checkpoint), "127.0.0.1:50051": self.target}
        command = documented(
            "vision-encoder serve", {**replaced, "/run/vision-encoder/broker.sock": self.broker_path}
        )
        if with_broker and self._device == "cpu":
            command += ["--arena-bytes", str(64 << 20)]
        if not with_broker:
            place = command.index("--broker-path")
            del command[place : place + 2]
        self.run(
            [
                *("-m", "encoder_service", *command[1:], "--device", self._device, "--dtype", self._dtype),
                *("--admin-listen", self._admin),
            ],
            {"OMP_NUM_THREADS": "1"} if self._device == "cpu" else {},
            self._is_ready,
            "the encoder",
        )

    def num_asked(self) -> int:
        """Calls since its start that name an image or a clip."""
        text = httpx.get(f"http://{self._admin}/metrics", timeout=10).text
        calls = re.findall(
            r'^ve_requests_total{method="(?:Encode|Prefetch|Fetch)".*} (.*)$', text, re.MULTILINE
        )
        return sum(int(float(number)) for number in calls)

    def _is_ready(self) -> bool:
        with VisionEncoderClient(self.target) as client:
            try:
                client.wait_ready(0.5)
            except DeadlineExceeded:
                return False
        return True


class VllmServer:
    """``vllm serve``: with rows from an encoder, or, without ``extra_config``, as it comes."""

    def __init__(
        self,
        checkpoint: Path,
        dtype: str,
        extra_config: Mapping[str, Any] | None,
        folder: Path,
        arguments: Sequence[str] = (),
        device: str = "cpu",
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._process = Process(
            [
                *("-m", "vllm.entrypoints.cli.main"),
                *serve_arguments(checkpoint, dtype, self.port, extra_config),
                *arguments,
            ],
            folder / "vllm.log",
            VLLM_ENVIRONMENT if device == "cpu" else {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
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


def serve_arguments(
    checkpoint: Path, dtype: str, port: int, extra_config: Mapping[str, Any] | None
) -> list[str]:
    """The command of docs/vllm.md, for a tiny model on the CPU; without ``extra_config`` no connector."""
    tiny = [
        *("--host", "127.0.0.1", "--dtype", dtype, "--max-model-len", "2048", "--max-num-seqs", "16"),
        *("--max-num-batched-tokens", "48", "--enforce-eager", "--enable-chunked-prefill"),
        *("--served-model-name", "model", "--no-enable-log-requests", "--trust-request-mm-kwargs"),
    ]
    if extra_config is None:
        return ["serve", str(checkpoint), "--port", str(port), *tiny]
    replaced = {"MODEL": str(checkpoint), "8000": str(port), "127.0.0.1:50051": str(extra_config["target"])}
    command = documented("vllm serve", replaced)
    place = command.index("--ec-transfer-config") + 1
    transfer = json.loads(command[place])
    transfer["ec_connector_extra_config"] |= extra_config
    command[place] = json.dumps(transfer)
    return [*command[1:], *tiny]


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5).status_code == 200
    except httpx.TransportError:
        return False


class Stack:
    """A vLLM server fed by an encoder, or several behind a gateway, which may stop and start meanwhile."""

    def __init__(
        self,
        encoder: Encoder | Replicas,
        checkpoint: Path,
        dtype: str,
        folder: Path,
        *,
        timeout_s: float = TIMEOUT_S,
        arguments: Sequence[str] = (),
        device: str = "cpu",
        **settings: Any,
    ) -> None:
        """timeout_s: of an image's rows; arguments: further ones of vLLM. settings: of the plugin."""
        self.encoder = encoder
        self.checkpoint = checkpoint
        config = {"target": encoder.target, "finite": True, "timeout_s": timeout_s, "retry_s": 2.0}
        config |= settings
        self.vllm = VllmServer(checkpoint, dtype, config, folder, arguments, device)

    def __enter__(self) -> Self:
        try:
            self.vllm.wait_ready()
        except BaseException:
            self.vllm.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.vllm.stop()

    def chat(
        self, messages: list[dict[str, Any]], *, timeout_s: float = 120, **fields: Any
    ) -> httpx.Response:
        """One request."""
        url = f"{self.vllm.url}/v1/chat/completions"
        return httpx.post(url, json=chat_body(messages, **fields), timeout=timeout_s)

    def answer(self, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        """Of a request that has to succeed."""
        response = self.chat(messages, **fields)
        assert response.status_code == 200, response.text
        return of_response(response.json())


def chat_body(messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    return {
        "model": "model",
        "messages": messages,
        "max_tokens": 12,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": True,
        "top_logprobs": 8,
        "return_tokens_as_token_ids": True,
        **fields,
    }


def run_offline(settings: dict[str, Any]) -> dict[str, Any]:
    """The answers of offline.py."""
    completed = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "engines" / "offline.py")],
        input=json.dumps(settings),
        env=environment(**VLLM_ENVIRONMENT, VLLM_ENABLE_V1_MULTIPROCESSING="0"),
        capture_output=True,
        text=True,
        timeout=560,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr[-6000:]
    answers: dict[str, Any] = json.loads(completed.stdout.strip().splitlines()[-1])
    return answers


class TextRequests:
    """Text requests one after another until ``end``, each of which must be answered."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._stop = threading.Event()
        self.num_answered = 0
        self._pool = ThreadPoolExecutor(1)
        self._future: Future[None] = self._pool.submit(self._ask)

    def _ask(self) -> None:
        while not self._stop.is_set():
            response = self._stack.chat(TEXT, max_tokens=4)
            assert response.status_code == 200, response.text
            self.num_answered += 1

    def end(self) -> None:
        self._stop.set()
        self._future.result(60)
        self._pool.shutdown()
        assert self.num_answered > 0
