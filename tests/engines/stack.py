"""A vLLM server with its encoder, requests to it, and vLLM offline."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import httpx

from bench.harness.processes import ROOT, environment
from bench.harness.vllm import ALONE, VLLM_ENVIRONMENT, Command, Encoder, VllmServer
from bench.harness.waiting import PATIENCE_S
from tests.engines.agreement import of_response
from tests.engines.pictures import TEXT

TIMEOUT_S = 10.0
"""Of an image's rows."""


class Stack:
    """A vLLM server fed by an encoder, which may stop and start meanwhile."""

    def __init__(
        self,
        encoder: Encoder,
        checkpoint: Path,
        dtype: str,
        folder: Path,
        *,
        timeout_s: float = TIMEOUT_S,
        arguments: Sequence[str] = (),
        device: str = "cpu",
        command: Command = ALONE,
        variables: Mapping[str, str] | None = None,
        **settings: Any,
    ) -> None:
        """timeout_s: of an image's rows; arguments, variables: further ones of vLLM. settings: the plugin's.
        vLLM starts at once, and ``with`` waits until it is ready."""
        self.encoder = encoder
        self.checkpoint = checkpoint
        config = {"target": encoder.target, "finite": True, "timeout_s": timeout_s, "retry_s": 2.0}
        config |= settings
        self.vllm = VllmServer(checkpoint, dtype, config, folder, arguments, device, command, variables)

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


def metric(stack: Stack, name: str) -> int:
    """Of vLLM: the sum of its series."""
    text = httpx.get(f"{stack.vllm.url}/metrics", timeout=PATIENCE_S).text
    return sum(int(float(value)) for value in re.findall(rf"^vllm:{name}{{.*}} (.*)$", text, re.MULTILINE))


PREFIX = "vllm:vision_encoder_"


def figures_of(stack: Stack) -> Counter[str]:
    """The plugin's metrics of vLLM: sums of its engines, by the name behind PREFIX and the label that is not
    vLLM's own."""
    text = httpx.get(f"{stack.vllm.url}/metrics", timeout=PATIENCE_S).text
    found = Counter[str]()
    for name, labels, value in re.findall(rf"^{PREFIX}(\w+){{(.*)}} (.*)$", text, re.MULTILINE):
        if name.endswith(("_bucket", "_created", "_sum")):
            continue
        own = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        assert own.pop("model_name") == "model"
        own.pop("engine")
        own.pop("pid", None)
        found[" ".join((name, *own.values()))] += int(float(value))
    return found


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
