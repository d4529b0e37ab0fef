"""The language-model servers that ``epd.py`` compares, and the encoders beside them.

Owns their commands, as documented, with what a CPU or a shared GPU needs in addition. The servers start one
after the other, because each takes a share of the free memory.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from bench.harness import sglang, vllm
from bench.harness.ports import free_port
from bench.harness.processes import Process, answers

TOWER, ENCODER = "its own tower", "rows from the encoder"
GRAPHS = "its own tower in its graphs"
OWN_SPLIT, PROTOCOL = "its own encoder", "the encoder by its protocol"
START_S = 600
WAYS = re.compile(
    r"rows come by .*|Using CUDA \w+ for multimodal features|'mm_feature_transport': '\w+'"
    r"|MmItemMemoryPool has no .*"
)
"""What the servers' logs say of how rows come; SGLang's pool in device memory was full at least once."""
SERVERS = {"vllm": (TOWER, GRAPHS, ENCODER), "sglang": (TOWER, OWN_SPLIT, PROTOCOL, ENCODER)}


@dataclass
class Servers:
    """urls: of the servers, by name. encoder_start_s: times until the encoder was ready; the second start, on
    a GPU, had the kernel choices and compiled kernels of the first. logs: by URL."""

    urls: dict[str, str] = field(default_factory=dict)
    encoder_start_s: list[float] = field(default_factory=list)
    logs: dict[str, Path] = field(default_factory=dict)

    def rows_come_by(self) -> dict[str, list[str]]:
        """By server, as its log says it; each change."""
        texts = {
            server: self.logs[url].read_text(errors="replace")
            for server, url in self.urls.items()
            if url in self.logs
        }
        return {
            server: [way for way, _ in itertools.groupby(WAYS.findall(text))]
            for server, text in texts.items()
        }


Start = Callable[[list[str], dict[str, str], str], None]
"""Starts a process of these arguments and environment, and waits for /health at this URL."""


def engine_arguments(arguments: argparse.Namespace) -> list[str]:
    """What every server of this run gets in addition to its documented command."""
    on_cpu = arguments.device == "cpu"
    if arguments.engine == "vllm":
        common = ["--host", "127.0.0.1", "--served-model-name", "model", "--no-enable-log-requests"]
        if on_cpu:
            common += ["--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", "16"]
            common += ["--max-num-batched-tokens", "512", "--enforce-eager"]
        else:
            common += ["--dtype", "bfloat16", "--max-model-len", "16384", "--max-num-batched-tokens", "8192"]
            common += ["--load-format", "dummy", "--gpu-memory-utilization", "0.28"]
    elif on_cpu:
        common = [*sglang.CPU, *sglang.LANGUAGE_MODEL]
    else:
        common = ["--host", "127.0.0.1", "--dtype", "bfloat16", "--load-format", "dummy"]
        # The fraction is of what is free at a server's start; the tokens bound what it takes of that.
        common += ["--mem-fraction-static", "0.7", "--max-total-tokens", "40960", "--skip-server-warmup"]
    return [*common, *arguments.engine_arguments.split()]


@contextmanager
def serving(arguments: argparse.Namespace, checkpoint: Path, folder: Path) -> Iterator[Servers]:
    """Runs all servers and encoders."""
    with ExitStack() as stack:
        logs: dict[str, Path] = {}

        def start(run: list[str], environment: dict[str, str], url: str) -> None:
            logs[url] = folder / f"server-{len(logs)}.log"
            process = Process(run, logs[url], environment)
            stack.callback(process.stop)
            process.wait_for(lambda: answers(f"{url}/health"), f"the server at {url}", START_S)

        start_all = vllm_servers if arguments.engine == "vllm" else sglang_servers
        servers = start_all(arguments, checkpoint, folder, stack, start)
        servers.logs = logs
        yield servers


def vllm_servers(
    arguments: argparse.Namespace, checkpoint: Path, folder: Path, stack: ExitStack, start: Start
) -> Servers:
    on_cpu = arguments.device == "cpu"
    environment = vllm.VLLM_ENVIRONMENT if on_cpu else {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    dtype = "float32" if on_cpu else "bfloat16"
    os.environ["VE_CHOICES_DIR"] = str(folder / "choices")
    encoder = vllm.Encoder(checkpoint, dtype, folder, device=arguments.encoder_device)
    stack.push(encoder)
    servers = Servers(dict(arguments.running))
    for _ in range(0 if ENCODER in servers.urls else 1 if on_cpu else 2):
        encoder.stop()
        begun = time.perf_counter()
        encoder.start()
        servers.encoder_start_s.append(time.perf_counter() - begun)
    for server in SERVERS["vllm"]:
        if server in servers.urls or (server == GRAPHS and on_cpu):
            continue
        port = free_port()
        replaced = {"MODEL": str(checkpoint), "8000": str(port), "127.0.0.1:50051": encoder.target}
        command = vllm.documented("vllm serve", replaced)
        if server != ENCODER:
            command = command[: command.index("--ec-transfer-config")]
        if server == GRAPHS:
            command += ["--compilation-config", '{"cudagraph_mm_encoder": true}']
        run = ["-m", "vllm.entrypoints.cli.main", *command[1:], *engine_arguments(arguments)]
        servers.urls[server] = f"http://127.0.0.1:{port}"
        start(run, environment, servers.urls[server])
    return servers


def sglang_servers(
    arguments: argparse.Namespace, checkpoint: Path, folder: Path, stack: ExitStack, start: Start
) -> Servers:
    """Its own encoder runs in a process of its own, as ours does."""
    environment = {"HF_HUB_OFFLINE": "1"}
    dtype = "bfloat16"
    if arguments.device == "cpu":
        environment, dtype = sglang.ENVIRONMENT | sglang.FORKED, "float32"
    encoder = stack.enter_context(
        sglang.Encoder(
            checkpoint, folder, Path(folder, "broker.sock"), device=arguments.encoder_device, dtype=dtype
        )
    )

    def launch(server: str, more: list[str], variables: dict[str, str]) -> None:
        port = free_port()
        servers.urls[server] = f"http://127.0.0.1:{port}"
        run = [*sglang.PROGRAM, "serve", "--model-path", str(checkpoint), "--port", str(port)]
        start([*run, *engine_arguments(arguments), *more], environment | variables, servers.urls[server])

    servers = Servers()
    launch(TOWER, [], {})
    # Its cache of rows is off by default.
    own = ["--encoder-only", "--encoder-transfer-backend", "zmq_to_tokenizer", "--enable-prefix-mm-cache"]
    launch("", own, {})
    own_encoder = servers.urls.pop("")
    for server, url in ((OWN_SPLIT, own_encoder), (PROTOCOL, encoder.sglang_url)):
        launch(server, sglang.protocol_arguments(url), {})
    launch(ENCODER, [], sglang.plugin_variables(encoder.target))
    return servers
