"""LMDeploy as a process, by the command of docs/lmdeploy.md, and requests to it.

On a CPU in the environment of `make test-lmdeploy`, where LMDeploy has a CPU device.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import httpx

from bench.harness.ports import free_port
from bench.harness.processes import ROOT, Process, answers, data_url, documented_in
from lm_adapter.engines.lmdeploy.settings import VARIABLE

DOCUMENT = ROOT / "docs" / "lmdeploy.md"
NUM_TOKENS = 12
BEGINNING = VARIABLE
SERVING = ["--server-name", "127.0.0.1", "--log-level", "INFO", "--model-name", "model"]
SMALL = ["--session-len", "2048", "--max-batch-size", "16", "--eager-mode"]
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
FLOAT32 = {"LMDEPLOY_ON_CPU_FLOAT32": "1"}

documented = functools.partial(documented_in, DOCUMENT)


def command(
    checkpoint: Path, port: int, target: str | None, **settings: Any
) -> tuple[list[str], dict[str, str]]:
    """(arguments of Python, variables): with rows from an encoder, or, without ``target``, as it comes.
    settings: further ones of the plugin."""
    replaced = {"MODEL": str(checkpoint), "23333": str(port), "127.0.0.1:50051": str(target)}
    variable, _, *program = documented(BEGINNING, replaced)
    if target is None:
        return ["-m", "lmdeploy", "serve", *program[2:]], {}
    name, value = variable.split("=", 1)
    return program, {name: json.dumps(json.loads(value) | settings)}


class Lmdeploy:
    """`lmdeploy serve api_server` of a checkpoint, on a port of its own: with rows from an encoder, or,
    without ``target``, as it comes."""

    def __init__(
        self,
        checkpoint: Path,
        folder: Path,
        target: str | None,
        arguments: Sequence[str] = (*SERVING, *SMALL),
        environment: Mapping[str, str] = FLOAT32,
        **settings: Any,
    ) -> None:
        """settings: further ones of the plugin."""
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        program, variables = command(checkpoint, self.port, target, **settings)
        self._process = Process(
            [*program, *arguments], folder / "lmdeploy.log", ENVIRONMENT | variables | dict(environment)
        )

    def __enter__(self) -> Self:
        try:
            self._process.wait_for(lambda: answers(f"{self.url}/health"), "LMDeploy")
        except BaseException:
            self._process.kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()

    @property
    def is_running(self) -> bool:
        return self._process.is_running

    @property
    def log(self) -> str:
        return self._process.tail(1 << 22)

    def post(self, path: str, body: Mapping[str, Any], timeout_s: float = 120) -> httpx.Response:
        headers = {"anthropic-version": "2023-06-01"}  # for /v1/messages
        return httpx.post(self.url + path, json=body, headers=headers, timeout=timeout_s)

    def generate(self, prompt: str | list[int], images: Sequence[bytes], **fields: Any) -> httpx.Response:
        """LMDeploy's own request; a prompt has one image placeholder for each image."""
        key = "prompt" if isinstance(prompt, str) else "input_ids"
        media = {"image_data": [data_url(image) for image in images]} if images else {}
        sampling = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
        return self.post("/generate", {key: prompt, **media, **sampling, **fields})

    def tokens(self, prompt: str | list[int], images: Sequence[bytes], **fields: Any) -> list[int]:
        """Of a request that has to succeed."""
        response = self.generate(prompt, images, **fields)
        assert response.status_code == 200, response.text
        tokens: list[int] = response.json()["output_ids"]
        return tokens

    def chat(self, image: bytes, **fields: Any) -> httpx.Response:
        parts = [
            {"type": "image_url", "image_url": {"url": data_url(image)}},
            {"type": "text", "text": "What is it?"},
        ]
        body = {"model": "model", "messages": [{"role": "user", "content": parts}], "max_tokens": 4}
        return self.post("/v1/chat/completions", {**body, "temperature": 0, **fields})

    def message(self, image: bytes, **fields: Any) -> httpx.Response:
        """Anthropic's request."""
        encoded = data_url(image).partition(",")[2]
        source = {"type": "base64", "media_type": "image/png", "data": encoded}
        content = [{"type": "image", "source": source}, {"type": "text", "text": "What is it?"}]
        body = {"model": "model", "max_tokens": 4, "messages": [{"role": "user", "content": content}]}
        return self.post("/v1/messages", {**body, **fields})
