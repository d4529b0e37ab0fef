"""The peers that ``epd.py`` compares: language-model servers, encoders, and where both run.

Owns placements, their commands as documented, with what a CPU or a shared GPU needs in addition, and what the
processes have used. All processes of a group of peers are up at the same time. A peer that cannot run is left
out with the reason.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import json
import os
import re
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import torch

from bench.harness import lmdeploy, sglang, vllm
from bench.harness.children import CLOCK_TICKS_PER_S, Child, counters_of, visible_gpu
from bench.harness.mps import MPS_CONTROL, has_mps, mps_daemon
from bench.harness.ports import free_port
from bench.harness.processes import Process, answers

START_S = 600
WAYS = re.compile(
    r"rows come by .*|Using CUDA \w+ for multimodal features|'mm_feature_transport': '\w+'"
    r"|MmItemMemoryPool has no .*"
)
"""What the servers' logs say of how rows come; SGLang's pool in device memory was full at least once."""
OURS, SPLIT = "this service", "the engine's own"
GRAPHS, PROTOCOL, HOST = "encoder graphs", "by SGLang's protocol", "rows by host memory"
ONE_THREAD = "OMP_NUM_THREADS=1"
NO_SPLIT = (
    "vLLM 0.33's ECCPUConnector and ECMooncakeConnector need its V2 model runner, which needs Triton: on a"
    " CPU the first does not start, and with the second no request gets its rows"
)
"""Why vLLM's own split is no peer on a CPU."""
VLLM = ["-m", "vllm.entrypoints.cli.main"]
VLLM_GRAPHS = ["--compilation-config", '{"cudagraph_mm_encoder": true}']
ENCODER_TOKENS = 32768
"""That an instance of vLLM which only encodes takes in a step. vLLM's example asks for many."""
ROWS_BYTES = 2 << 30
"""Of rows in host memory that each instance of vLLM's own split keeps. With every file that is read, the one
that encodes sends a description of all of it, 2 KB a MiB."""
WHOLE_GPU = 100
SERVER_GIB, ENCODER_GIB = 22, 6
"""Memory of a server beside its KV cache (about 8B parameters in bfloat16, activations, graphs), and of an
encoder beside its arena."""
ARENA_GIB = 2
"""Of rows that an encoder keeps on its GPU: this service's default there."""
USABLE_SHARE = 0.92
LMDEPLOY_BLOCK, KV_BYTES = 64, 2 * 8 * 128 * 2
"""Tokens of a block of LMDeploy's KV cache, and bytes of a token in a layer of the language model of size
``full``."""
REASON = re.compile(r"^(?:\([^)]*\) ERROR [^\]]*\] )?([\w.]*(?:Error|Exception)\b.*)$", re.MULTILINE)


@dataclass(frozen=True)
class EncoderAt:
    """An encoder. mps: the percentage of the GPU's threads that it may use under MPS; 0 without MPS."""

    gpu: int
    program: str = OURS
    mps: int = 0


@dataclass(frozen=True)
class ServerAt:
    """A language-model server: one rank on each of the GPUs. encoder: None for its own tower. Under MPS if
    its encoder is."""

    gpus: tuple[int, ...]
    encoder: EncoderAt | None = None
    option: str = ""


@dataclass(frozen=True)
class Peer:
    """Servers that take requests in turns. others: further servers whose images a generator sends to the
    encoder while these are measured."""

    servers: tuple[ServerAt, ...]
    others: int = 0


def parts_of(peers: Iterable[Peer]) -> tuple[list[ServerAt], list[EncoderAt]]:
    """Their servers and encoders, each once."""
    servers = list(dict.fromkeys(server for peer in peers for server in peer.servers))
    return servers, list(dict.fromkeys(server.encoder for server in servers if server.encoder))


def peers_of(engine: str, num_gpus: int) -> dict[str, Peer]:
    """All that so many GPUs can hold, by name; bench/README.md describes them."""
    every, last = range(num_gpus), num_gpus - 1
    rest = range(max(1, last))

    def pairs(mps: int = 0) -> Peer:
        return Peer(tuple(ServerAt((gpu,), EncoderAt(gpu, mps=mps)) for gpu in every))

    found = {
        "tower": Peer(tuple(ServerAt((gpu,)) for gpu in every)),
        "graphs": Peer(tuple(ServerAt((gpu,), option=GRAPHS) for gpu in every)),
        "beside": pairs(),
        "mps": pairs(WHOLE_GPU),
    }
    if engine == "lmdeploy":  # its tower has no graphs of its own
        del found["graphs"]
        found["one thread"] = Peer(tuple(ServerAt((gpu,), option=ONE_THREAD) for gpu in every))
        found["host"] = Peer(tuple(ServerAt((gpu,), EncoderAt(gpu), HOST) for gpu in every))
        return found
    found["split"] = Peer(tuple(ServerAt((gpu,), EncoderAt(last, SPLIT)) for gpu in rest))
    if engine == "sglang":
        protocol = (ServerAt((gpu,), EncoderAt(last), PROTOCOL) for gpu in rest)
        found["protocol"] = Peer(tuple(protocol))
    if num_gpus > 1:
        found["tp"] = Peer((ServerAt(tuple(every), option=GRAPHS),))
        found["one beside all"] = Peer(tuple(ServerAt((gpu,), EncoderAt(0)) for gpu in every))
        found["apart"] = Peer(tuple(ServerAt((gpu,), EncoderAt(last)) for gpu in rest))
    if num_gpus == 2:
        found["apart, for three"] = replace(found["apart"], others=2)
    return found


def default_groups(engine: str, device: str, num_gpus: int) -> list[list[str]]:
    """The most informative together and first; a GPU has the memory for three servers at a time."""
    if engine == "lmdeploy":
        return [["tower", "beside"] if device == "cpu" else ["tower", "one thread", "beside", "mps"]]
    if device == "cpu":
        return [["tower", "split", *(["protocol"] if engine == "sglang" else []), "beside"]]
    if engine == "sglang":
        return [["tower", "graphs", "beside"], ["split", "protocol"]]
    # vLLM's own split alone: its two engines take a core each while they have no request.
    return {
        1: [["graphs", "beside", "mps"], ["tower"], ["split"]],
        2: [
            ["graphs", "beside", "apart", "apart, for three", "one beside all"],
            ["tower", "mps", "tp"],
            ["split"],
        ],
    }.get(num_gpus, [["graphs", "apart", "mps"]])


class CannotRun(Exception):
    """A process of a peer does not run here."""


def reason_of(error: BaseException) -> str:
    """One line of a failed start, from the process's log if it has an exception."""
    text = str(error)
    found = REASON.search(text)
    if found is None:
        return text.partition("\n")[0]
    # pydantic's next line says which.
    more = text[found.end() :].strip().partition("\n")[0] if "validation error" in found[1] else ""
    return f"{found[1]} {more.strip()}".strip()


@dataclass
class Running:
    """A peer that is up. servers: URLs; counters: where its encoders have theirs; others: what sends the
    images of ``num_others`` further servers."""

    servers: list[str] = field(default_factory=list)
    processes: list[Process] = field(default_factory=list)
    counters: list[str] = field(default_factory=list)
    others: Child | None = None
    num_others: int = 0

    def used(self) -> tuple[Mapping[str, float], Mapping[str, float]]:
        """So far: CPU seconds by program of the language-model servers, and the encoders' counters."""
        counters: dict[str, float] = {}
        for admin in self.counters:
            for name, value in counters_of(httpx.get(f"http://{admin}/metrics", timeout=10).text).items():
                counters[name] = counters.get(name, 0.0) + value
        return cpu_seconds({process.pid for process in self.processes}), counters

    def rows_come_by(self) -> list[str]:
        """As the servers' logs say it; each change."""
        texts = (process.log.read_text(errors="replace") for process in self.processes)
        return [way for text in texts for way, _ in itertools.groupby(WAYS.findall(text))]


def cpu_seconds(sessions: set[int]) -> dict[str, float]:
    """Of the processes of these sessions, by program; the leader is the API server."""
    found: dict[str, float] = defaultdict(float)
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):  # it has just ended
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) in sessions:
                # Such as VLLM::Worker_TP1; what has no title does nothing.
                _, colons, title = (folder / "cmdline").read_text().partition("\0")[0].rpartition("::")
                name = title.partition("_")[0] if colons else ""
                if int(folder.name) in sessions:
                    name = "API server"
                found[name] += (int(fields[11]) + int(fields[12])) / CLOCK_TICKS_PER_S
    return {name: seconds for name, seconds in found.items() if name}


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
            # With a KV cache of a given size, the share is only what has to be free at the start.
            common += ["--load-format", "dummy", "--gpu-memory-utilization", "0.1"]
    elif arguments.engine == "lmdeploy" and on_cpu:
        common = [*lmdeploy.SERVING, *lmdeploy.SMALL]
    elif arguments.engine == "lmdeploy":
        blocks = int(arguments.kv_gib * (1 << 30)) // (LMDEPLOY_BLOCK * KV_BYTES * arguments.lm_layers)
        common = [*lmdeploy.SERVING, "--log-level", "WARNING", "--dtype", "bfloat16"]
        common += ["--session-len", "16384", "--num-gpu-blocks", str(blocks)]
    elif on_cpu:
        common = [*sglang.CPU, *sglang.LANGUAGE_MODEL]
    else:
        common = ["--host", "127.0.0.1", "--dtype", "bfloat16", "--load-format", "dummy"]
        # The tokens bound the KV cache, so that it is the same in each: the fraction is of what is free at a
        # server's start, when others may start too. They are enough for four images of 1024 px at a rate.
        common += ["--mem-fraction-static", "0.9", "--max-total-tokens", "65536", "--skip-server-warmup"]
        common += ["--context-length", "16384"]
    return [*common, *arguments.engine_arguments.split()]


def transfer_of_rows(role: str, on_cpu: bool) -> list[str]:
    """Arguments of an instance of vLLM's own split. Raises CannotRun."""
    if on_cpu:
        raise CannotRun(NO_SPLIT)
    if importlib.util.find_spec("nixl") is None:
        raise CannotRun("vLLM's ECCPUConnector needs the package nixl, which is not installed")
    extra = {"ec_cpu_bytes": ROWS_BYTES, "ec_enable_nixl": True}
    config = {"ec_connector": "ECCPUConnector", "ec_role": role, "ec_connector_extra_config": extra}
    return ["--ec-transfer-config", json.dumps(config)]


def kv_gib(peers: Iterable[Peer], arena_gib: int) -> float:
    """Of each server on each of its GPUs: what the fullest GPU has left for each of its servers."""
    servers, encoders = parts_of(peers)
    left = []
    for gpu in {gpu for server in servers for gpu in server.gpus}:
        own = sum(gpu in server.gpus for server in servers)
        beside = sum(encoder.gpu == gpu for encoder in encoders)
        usable = torch.cuda.get_device_properties(gpu).total_memory / (1 << 30) * USABLE_SHARE
        left.append((usable - beside * (ENCODER_GIB + arena_gib)) / own - SERVER_GIB)
    return round(min(left), 1)


class Group:
    """Starts the processes of some peers. servers: those that are up; failures: why others are not."""

    def __init__(
        self, arguments: argparse.Namespace, peers: Mapping[str, Peer], checkpoint: Path, folder: Path
    ) -> None:
        self.arguments, self.peers, self.checkpoint, self.folder = arguments, peers, checkpoint, folder
        self.on_cpu = arguments.device == "cpu"
        self.stack = ExitStack()
        self.wanted, self.wanted_encoders = parts_of(peers.values())
        self.encoders: dict[EncoderAt, Any] = {}
        self.splits: dict[EncoderAt, str] = {}
        self.processes: dict[ServerAt | EncoderAt, list[Process]] = defaultdict(list)
        self.servers: dict[ServerAt, str] = {}
        self.failures: dict[ServerAt | EncoderAt, str] = {}
        self.encoder_start_s: list[float] = []
        self._mps: dict[str, str] = {}
        self._numbers = itertools.count()

    def start(self) -> dict[str, Running]:
        """This service's first encoder alone, because it measures kernels; then all others at once, as far as
        there are cores."""
        encoders = sorted(self.wanted_encoders, key=lambda encoder: encoder.program == SPLIT)
        if any(encoder.mps for encoder in encoders):
            self._start_mps()
        first = [encoder for encoder in encoders[:1] if encoder.program == OURS]
        for encoder in first:
            self._try(self._start_encoder, encoder)
        num_threads = max(1, len(os.sched_getaffinity(0)) // 2)
        with ThreadPoolExecutor(num_threads) as pool:
            # Encoders are first in the queue, so that none waits for a thread that a server has.
            rest = encoders[len(first) :]
            starts = {part: pool.submit(self._try, self._start_encoder, part) for part in rest}

            def start_server(server: ServerAt) -> None:
                encoder = server.encoder
                if encoder in starts and self.on_cpu:
                    starts[encoder].result()
                self._start_server(server)

            servers = [pool.submit(self._try, start_server, server) for server in self.wanted]
        for future in (*starts.values(), *servers):
            future.result()
        running = {name: self._running(peer) for name, peer in self.peers.items() if not self.why_not(peer)}
        # All end at the same time; each is waited for afterwards.
        for process in itertools.chain(*self.processes.values()):
            self.stack.callback(process.send_signal, signal.SIGTERM)
        return running

    def why_not(self, peer: Peer) -> str:
        parts = [part for server in peer.servers for part in (server.encoder, server)]
        return next((self.failures[part] for part in parts if part in self.failures), "")

    def _try(self, start: Callable[[Any], None], part: Any) -> None:
        try:
            start(part)
        except (AssertionError, CannotRun, OSError) as error:
            self.failures[part] = reason_of(error)

    def _running(self, peer: Peer) -> Running:
        encoders = dict.fromkeys(server.encoder for server in peer.servers if server.encoder)
        running = Running([self.servers[server] for server in peer.servers])
        parts: list[ServerAt | EncoderAt] = [*peer.servers, *encoders]
        running.processes = [process for part in parts for process in self.processes[part]]
        running.counters = [self.encoders[encoder].admin for encoder in encoders if encoder in self.encoders]
        if peer.others:
            (encoder,) = encoders
            gpu = None if self.on_cpu else encoder.gpu
            running.others = self.stack.enter_context(Child("bench.epd_images", "images", gpu=gpu))
            running.num_others = peer.others
            running.others.ask("connect", target=self.encoders[encoder].target, on_gpu=not self.on_cpu)
        return running

    # -- encoders ------------------------------------------------------------------------------------------

    def _start_encoder(self, at: EncoderAt) -> None:
        if at.program == SPLIT:
            own = {"vllm": self._start_vllm_split, "sglang": self._start_sglang_split}
            own[self.arguments.engine](at)
            return
        folder = self._folder("encoder")
        device = "cpu" if self.on_cpu else f"cuda:{at.gpu}"
        dtype = "float32" if self.on_cpu else "bfloat16"
        variables = dict(self._mps_variables(at))
        if not self.on_cpu:
            variables["VE_DEVICE_ARENA_BYTES"] = str(self.arguments.arena_gib << 30)
        if 0 < at.mps < WHOLE_GPU:
            variables["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(at.mps)
        encoder: Any
        if self.arguments.engine != "sglang":
            encoder = vllm.Encoder(self.checkpoint, dtype, folder, device=device, variables=variables)
        else:
            broker = folder / "broker.sock"
            encoder = sglang.Encoder(
                self.checkpoint, folder, broker, device=device, dtype=dtype, variables=variables
            )
        begun = time.perf_counter()
        # Known before it is ready, so that servers start at the same time.
        self.encoders[at] = encoder
        self.stack.enter_context(encoder)
        self.encoder_start_s.append(time.perf_counter() - begun)

    def _start_mps(self) -> None:
        if not self.on_cpu and has_mps():
            self._mps = self.stack.enter_context(mps_daemon(self._folder("mps")))

    def _mps_variables(self, at: EncoderAt | None) -> dict[str, str]:
        """Of the processes that share a GPU by MPS. Raises CannotRun."""
        if at is None or not at.mps:
            return {}
        if not self._mps:
            raise CannotRun("MPS needs a GPU" if self.on_cpu else f"{MPS_CONTROL} is not on PATH")
        return self._mps

    def _start_vllm_split(self, at: EncoderAt) -> None:
        """An instance that only encodes, in encoder graphs, and has no KV cache. Raises CannotRun."""
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        run = [*VLLM, "serve", str(self.checkpoint), "--port", str(port), *engine_arguments(self.arguments)]
        run += ["--gpu-memory-utilization", "0.01", "--no-enable-prefix-caching"]
        run += ["--max-num-batched-tokens", str(ENCODER_TOKENS), *VLLM_GRAPHS]
        run += transfer_of_rows("ec_producer", self.on_cpu)
        variables = {"VLLM_EC_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_EC_SIDE_CHANNEL_PORT": str(free_port())}
        self._launch(at, run, variables, (at.gpu,), url)
        self.splits[at] = url

    def _start_sglang_split(self, at: EncoderAt) -> None:
        """Its cache of rows is off by default."""
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        own = ["--encoder-only", "--encoder-transfer-backend", "zmq_to_tokenizer", "--enable-prefix-mm-cache"]
        self._launch(at, [*self._sglang_command(port), *own], {}, (at.gpu,), url)
        self.splits[at] = url

    # -- servers -------------------------------------------------------------------------------------------

    def _start_server(self, at: ServerAt) -> None:
        make = {"vllm": self._vllm_server, "sglang": self._sglang_server, "lmdeploy": self._lmdeploy_server}[
            self.arguments.engine
        ]
        port = free_port()
        run, variables = make(at, port)
        url = f"http://127.0.0.1:{port}"
        self._launch(at, run, variables | self._mps_variables(at.encoder), at.gpus, url)
        if self.arguments.engine == "vllm" and at.encoder is not None and at.encoder.program == SPLIT:
            url = self._start_proxy(at, url)
        self.servers[at] = url

    def _start_proxy(self, at: ServerAt, server: str) -> str:
        """Before both instances of vLLM's own split. Returns its URL."""
        port, encoder = free_port(), self._started(at, self.splits)
        url = f"http://127.0.0.1:{port}"
        self._launch(at, ["-m", "bench.epd_proxy", str(port), encoder, server], {}, at.gpus, url)
        return url

    def _vllm_server(self, at: ServerAt, port: int) -> tuple[list[str], dict[str, str]]:
        is_ours = at.encoder is not None and at.encoder.program == OURS
        target = self._encoder(at).target if is_ours else "127.0.0.1:50051"
        replaced = {"MODEL": str(self.checkpoint), "8000": str(port), "127.0.0.1:50051": target}
        command = vllm.documented("vllm serve", replaced)
        if not is_ours:
            command = command[: command.index("--ec-transfer-config")]
        if at.encoder is not None and not is_ours:
            command += transfer_of_rows("ec_consumer", self.on_cpu)
        if at.option == GRAPHS and not self.on_cpu:
            command += VLLM_GRAPHS
        if len(at.gpus) > 1:
            command += ["--tensor-parallel-size", str(len(at.gpus))]
        if self.arguments.kv_gib:
            command += ["--kv-cache-memory-bytes", str(int(self.arguments.kv_gib * (1 << 30)))]
        return [*VLLM, *command[1:], *engine_arguments(self.arguments)], {}

    def _sglang_server(self, at: ServerAt, port: int) -> tuple[list[str], dict[str, str]]:
        run, variables = self._sglang_command(port), {}
        if at.option == GRAPHS:
            variables["SGLANG_VIT_ENABLE_CUDA_GRAPH"] = "1"
        if len(at.gpus) > 1:
            run += ["--tp-size", str(len(at.gpus))]
        if at.encoder is not None and at.encoder.program == SPLIT:
            run += sglang.protocol_arguments(self._started(at, self.splits))
        elif at.encoder is not None and at.option == PROTOCOL:
            run += sglang.protocol_arguments(self._encoder(at).sglang_url)
        elif at.encoder is not None:
            variables |= sglang.plugin_variables(self._encoder(at).target)
        return run, variables

    def _lmdeploy_server(self, at: ServerAt, port: int) -> tuple[list[str], dict[str, str]]:
        target = self._encoder(at).target if at.encoder else None
        settings = {"transports": ["host", "inline"]} if at.option == HOST else {}
        run, variables = lmdeploy.command(self.checkpoint, port, target, **settings)
        if at.option == ONE_THREAD:
            variables["OMP_NUM_THREADS"] = "1"
        return [*run, *engine_arguments(self.arguments)], variables

    def _sglang_command(self, port: int) -> list[str]:
        model = ["serve", "--model-path", str(self.checkpoint), "--port", str(port)]
        return [*sglang.PROGRAM, *model, *engine_arguments(self.arguments)]

    def _encoder(self, at: ServerAt) -> Any:
        return self._started(at, self.encoders)

    def _started(self, at: ServerAt, known: dict[EncoderAt, Any]) -> Any:
        """The server's encoder, as soon as it is known. Raises CannotRun."""
        while at.encoder not in known:
            if at.encoder in self.failures:
                raise CannotRun(self.failures[at.encoder])
            time.sleep(0.1)
        return known[at.encoder]

    # -- processes -----------------------------------------------------------------------------------------

    def _launch(
        self,
        at: ServerAt | EncoderAt,
        run: list[str],
        variables: Mapping[str, str],
        gpus: tuple[int, ...],
        url: str,
    ) -> None:
        """Starts a server and waits until it answers at /health."""
        if self.on_cpu and self.arguments.engine == "sglang":
            environment = sglang.ENVIRONMENT | sglang.FORKED
        elif self.on_cpu and self.arguments.engine == "lmdeploy":
            environment = lmdeploy.ENVIRONMENT | lmdeploy.FLOAT32
        else:
            environment = vllm.VLLM_ENVIRONMENT if self.on_cpu else vllm.GPU_ENVIRONMENT
        if not self.on_cpu:
            visible = ",".join(visible_gpu(gpu) for gpu in gpus)
            environment = environment | {"CUDA_VISIBLE_DEVICES": visible}
        process = Process(run, self._folder("server") / "log", environment | dict(variables))
        self.stack.callback(process.stop)
        try:
            process.wait_for(lambda: answers(f"{url}/health"), f"the server at {url}", START_S)
        except AssertionError as error:
            # What failed first is above the end of the log.
            raise AssertionError(f"{process.tail(1 << 20)}\n{error}") from None
        self.processes[at].append(process)

    def _folder(self, name: str) -> Path:
        folder = self.folder / f"{name}-{next(self._numbers)}"
        folder.mkdir(parents=True)
        return folder


@contextmanager
def started(
    arguments: argparse.Namespace, peers: Mapping[str, Peer], checkpoint: Path, folder: Path
) -> Iterator[tuple[Group, dict[str, Running]]]:
    """The peers that run here, by name, in the order of ``peers``."""
    os.environ.setdefault("VE_CHOICES_DIR", str(folder / "choices"))
    group = Group(arguments, peers, checkpoint, folder)
    with group.stack:
        yield group, group.start()
