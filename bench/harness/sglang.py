"""SGLang and its encoders as processes on the CPU, and requests to them."""

from __future__ import annotations

import contextlib
import functools
import http.client
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import httpx

from bench.harness.ports import free_port
from bench.harness.processes import ROOT, Process, Restartable, answers, data_url, documented_in
from bench.harness.waiting import PATIENCE_S, wait_until
from lm_adapter.engines.sglang.settings import VARIABLE

DOCUMENT = ROOT / "docs" / "sglang.md"
NUM_TOKENS = 12
SERVING = ["--skip-server-warmup", "--host", "127.0.0.1", "--log-level", "info"]
CPU = [
    *("--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32", "--disable-cuda-graph"),
    *("--sleep-on-idle", *SERVING),
]
LANGUAGE_MODEL = ["--max-total-tokens", "4096", "--max-running-requests", "4", "--context-length", "2048"]
# Of Qwen3.5's recurrent layers, with ENVIRONMENT: all states in float32.
RECURRENT = ["--disable-radix-cache", "--mamba-ssm-dtype", "float32"]
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "SGLANG_MAMBA_CONV_DTYPE": "float32",
    "SGLANG_USE_CPU_ENGINE": "1",
}
# A start takes half the processor time. Not tested then: that each process loads the plugin by itself.
FORKED = {"SGLANG_ON_CPU_FORK": "1"}
# What an encoder holds for requests.
HELD = (
    "ve_open_calls",
    "ve_encodes_in_flight",
    "ve_queued_patches",
    "ve_queued_bytes",
    "ve_undelivered_bytes",
)

SERVE_PROTOCOL = "vision-encoder serve --model MODEL --serve-sglang"
SERVE_PLUGIN = "vision-encoder serve --model MODEL --listen"
"""Beginnings of the document's commands for the encoder."""
PROGRAM = ("-c", "from sglang.cli.main import main; main()")
"""Python's arguments for the command ``sglang``, also where its script is not beside the interpreter."""

documented = functools.partial(documented_in, DOCUMENT)


class Sglang:
    """`sglang serve` of a checkpoint with further arguments, on a port of its own."""

    def __init__(
        self,
        checkpoint: Path,
        folder: Path,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        device: str = "cpu",
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._process = Process(
            [
                *(*PROGRAM, "serve", "--model-path", str(checkpoint), "--port", str(self.port)),
                *(*(CPU if device == "cpu" else SERVING), *arguments),
            ],
            folder / "sglang.log",
            {**(ENVIRONMENT if device == "cpu" else {"HF_HUB_OFFLINE": "1"}), **(environment or {})},
        )

    def __enter__(self) -> Self:
        try:
            self._process.wait_for(lambda: answers(f"{self.url}/health"), "SGLang")
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

    def post(self, path: str, body: Mapping[str, Any], timeout_s: float = 60) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=timeout_s)

    def generate(self, prompt: str | list[int], images: Sequence[bytes], **fields: Any) -> httpx.Response:
        """SGLang's own request; a prompt has one image placeholder for each image."""
        return self.post("/generate", generate_body(prompt, images, **fields))

    def leave(self, prompt: str, images: Sequence[bytes], when: Callable[[], object], **fields: Any) -> None:
        """A client that hangs up at that time, without an answer."""
        caller = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        with contextlib.closing(caller):
            body = json.dumps(generate_body(prompt, images, **fields))
            caller.request("POST", "/generate", body, {"Content-Type": "application/json"})
            wait_until(when, "the time to hang up")

    def tokens(self, prompt: str | list[int], images: Sequence[bytes], **fields: Any) -> list[int]:
        """Of a request that has to succeed."""
        response = self.generate(prompt, images, **fields)
        assert response.status_code == 200, response.text
        tokens: list[int] = response.json()["output_ids"]
        return tokens


def generate_body(prompt: str | list[int], images: Sequence[bytes], **fields: Any) -> dict[str, Any]:
    key = "text" if isinstance(prompt, str) else "input_ids"
    sampling = {"temperature": 0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True}
    media = {"image_data": [data_url(image) for image in images]} if images else {}
    return {key: prompt, "sampling_params": sampling, **media, **fields}


def language_model_arguments(family: str) -> list[str]:
    return [*LANGUAGE_MODEL, *(RECURRENT if family == "qwen3_5" else [])]


class Encoder(Restartable):
    """The service with SGLang's protocol, gRPC and a broker, each on an address that stays the same."""

    def __init__(
        self,
        checkpoint: Path,
        folder: Path,
        broker_path: Path,
        *,
        device: str = "cpu",
        dtype: str = "float32",
        variables: Mapping[str, str] | None = None,
        registers_at: str | None = None,
    ) -> None:
        """registers_at: the URL of SGLang's bootstrap server."""
        self.target = f"127.0.0.1:{free_port()}"
        self.sglang_address = f"127.0.0.1:{free_port()}"
        self.sglang_url = f"http://{self.sglang_address}"
        self.broker_path = broker_path
        self.admin = f"127.0.0.1:{free_port()}"
        self._checkpoint = checkpoint
        self._variables = {
            **(variables or {}),
            **({"OMP_NUM_THREADS": "1"} if device == "cpu" else {}),
            "VE_ADMIN_LISTEN": self.admin,
        }
        if registers_at is not None:
            self._variables |= {"VE_SGLANG_REGISTER": registers_at, "VE_SGLANG_URL": self.sglang_url}
        self._options = ["--listen", self.target, "--broker-path", str(broker_path)]
        self._options += ["--device", device, "--dtype", dtype]
        if device == "cpu":
            self._options += ["--arena-bytes", str(64 << 20)]
        super().__init__(folder / "encoder.log")

    def start(self) -> None:
        command = documented(SERVE_PROTOCOL, self._replaced("127.0.0.1:31000", self.sglang_address))
        self._run([*command, *self._options], f"{self.sglang_url}/health")

    def _replaced(self, documents_address: str, address: str) -> dict[str, str]:
        return {"MODEL": str(self._checkpoint), documents_address: address}

    def _run(self, command: Sequence[str], health_url: str) -> None:
        arguments = ["-m", "encoder_service", *command[1:]]
        self.run(arguments, self._variables, lambda: answers(health_url), "the encoder")

    def metrics(self) -> dict[str, float]:
        """Values by name and labels, as they are written."""
        text = httpx.get(f"http://{self.admin}/metrics", timeout=PATIENCE_S).text
        pairs = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    def held(self) -> dict[str, float]:
        found = self.metrics()
        return {name: found[name] for name in HELD if found[name]}

    def total(self, name: str) -> float:
        """Of a counter since the start, whatever its labels."""
        return sum(value for labelled, value in self.metrics().items() if labelled.startswith(name + "{"))


class DocumentedEncoder(Encoder):
    """The service by a command of the document without a further option: for SGLang's protocol, or for the
    plugin, whichever ``starts_for`` says."""

    def __init__(self, checkpoint: Path, folder: Path, starts_for: str) -> None:
        super().__init__(checkpoint, folder, folder / "unused")
        self._starts_for = starts_for

    def start(self) -> None:
        if self._starts_for == "protocol":
            self._variables["VE_LISTEN"] = self.target
            command = documented(SERVE_PROTOCOL, self._replaced("127.0.0.1:31000", self.sglang_address))
        else:
            command = documented(SERVE_PLUGIN, self._replaced("127.0.0.1:50051", self.target))
        self._run(command, f"http://{self.admin}/readyz")


def protocol_arguments(encoder_urls: str, **replaced: str) -> list[str]:
    """The documented options of SGLang for its own encoder protocol. encoder_urls: separated by spaces;
    replaced: other words of the command."""
    command = documented("sglang serve", {"http://127.0.0.1:31000": encoder_urls, **replaced})
    return command[command.index("--language-only") :]


def plugin_variables(target: str, **settings: Any) -> dict[str, str]:
    """The documented variables that load the plugin, with this encoder's address. settings: further ones."""
    words = documented("SGLANG_EXTERNAL_MM", {"127.0.0.1:50051": target})
    variables = dict(word.split("=", 1) for word in words[: words.index("sglang")])
    variables[VARIABLE] = json.dumps(json.loads(variables[VARIABLE]) | settings)
    return variables
